"""Files of text, plain or compressed: their pieces between separators, such as lines.

The first bytes of a file tell its compression, whatever its name.
"""

import math
import re
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from typing import Any, BinaryIO

from gregale.data.sources.base import BadDocument, SourceRange, ranges
from gregale.data.sources.files import opened, readable
from gregale.errors import UserError, install_hint

READ_BYTES = 64 << 10  # of compressed data in a step
WINDOW_BYTES = 1 << 31  # the largest window of zstd, which a process that reads such a file holds in memory
FIRST_BYTES = {
    "gzip": rb"\x1f\x8b",
    "bzip2": rb"BZh[1-9](1AY&SY|\x17rE8P\x90)",
    "xz": rb"\xfd7zXZ\0",
    "zstd": rb"\x28\xb5\x2f\xfd|[\x50-\x5f]\x2a\x4d\x18",  # a frame, or one to skip
}
ENDINGS = {".gz": "gzip", ".bz2": "bzip2", ".xz": "xz", ".zst": "zstd"}
OTHER_ENCODINGS = {  # by a byte order mark, or two characters of ASCII
    "UTF-32": rb"\xff\xfe\0\0|\0\0\xfe\xff",
    "UTF-16": rb"\xff\xfe|\xfe\xff|([^\0]\0){2}|(\0[^\0]){2}",
}


def compression_of(path: str, file: BinaryIO) -> str | None:
    """Return the compression of a file that is opened at its beginning; None if it has none.

    Raises `BadDocument` if it begins neither as one that its name promises nor as text, or as UTF-16 or UTF-32.
    """
    head = file.read(16)
    file.seek(0)
    named = next((kind for ending, kind in ENDINGS.items() if path.endswith(ending)), None)
    kind = first_match(FIRST_BYTES, head)
    if named and not kind and re.search(rb"[\0-\x08\x0e-\x1f]", head):
        raise BadDocument(f"{path}: a damaged {named} file, or none: it begins neither as one nor as text.")
    check_encoding(path, head)
    return kind


def first_match(patterns: Mapping[str, bytes], head: bytes) -> str | None:
    return next((name for name, pattern in patterns.items() if re.match(pattern, head)), None)


def text_ranges(path: str, size: int, step: int) -> list[SourceRange]:
    """Return the ranges of a file of `size` bytes, of `step` bytes each; one if it is compressed."""
    if size > step:
        with readable(path), opened(path) as file:
            step = size if compression_of(path, file) else step
    return [SourceRange(path, start, stop, stop - start) for start, stop in ranges(size, step)]


def check_encoding(path: str, head: bytes) -> None:
    """Raise `BadDocument` for a text that begins as UTF-16 or UTF-32."""
    if found := first_match(OTHER_ENCODINGS, head):
        raise BadDocument(f"{path}: its text is {found}, not UTF-8. Convert it: iconv -f {found} -t UTF-8 OLD > NEW.")


def unpacked(path: str, kind: str) -> Iterator[bytes]:
    """Yield the content of a compressed file in blocks; raise `BadDocument` at damage, after all bytes before it."""
    new, errors = decompressor(path, kind)
    done = at = 0
    try:
        for after, block in steps(path, new, math.inf):
            if done == 0:
                check_encoding(path, block)
            yield block
            done, at = done + len(block), after
        return
    except EOFError as error:
        raise BadDocument(f"{path}: a truncated {kind} file, which ends after {done:,} bytes of its text.") from error
    except errors as error:
        damage = error
    # A decompressor gives nothing of the step in which it finds damage. Single bytes lose only the damaged one.
    passed = done
    with suppress(*errors):
        for _, block in steps(path, new, at):
            rest = block[passed:]
            passed -= len(block) - len(rest)
            done += len(rest)
            yield rest
    if "too much memory" in str(damage):
        raise BadDocument(f"{path}: its zstd window is above {WINDOW_BYTES >> 30} GiB. Compress it with a smaller one.")
    raise BadDocument(f"{path}: a damaged {kind} file after {done:,} bytes of its text ({damage}).") from damage


def steps(path: str, new: Callable[[], Any], bytes_from: float) -> Iterator[tuple[int, bytes]]:
    """Yield the content that each step over a file unpacks, after the number of bytes of the file up to its end.

    - `new()`: returns a decompressor of one frame; a file has one or several
    - `bytes_from`: offset in the file from which on a step is a single byte

    Raises `EOFError` if the file ends inside a frame, and the decompressor's errors.
    """
    with readable(path), opened(path) as file:
        frame, at = new(), 0
        while data := file.read(READ_BYTES if at < bytes_from else 1):
            at += len(data)
            blocks = []
            while data := data.lstrip(b"\0") if frame.eof else data:  # zeros may follow a frame
                frame = new() if frame.eof else frame
                blocks.append(frame.decompress(data))
                data = frame.unused_data
            yield at, b"".join(blocks)
        if not frame.eof:
            raise EOFError


def decompressor(path: str, kind: str) -> tuple[Callable[[], Any], tuple[type[Exception], ...]]:
    """Return what makes a decompressor of one frame, and the errors by which it reports damage."""
    try:
        if kind == "gzip":
            return lambda: zlib.decompressobj(16 + zlib.MAX_WBITS), (zlib.error,)
        if kind == "bzip2":
            import bz2

            return bz2.BZ2Decompressor, (OSError,)
        if kind == "xz":
            import lzma

            return lzma.LZMADecompressor, (lzma.LZMAError,)
        import zstandard

        return zstandard.ZstdDecompressor(max_window_size=WINDOW_BYTES).decompressobj, (zstandard.ZstdError,)
    except ImportError as error:
        lacking = (
            f"the extra `formats`. {install_hint('formats')}" if kind == "zstd" else f"Python's module {error.name}."
        )
        raise UserError(f"{path}: {kind} files need {lacking}") from error


def pieces_of_part(part: SourceRange, separator: bytes) -> Iterator[tuple[int, bytes]]:
    """Yield (offset in the unpacked text, piece) of the pieces between separators that begin in a range of a file."""
    with readable(part.path), opened(part.path) as file:
        kind = compression_of(part.path, file) if part.start == 0 else None
        first = file.seek(max(part.start - len(separator), 0))  # a piece begins behind a separator
        blocks = unpacked(part.path, kind) if kind else iter(lambda: file.read(READ_BYTES), b"")
        for number, (start, piece) in enumerate(pieces(blocks, separator)):
            if first + start >= part.stop and not kind:
                return
            if number > 0 or part.start == 0:
                yield first + start, piece


def pieces(blocks: Iterable[bytes], separator: bytes) -> Iterator[tuple[int, bytes]]:
    """Yield (offset, piece) of the pieces of a text between separators; the text comes in blocks."""
    start, rest = 0, bytearray()
    for block in blocks:
        old = max(len(rest) - len(separator) + 1, 0)
        rest += block
        if rest.find(separator, old) >= 0:
            *whole, last = bytes(rest).split(separator)
            for piece in whole:
                yield start, piece
                start += len(piece) + len(separator)
            rest = bytearray(last)
    if rest:
        yield start, bytes(rest)
