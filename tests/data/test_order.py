"""The order by parts: the same before and after everything is encoded, whoever encoded it."""

import dataclasses
import threading
from contextlib import closing
from itertools import pairwise

import numpy as np
import pytest

from gregale.data import order, parts
from gregale.data.build import store_key
from gregale.data.config import DataConfig, build_stores, prepare
from gregale.data.sources import TextSource
from gregale.data.stream import Chain, DocumentStream
from gregale.data.tokenizers import BpeConfig, BytesTokenizer
from gregale.errors import UserError

FILES = 40
LENGTH = 16


@pytest.fixture
def config(tmp_path, monkeypatch):
    """A source of as many parts as files, in blocks of four."""
    monkeypatch.setattr(parts, "TASK_BYTES", 1)
    monkeypatch.setattr(order, "BLOCK_PARTS", 4)
    (tmp_path / "text").mkdir()
    for number in range(FILES):
        documents = [f"{number:02} {document} " * (3 + number % 5) for document in range(4)]
        (tmp_path / "text" / f"{number:02}.txt").write_text("<e>".join(documents))
    source = TextSource(files=(f"{tmp_path}/text/*.txt",), separator="<e>")
    return DataConfig({"books": source}, held_out=0.2, cache=str(tmp_path / "cache"), order="parts", workers=1)


def opened(config, seed=3):
    return closing(prepare(config, LENGTH, seed))


def rows(corpus, count=300):
    return corpus.train.rows(range(count))["tokens"]


def test_an_epoch_has_every_training_token_and_the_next_comes_in_another_order(config):
    with opened(config) as corpus:
        train, held_out = (streams["books"] for streams in (corpus.train_streams, corpus.held_out_streams))
        count = sum(len(corpus_block) for corpus_block in blocks_of(corpus))
        first, second = (windows(corpus, range(start, start + count)) for start in (0, count))
        assert len(train) - count * LENGTH < 11 * LENGTH, "less than a window is left over in each block"
        in_both = set(first) & set(second)
        assert len(set(first)) > 0.9 * count
        assert list(first) != list(second)
        assert len(in_both) < count, "blocks are made of other parts, so windows begin elsewhere"
        out, kept = words(held_out), words(train)
        assert not out & kept, "no document is in both"
        assert len(out | kept) == 4 * FILES


def blocks_of(corpus):
    """The windows of each block of the first epoch, from what the dataset is made of."""
    blocks = corpus.train._dataset._source
    corpus.train[len(blocks._tokens) * 1000]  # far behind: all counts are known then
    return [range(b - a) for a, b in pairwise([0, *blocks._ends[: blocks._blocks]])]


def windows(corpus, numbers):
    return [corpus.train[number]["tokens"].tobytes() for number in numbers]


def words(chain):
    tokens, documents = chain.read(0, len(chain))
    texts = np.split(tokens, np.flatnonzero(np.diff(documents)) + 1)
    return {bytes(text[:4].astype(np.uint8)) for text in texts}


def test_it_trains_while_the_rest_is_still_encoded_and_the_order_is_what_it_would_have_been(
    config, monkeypatch, tmp_path
):
    with opened(dataclasses.replace(config, cache=str(tmp_path / "other"))) as corpus:
        list(corpus.train_streams["books"].read(0, 1))  # waits for everything
        expected, text = rows(corpus), corpus.held_out.rows(range(10))["tokens"]
    may_go_on, scan, read = threading.Event(), TextSource.scan, []

    def watched(self, part):
        if len(read) >= 8:
            may_go_on.wait(300)
        read.append(part.path)
        yield from scan(self, part)

    monkeypatch.setattr(TextSource, "scan", watched)
    with opened(config) as corpus:
        np.testing.assert_array_equal(rows(corpus, 20), expected[:20])
        assert len(read) <= 9, "the other parts are still to be encoded"
        may_go_on.set()
        np.testing.assert_array_equal(corpus.held_out.head(10).rows(range(10))["tokens"], text)
        np.testing.assert_array_equal(rows(corpus), expected)
    assert len(read) == FILES
    with opened(config) as corpus:
        np.testing.assert_array_equal(rows(corpus), expected)
    assert len(read) == FILES, "what is finished is not done again"


@pytest.mark.parametrize("at", ["a whole store", "an object store"])
def test_wherever_the_parts_lie_the_order_is_the_same(config, tmp_path, request, at):
    with opened(config) as corpus:
        expected, fingerprint, head = rows(corpus), corpus.fingerprint, corpus.held_out.rows(range(5))["tokens"]
    elsewhere = str(tmp_path / "whole") if at == "a whole store" else str(request.getfixturevalue("s3"))
    other = dataclasses.replace(config, cache=elsewhere, local_cache=str(tmp_path / "pieces"))
    if at == "a whole store":
        build_stores(dataclasses.replace(other, order="whole"))
    with opened(other) as corpus:
        np.testing.assert_array_equal(rows(corpus), expected)
        np.testing.assert_array_equal(corpus.held_out.rows(range(5))["tokens"], head)
        assert corpus.fingerprint == fingerprint
        for each in corpus.parts.values():
            assert each.check("checking", lambda *_: None).count == 0


def test_seed_and_shuffle_choose_the_order(config):
    with opened(config) as one, opened(config, seed=4) as other:
        assert (rows(one) != rows(other)).any()
        np.testing.assert_array_equal(*(each.held_out.rows(range(10))["tokens"] for each in (one, other)))
    with opened(dataclasses.replace(config, shuffle=False)) as plain:
        tokens = plain.train_streams["books"].read(0, 4 * LENGTH)[0]
        np.testing.assert_array_equal(np.concatenate(rows(plain, 4)), tokens)


def test_a_part_that_is_damaged_is_encoded_again(config, tmp_path):
    with opened(config) as corpus:
        expected = rows(corpus)
    (source,) = config.sources.values()
    folder = tmp_path / "cache" / f"{store_key(source, BytesTokenizer())}.parts"
    for number, name in enumerate(sorted(folder.glob("part-*.bin"))):
        if number % 3 == 0:
            data = bytearray(name.read_bytes())
            data[4 if number % 2 else -4] ^= 1
            name.write_bytes(data)
    with opened(config) as corpus:
        np.testing.assert_array_equal(rows(corpus), expected)
        corpus.parts["books"].check("checking", lambda *_: None)


def test_a_mistake_in_the_background_reaches_who_waits(config, tmp_path):
    (tmp_path / "text" / "33.txt").write_bytes(b"\xff")
    with pytest.raises(UserError, match=r"33\.txt, byte 0: 0xff"), opened(config) as corpus:
        rows(corpus, 3000)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tokenizer": BpeConfig()}, r"data\.order: parts begins to train before all of the text is read"),
        ({"replica_mixtures": [{"books": 1.0}]}, r"data\.order: parts, and data\.replica_mixtures cuts"),
        ({"order": "sorted"}, r"order is 'sorted'"),
    ],
)
def test_what_needs_all_of_the_text_is_refused(config, changes, message):
    with pytest.raises(UserError, match=message):
        dataclasses.replace(config, **changes)


def test_too_little_text_is_said(config):
    with pytest.raises(
        UserError, match=r"data\.sources\.books: too little text to train on. A window takes 99998 \+ 1 = "
    ):
        prepare(config, 99998, 0)
    with (
        closing(prepare(dataclasses.replace(config, held_out=0.01), 300, 0)) as corpus,
        pytest.raises(UserError, match="too little text to evaluate on"),
    ):
        corpus.held_out.head(1000)


def test_a_chain_of_streams_is_one(make_store):
    store = make_store([[1, 2], [3], [4, 5, 6]])
    apart = [DocumentStream(store, np.arange(3) == number) for number in range(3)]
    empty = DocumentStream(store, np.zeros(3, bool))
    chain, whole = Chain([apart[0], empty, *apart[1:]]), DocumentStream(store, np.ones(3, bool))
    assert len(chain) == len(whole)
    for start in range(len(whole)):
        for stop in range(start + 1, len(whole) + 1):
            for one, two in zip(chain.read(start, stop), whole.read(start, stop), strict=True):
                np.testing.assert_array_equal(one, two)
