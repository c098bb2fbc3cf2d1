import dataclasses
import json

import draccus
import numpy as np
import pytest

from gregale.data.config import DataConfig, build_stores, prepare, training_texts
from gregale.data.loader import batches
from gregale.data.progress import silent
from gregale.data.sources import JsonLinesSource, TextSource, TokensSource
from gregale.data.stream import held_out_documents
from gregale.data.tokenizers import BpeConfig, BytesConfig, FileConfig, save_tokenizer
from gregale.errors import UserError

TEXTS = [f"document {number} says: " + "la " * (number % 7) + "\n" for number in range(60)]


def write_texts(folder):
    folder.mkdir(exist_ok=True)
    for number, text in enumerate(TEXTS):
        (folder / f"{number:02}.txt").write_text(text)
    (folder / "05b.txt").write_text("")  # an empty document has no number
    return TextSource(files=(f"{folder}/*.txt",))


@pytest.fixture
def config(tmp_path):
    source = write_texts(tmp_path / "texts")
    return DataConfig(sources={"books": source}, held_out=0.2, cache=str(tmp_path / "cache"))


def texts_of(streams, tokenizer):
    """The documents of streams as text."""
    (stream,) = streams.values()
    tokens, documents = stream.read(0, len(stream))
    return [tokenizer.decode(tokens[documents == number]) for number in range(len(stream.starts) - 1)]


def test_every_field_has_a_help_text_and_the_config_survives_yaml(config):
    assert all(field.metadata["help"] for field in dataclasses.fields(DataConfig))
    assert draccus.decode(DataConfig, draccus.encode(config)) == config


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


def test_a_bpe_is_trained_on_the_training_documents_alone(config):
    out = held_out_documents(len(TEXTS), config.held_out)
    found = list(training_texts(config, silent))
    assert found == [text for text, held in zip(TEXTS, out, strict=True) if not held]


def test_nothing_is_built_twice(config):
    config = dataclasses.replace(config, tokenizer=BpeConfig(vocabulary=270))
    told = []
    first = prepare(config, 16, 0, lambda *report: told.append(report[0]))
    assert set(told) == {"training the tokenizer", "books"}
    told.clear()
    again = prepare(config, 32, 1, lambda *report: told.append(report[0]))
    assert told == []
    assert again.fingerprint == first.fingerprint


def test_hosts_with_other_folders_agree(config, tmp_path):
    source = write_texts(tmp_path / "elsewhere")
    other = dataclasses.replace(config, sources={"books": source}, cache=str(tmp_path / "other"))
    one, two = prepare(config, 16, 5), prepare(other, 16, 5)
    assert one.fingerprint == two.fingerprint
    with batches(one.train, 8, first=24) as first, batches(two.train, 8, first=24) as second:
        np.testing.assert_array_equal(next(first)["tokens"], next(second)["tokens"])
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


def test_a_tokenizer_file_is_used(config, tmp_path):
    trained = prepare(dataclasses.replace(config, tokenizer=BpeConfig(vocabulary=270)), 16, 0).tokenizer
    save_tokenizer(trained, tmp_path / "run")
    library = json.loads((tmp_path / "run" / "tokenizer.json").read_text())["library"]
    (tmp_path / "t.json").write_text(json.dumps(library))
    choice = FileConfig(path=str(tmp_path / "t.json"), end_of_document="<|end_of_document|>")
    assert prepare(dataclasses.replace(config, tokenizer=choice), 16, 0).tokenizer.fingerprint == trained.fingerprint


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"held_out": 0.0}, r"data\.held_out: 0\.0 found; it is a fraction between 0 and 1"),
        ({"held_out": 1.0}, r"data\.held_out: 1\.0 found"),
        ({"workers": -1}, r"data\.workers: -1 found"),
    ],
)
def test_bad_values_are_named(fields, message):
    with pytest.raises(UserError, match=message):
        DataConfig(**fields)


def test_a_config_without_sources_is_refused():
    with pytest.raises(
        UserError, match=r"data\.sources: empty; .*types are: huggingface, jsonl, parquet, text, tokens"
    ):
        prepare(DataConfig(), 16, 0)


@pytest.mark.parametrize("tokenizer", [BytesConfig(), BpeConfig()])
def test_a_mistake_in_a_source_is_named_with_the_source_and_writes_nothing(config, tmp_path, tokenizer):
    sources = {"gone": TextSource(files=("/nowhere/*",))}
    with pytest.raises(UserError, match=r"data\.sources\.gone: files: no file matches /nowhere/\*"):
        prepare(dataclasses.replace(config, sources=sources, tokenizer=tokenizer), 16, 0)
    assert not (tmp_path / "cache").exists()


def test_bad_text_is_found_while_a_bpe_is_trained(config, tmp_path):
    (tmp_path / "texts" / "30.txt").write_bytes(b"\xff")
    with pytest.raises(UserError, match=r"data\.sources\.books: .*30\.txt, byte 0: 0xff is not UTF-8"):
        build_stores(dataclasses.replace(config, tokenizer=BpeConfig()))


def test_tokens_alone_train_no_bpe(config, tmp_path):
    np.arange(100, dtype=np.uint16).tofile(tmp_path / "a.bin")
    sources = {"a": TokensSource(files=(f"{tmp_path}/a.bin",))}
    with pytest.raises(UserError, match=r"data\.tokenizer: no text to train a BPE on"):
        prepare(dataclasses.replace(config, sources=sources, tokenizer=BpeConfig()), 16, 0)


def test_too_little_text_is_refused_with_the_arithmetic(config):
    corpus = prepare(config, 16, 0)
    train, out = corpus.training_tokens, corpus.held_out_tokens
    with pytest.raises(
        UserError, match=rf"data\.sources\.books: .* {train} \+ 1 = {train + 1} tokens; .* has {train} "
    ):
        prepare(config, train, 0)
    with pytest.raises(UserError, match=rf"data\.held_out: .*{out} \+ 1 = {out + 1} tokens; .* are: books {out}\."):
        prepare(config, out, 0)
    assert len(prepare(config, out - 1, 0).held_out) == 1
