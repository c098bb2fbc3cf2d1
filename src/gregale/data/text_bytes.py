"""Count the bytes of text of each token, where they differ from the bytes of the token's vocabulary entry ("piece").

A tokenizer may add a space before a text, change characters (lower case, Unicode forms) or remove some. Then a text has
more or fewer bytes than its tokens' pieces. The encoder computes the difference of each token; a token store keeps the
differences, and nothing for a tokenizer that has none.
"""

import base64
import zlib
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

Offsets = Sequence[tuple[int, int]] | np.ndarray
"""The first character of each token in a text, and the one after its last."""

KEEPS_TEXT = ("Digits", "Split")  # pre-tokenizers that change no character; a Split may remove characters


class Corrections(NamedTuple):
    """The tokens whose bytes of text differ from those of their pieces."""

    places: np.ndarray  # the indices of these tokens, ascending, int64 [correction]
    differences: np.ndarray  # bytes of text less bytes of the piece, int64 [correction]

    @staticmethod
    def of(differences: np.ndarray) -> "Corrections":
        """Return the corrections of consecutive tokens with these differences [token], most of them 0."""
        places = np.flatnonzero(differences)
        return Corrections(places, differences[places])

    @staticmethod
    def joined(parts: Iterable[tuple[int, "Corrections"]]) -> "Corrections":
        """Return the corrections of consecutive parts; each comes with its number of tokens."""
        places, differences, first = [np.zeros(0, np.int64)], [np.zeros(0, np.int64)], 0
        for tokens, part in parts:
            places.append(part.places + first)
            differences.append(part.differences)
            first += tokens
        return Corrections(np.concatenate(places), np.concatenate(differences))

    def at(self, places: np.ndarray) -> np.ndarray:
        """Return the differences of the tokens at some indices, int64 [index]."""
        if not len(self.places):
            return np.zeros(len(places), np.int64)
        found = np.searchsorted(self.places, places).clip(max=len(self.places) - 1)
        return np.where(self.places[found] == places, self.differences[found], 0)

    def packed(self) -> str:
        """Return the corrections as a short text."""
        rows = np.array([np.diff(self.places, prepend=0), self.differences], "<i8")
        return base64.b64encode(zlib.compress(rows.tobytes())).decode("ascii")

    @staticmethod
    def unpacked(text: str) -> "Corrections":
        """Return the corrections that `packed` encoded."""
        steps, differences = np.frombuffer(zlib.decompress(base64.b64decode(text)), "<i8").reshape(2, -1)
        return Corrections(steps.cumsum(), differences)


NONE = Corrections.of(np.zeros(0, np.int64))


def bytes_of_tokens(text: str, offsets: Offsets, pieces: np.ndarray) -> np.ndarray:
    """Return how many bytes of a text each of its tokens represents, int64 [token]; their sum is that of the text.

    A token represents the characters between the last one of the token before it and its own last one. Tokens that
    share a character are a group. If the pieces of a group do not have the bytes of its characters, the difference goes
    to the first token, down to 0 bytes, and then to the next one.

    - `text`: the encoded text.
    - `offsets`: the first character of each token, and the one after its last.
    - `pieces`: bytes of each token's piece, int64 [token].
    """
    starts, ends = np.array(offsets, np.int64).reshape(-1, 2).T
    ends = np.maximum.accumulate(ends)
    begins = np.flatnonzero(np.concatenate([[True], starts[1:] >= ends[:-1]]))  # the first token of each group
    last = np.append(begins[1:], len(ends)) - 1
    stops = bytes_before(text)[ends[last]]
    stops[-1] = len(text.encode())
    sizes = np.diff(stops, prepend=0)
    behind = pieces[::-1].cumsum()[::-1]  # of this token and all later ones
    group = np.repeat(np.arange(len(begins)), np.diff(np.append(begins, len(ends))))
    after_group = np.append(behind[begins[1:]], 0)
    left = np.minimum(behind - after_group[group], sizes[group])
    left[begins] = sizes
    following = np.append(left[1:], 0)
    following[last] = 0
    return left - following


def bytes_before(text: str) -> np.ndarray:
    """Return the UTF-8 bytes before each character and before the end of a text, int64 [character + 1]."""
    codes = np.frombuffer(text.encode("utf-32-le"), "<u4")
    sizes = 1 + (codes > 0x7F).astype(np.int64) + (codes > 0x7FF) + (codes > 0xFFFF)
    return np.concatenate([[0], sizes.cumsum()])


def is_exact(tokenizer_json: dict, alphabet: Iterable[str]) -> bool:
    """Return whether every text has as many bytes as the pieces of its tokens, according to a `tokenizer.json`.

    - `alphabet`: the characters by which byte-level tokenizers write the 256 bytes
    """
    model = tokenizer_json.get("model") or {}
    vocabulary = model.get("vocab") or {}
    steps = pre_tokenizers_of(tokenizer_json.get("pre_tokenizer"))
    byte_level = [step for step in steps if step["type"] == "ByteLevel"]
    others = [step for step in steps if step["type"] != "ByteLevel"]
    return (
        model.get("type") == "BPE"
        and not any(model.get(key) for key in ("continuing_subword_prefix", "end_of_word_suffix"))
        and all(character in vocabulary for character in alphabet)
        and tokenizer_json.get("normalizer") is None
        and bool(byte_level)
        and not any(step.get("add_prefix_space", True) for step in byte_level)
        and all(step["type"] in KEEPS_TEXT and step.get("behavior") != "Removed" for step in others)
        and not any(
            token.get("lstrip") or token.get("rstrip")
            for token in tokenizer_json.get("added_tokens") or []
            if not token["special"]
        )
    )


def pre_tokenizers_of(part: dict | None) -> list[dict]:
    """Return the pre-tokenizers of a `tokenizer.json`, with sequences flattened."""
    if part is None:
        return []
    inner = part.get("pretokenizers")
    return [part] if inner is None else [step for each in inner for step in pre_tokenizers_of(each)]
