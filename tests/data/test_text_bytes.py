"""Bytes of text by tokens, for tokenizers whose pieces are not the text, against the text's own bytes."""

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from gregale.data.config import DataConfig
from gregale.data.preparation import prepare
from gregale.data.sources import JsonLinesSource
from gregale.data.tokenizers import ByteCountOverrides, FileConfig, LibraryTokenizer
from gregale.evaluation.bigram import more_bytes_of
from gregale.programs.runtime.evaluation import SlidingWindows

END = "</s>"
TEXTS = ["the café", "a", " the end ", "ﬁne\nWÖRD  𝔘x", "the the the", "▁a\tb", "x" * 40]


def byte_level(prefix: bool, **changes) -> Tokenizer:
    """A tokenizer of bytes with two merges."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {name: number for number, name in enumerate([*alphabet, "th", "the"])}
    library = Tokenizer(models.BPE(vocab=vocabulary, merges=[("t", "h"), ("th", "e")]))
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=prefix)
    library.decoder = decoders.ByteLevel()
    for name, value in changes.items():
        setattr(library, name, value)
    library.add_special_tokens([END])
    return library


def sentence_piece(fallback: bool, **changes) -> Tokenizer:
    """A tokenizer of characters that has a mark for a space, and of what it does not know bytes or one token."""
    names = ["<unk>", *(f"<0x{value:02X}>" for value in range(256)), *"▁abcdefhtxu", "▁t", "▁th", "▁the"]
    vocabulary = {name: number for number, name in enumerate(names)}
    merges = [("▁", "t"), ("▁t", "h"), ("▁th", "e")]
    library = Tokenizer(models.BPE(vocab=vocabulary, merges=merges, byte_fallback=fallback, unk_token="<unk>"))
    parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    library.decoder = decoders.Sequence(parts)
    for name, value in changes.items():
        setattr(library, name, value)
    library.add_special_tokens(["<unk>", END])
    return library


def metaspace(scheme: str, split: bool = True):
    return pre_tokenizers.Metaspace(prepend_scheme=scheme, split=split)


def with_stripping_token() -> Tokenizer:
    library = byte_level(False)
    library.add_tokens([AddedToken("the", lstrip=True, rstrip=True, special=False)])
    return library


LLAMA = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
LOSSY = normalizers.Sequence([normalizers.NFKC(), normalizers.Lowercase(), normalizers.Strip()])
WORDS = pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), metaspace("always")])
# Name -> tokenizer, and whether the pieces of its tokens are the text.
LIBRARIES = {
    "byte-level": (byte_level(False), True),
    "prefix-space": (byte_level(True), False),
    "trimmed": (byte_level(True, post_processor=processors.ByteLevel(trim_offsets=True)), False),
    "nfkc-lower": (byte_level(False, normalizer=LOSSY), False),
    "removing": (
        byte_level(
            False,
            pre_tokenizer=pre_tokenizers.Sequence(
                [pre_tokenizers.Split(" ", "removed"), pre_tokenizers.ByteLevel(add_prefix_space=False)]
            ),
        ),
        False,
    ),
    "stripping": (with_stripping_token(), False),
    "llama": (sentence_piece(True, normalizer=LLAMA), False),
    "metaspace-first": (sentence_piece(True, pre_tokenizer=metaspace("first", split=False)), False),
    "metaspace-always": (sentence_piece(True, pre_tokenizer=metaspace("always")), False),
    "metaspace-never": (sentence_piece(True, pre_tokenizer=metaspace("never")), False),
    "unknown": (sentence_piece(False, pre_tokenizer=metaspace("always")), False),
    "words": (sentence_piece(False, pre_tokenizer=WORDS), False),
}
TOKENIZERS = {name: LibraryTokenizer(library.to_str(), END, name) for name, (library, _) in LIBRARIES.items()}


@given(text=st.one_of(st.text(), st.lists(st.sampled_from([*TEXTS, " ", "\n", END]), max_size=6).map("".join)))
def test_tokens_stand_for_all_bytes_of_the_text_and_each_for_none_or_more(text):
    for name, tokenizer in TOKENIZERS.items():
        assert tokenizer.is_exact == LIBRARIES[name][1], name
        ((ids, more_bytes),) = tokenizer.encode_counted([text])
        assert ids.tolist() == tokenizer.encode(text).tolist(), name
        found = tokenizer.token_bytes[ids] + more_bytes
        assert found.sum() == (len(text.encode()) if len(ids) else 0), name
        assert (found >= 0).all(), name
        assert not (tokenizer.is_exact and more_bytes.any()), name


def test_a_space_that_was_put_before_the_text_is_no_byte_of_it():
    for name in ("prefix-space", "llama", "metaspace-first"):
        ((ids, more_bytes),) = TOKENIZERS[name].encode_counted(["the café the"])
        assert more_bytes.tolist() == [-1] + [0] * (len(ids) - 1), name


@given(st.lists(st.tuples(st.integers(0, 9), st.lists(st.integers(-3, 3), max_size=9))))
def test_corrections_are_found_after_packing_and_joining(parts):
    rows = [np.array([*differences, *[0] * zeros], np.int64) for zeros, differences in parts]
    one = ByteCountOverrides.joined(
        [(len(row), ByteCountOverrides.unpacked(ByteCountOverrides.of(row).packed())) for row in rows]
    )
    whole = np.concatenate([*rows, np.zeros(0, np.int64)])
    np.testing.assert_array_equal(one.at(np.arange(len(whole))), whole)


def config_of(folder: Path, documents: list[str], library: Tokenizer) -> DataConfig:
    """Documents with a tokenizer, all for validation too."""
    (folder / "text.jsonl").write_text("".join(json.dumps({"text": each}) + "\n" for each in documents))
    (folder / "t.json").write_text(library.to_str())
    source = JsonLinesSource(files=(f"{folder}/text.jsonl",))
    tokenizer = FileConfig(path=f"{folder}/t.json", end_of_document=END)
    return DataConfig({"x": source}, tokenizer, {"y": source}, 0.2, cache=f"{folder}/cache", workers=1)


def corpus(folder: Path, name: str) -> tuple[DataConfig, list[str]]:
    """The configuration of a corpus of short documents with a tokenizer, and its documents."""
    random = np.random.default_rng(0)
    documents = [" ".join(random.choice(TEXTS, random.integers(1, 9))) for _ in range(200)]
    return config_of(folder, documents, LIBRARIES[name][0]), documents


@pytest.mark.parametrize("name", ["prefix-space", "nfkc-lower", "words"])
def test_documents_and_windows_count_the_bytes_of_their_text(tmp_path, name):
    config, documents = corpus(tmp_path, name)
    for found in (prepare(config, 16, 0), prepare(config, 16, 0)):
        tokenizer, stream = found.tokenizer, found.validation_streams["y"]
        windows = SlidingWindows([stream], 16, 16, (0,), tokenizer.end_of_document)
        assert windows.text_bytes(tokenizer.token_bytes).tolist() == [len(each.encode()) for each in documents]
        sizes = [
            own + more for own, more in ((tokenizer.token_bytes[i], d) for i, d in tokenizer.encode_counted(documents))
        ]
        of_store = np.concatenate([np.append(each, 0) for each in sizes])
        starts = np.cumsum([0, *(len(each) + 1 for each in sizes)])
        of_store[starts[:-1]] = 0  # the first token of a document is no target
        rows = found.validation["y"].rows(range(len(found.validation["y"]) + 1))
        scored = (tokenizer.token_bytes[rows["targets"]] + rows["more_bytes"]) * rows["loss_mask"]
        assert scored.sum() == of_store[: len(found.validation["y"]) * 16 + 1].sum()
        held_out = found.held_out
        assert held_out is not None
        streams = list(found.held_out_streams.values())
        counts = [SlidingWindows([each], 16, 16, (0,), 0).text_bytes(tokenizer.token_bytes) for each in streams]
        assert set(np.concatenate(counts).tolist()) <= {len(each.encode()) for each in documents}
        assert not found.notes


def test_a_store_has_the_counts_in_an_object_store_too_and_the_bigram_model_uses_them(tmp_path, s3):
    config, documents = corpus(tmp_path, "prefix-space")
    without_space = sum(not each.startswith(" ") for each in documents)
    for _ in range(2):
        found = prepare(dataclasses.replace(config, cache=str(s3), local_cache=str(tmp_path / "pieces")), 16, 0)
        assert found.stores["sources.x"].corrections.differences.tolist() == [-1] * without_space
    stream = found.validation_streams["y"]
    assert more_bytes_of(stream, cross=True) == -sum(not each.startswith(" ") for each in documents[1:])
    assert more_bytes_of(stream, cross=False) == 0
