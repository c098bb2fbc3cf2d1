"""Where texts end: stop strings however a text is cut, tokens that end it, characters over several tokens."""

import json
import random

import numpy as np
import pytest
from tokenizers import Tokenizer as Library
from tokenizers.processors import TemplateProcessing

from gregale.data.tokenizer_training import train_bpe
from gregale.data.tokenizers import BpeConfig, BytesTokenizer, LibraryTokenizer
from gregale.programs.runtime.sampler import (
    COUNT,
    END,
    INTERRUPTED,
    STOP,
    Continuation,
    StopStrings,
    TextFormat,
    text_format_of,
)
from gregale.runs.run_directory import RunDirectory

BYTES = BytesTokenizer()
FORM = TextFormat(BYTES)


def cut_by(text: str, stops: list[str]) -> tuple[str, str | None]:
    """What stands before the first stop string to be complete, found by looking at every beginning of the text."""
    for end in range(len(text) + 1):
        complete = [stop for stop in stops if text[:end].endswith(stop)]
        if complete:
            longest = max(complete, key=len)
            return text[: end - len(longest)], longest
    return text, None


@pytest.mark.parametrize(
    "stops", [[], ["b"], ["ab"], ["abab", "ba"], ["bc", "abcd"], ["cab", "ab"], ["aaab", "aab"], ["abcabc", "ca"]]
)
def test_stop_strings_are_found_however_a_text_is_cut(stops):
    source = random.Random(0)
    for _ in range(100):
        text = "".join(source.choices("abc", k=source.randrange(12)))
        finder, shown, rest = StopStrings(stops), "", text
        while rest and finder.found is None:
            size = source.randint(1, 4)
            shown, rest = shown + finder.push(rest[:size]), rest[size:]
            assert cut_by(text, stops)[0].startswith(shown), "what was shown is not taken back"
        shown += finder.finish()
        assert (shown, finder.found) == cut_by(text, stops)


def test_only_what_may_become_a_stop_string_is_held_back():
    finder = StopStrings(["\n\ndef", "# end"])
    assert [finder.push(piece) for piece in ("a\n", "b", "\n\n", "de", "l #")] == ["a", "\nb", "", "", "\n\ndel "]
    assert finder.finish() == "#"


def pushed(tokens: list[list[int]], count: int = 99, stops: tuple[str, ...] = ()) -> tuple[Continuation, list[str]]:
    text = Continuation(FORM, count, stops)
    return text, [text.push(block) for block in tokens]


def test_characters_are_shown_whole():
    text, pieces = pushed([[byte] for byte in "aß€🌬".encode()])
    assert [piece for piece in pieces if piece] == list("aß€🌬")
    assert text.ended is None
    cut_off, pieces = pushed([list("a🌬".encode())[:3]])
    assert (pieces, cut_off.finish(INTERRUPTED), cut_off.text) == (["a"], "\ufffd", "a\ufffd")


@pytest.mark.parametrize("size", [1, 3, 50])
def test_what_ends_a_text(size):
    def of(text: str, *last: int, **options):
        tokens = [*text.encode(), *last, *b"beyond"]
        found, pieces = pushed([tokens[at : at + size] for at in range(0, len(tokens), size)], **options)
        assert "".join(pieces) == found.text
        return found.text, found.ended, found.tokens

    end = BYTES.end_of_document
    assert of("one two", end) == ("one two", END, 7)
    assert of("one two", count=7) == ("one two", COUNT, 7)
    assert of("one two", end, stops=("e t", "x")) == ("on", STOP, 5)
    assert of("one t", end, stops=("e two",)) == ("one t", END, 5), "what was held back belongs to the text"
    assert of("one t", count=5, stops=("e two",)) == ("one t", COUNT, 5)
    assert of("one two", count=7, stops=("two",)) == ("one ", STOP, 7)
    assert of("ü", count=1) == ("\ufffd", COUNT, 1)
    text, _ = pushed([[*b"one", BYTES.end_of_document]])
    assert (text.push(b"two"), text.finish(INTERRUPTED), text.text, text.ended) == ("", "", "one", END)


def imported(folder, tokenizer, **generation) -> RunDirectory:
    (folder / "huggingface").mkdir()
    (folder / "huggingface" / "model.safetensors").write_bytes(b"")
    (folder / "huggingface" / "generation_config.json").write_text(json.dumps(generation))
    return RunDirectory(folder)


def test_an_imported_model_gets_what_transformers_would_give_it(tmp_path):
    plain = train_bpe(BpeConfig(vocabulary=260), iter(["a gale"]))
    saved = plain.to_json()
    library = Library.from_str(json.dumps(saved["library"]))
    end = saved["end_of_document"]
    library.post_processor = TemplateProcessing(single=f"{end} $A", special_tokens=[(end, plain.end_of_document)])
    tokenizer = LibraryTokenizer(library.to_str(), end, "tokenizer.json")
    assert tokenizer.start == (plain.end_of_document,)
    np.testing.assert_array_equal(tokenizer.encode("gale"), plain.encode("gale"))
    form = text_format_of(imported(tmp_path, tokenizer, eos_token_id=[plain.end_of_document, 7]), tokenizer)
    assert form.ends == (plain.end_of_document, 7)
    assert form.ids("gale") == [plain.end_of_document, *plain.encode("gale").tolist()]
    assert form.ids("") == [plain.end_of_document]
    assert text_format_of(RunDirectory(tmp_path / "trained"), tokenizer) == TextFormat(tokenizer)
