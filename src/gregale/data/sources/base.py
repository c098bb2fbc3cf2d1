"""The common base of all document sources: ranges that can be read in parallel, in a fixed order."""

import dataclasses
import fnmatch
import glob
import hashlib
import os
import re
import sys
import sysconfig
from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import ClassVar

import draccus
import numpy as np

from gregale.data.chat.conversation import Conversation, Pair
from gregale.data.sources.files import WILD, each_once, files_of
from gregale.errors import KeyedError, UserError
from gregale.settings import Fixed, Settings, at_least, setting
from gregale.storage import Status, is_url, names, status, storage_path

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
