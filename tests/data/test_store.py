import json

import numpy as np
import pytest

from gregale.data.store import MANIFEST_NAME, json_sha256, open_store
from gregale.errors import UserError

FILES = ["tokens.bin", "documents.npy", "manifest.json"]


def flip_byte(path, place):
    data = bytearray(path.read_bytes())
    data[place] ^= 1
    path.write_bytes(data)


def test_what_is_written_is_read(make_store, contents):
    store = make_store([[1, 2], [3]])
    assert contents(store) == [[1, 2, 9], [3, 9]]
    assert store.tokens.dtype == np.uint16
    assert (store.manifest["tokens"], store.manifest["documents"]) == (5, 2)
    assert isinstance(store.tokens, np.memmap)
    store.verify()


@pytest.mark.parametrize("name", FILES)
def test_a_flipped_byte_is_found_wherever_it_is(make_store, name):
    path = make_store([[1, 2], [3]]).folder / name
    original = path.read_bytes()
    for place in range(len(original)):
        flip_byte(path, place)
        with pytest.raises(UserError, match=str(path)):
            open_store(path.parent).verify()
        path.write_bytes(original)
    open_store(path.parent).verify()


@pytest.mark.parametrize("name", FILES)
def test_truncated_and_missing_files_are_found_on_opening(make_store, name):
    path = make_store([[1, 2], [3]]).folder / name
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(UserError, match=rf"{path}: .*Delete the folder and it will be built again"):
        open_store(path.parent)
    path.unlink()
    with pytest.raises(UserError, match=rf"{path}: missing"):
        open_store(path.parent)


def test_another_version_of_the_format_is_refused(make_store):
    path = make_store([[1]]).folder / MANIFEST_NAME
    manifest = json.loads(path.read_bytes()) | {"format": 0}
    del manifest["sha256"]
    path.write_text(json.dumps(manifest | {"sha256": json_sha256(manifest)}))
    with pytest.raises(UserError, match="format 0, this program reads format 1"):
        open_store(path.parent)
