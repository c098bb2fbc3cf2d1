"""The choice of a source by `type`, and the files that sources read, plain or compressed, by ranges.

The first bytes of a file tell its compression, whatever its name.
"""

import dataclasses
import fnmatch
import glob
import hashlib
import io
import math
import os
import re
import stat
import sys
import sysconfig
import zlib
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, BinaryIO, ClassVar, cast

import draccus
import numpy as np

from gregale.data.chat.conversation import Conversation, Pair
from gregale.errors import KeyedError, UserError, install_hint
from gregale.settings import Fixed, Settings, at_least, setting
from gregale.storage import ObjectPath, Status, files_below, is_url, names, status, storage_path

BUFFER_BYTES = 1 << 20
WILD = re.compile(r"[*?[]")

Folder = tuple[int, int]
"""What tells a folder from others: its device and its inode."""


def matches(pattern: str, root: str = "") -> Iterator[str]:
    """Yield the matches, as `glob.glob(pattern, root_dir=root, recursive=True)` does, in no particular order.

    `**` does not follow a link into a folder that contains the link. Folders that match `**` itself are left out.
    """
    parts = pattern.split("/")
    if "**" not in parts:
        yield from glob.glob(pattern, root_dir=root)
        return
    at = parts.index("**")
    before, after = "/".join(parts[:at]), "/".join(parts[at + 1 :]).lstrip("/")
    if at + 1 < len(parts) and not after:  # `**/` matches only folders
        return
    if at > 0:
        before = before or "/"
    for base in glob.glob(before, root_dir=root) if before else [""]:
        for folder in _folders(os.path.join(root, base)):
            name = os.path.join(base, folder)
            for found in matches(after or "*", os.path.join(root, name)):
                yield os.path.join(name, found)


def each_once(paths: Iterable[str]) -> list[str]:
    """Return the paths in order, without further names of the same file.

    Of several names for one file, keep one without links if possible, with the fewest folders; of equal ones the first.
    """
    names: dict[object, list[str]] = {}
    for path in paths:
        names.setdefault(_identity(path), []).append(path)

    def detour(path: str) -> tuple[bool, int]:
        return os.path.realpath(path) != os.path.abspath(path), path.count("/")

    kept = {min(each, key=detour) if len(each) > 1 else each[0] for each in names.values()}
    return [path for each in names.values() for path in each if path in kept]


def _folders(base: str, below: str = "", inside: frozenset[Folder] = frozenset()) -> Iterator[str]:
    """Yield a folder and its subfolders, by their paths from the base, without hidden ones."""
    here = os.path.join(base, below)
    try:
        found = os.stat(here or ".")
        with os.scandir(here or ".") as entries:
            names = [entry.name for entry in entries if not entry.name.startswith(".")]
    except OSError:  # not a folder, or listing is not permitted
        return
    if (identity := (found.st_dev, found.st_ino)) in inside:
        return
    yield below
    for name in names:
        if os.path.isdir(os.path.join(here, name)):
            yield from _folders(base, os.path.join(below, name), inside | {identity})


def _identity(path: str) -> object:
    """Return what is equal for two names of one file; some file systems invent inodes, so not the inode alone."""
    try:
        found = os.stat(path)
    except OSError:
        return path
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns


def files_of(pattern: str) -> dict[str, Status]:
    """Return the files that match a glob pattern, by name."""
    if not is_url(pattern):
        paths = sorted(matches(pattern))
        found = {path: status(storage_path(path)) for path in paths}
        return {path: each for path, each in found.items() if each is not None}
    if not WILD.search(pattern):
        exact = storage_path(pattern)
        alone = status(exact)
        return {str(exact): alone} if alone is not None else {}
    folder = storage_path(pattern[: WILD.search(pattern).start()].rpartition("/")[0])  # type: ignore[union-attr]
    wanted = re.compile(regular(str(storage_path(pattern))))
    named = {f"{folder}/{name}": each for name, each in files_below(folder).items()}
    return {name: named[name] for name in sorted(named) if wanted.fullmatch(name)}


def regular(pattern: str) -> str:
    """Return a glob pattern as a regular expression: `**/` is any folders, `*` and `?` stay in one, `[ab]` chooses."""
    tokens = re.split(r"(\*\*/|\*\*|\*|\?|\[[^]]+\])", pattern)
    wild = {"**/": "(?:.*/)?", "**": ".*", "*": "[^/]*", "?": "[^/]"}
    return "".join(
        wild.get(token) or (f"[{token[1:].replace('!', '^', 1)}" if token.startswith("[") else re.escape(token))
        for token in tokens
    )


def opened(path: str) -> BinaryIO:
    """Open a file or an object for reads at any offset."""
    found = storage_path(path)
    if isinstance(found, ObjectPath):
        return cast(BinaryIO, io.BufferedReader(RemoteFile(found), BUFFER_BYTES))
    descriptor = os.open(found, os.O_RDONLY | os.O_NONBLOCK)  # a pipe in place of the file could wait for ever
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise UserError(f"{path} is a pipe or a device now, and was a file when it was listed. Put the file back.")
    return os.fdopen(descriptor, "rb")


def read_bytes(path: str) -> bytes:
    """Return a file's content; raise `UserError` if it cannot be read."""
    with readable(path):
        return storage_path(path).read_bytes()


@contextmanager
def readable(path: str) -> Iterator[None]:
    """Turn an OSError of the system into a `UserError`, whatever `on_bad_document` is: the user can try again later.

    Libraries raise an OSError without a number for damage that they find; that error passes through.
    """
    try:
        yield
    except FileNotFoundError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror or 'there is no such object'}).") from error
    except OSError as error:
        if error.errno is None:
            raise
        raise UserError(f"{path}: cannot be read ({error.strerror}).") from error


class RemoteFile(io.RawIOBase):
    def __init__(self, remote: ObjectPath):
        super().__init__()
        found = remote.status()
        if found is None:
            raise FileNotFoundError(str(remote))
        self._remote, self._size, self._at = remote, found.size, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        start = {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._size}[whence]
        self._at = start + offset
        return self._at

    def readall(self) -> bytes:  # that of the base class reads 8 KiB at a time
        data = self._remote.read_range(self._at, self._size)
        self._at += len(data)
        return data

    def readinto(self, buffer) -> int:
        data = self._remote.read_range(self._at, min(self._at + len(buffer), self._size))
        buffer[: len(data)] = data
        self._at += len(data)
        return len(data)


BYTE_ORDER_MARK = b"\xef\xbb\xbf"  # some programs begin every UTF-8 file with it; it is not text
STOP, SKIP = ON_BAD_DOCUMENT = ("stop", "skip")
CONCAT, FIT, PAD = PACKINGS = ("concat", "fit", "pad")
REFUSE, KEEP_START, KEEP_END = LONG_DOCUMENTS = ("refuse", "keep_start", "keep_end")
ORDER = Fixed("examples would come in another order, which repeats and leaves out some")
PLACES_SHOWN = 5
CHANGED = (
    "changed while it was read: its text would be partly old and partly new. Nothing of it is kept. Run the same "
    "command again when no program writes to the file any more."
)
EXAMPLES = Path(__file__).parents[2] / "starters"
_VARIABLE = re.compile(r"\$(\w+|\{[^}]*\})", re.ASCII)  # as `os.path.expandvars` has it


@dataclass(frozen=True)
class SourceRange:
    """A range of a source that one process reads: `start` and `stop` count in the source's own unit.

    The unit is bytes for text, JSON lines and CSV, row groups for Parquet, tokens for token files, rows for data sets.
    `version` is the status of the file when it was listed; None for what is not a file.
    """

    path: str
    start: int
    stop: int
    size_bytes: int
    version: Status | None = None


@dataclass(frozen=True)
class Document:
    """One document: text, a conversation, or token ids [token]; or a pair of two documents.

    `path` and `start` are its location (of a CSV file: the line).
    """

    content: str | Conversation | Pair | np.ndarray
    path: str
    start: int


class BadDocument(UserError):
    """Invalid content and its location. A source yields it if it can read on, and raises it otherwise."""


class Needless(BadDocument):
    """A document from which nothing is learned: it is left out and counted, whatever `on_bad_document` is."""


@dataclass
class Skipped:
    """The number of documents that could not be read, and of the first few the error and the location."""

    count: int = 0
    first: list[str] = field(default_factory=list)

    def note(self, bad: BadDocument) -> None:
        """Count one more document."""
        # A file's name and text in a message may contain characters that UTF-8 cannot encode.
        self.add(Skipped(1, [str(bad).encode("utf-8", "backslashreplace").decode("utf-8")]))

    def add(self, later: "Skipped") -> None:
        """Add documents that follow these."""
        self.count += later.count
        self.first = [*self.first, *later.first][:PLACES_SHOWN]


@dataclass(frozen=True)
class SourceConfig(Settings, draccus.ChoiceRegistry):
    """A source of documents. The order of the documents depends only on the files, not on how they are read."""

    has_conversations: ClassVar[bool] = False
    weight: float = setting(1.0, "share of the examples, beside others", range=at_least(0))
    on_bad_document: str = setting(STOP, "bad documents: stop, or skip and report", choices=ON_BAD_DOCUMENT)
    packing: str = setting(
        CONCAT,
        "documents in rows: concat cuts them, fit packs whole ones, pad has one a row",
        choices=PACKINGS,
        fixed=ORDER,
        by_topic=True,
    )
    long_documents: str | None = setting(
        None, "longer than a row of fit or pad; null: refuse", choices=LONG_DOCUMENTS, fixed=ORDER, by_topic=True
    )

    tags: tuple[str, ...] = setting((), "of text: its held-out losses are also averaged by tag", by_topic=True)

    def __post_init__(self):
        super().__post_init__()
        if self.long_documents is not None and self.packing == CONCAT:
            raise KeyedError(
                "long_documents",
                f"is {self.long_documents}",
                f", but packing {CONCAT} cuts documents of any length. Leave it out, or set packing to {FIT} or {PAD}.",
            )
        if self.rows_together > 1 and self.packing != PAD:
            raise KeyedError("packing", f"is {self.packing}", f", but a row has one answer of a pair: set it to {PAD}.")

    @abstractmethod
    def parts(self) -> list[SourceRange]:
        """Return the ranges in order; together they give every document once."""

    @abstractmethod
    def scan(self, part: SourceRange) -> Iterator[Document | BadDocument]:
        """Yield the documents that begin in a range, in order, and a `BadDocument` for each invalid one.

        Raises `BadDocument` if the rest of the range cannot be read, because of its content; `UserError` if the range
        contradicts the configuration, or the system cannot read it; names the file.
        """

    @abstractmethod
    def identity(self) -> dict:
        """Return as JSON what determines the documents: sources with equal identities have equal documents."""

    def read(self, part: SourceRange, skipped: Skipped) -> Iterator[Document]:
        """Yield the documents that begin in a range, in order; count those that are left out in `skipped`.

        Raises `UserError` if the range is damaged or contradicts the configuration, or the file has changed since it
        was listed; names the file and the location.
        """
        try:
            for found in self.scan(part):
                if isinstance(found, Document):
                    yield found
                else:
                    self.leave_out(found, skipped)
        except BadDocument as bad:
            check_unchanged(part)  # a change explains more than the damage that it makes
            self.leave_out(bad, skipped)
        except OSError as error:  # of a library, which else would count as one of the cache
            raise UserError(f"{part.path}: cannot be read ({error}).") from error
        check_unchanged(part)

    def leave_out(self, bad: BadDocument, skipped: Skipped) -> None:
        """Count a document that is left out; raise it if bad documents stop the run."""
        if self.on_bad_document == STOP and not isinstance(bad, Needless):
            raise bad
        skipped.note(bad)

    @property
    def has_masks(self) -> bool:
        """Return whether the loss is on some tokens of a document only."""
        return False

    @property
    def rows_together(self) -> int:
        """Return the number of adjacent rows of a batch that belong together: 2 for pairs."""
        return 1

    def documents(self) -> Iterator[Document]:
        """Yield all documents, in order, read by this process."""
        for part in self.parts():
            yield from self.read(part, Skipped())


@dataclass(frozen=True)
class FileSource(SourceConfig):
    """A source that reads files found by glob patterns."""

    files: tuple[str, ...] = setting(
        (), "glob patterns of files or URLs; ~, $VARIABLES, {stdlib} (Python's) and {examples} (Gregale's) expand"
    )
    exclude: tuple[str, ...] = setting((), "patterns of paths to leave out; a * matches any text, / included")

    def parts(self) -> list[SourceRange]:
        found = self.found().items()
        return [replace(part, version=each) for path, each in found for part in self.parts_of(path, each.size)]

    def parts_of(self, path: str, size: int) -> list[SourceRange]:
        """Return the ranges of one file. An unsplittable file is one range, so that reading reports the error."""
        try:
            return self.split(path, size)
        except BadDocument:
            if self.on_bad_document == STOP:
                raise
            return [SourceRange(path, 0, 1, size)]

    def found(self) -> dict[str, Status]:
        """Return the files, by pattern and then by name. A file that several links or patterns reach appears once.

        Raises `UserError` if no file matches, or an exclusion leaves none.
        """
        if not self.files:
            raise UserError("files: empty; give at least one glob pattern, for example files: ['~/corpus/**/*.txt'].")
        found: dict[str, Status] = {}
        for pattern in self.files:
            found |= files_matching(pattern, "files")  # keeps the order of the files found before
        if not found:
            patterns = ", ".join(expand(pattern, "files") for pattern in self.files)
            raise UserError(f"files: no file matches {patterns}. Patterns may use *, ? and **; check the folder.")
        excluded = [expand(pattern, "exclude") for pattern in self.exclude]
        kept = [path for path in found if not any(fnmatch.fnmatchcase(path, pattern) for pattern in excluded)]
        if not kept:
            raise UserError(f"exclude: {', '.join(excluded)} leaves none of the {len(found)} matching files.")
        return {path: found[path] for path in each_once(kept)}

    def split(self, path: str, size: int) -> list[SourceRange]:
        """Return a file's ranges: one, unless it can be read from the middle. Raises `BadDocument` if it is damaged."""
        return [SourceRange(path, 0, size, size)]

    def identity(self) -> dict:
        files = [identity_of(path, found) for path, found in self.found().items()]
        return {"type": self.get_choice_name(type(self)), "files": files, **options(self), **code_of(type(self))}


def identity_of(path: str, found: Status) -> list:
    """Return what identifies a version of a file: name, size and modification time."""
    if is_url(path):
        return [path, found.size, found.identity]
    return [str(Path(path).absolute()), found.size, Path(path).stat().st_mtime_ns]


def check_unchanged(part: SourceRange) -> None:
    """Raise `UserError` if the file of a range is not the version that was listed."""
    if part.version is not None and status(storage_path(part.path)) != part.version:
        raise UserError(f"{part.path} {CHANGED}")


def code_of(kind: type) -> dict[str, str]:
    """Return a digest of a class's file if the class is the user's own: with other code its documents may be others."""
    file = getattr(sys.modules.get(kind.__module__), "__file__", None)
    if file is None or kind.__module__.startswith("gregale."):
        return {}
    return {"code": hashlib.sha256(Path(file).read_bytes()).hexdigest()}


def options(source: SourceConfig) -> dict:
    """Return the fields of a source that determine how its files are read."""
    ignored = {"weight", "packing", "long_documents", "files", "exclude"}
    return {key: value for key, value in dataclasses.asdict(source).items() if key not in ignored}


def ranges(total: int, step: int) -> list[tuple[int, int]]:
    """Return (start, stop) of consecutive ranges of at most `step` that cover `total`."""
    return [(start, min(start + step, total)) for start in range(0, total, step)]


def files_matching(pattern: str, key: str) -> dict[str, Status]:
    """Return the files that match a pattern, by name, after the expansion by `expand`.

    Raises `UserError` that names the key if the pattern is a folder, or the name of a file that it does not match.
    """
    expanded = expand(pattern, key)
    found = files_of(expanded)
    if found or (is_url(expanded) and WILD.search(expanded)):
        return found
    if names(storage_path(expanded)):
        raise UserError(
            f"{key}: {expanded} is a folder, and patterns of files are needed: {expanded.rstrip('/')}/**/* matches all "
            f"files in it and below, {expanded.rstrip('/')}/*.txt those of one kind."
        )
    if os.path.exists(expanded) and not os.path.isfile(expanded) and not os.path.isdir(expanded):
        raise UserError(
            f"{key}: {expanded} is a pipe or a device. Its text can be read only once, but several processes read a "
            f"text, and read it again. Write it into a file: cat {expanded} > FILE."
        )
    if os.path.isfile(expanded):
        raise UserError(
            f"{key}: {expanded} is a file, but as a pattern it does not match that name, for [ ] stands for one "
            f"character of those between. Write {glob.escape(expanded)}."
        )
    return found


def expand(text: str, key: str = "") -> str:
    """Return a path with ~, $VARIABLES, {stdlib} and {examples} replaced; raise `UserError` for unknown variables."""
    for name in (found.strip("{}") for found in _VARIABLE.findall(text)):
        if name not in os.environ:
            raise UserError(
                f"{f'{key}: ' if key else ''}{text} has the variable {name}, which is not set in the environment. "
                f"Set it (`export {name}=...`), or write the path itself."
            )
    text = text.replace("{stdlib}", sysconfig.get_path("stdlib")).replace("{examples}", str(EXAMPLES))
    return os.path.expandvars(os.path.expanduser(text))


def encodable(text: str, location: object) -> str:
    """Return the text if UTF-8 can encode it: JSON and Parquet may contain half a surrogate pair."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        found = f"U+{ord(text[error.start]):04X}"
        raise BadDocument(
            f"{location}: character {error.start} of the text is {found}, half a surrogate pair."
        ) from error
    return text


def in_column(value, column: str, path: str, row: int) -> Document | BadDocument:
    """Return a table's value as a document if it is text."""
    location = f"{path}, row {row}"
    if not isinstance(value, str):
        kind = "empty (null)" if value is None else type(value).__name__
        return BadDocument(f"{location}: column `{column}` is {kind}, expected text.")
    try:
        return Document(encodable(value, location), path, row)
    except BadDocument as bad:
        return bad


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
