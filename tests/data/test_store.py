import json
import os
from pathlib import Path

import numpy as np
import pytest

from gregale.data import store
from gregale.data.sources import TextSource
from gregale.data.store import MANIFEST_NAME, ChunkCache, json_sha256, open_store
from gregale.errors import UserError
from tests.data.conftest import build, store_of

FILES = ["part-00000000.bin", "part-00000000.json", "documents.npy", "manifest.json"]
NO_DISK = ChunkCache(Path("nowhere"), 0)


def flip_byte(path, place):
    data = bytearray(path.read_bytes())
    data[place] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize("at_hand", [1, 64])
def test_places_in_many_parts_and_chunks_are_read_in_any_order(tmp_path, monkeypatch, at_hand):
    monkeypatch.setattr(store, "CHUNK_BYTES", 16)
    monkeypatch.setattr(store, "MAPS_AT_HAND", at_hand)
    sizes = [3, 40, 0, 17, 8, 1]
    tokens = np.arange(sum(sizes))
    documents = [each.tolist() for each in np.split(tokens, np.cumsum(sizes)[:-1])]
    found = store_of(tmp_path / "x", *([each] if each else [] for each in documents))
    found.verify()
    assert found.tokens.dtype == np.uint16
    assert (found.manifest["tokens"], found.manifest["documents"]) == (sum(sizes), 5)
    random = np.random.default_rng(0)
    for _ in range(50):
        places = random.integers(0, len(tokens), random.integers(0, 30))
        np.testing.assert_array_equal(found.tokens[places], places)
        start, stop = sorted(random.integers(0, len(tokens) + 1, 2).tolist())
        np.testing.assert_array_equal(found.tokens[start:stop], tokens[start:stop])
    assert len(found.tokens) == len(tokens)


@pytest.mark.parametrize("name", FILES)
def test_a_flipped_byte_is_found_wherever_it_is(tmp_path, name):
    path = store_of(tmp_path / "store", [[1, 2, 9], [3, 9]]).folder / name
    original = path.read_bytes()
    for place in range(0, len(original), 3):
        flip_byte(path, place)
        with pytest.raises(UserError, match=str(path.parent / name.replace(".json", "") if "part" in name else path)):
            open_store(path.parent, NO_DISK).verify()
        path.write_bytes(original)
    open_store(path.parent, NO_DISK).verify()


def test_no_token_of_a_damaged_chunk_is_handed_out(tmp_path, monkeypatch):
    monkeypatch.setattr(store, "CHUNK_BYTES", 16)
    folder = store_of(tmp_path / "x", [list(range(20))]).folder
    flip_byte(folder / "part-00000000.bin", 20)
    damaged = open_store(folder, NO_DISK)
    assert damaged.tokens[:8].tolist() == list(range(8))
    for _ in range(2):
        with pytest.raises(UserError, match=rf"{folder}/part-00000000\.bin is damaged or .* Delete {folder}/manifest"):
            damaged.tokens[7:9]
    (folder / "part-00000000.bin").write_bytes(b"")
    for _ in ("empty", "missing"):
        with pytest.raises(UserError, match=r"part-00000000\.bin is damaged or missing"):
            open_store(folder, NO_DISK).tokens[:1]
        (folder / "part-00000000.bin").unlink(missing_ok=True)


@pytest.mark.parametrize("name", ["documents.npy", "manifest.json"])
def test_truncated_and_missing_files_are_found_on_opening(tmp_path, name):
    path = store_of(tmp_path / "store", [[1, 2, 9], [3, 9]]).folder / name
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(UserError, match=rf"{path}: .*Delete the folder and it will be built again"):
        open_store(path.parent, NO_DISK)
    path.unlink()
    with pytest.raises(UserError, match=rf"{path}: missing"):
        open_store(path.parent, NO_DISK)


def test_another_version_of_the_format_is_refused(tmp_path):
    path = store_of(tmp_path / "store", [[1, 9]]).folder / MANIFEST_NAME
    manifest = json.loads(path.read_bytes()) | {"format": 0}
    del manifest["sha256"]
    path.write_text(json.dumps(manifest | {"sha256": json_sha256(manifest)}))
    with pytest.raises(UserError, match="format 0, this program reads format 3"):
        open_store(path.parent, NO_DISK)


def test_all_of_a_store_is_on_the_disk_before_its_manifest_has_its_name(tmp_path, monkeypatch):
    flushed: list[str] = []
    fsync, replace = os.fsync, os.replace

    def waited(file: int) -> None:
        flushed.append(os.readlink(f"/proc/self/fd/{file}"))
        fsync(file)

    def renamed(before, after) -> None:
        assert str(before) in flushed
        replace(before, after)
        flushed.append(str(after))

    monkeypatch.setattr(os, "fsync", waited)
    monkeypatch.setattr(os, "replace", renamed)
    (tmp_path / "a").write_text("text")
    folder = build(TextSource(files=(f"{tmp_path}/a",)), tmp_path / "cache").folder
    assert flushed[-2:] == [str(folder / MANIFEST_NAME), str(folder)], "the folder's names too"
    assert {str(path) for path in folder.iterdir()} < set(flushed)
