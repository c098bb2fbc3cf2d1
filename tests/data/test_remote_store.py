"""Token stores in an object store: built there by several, read by pieces, kept on this host's disk."""

import dataclasses

import numpy as np
import pytest

from gregale.data import store as parts
from gregale.data.config import DataConfig
from gregale.data.preparation import prepare
from gregale.errors import UserError
from gregale.storage import files_below
from tests.data.test_config import write_texts


@pytest.fixture
def config(s3, tmp_path, monkeypatch):
    """Several parts of several pieces."""
    monkeypatch.setattr(parts, "CHUNK_BYTES", 64)
    monkeypatch.setattr(parts, "TASK_BYTES", 300)
    source = write_texts(tmp_path / "texts")
    return DataConfig({"books": source}, held_out=0.2, cache=str(s3), local_cache=str(tmp_path / "pieces"), workers=1)


def test_a_store_holds_what_one_on_a_disk_holds(config, tmp_path):
    far, near = prepare(config, 16, 3), prepare(dataclasses.replace(config, cache=str(tmp_path / "near")), 16, 3)
    assert far.fingerprint == near.fingerprint
    one, two = far.train.rows(range(40)), near.train.rows(range(40))
    assert all(np.array_equal(one[key], two[key]) for key in one)
    for key, store in far.stores.items():
        assert store.manifest == near.stores[key].manifest
        np.testing.assert_array_equal(store.tokens[:], near.stores[key].tokens[:])
        store.verify()


def test_a_host_reads_what_its_rows_need_and_keeps_it(config, tmp_path, s3):
    prepare(config, 16, 3)
    corpus = prepare(dataclasses.replace(config, local_cache=str(tmp_path / "other")), 16, 3)

    def kept():
        return [path for path in (tmp_path / "other").rglob("*") if path.is_file()]

    assert len(kept()) == 1, "where the documents begin"
    first = corpus.train[5]
    assert 1 <= len(kept()) - 1 <= 4
    for name in files_below(s3):
        if name.endswith(".bin"):
            (s3 / name).unlink()
    np.testing.assert_array_equal(corpus.train[5]["tokens"], first["tokens"])
    with pytest.raises(UserError, match=r"part-\d+\.bin is damaged .* Delete s3://bucket/\w+/\w+/manifest.json, and"):
        corpus.train.rows(range(40))
