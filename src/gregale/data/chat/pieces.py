"""Encodes a text in which some names of special tokens are tokens, and others characters.

The text is in pieces: the second, fourth and so on are names of special tokens.
"""

import json
from collections.abc import Mapping, Sequence
from functools import cached_property

import numpy as np

ALIAS = "\ufdd0"  # no text that a template rendered has this character; one more character makes a token's alias
FIRST_ALIAS = 0xE000


class LibraryPieces:
    """Encodes texts in pieces with the `tokenizers` library.

    A text is tokenized once, as a whole. If no other piece has such a name, the library finds the tokens by their
    names, as `transformers` does. Otherwise they have aliases, which are added tokens with the same rules, and names
    are characters.

    - `content`: of a tokenizer.json
    - `control_tokens`: ids of the special tokens, by name
    """

    def __init__(self, content: dict, control_tokens: Mapping[str, int]):
        self._content, self._control = content, control_tokens

    def encode(self, pieces: Sequence[str]) -> tuple[str, np.ndarray, np.ndarray, np.ndarray]:
        """Return the text as it was encoded, ids int32 [token], and the characters of each token, int64 [token, 2].

        The characters are indices of the joined pieces, and then also of the text as it was encoded.
        """
        if not any(name in text for text in pieces[::2] for name in self._control):
            text = "".join(pieces)
            found = self._parsing.encode(text, add_special_tokens=False)
            places = np.array(found.offsets, np.int64).reshape(-1, 2)
            return text, np.array(found.ids, np.int32), places, places
        library, aliases = self._with_aliases
        written = [aliases[each] if number % 2 else each for number, each in enumerate(pieces)]
        text = "".join(written)
        found = library.encode(text, add_special_tokens=False)
        back = {library.token_to_id(alias): self._control[name] for name, alias in aliases.items()}
        ids = np.array([back.get(each, each) for each in found.ids], np.int32)
        own, given = (np.array([0, *map(len, each)]).cumsum() for each in (pieces, written))
        places = np.array(found.offsets, np.int64).reshape(-1, 2)
        piece = np.searchsorted(given, places, side="right") - 1
        offsets = np.minimum(own[piece] + places - given[piece], own[np.minimum(piece + 1, len(pieces))])
        return text, ids, offsets, places

    @cached_property
    def _parsing(self):
        import tokenizers

        found = tokenizers.Tokenizer.from_str(json.dumps(self._content))
        found.no_truncation()
        found.no_padding()
        return found

    @cached_property
    def _with_aliases(self):
        import tokenizers

        found = tokenizers.Tokenizer.from_str(self._parsing.to_str())
        found.encode_special_tokens = True
        aliases = {}
        for each in self._content["added_tokens"]:
            if each["content"] in self._control:
                aliases[each["content"]] = ALIAS + chr(FIRST_ALIAS + len(aliases))
                rules = {rule: each.get(rule, False) for rule in ("single_word", "lstrip", "rstrip", "normalized")}
                found.add_tokens([tokenizers.AddedToken(aliases[each["content"]], special=False, **rules)])
        return found, aliases
