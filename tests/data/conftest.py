"""Small stores and files that the tests of the data layer share."""

from itertools import pairwise

import numpy as np
import pytest

from gregale.data.store import TOKENS_NAME, finish_store, open_store

END = 9


@pytest.fixture
def make_store(tmp_path):
    """A store of the given documents [document][token], each ended by END."""

    def make(documents, name="store"):
        folder = tmp_path / name
        folder.mkdir()
        ended = [[*document, END] for document in documents]
        np.array([token for document in ended for token in document], np.uint16).tofile(folder / TOKENS_NAME)
        offsets = np.cumsum([0, *map(len, ended)])
        finish_store(folder, offsets, {"dtype": "uint16", "tokenizer": "none", "source": {}})
        return open_store(folder)

    return make


@pytest.fixture
def contents():
    """The documents of a store or a source, as lists or texts."""

    def read(found):
        if hasattr(found, "offsets"):
            return [found.tokens[a:b].tolist() for a, b in pairwise(found.offsets)]
        return [one.content if isinstance(one.content, str) else one.content.tolist() for one in found.documents()]

    return read
