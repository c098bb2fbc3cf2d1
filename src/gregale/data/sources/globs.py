"""Glob patterns on a disk: yield each matching file once, even if several links lead to it."""

import glob
import os
from collections.abc import Iterable, Iterator

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
