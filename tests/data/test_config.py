import dataclasses
import json

import numpy as np
import pytest

from gregale.data.config import DataConfig
from gregale.data.examples import held_out_documents
from gregale.data.preparation import build_stores, prepare, token_cache
from gregale.data.sources import JsonLinesSource, TextSource, TokensSource
from gregale.data.store import progress_bars, silent
from gregale.data.tokenizer_training import training_texts
from gregale.data.tokenizers import BpeConfig, BytesConfig, FileConfig
from gregale.errors import UserError

TEXTS = [f"document {number} says: " + "la " * (number % 7) + "\n" for number in range(60)]


def write_texts(folder):
    folder.mkdir(exist_ok=True)
    for number, text in enumerate(TEXTS):
        (folder / f"{number:02}.txt").write_text(text)
    (folder / "05b.txt").write_text("")  # an empty document has no number
    return TextSource(files=(f"{folder}/*.txt",))


FINGERPRINTS = {
    BytesConfig: "85b6e663f3c8a454fdd34073f30800a12e3557d11392a854f61ef84f48d7fbe9",
    BpeConfig: "aeda2d9a6725fa99208f631272c1b4e21c8939974e969be7c8144b084fb9af1e",
}


@pytest.fixture
def config(tmp_path):
    source = write_texts(tmp_path / "texts")
    return DataConfig(sources={"books": source}, held_out=0.2, cache=str(tmp_path / "cache"))


def texts_of(streams, tokenizer):
    """The documents of streams as text."""
    (stream,) = streams.values()
    tokens, documents = stream.read(0, len(stream))
    return [tokenizer.decode(tokens[documents == number]) for number in range(len(stream.starts) - 1)]


@pytest.mark.parametrize("tokenizer", [BytesConfig(), BpeConfig(vocabulary=270)], ids=["bytes", "bpe"])
def test_every_document_is_trained_on_or_held_out(config, tokenizer):
    corpus = prepare(dataclasses.replace(config, tokenizer=tokenizer), 16, seed=0)
    out = held_out_documents(len(TEXTS), 0.2)
    assert 0 < out.sum() < len(TEXTS)
    expected = {held: [text for text, one in zip(TEXTS, out, strict=True) if one == held] for held in (True, False)}
    assert texts_of(corpus.train_streams, corpus.tokenizer) == expected[False]
    assert texts_of(corpus.held_out_streams, corpus.tokenizer) == expected[True]
    if isinstance(tokenizer, BytesConfig):
        assert corpus.training_tokens == sum(len(text) + 1 for text in expected[False])
        assert corpus.held_out_tokens == sum(len(text) + 1 for text in expected[True])
    assert len(corpus.held_out) == (corpus.held_out_tokens - 1) // 16
    assert list(training_texts(config.sources, config.held_out, {}, silent)) == expected[False], "a BPE's text"
    # The fingerprints were written down before ends were held out: runs of then go on.
    assert corpus.fingerprint == FINGERPRINTS[type(tokenizer)]


def test_nothing_is_built_twice_and_a_tokenizer_file_is_used(config, tmp_path):
    config = dataclasses.replace(config, tokenizer=BpeConfig(vocabulary=270))
    told = []
    first = prepare(config, 16, 0, lambda *report: told.append(report[0]))
    assert set(told) == {"training the tokenizer", "books"}
    told.clear()
    again = prepare(config, 32, 1, lambda *report: told.append(report[0]))
    assert told == []
    assert again.fingerprint == first.fingerprint
    (tmp_path / "t.json").write_text(json.dumps(first.tokenizer.to_json()["library"]))
    choice = FileConfig(path=str(tmp_path / "t.json"), end_of_document="<|end_of_document|>")
    assert prepare(dataclasses.replace(config, tokenizer=choice), 16, 0).fingerprint == first.fingerprint


def test_hosts_with_other_folders_agree(config, tmp_path):
    source = write_texts(tmp_path / "elsewhere")
    other = dataclasses.replace(config, sources={"books": source}, cache=str(tmp_path / "other"))
    one, two = prepare(config, 16, 5), prepare(other, 16, 5)
    assert one.fingerprint == two.fingerprint
    np.testing.assert_array_equal(*(each.train.rows(range(24, 32))["tokens"] for each in (one, two)))
    changed = dataclasses.replace(config, held_out=0.3)
    assert prepare(changed, 16, 5).fingerprint != one.fingerprint


def test_shuffle_and_cross_documents_reach_the_examples(config):
    plain = prepare(dataclasses.replace(config, shuffle=False), 16, seed=0)
    tokens, _ = plain.train_streams["books"].read(0, 16)
    np.testing.assert_array_equal(plain.train[0]["tokens"], tokens)
    crossing = prepare(dataclasses.replace(config, cross_documents=True), 64, seed=0)
    for examples in (crossing.train, crossing.held_out):
        assert examples.rows(range(3))["loss_mask"].all()
    apart = prepare(config, 64, seed=0)
    for examples in (apart.train, apart.held_out):
        assert not examples.rows(range(3))["loss_mask"].all()


def test_sources_of_all_kinds_mix(config, tmp_path):
    lines = "".join('{"text": "XXXXXXXXXXXXXXX"}\n' for _ in range(60))
    (tmp_path / "a.jsonl").write_text(lines)
    sources = {"books": config.sources["books"], "x": JsonLinesSource(files=(f"{tmp_path}/a.jsonl",), weight=3.0)}
    corpus = prepare(dataclasses.replace(config, sources=sources), 16, seed=0)
    tokens = corpus.train.rows(range(400))["tokens"]
    assert (tokens == ord("X")).any(axis=1).mean() == 0.75
    assert list(corpus.train_streams) == ["books", "x"]


@pytest.mark.parametrize("tokenizer", [BytesConfig(), BpeConfig()])
def test_a_mistake_in_a_source_is_named_with_the_source_and_writes_nothing(config, tmp_path, tokenizer):
    sources = {"gone": TextSource(files=("/nowhere/*",))}
    with pytest.raises(UserError, match=r"data\.sources\.gone: files: no file matches /nowhere/\*"):
        prepare(dataclasses.replace(config, sources=sources, tokenizer=tokenizer), 16, 0)
    assert not (tmp_path / "cache").exists()


def test_sources_that_train_no_bpe_are_refused(config, tmp_path):
    types = "text, jsonl, csv, tsv, parquet, huggingface, tokens, chat, chat_csv, chat_parquet, chat_huggingface"
    with pytest.raises(UserError, match=rf"data\.sources: empty; .*types are: {types}"):
        prepare(DataConfig(), 16, 0)
    np.arange(100, dtype=np.uint16).tofile(tmp_path / "a.bin")
    tokens = {"a": TokensSource(files=(f"{tmp_path}/a.bin",))}
    with pytest.raises(UserError, match=r"data\.tokenizer: no text to train a BPE on"):
        build_stores(dataclasses.replace(config, sources=tokens, tokenizer=BpeConfig()), token_cache(config))


def book(tmp_path, text, **fields):
    """A configuration of one file, the most common first try."""
    (tmp_path / "book.txt").write_text(text)
    source = TextSource(files=(f"{tmp_path}/book.txt",))
    return DataConfig(sources={"book": source}, cache=str(tmp_path / "cache"), workers=1, **fields)


def test_of_one_book_the_end_is_held_out(tmp_path):
    text = "".join(f"sentence {number}. " for number in range(600))
    config = book(tmp_path, text, held_out=0.05)
    corpus = prepare(config, 32, 0)
    held = round(0.05 * (len(text) + 1) / 32) * 32 + 1
    assert corpus.held_out_tokens == held
    assert texts_of(corpus.held_out_streams, corpus.tokenizer) == [(text + "$")[-held:].rstrip("$")]
    assert texts_of(corpus.train_streams, corpus.tokenizer) == [(text + "$")[:-held]]
    assert len(corpus.held_out) == held // 32
    assert prepare(config, 32, 0).fingerprint == corpus.fingerprint
    assert prepare(config, 64, 0).fingerprint != corpus.fingerprint, "the cut is part of it"


def test_a_source_without_held_out_documents_has_an_end_and_the_others_stay(config, tmp_path):
    alone = prepare(config, 16, 0)
    both = book(tmp_path, "words " * 100, held_out=config.held_out)
    corpus = prepare(dataclasses.replace(config, sources=config.sources | both.sources), 16, 0)
    assert len(corpus.held_out_streams["book"]) == round(0.2 * 601 / 16) * 16 + 1
    for streams in ("train_streams", "held_out_streams"):
        ours, before = (getattr(each, streams)["books"] for each in (corpus, alone))
        np.testing.assert_array_equal(ours.read(0, len(ours)), before.read(0, len(before)))


def test_a_held_out_end_trains_no_bpe(tmp_path):
    text = "the sea and the wind. " * 300 + "qzqz qzqz " * 80
    held = len("qzqz qzqz " * 80) / len(text)
    config = book(tmp_path, text, held_out=held, tokenizer=BpeConfig(vocabulary=300))
    told = []
    corpus = prepare(config, 16, 0, lambda *report: told.append(report[0]))
    assert told.count("book") == 2, "once to see that an end is needed, once with the tokenizer that never saw it"
    (out,) = texts_of(corpus.held_out_streams, corpus.tokenizer)
    (train,) = texts_of(corpus.train_streams, corpus.tokenizer)
    assert train + out == text
    assert "qz" in out
    assert not [piece for piece in corpus.tokenizer.vocabulary_bytes if b"qz" in piece or b"zq" in piece]
    leaky = build_stores(config, token_cache(config))[0]
    assert [piece for piece in leaky.vocabulary_bytes if b"qz" in piece], "it would have learnt them"
    told.clear()
    assert prepare(config, 16, 0, lambda *report: told.append(report[0])).fingerprint == corpus.fingerprint
    assert told == []


def test_validation_sources_are_evaluated_on_and_never_trained_on(config, tmp_path):
    (tmp_path / "news.txt").write_text("NEWS " * 40)
    (tmp_path / "code.txt").write_text("CODE " * 20)
    validation = {name: TextSource(files=(f"{tmp_path}/{name}.txt",)) for name in ("news", "code")}
    config = dataclasses.replace(config, tokenizer=BpeConfig(vocabulary=290))
    plain, corpus = (prepare(each, 16, 0) for each in (config, dataclasses.replace(config, validation=validation)))
    assert corpus.fingerprint == plain.fingerprint, "they may change when a run resumes"
    assert corpus.tokenizer.fingerprint == plain.tokenizer.fingerprint
    assert {key: len(examples) for key, examples in corpus.validation.items()} == {
        name: (len(stream) - 1) // 16 for name, stream in corpus.validation_streams.items()
    }
    assert texts_of({"news": corpus.validation_streams["news"]}, corpus.tokenizer) == ["NEWS " * 40]
    assert list(corpus.stores) == ["sources.books", "validation.news", "validation.code"]
    assert len(set(corpus.validation_fingerprints.values())) == 2
    with pytest.raises(UserError, match=r"data\.validation\.code: too little .* 120 \+ 1 = 121 tokens, and there are"):
        prepare(dataclasses.replace(config, validation=validation), 120, 0)
    with pytest.raises(UserError, match=r"data\.validation\.x\.weight: 2 found, .* evaluated by itself"):
        DataConfig(validation={"x": TextSource(weight=2.0)})
    with pytest.raises(UserError, match=r"data\.validation\.x: files: no file matches /nowhere"):
        prepare(dataclasses.replace(config, validation={"x": TextSource(files=("/nowhere",))}), 16, 0)


def test_skipped_documents_are_told_of_whenever_the_store_is_opened(config, tmp_path):
    (tmp_path / "texts" / "30.txt").write_bytes(b"caf\xe9")
    (tmp_path / "texts" / "33.txt").write_bytes(b"\xff")
    source = dataclasses.replace(config.sources["books"], on_bad_document="skip")
    config = dataclasses.replace(config, sources={"books": source}, tokenizer=BpeConfig(vocabulary=270))
    first = prepare(config, 16, 0)
    assert [line.partition(": 0x")[0] for line in first.notes] == [
        "data.sources.books:",
        "  2 bad document(s) skipped:",
        f"  {tmp_path}/texts/30.txt, byte 3",
        f"  {tmp_path}/texts/33.txt, byte 0",
    ]
    assert prepare(config, 16, 0).notes == first.notes
    found = [
        text for streams in (first.train_streams, first.held_out_streams) for text in texts_of(streams, first.tokenizer)
    ]
    assert sorted(found) == sorted(TEXTS[:30] + TEXTS[31:33] + TEXTS[34:])


def test_too_little_text_is_refused_with_the_arithmetic(config, tmp_path):
    corpus = prepare(config, 16, 0)
    train = corpus.training_tokens
    with pytest.raises(
        UserError, match=rf"data\.sources\.books: .* {train} \+ 1 = {train + 1} tokens; .* has {train} "
    ):
        prepare(config, train, 0)
    with pytest.raises(UserError, match=r"data\.held_out: .* 50 \+ 1 = 51 tokens; the held-out tokens are: book 0\."):
        prepare(book(tmp_path, "a" * 100), 50, 0)
    assert len(prepare(book(tmp_path, "a" * 101), 50, 0).held_out) == 1
    config = book(tmp_path, "a" * 60, held_out=0.0)
    corpus = prepare(config, 50, 0)
    assert (corpus.held_out, corpus.held_out_tokens, corpus.training_tokens) == (None, 0, 61)
    assert not config.evaluates


def test_bars_are_drawn_on_standard_error(capsys):
    with progress_bars() as report:
        report("books", 1, 4)
        report("books", 4, 4)
    output = capsys.readouterr()
    assert "books" in output.err
    assert output.out == ""
