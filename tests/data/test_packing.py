"""Rows of whole documents: which document is in which row, the examples, the order, and the loss."""

import dataclasses
import itertools

import haliax as hax
import jax
import numpy as np
import pytest
from haliax import Axis
from hypothesis import given, settings
from hypothesis import strategies as st

from gregale.axes.layout import BATCH
from gregale.data import examples as packing
from gregale.data.config import DataConfig
from gregale.data.examples import PackedRows, Packing, held_out_examples, in_order, rows_of, training_examples
from gregale.data.mixtures import replica_examples
from gregale.data.preparation import prepare
from gregale.data.sources import TextSource
from gregale.data.store import LossMask
from gregale.data.tokenizers import ByteCountOverrides
from gregale.errors import UserError
from tests.data.conftest import in_memory, stream_of
from tests.mesh.support import assert_trees_close, one_device, small_model

L = 12
FIT, PAD = Packing("fit"), Packing("pad")
KEYS = ("tokens", "targets", "loss_mask", "positions")


def documents_of(lengths, first=1):
    """Documents of these lengths, in which every token is another number."""
    return [list(part) for part in np.split(np.arange(first, first + sum(lengths)), np.cumsum(lengths)[:-1])]


def rows_for(documents, kind=FIT, **options):
    return rows_of(stream_of(in_memory(documents)), L, kind, **options)


def found_in(example):
    """The documents in a row, from inputs, targets, segments, positions and mask; the rest is checked as padding."""
    found = []
    for segment in range(example["segment_ids"].max() + 1):
        places = np.flatnonzero(example["segment_ids"] == segment)
        assert places.tolist() == list(range(places[0], places[-1] + 1))
        inputs, targets, mask, positions = (example[key][places].tolist() for key in KEYS)
        assert positions == list(range(len(places)))
        assert inputs[1:] == targets[:-1]
        assert all(mask) or (not any(inputs + targets + mask) and places[-1] == L - 1), "text or padding"
        found += [[*inputs, targets[-1]]] * all(mask)
    return found


def slow_first_fit(lengths, window_rows):
    """The rows as lists of documents, one document after the other."""
    kept = [number for number, length in enumerate(lengths) if length > 1]
    targets = sum(lengths[number] - 1 for number in kept)
    window = -(-window_rows * L * len(kept) // targets) if kept else 1
    rows = []
    for first in range(0, len(kept), window):
        own = []
        for number in sorted(kept[first : first + window], key=lambda number: -lengths[number]):
            for row in own:
                if sum(lengths[each] - 1 for each in row) + lengths[number] - 1 <= L:
                    row.append(number)
                    break
            else:
                own.append([number])
        rows += [sorted(row) for row in own]
    return rows


@settings(max_examples=80)
@given(
    lengths=st.lists(st.one_of(st.sampled_from([1, 2, L, L + 1]), st.integers(1, L + 1)), min_size=1, max_size=60),
    window_rows=st.integers(1, 5),
    group=st.sampled_from([1, 16, 1 << 22]),
)
def test_rows_are_those_of_a_slow_first_fit_and_have_every_document_once(lengths, window_rows, group):
    documents = documents_of(lengths)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(packing, "WINDOW_ROWS", window_rows)
        patch.setattr(packing, "GROUP", group)
        rows = rows_for(documents)
    found = [found_in(rows[number]) for number in range(len(rows))]
    assert found == [[documents[number] for number in row] for row in slow_first_fit(lengths, window_rows)]
    assert sorted(each for row in found for each in row) == [each for each in documents if len(each) > 1]
    padded = rows_for(documents, PAD)
    assert [found_in(padded[number]) for number in range(len(padded))] == [[d] for d in documents if len(d) > 1]


@pytest.mark.parametrize("kind", ["fit", "pad"])
def test_long_documents_keep_the_side_that_is_chosen_or_are_refused(kind):
    documents = documents_of([L + 2, 3, 40, L + 1])
    for choice, side in {"keep_start": slice(L + 1), "keep_end": slice(-L - 1, None)}.items():
        rows = rows_for(documents, Packing(kind, choice))
        found = sorted(each for number in range(len(rows)) for each in found_in(rows[number]))
        assert found == [each[side] for each in documents], choice
        assert f"{choice} leaves out {1 + 40 - L - 1} tokens of them: number 0, 2, counted from 0" in rows.note
    message = r"long_documents: 2 of 4 documents have more than the 12 \+ 1 = 13 tokens of a row \(the longest 40\): "
    with pytest.raises(UserError, match=message + r"number 0, 2, .* batch\.sequence_length to at least 39\."):
        rows_for(documents, Packing(kind))
    assert rows_for(documents[1:2], Packing(kind)).note == ""


def test_targets_are_counted_and_each_has_its_bytes_once():
    at_the_end = rows_for(documents_of([5, 2 * L - 5, 3]), Packing("concat"))  # a document begins after two rows
    assert at_the_end.targets == sum(at_the_end[number]["loss_mask"].sum() for number in range(2)) == 2 * L - 2
    lengths = np.random.default_rng(0).integers(1, L + 2, 50)
    documents = documents_of(lengths)
    store = dataclasses.replace(
        in_memory(documents), corrections=ByteCountOverrides.of(np.arange(1, 1 + sum(lengths)) % 3)
    )
    mask = np.random.default_rng(1).integers(0, 2, sum(lengths)).astype(bool)
    masked = dataclasses.replace(store, supervised=LossMask.joined([mask]))
    cut = [Packing(FIT.kind, long_documents=choice) for choice in ("keep_start", "keep_end")]
    for kind in (FIT, PAD, *cut, Packing("concat"), Packing("concat", cross_documents=True)):
        for each in (store, masked):
            rows = rows_of(stream_of(each), L if kind not in cut else 3, kind, evaluates=True)
            examples = held_out_examples({"a": rows, "b": rows})
            assert len(examples) == 2 * len(rows)
            example = examples.rows(range(len(examples)))
            text = example["loss_mask"] > 0
            assert text.sum() == 2 * rows.targets
            assert np.array_equal(example["more_bytes"][text], example["targets"][text] % 3)  # a token's id


def test_documents_that_lose_all_their_loss_to_a_cut_are_counted():
    store = in_memory(documents_of([6, 6, 6]))
    ends = [np.arange(6) == place for place in (5, 1, 5)]
    stream = stream_of(dataclasses.replace(store, supervised=LossMask.joined(ends)))
    start, end = (PackedRows(stream, 3, Packing("fit", long_documents=f"keep_{each}")) for each in ("start", "end"))
    assert start.note.endswith("counted from 0; 2 of them keep no token that the loss is on")
    assert end.note.endswith("counted from 0; 1 of them keep no token that the loss is on")
    assert (start.targets, end.targets) == (1, 2)


def test_epochs_mixtures_and_replicas_have_every_document_once_and_any_example_alone():
    generator = np.random.default_rng(1)
    chats = documents_of(generator.integers(2, L + 2, 120))
    texts = documents_of(generator.integers(2, 90, 20), first=5000)

    def made():
        return {"chat": rows_for(chats), "text": rows_for(texts, Packing("concat"))}

    def chats_in(examples, numbers):
        return [found_in(one) for one in map(examples.__getitem__, numbers) if one["tokens"][0] < 5000]

    weights, count = {"chat": 1.0, "text": 3.0}, len(made()["chat"])
    examples = training_examples(made(), weights, seed=0)
    epochs = [chats_in(examples, range(first, first + 4 * count)) for first in (0, 4 * count)]
    assert epochs[0] != epochs[1]
    assert all(sorted(itertools.chain(*epoch)) == chats for epoch in epochs)
    resumed = training_examples(made(), weights, seed=0)
    for number in (57, 3, 5 * count):
        assert all(np.array_equal(resumed[number][key], array) for key, array in examples[number].items())
    # The first replica has only chats, the second as many texts: they share the chats 2 to 1.
    replicas = replica_examples(made(), [{"chat": 1.0}, weights | {"text": 1.0}], seed=0).replicas
    parts = round(count * 2 / 3), count - round(count * 2 / 3)
    own = [chats_in(each, range(part * (1 + k))) for k, (each, part) in enumerate(zip(replicas, parts, strict=True))]
    assert [len(each) for each in own] == list(parts)
    assert sorted(itertools.chain(*own[0], *own[1])) == chats


def test_the_packed_loss_is_the_token_weighted_loss_of_single_documents():
    generator = np.random.default_rng(2)
    documents = [generator.integers(1, 64, length).tolist() for length in (5, 9, 3, L + 1, 2, 7, 1)]
    packed = in_order([rows_for(documents)])
    assert len(packed) < len(documents) - 1
    batch = packed.rows(range(len(documents)))  # the last rows have no target
    single = {key: np.zeros_like(array) for key, array in batch.items()}
    for row, document in enumerate(documents):  # a position does not see the padding behind it
        size = len(document) - 1
        single["tokens"][row, :size], single["targets"][row, :size] = document[:-1], document[1:]
        single["loss_mask"][row, :size], single["positions"][row] = 1, np.arange(L)

    @jax.jit
    @jax.value_and_grad
    def mean(model, batch):
        total, weight = model.loss(batch, one_device(loss_block=8))
        return total / weight

    axes = Axis(BATCH, len(documents)), Axis("position", L)
    joined = batch | {"segment_ids": np.zeros_like(batch["segment_ids"])}
    (loss, gradients), (expected, expected_gradients), (crossing, _) = (
        mean(small_model(), {key: hax.named(array, axes) for key, array in each.items()})
        for each in (batch, single, joined)
    )
    assert float(loss) == pytest.approx(float(expected), abs=1e-6)
    assert_trees_close(gradients, expected_gradients, atol=1e-6, rtol=0)
    assert abs(float(crossing) - float(expected)) > 1e-4, "the check would notice attention between documents"


def test_a_source_chooses_its_packing_for_training_held_out_and_validation_text(tmp_path):
    for name, text in {
        "chat": "7 bytes, " * 6,
        "book": "word " * 60,
        "news": "a document of 30 bytes is long," * 3,
    }.items():
        (tmp_path / name).write_text(text)
    chat = TextSource(files=(f"{tmp_path}/chat",), separator=", ", packing="fit")
    news = TextSource(files=(f"{tmp_path}/news",), separator=",", packing="pad", long_documents="keep_end")
    sources = {"chat": chat, "book": TextSource(files=(f"{tmp_path}/book",))}
    config = DataConfig(sources, validation={"news": news}, held_out=0.01, cache=f"{tmp_path}/cache")
    corpus = prepare(config, 16, seed=0)
    # No hash holds one of six documents out: the last document is.
    assert (corpus.train_streams["chat"].numbers.tolist(), len(corpus.held_out_streams["chat"])) == ([*range(5)], 8)
    assert corpus.held_out[0]["loss_mask"].sum() == 7
    assert (len(corpus.train_rows["chat"]), corpus.train_rows["chat"].targets) == (3, 5 * 7)
    news_rows = corpus.validation["news"].rows(range(3))
    assert news_rows["loss_mask"].all()
    assert (news_rows["targets"][:, -1] == corpus.tokenizer.end_of_document).all()
    (note,) = corpus.notes
    assert note.startswith("data.validation.news: 3 of 3 documents have more than the 16 + 1 = 17 tokens of a row; ")
    refusing = dataclasses.replace(config, validation={"news": dataclasses.replace(news, long_documents=None)})
    with pytest.raises(UserError, match=r"data\.validation\.news: long_documents: 3 of 3 documents have more"):
        prepare(refusing, 16, seed=0)


def test_contradicting_keys_are_refused():
    with pytest.raises(UserError, match="long_documents is keep_end, but packing concat cuts documents of any length"):
        TextSource(files=("x",), long_documents="keep_end")
    for group in ("sources", "validation"):
        with pytest.raises(UserError, match=rf"cross_documents is true, but data\.{group}\.a\.packing is pad, whose"):
            DataConfig(**{group: {"a": TextSource(files=("x",), packing="pad")}}, cross_documents=True)
