"""Tokenizers: text to ids and back, and the number of bytes of text of each id."""

import hashlib
import json
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property

import draccus
import numpy as np

from gregale.data import vocabulary_bytes
from gregale.data.chat.pieces import LibraryPieces
from gregale.data.chat.template import ChatTemplate
from gregale.data.sources.base import expand
from gregale.data.sources.files import read_bytes
from gregale.data.text_bytes import Offsets, bytes_before, bytes_of_tokens, is_exact
from gregale.errors import UserError
from gregale.settings import Fixed, Settings, setting, whole
from gregale.storage import StoragePath, write_bytes

SAVED_NAME = "tokenizer.json"
TRAINED_END_OF_DOCUMENT = "<|end_of_document|>"


@dataclass(frozen=True)
class TokenizerConfig(Settings, draccus.ChoiceRegistry):
    """The choice of the tokenizer.

    A tokenizer of one's own is a subclass with `build` and `restore`. Its `Tokenizer.to_json` has the name of the
    choice as `type`.
    """

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
        self._pieces = vocabulary_bytes.vocabulary_bytes(
            self._json, self._library.get_vocab(with_added_tokens=True), origin
        )
        self._pieces[end] = b""
        self.vocabulary_size = len(self._pieces)
        special = [each for each in self._json.get("added_tokens") or [] if each["special"]]
        self.special_names = [each["content"] for each in special]
        model = self._json.get("model") or {}
        unknown = (model.get("unk_token"), model.get("unk_id"))  # the token of characters, which have bytes
        self._control = {
            each["content"]: each["id"] for each in special if not {each["content"], each["id"]} & {*unknown}
        }
        self.is_exact = is_exact(self._json, vocabulary_bytes.byte_level_alphabet())

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
    return BytesTokenizer.vocabulary_size if isinstance(config, BpeConfig) else vocabulary_size(config)


def vocabulary_size(config: TokenizerConfig) -> int:
    """Return a configured tokenizer's number of ids, without text; a BPE has fewer if its texts have too few pairs."""
    return config.vocabulary if isinstance(config, BpeConfig) else config.build().vocabulary_size


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
