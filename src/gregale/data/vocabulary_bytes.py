"""The bytes of text of each entry of a `tokenizer.json` vocabulary."""

import re

from gregale.errors import UserError

BYTE_FALLBACK = re.compile(r"<0x([0-9A-Fa-f]{2})>")
LARGEST_ID = 2**24 - 1
SPACE_MARK = "▁"  # SentencePiece's character for a space


def vocabulary_bytes(tokenizer_json: dict, vocabulary: dict[str, int], origin: str) -> list[bytes]:
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
