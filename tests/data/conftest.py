"""Small stores and files that the tests of the data layer share."""

from hashlib import sha256
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from gregale.data.disk import Disk
from gregale.data.parts import CHUNK_BYTES, LENGTH, Seal, part_name, write_seal
from gregale.data.store import TokenStore, complete_store, open_store

END = 9


def store_of(folder: Path, *parts: list[list[int]]) -> TokenStore:
    """A store of documents [part][document][token] as they are, without ends of their own."""
    folder.mkdir()
    seals = []
    for number, documents in enumerate(parts):
        lengths = [len(each) for each in documents]
        tokens = np.array([token for each in documents for token in each], "<u2")
        content = tokens.tobytes() + np.array(lengths, LENGTH).tobytes()
        (folder / part_name(number)).write_bytes(content)
        chunks = [content[at : at + CHUNK_BYTES] for at in range(0, len(content), CHUNK_BYTES)]
        digests = "".join(sha256(chunk).hexdigest() for chunk in chunks)
        seals.append(Seal(len(documents), len(tokens), 2, {}, digests))
        write_seal(folder, number, seals[-1])
    complete_store(folder, seals, {"dtype": "uint16", "tokenizer": "none", "source": {}})
    return open_store(folder, Disk(folder / "pieces", 0))


@pytest.fixture
def make_store(tmp_path):
    """A store of the given documents [document][token], each ended by END."""

    def make(documents, name="store"):
        return store_of(tmp_path / name, [[*document, END] for document in documents])

    return make


@pytest.fixture
def contents():
    """The documents of a store or a source, as lists or texts."""

    def read(found):
        if hasattr(found, "offsets"):
            return [found.tokens[a:b].tolist() for a, b in pairwise(found.offsets)]
        return [one.content if isinstance(one.content, str) else one.content.tolist() for one in found.documents()]

    return read
