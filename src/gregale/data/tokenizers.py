"""Tokenizers by `type`: texts and control tokens to IDs, and the bytes of text that each token has.

A tokenizer may add a space before a text, change characters (lower case, Unicode forms) or remove some. Then a text has
more or fewer bytes than its tokens' pieces. The encoder computes the difference of each token; a token store keeps the
differences, and nothing for a tokenizer that has none.

The text is in pieces: the second, fourth and so on are names of special tokens.
"""

import base64
import hashlib
import json
import re
import zlib
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import NamedTuple, cast

import draccus
import numpy as np

from gregale.data.chat.template import ChatTemplate
from gregale.data.sources.base import expand, read_bytes
from gregale.errors import UserError
from gregale.settings import Fixed, Settings, setting, whole
from gregale.storage import StoragePath, write_bytes

BYTE_FALLBACK = re.compile(r"<0x([0-9A-Fa-f]{2})>")
LARGEST_ID = 2**24 - 1
SPACE_MARK = "▁"  # SentencePiece's character for a space


def bytes_of_vocabulary(tokenizer_json: dict, vocabulary: dict[str, int], origin: str) -> list[bytes]:
    """Return the UTF-8 bytes of each id [vocabulary]: none for special tokens and for unused ids.

    - `vocabulary`: id of each token, added ones included
    - `origin`: the origin of the content, for messages

    Raises `UserError` if the decoder is neither byte-level nor of the SentencePiece kind, or an id is too large.
    """
    last = max(vocabulary, key=vocabulary.__getitem__)
    if vocabulary[last] > LARGEST_ID:
        raise UserError(
            f"{origin}: the token {last!r} has the id {vocabulary[last]:,}; ids up to {LARGEST_ID:,} work, because "
            "a model has a row for every id up to the largest. "
            f"There are {len(vocabulary):,} tokens: number them from 0."
        )
    kinds = decoder_kinds(tokenizer_json.get("decoder"))
    added = {token["id"]: token for token in tokenizer_json.get("added_tokens", [])}
    if "ByteLevel" in kinds:
        read = byte_level_reader()
    elif kinds & {"Metaspace", "ByteFallback"}:
        read = sentence_piece
    else:
        found = ", ".join(sorted(kinds)) or "none"
        raise UserError(
            f"{origin}: its decoder ({found}) does not determine the bytes of a token; tokenizers with a ByteLevel, "
            "Metaspace or ByteFallback decoder work."
        )
    found = [b""] * (vocabulary[last] + 1)
    for token, number in vocabulary.items():
        if number not in added:
            found[number] = read(token)
        elif not added[number]["special"]:
            found[number] = token.encode("utf-8")
    return found


def decoder_kinds(decoder: dict | None) -> set[str]:
    """Return the types in a decoder, those inside a sequence included."""
    if decoder is None:
        return set()
    return {decoder["type"]}.union(*(decoder_kinds(part) for part in decoder.get("decoders", [])))


def byte_level_reader():
    """Return a decoder of the printable characters by which byte-level tokenizers write bytes."""
    byte_of = byte_level_alphabet()
    return lambda token: bytes(byte_of[character] for character in token if character in byte_of)


def byte_level_alphabet() -> dict[str, int]:
    """Return, for each character by which byte-level tokenizers write a byte, the byte.

    Printable Latin-1 bytes stand for themselves, the others for the characters from U+0100 on, in order (the scheme of
    GPT-2).
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [value for value in range(256) if value not in printable]
    byte_of = {chr(value): value for value in printable}
    return byte_of | {chr(0x100 + position): value for position, value in enumerate(hidden)}


def sentence_piece(token: str) -> bytes:
    """Return the bytes of a SentencePiece token: a mark for each space, `<0x0A>` for a byte."""
    byte = BYTE_FALLBACK.fullmatch(token)
    return bytes([int(byte[1], 16)]) if byte else token.replace(SPACE_MARK, " ").encode("utf-8")


Offsets = Sequence[tuple[int, int]] | np.ndarray
"""The first character of each token in a text, and the one after its last."""

KEEPS_TEXT = ("Digits", "Split")  # pre-tokenizers that change no character; a Split may remove characters


class ByteCountOverrides(NamedTuple):
    """The tokens whose bytes of text differ from those of their pieces."""

    places: np.ndarray  # the indices of these tokens, ascending, int64 [correction]
    differences: np.ndarray  # bytes of text less bytes of the piece, int64 [correction]

    @staticmethod
    def of(differences: np.ndarray) -> "ByteCountOverrides":
        """Return the corrections of consecutive tokens with these differences [token], most of them 0."""
        places = np.flatnonzero(differences)
        return ByteCountOverrides(places, differences[places])

    @staticmethod
    def joined(parts: Iterable[tuple[int, "ByteCountOverrides"]]) -> "ByteCountOverrides":
        """Return the corrections of consecutive parts; each comes with its number of tokens."""
        places, differences, first = [np.zeros(0, np.int64)], [np.zeros(0, np.int64)], 0
        for tokens, part in parts:
            places.append(part.places + first)
            differences.append(part.differences)
            first += tokens
        return ByteCountOverrides(np.concatenate(places), np.concatenate(differences))

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
    def unpacked(text: str) -> "ByteCountOverrides":
        """Return the corrections that `packed` encoded."""
        steps, differences = np.frombuffer(zlib.decompress(base64.b64decode(text)), "<i8").reshape(2, -1)
        return ByteCountOverrides(steps.cumsum(), differences)


NONE = ByteCountOverrides.of(np.zeros(0, np.int64))


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


SAVED_NAME = "tokenizer.json"
TRAINED_END_OF_DOCUMENT = "<|end_of_document|>"


@dataclass(frozen=True)
class TokenizerConfig(Settings, draccus.ChoiceRegistry):
    """The choice of the tokenizer.

    A tokenizer of one's own is a subclass with `build` and `restore`. Its `Tokenizer.to_json` has the name of the
    choice as `type`.
    """

    trained = cast("BpeConfig | None", None)  # settings of a training on the sources' text; None: `build` needs none
    json_path = cast(str | None, None)  # of its `tokenizer.json`; None: it is no such file

    def build(self) -> "Tokenizer":
        """Return the tokenizer; raise `UserError` if its files are missing or invalid."""
        raise TypeError(f"{type(self).__name__} makes no tokenizer without text; choose one by its type")

    @classmethod
    def restore(cls, saved: dict, origin: str) -> "Tokenizer":
        """Return the tokenizer that `Tokenizer.to_json` described; messages name its `origin`."""
        raise UserError(f"{origin}: {cls.__name__} restores no tokenizer.")


@TokenizerConfig.register_subclass("bytes")
@dataclass(frozen=True)
class BytesConfig(TokenizerConfig):
    """One id for each byte of UTF-8, and 256 for the end of a document."""

    def build(self) -> "Tokenizer":
        return BytesTokenizer()


@TokenizerConfig.register_subclass("file")
@dataclass(frozen=True)
class FileConfig(TokenizerConfig):
    """A `tokenizer.json` of the `tokenizers` library."""

    path: str = setting("tokenizer.json", "the tokenizer.json file; ~ and $VARIABLES expand")
    end_of_document: str = setting("<|endoftext|>", "name of the token that ends a document", aliases=("eos",))
    parse_special: bool = setting(False, "names of special tokens in the text are tokens, not characters")

    @property
    def json_path(self) -> str:
        return self.path

    def build(self) -> "Tokenizer":
        path = expand(self.path, "data.tokenizer.path")
        text = read_bytes(path).decode("utf-8-sig", "replace")
        return LibraryTokenizer(text, self.end_of_document, path, self.parse_special)


@TokenizerConfig.register_subclass("bpe")
@dataclass(frozen=True)
class BpeConfig(TokenizerConfig):
    """Byte-level byte-pair encoding, trained on the training documents."""

    vocabulary: int = setting(
        8192,
        "number of ids: 256 of bytes, of pairs, and of the end of a document",
        range=whole(257, 2**24),
        aliases=("vocab_size", "vocab", "vocabulary_size"),
        fixed=Fixed("the saved parameters were trained on its tokens"),
    )

    @property
    def trained(self) -> "BpeConfig":
        return self


class Tokenizer(ABC):
    """Text to ids and back.

    - `vocabulary_size`: number of ids; every id is below it.
    - `end_of_document`: the id that ends a document; no text encodes to it, unless `parses_special`.
    - `is_exact`: whether every text has as many bytes as the vocabulary entries of its tokens.
    - `special_names`: the names of special tokens.
    - `parses_special`: whether these names in a text encode to the special tokens, which stand for no bytes of text.
    - `end_name`: the name of the token that ends a document.
    - `chat_template`: makes the text of a conversation; None if nothing needs it.
    """

    vocabulary_size: int
    end_of_document: int
    is_exact: bool = True
    special_names: Sequence[str] = ()
    parses_special: bool = False
    end_name: str = TRAINED_END_OF_DOCUMENT
    chat_template: ChatTemplate | None = None

    @abstractmethod
    def encode(self, text: str) -> np.ndarray:
        """Return the ids of a text, int32 [token], without an end-of-document token."""

    def encode_all(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Return the ids of each text, as `encode` does."""
        return [self.encode(text) for text in texts]

    def encode_counted(self, texts: Sequence[str]) -> list[tuple[np.ndarray, np.ndarray]]:
        """Return each text's ids, and the bytes of text of each id beyond its vocabulary entry, int64 [token].

        With `token_bytes` of the ids, these add up to the bytes of the text.
        """
        return [(ids, np.zeros(len(ids), np.int64)) for ids in self.encode_all(texts)]

    @property
    def control_tokens(self) -> Mapping[str, int]:
        """Return the tokens that a chat template can write, by name."""
        return {self.end_name: self.end_of_document}

    def encode_pieces(self, pieces: Sequence[str]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return the tokens of a text in pieces, of which the second, fourth and so on are names of control tokens.

        Elsewhere such names are characters. Returns ids int32 [token], bytes of text as `encode_counted` does, and the
        first character of each token in the whole text and the one after its last, int64 [token, 2].
        """
        return encode_apart(pieces, self)

    @abstractmethod
    def decode(self, ids: np.ndarray) -> str:
        """Return the text of ids [token]; special tokens give nothing, broken UTF-8 gives U+FFFD."""

    @abstractmethod
    def to_json(self) -> dict:
        """Return a complete description of the tokenizer as JSON, for `from_json`; without the chat template."""

    def saved(self) -> dict:
        """Return the description with the chat template, if there is one."""
        return self.to_json() | ({"chat_template": asdict(self.chat_template)} if self.chat_template else {})

    @property
    @abstractmethod
    def vocabulary_bytes(self) -> list[bytes]:
        """Return the UTF-8 bytes of each id [vocabulary]; empty for special tokens."""

    def parsing_special(self) -> "Tokenizer":
        """Return the same tokenizer with `parses_special`, if it has special tokens."""
        return self

    @property
    def start(self) -> tuple[int, ...]:
        """Return the ids that the tokenizer's own rules put before every text; `encode` leaves them out."""
        return ()

    @cached_property
    def token_bytes(self) -> np.ndarray:
        """Return the number of UTF-8 bytes of each id, int32 [vocabulary]; 0 for special tokens.

        Bits per byte = sum of token losses in nats / ln 2 / bytes of the targets' text: those of their
        `vocabulary_bytes`, and the differences of `encode_counted`.
        """
        return np.array([len(piece) for piece in self.vocabulary_bytes], np.int32)

    @cached_property
    def fingerprint(self) -> str:
        """Return a hash of the tokenizer's complete behaviour."""
        return hashlib.sha256(json.dumps(self.to_json(), sort_keys=True).encode()).hexdigest()


class BytesTokenizer(Tokenizer):
    vocabulary_size = 257
    end_of_document = 256

    def encode(self, text: str) -> np.ndarray:
        return np.frombuffer(text.encode("utf-8"), np.uint8).astype(np.int32)

    def decode(self, ids: np.ndarray) -> str:
        ids = np.asarray(ids)
        return ids[ids < 256].astype(np.uint8).tobytes().decode("utf-8", "replace")

    def to_json(self) -> dict:
        return {"type": "bytes"}

    @property
    def vocabulary_bytes(self) -> list[bytes]:
        return [bytes([value]) for value in range(256)] + [b""]


class LibraryTokenizer(Tokenizer):
    """A tokenizer of the `tokenizers` library, from the content of a `tokenizer.json`; messages name its `origin`.

    Raises `UserError` for damaged content, a kind without a byte count per token, or no end-of-document token.
    """

    def __init__(self, text: str, end_of_document: str, origin: str, parses_special: bool = False):
        import tokenizers

        try:
            self._library = tokenizers.Tokenizer.from_str(text)
        except Exception as error:  # the library raises nothing more precise
            raise UserError(f"{origin}: not a tokenizer.json that the tokenizers library reads ({error}).") from error
        self._library.encode_special_tokens, self.parses_special = not parses_special, parses_special
        self._library.no_truncation()
        self._library.no_padding()
        self._json = json.loads(text)
        self.end_name = end_of_document
        end = self._library.token_to_id(end_of_document)
        if end is None:
            special = [token["content"] for token in self._json.get("added_tokens", [])]
            raise UserError(
                f"{origin}: no token `{end_of_document}` to end a document with. Set tokenizer.end_of_document to one "
                f"of its added tokens: {', '.join(special[:20]) or 'it has none'}."
            )
        self.end_of_document = end
        self._pieces = bytes_of_vocabulary(self._json, self._library.get_vocab(with_added_tokens=True), origin)
        self._pieces[end] = b""
        self.vocabulary_size = len(self._pieces)
        special = [each for each in self._json.get("added_tokens") or [] if each["special"]]
        self.special_names = [each["content"] for each in special]
        model = self._json.get("model") or {}
        unknown = (model.get("unk_token"), model.get("unk_id"))  # the token of characters, which have bytes
        self._control = {
            each["content"]: each["id"] for each in special if not {each["content"], each["id"]} & {*unknown}
        }
        self.is_exact = is_exact(self._json, byte_level_alphabet())

    def encode(self, text: str) -> np.ndarray:
        ids = self._library.encode(text, add_special_tokens=False).ids
        return np.fromiter(ids, np.int32, len(ids))

    def encode_all(self, texts: Sequence[str]) -> list[np.ndarray]:
        # the fast method computes no offsets, which take a sixth of the time
        found = self._library.encode_batch_fast(list(texts), add_special_tokens=False)
        return [np.fromiter(ids := each.ids, np.int32, len(ids)) for each in found]

    def encode_counted(self, texts: Sequence[str]) -> list[tuple[np.ndarray, np.ndarray]]:
        if self.is_exact:
            return super().encode_counted(texts)
        counted = []
        for text, each in zip(texts, self._library.encode_batch(list(texts), add_special_tokens=False), strict=True):
            ids = np.fromiter(each.ids, np.int32, len(each.ids))
            counted.append(
                (ids, self._more_bytes(text, ids, each.offsets, self._control if self.parses_special else {}))
            )
        return counted

    def _more_bytes(self, text: str, ids: np.ndarray, offsets: Offsets, without_text: Mapping[str, int]) -> np.ndarray:
        """Return the bytes of text of each token beyond its vocabulary entry; none for the tokens `without_text`."""
        if self.is_exact or not len(ids):
            return np.zeros(len(ids), np.int64)
        own = self.token_bytes[ids].astype(np.int64)
        more = bytes_of_tokens(text, offsets, own) - own
        more[np.isin(ids, list(without_text.values()))] = 0
        return more

    @property
    def control_tokens(self) -> Mapping[str, int]:
        return self._control

    @cached_property
    def _pieces_of_library(self) -> LibraryPieces:
        return LibraryPieces(self._json, self._control)

    def encode_pieces(self, pieces: Sequence[str]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        text, ids, offsets, encoded = self._pieces_of_library.encode(pieces)
        return ids, self._more_bytes(text, ids, encoded, self._control), offsets

    def decode(self, ids: np.ndarray) -> str:
        return self._library.decode(np.asarray(ids).tolist(), skip_special_tokens=True)

    def parsing_special(self) -> Tokenizer:
        found = LibraryTokenizer(json.dumps(self._json), self.end_name, "the tokenizer", parses_special=True)
        found.chat_template = self.chat_template
        return found

    @property
    def start(self) -> tuple[int, ...]:
        for text in ("a", *self._library.get_vocab(with_added_tokens=False)):
            whole = self._library.encode(text, add_special_tokens=True)
            if 0 in whole.sequence_ids:  # the tokens of the text itself have 0; others have None
                return tuple(whole.ids[: whole.sequence_ids.index(0)])
        return ()  # no text has a token

    def to_json(self) -> dict:
        saved = {"type": "library", "end_of_document": self.end_name, "library": self._json}
        return saved | ({"parse_special": True} if self.parses_special else {})

    @property
    def vocabulary_bytes(self) -> list[bytes]:
        return self._pieces


def from_json(saved: dict, origin: str) -> Tokenizer:
    """Return the tokenizer that `Tokenizer.saved` described; messages name its `origin`."""
    found = without_template(saved, origin)
    found.chat_template = ChatTemplate(**saved["chat_template"]) if saved.get("chat_template") else None
    return found


def without_template(saved: dict, origin: str) -> Tokenizer:
    """Return the tokenizer that `Tokenizer.to_json` described."""
    if saved.get("type") == "bytes":
        return BytesTokenizer()
    if saved.get("type") == "library" and {"library", "end_of_document"} <= saved.keys():
        end, parses = saved["end_of_document"], saved.get("parse_special", False)
        return LibraryTokenizer(json.dumps(saved["library"]), end, origin, parses)
    if (choice := TokenizerConfig.get_known_choices().get(str(saved.get("type")))) is not None:
        return choice.restore(saved, origin)
    raise UserError(f"{origin}: not a tokenizer that this program saved.")


def save_tokenizer(tokenizer: Tokenizer, folder: StoragePath) -> StoragePath:
    """Write the tokenizer atomically into a folder; return the file's path."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / SAVED_NAME
    write_bytes(path, json.dumps(tokenizer.saved()).encode(), durable=True)
    return path


def load_tokenizer(folder: StoragePath) -> Tokenizer:
    """Return the tokenizer that `save_tokenizer` wrote; raise `UserError` if the file is missing or damaged."""
    path = folder / SAVED_NAME
    try:
        saved = json.loads(read_bytes(str(path)))
    except ValueError as error:
        if isinstance(error, UserError):
            raise
        raise UserError(f"{path}: damaged, not JSON ({error}).") from error
    return from_json(saved if isinstance(saved, dict) else {}, str(path))


def fewest_tokens(config: TokenizerConfig) -> int:
    """Return the minimum number of ids of the configured tokenizer, without any text; exact unless it is a BPE."""
    return BytesTokenizer.vocabulary_size if config.trained else vocabulary_size(config)


def vocabulary_size(config: TokenizerConfig) -> int:
    """Return a configured tokenizer's number of ids, without text; a BPE has fewer if its texts have too few pairs."""
    return config.trained.vocabulary if config.trained else config.build().vocabulary_size


def encode_apart(pieces: Sequence[str], tokenizer: Tokenizer) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return what `Tokenizer.encode_pieces` does, from each piece of text encoded by itself."""
    found, at = [], 0
    for number, text in enumerate(pieces):
        if number % 2:
            ids, more = np.array([tokenizer.control_tokens[text]]), np.zeros(1, np.int64)
            offsets = np.array([[0, len(text)]])
        else:
            ids, more = tokenizer.encode_counted([text])[0] if text else (np.zeros(0, int), np.zeros(0, np.int64))
            ends, before = (tokenizer.token_bytes[ids] + more).cumsum(), bytes_before(text)
            starts = np.searchsorted(before, np.append(0, ends)[:-1], side="right") - 1
            offsets = np.stack([starts, np.searchsorted(before, ends)], axis=1)
        found.append((ids.astype(np.int32), more, offsets + at))
        at += len(text)
    ids, more, offsets = (np.concatenate(each) for each in zip(*found, strict=True))
    return ids, more, offsets


NAMES_SHOWN = 3


def counter_of_names(tokenizer: Tokenizer) -> Callable[[Iterable[str]], Counter[str]]:
    """Return a function that counts the names of special tokens which the tokenizer encodes as characters in texts."""
    names = frozenset() if tokenizer.parses_special else frozenset(tokenizer.special_names)
    lengths = sorted({len(name) for name in names}, reverse=True)
    beginnings = re.compile("|".join(sorted({re.escape(name[:2]) for name in names}, reverse=True)))

    def count(texts: Iterable[str]) -> Counter[str]:
        found = Counter()
        for text in texts if names else ():
            for at in (each.start() for each in beginnings.finditer(text)):
                found.update([text[at : at + size] for size in lengths if text[at : at + size] in names][:1])
        return found

    return count


def taken_as_text(found: Counter[str], what: str, key: str) -> str:
    """Return a note about names that `counter_of_names` counted; empty if there are none.

    - `what`: the texts, such as the prompts
    - `key`: of the setting by which the names are tokens
    """
    if not found:
        return ""
    named = ", ".join(f"{name} ({count:,})" for name, count in found.most_common(NAMES_SHOWN))
    return (
        f"{found.total():,} names of special tokens in {what} are encoded as characters, most often {named}. "
        f"With {key} they are the tokens."
    )
