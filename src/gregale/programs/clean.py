"""`gregale clean`: lists what a cache folder holds, and deletes it when told to."""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

from rich.filesize import decimal

from gregale.data.cache import Entry, entries, remove
from gregale.data.sources.base import expand
from gregale.errors import UserError
from gregale.services.command import Command
from gregale.services.tables import print_table
from gregale.storage import is_url
from gregale.streams import say
from gregale.terminal import Console


@dataclass(frozen=True)
class CleanOptions:
    """Options of the command."""

    cache: str = field(
        default="cache", metadata={"help": "the folder, as `data.cache` or `compilation_cache` names it"}
    )
    stale: bool = field(
        default=False, metadata={"help": "only what no run can use any more: of changed files, damaged, left over"}
    )
    yes: bool = field(default=False, metadata={"help": "delete without asking"})


def main(options: CleanOptions) -> int:
    """Lists, asks on a terminal, deletes; 1 if something could not be deleted."""
    if is_url(options.cache):
        raise UserError(
            f"{options.cache}: only folders are cleaned. In a store, delete what is below with the store's own tools: "
            "what is needed again is built again."
        )
    cache = Path(expand(options.cache, "cache"))
    found = [entry for entry in entries(cache) if entry.is_stale or not options.stale]
    if not found:
        say(f"{cache}: nothing to clean.")
        return 0
    rows = [
        (entry.folder.name, entry.kind, decimal(entry.size_bytes), age(entry.used), entry.origin) for entry in found
    ]
    print_table(Console(), str(cache), ("folder", "what", "size", "last used", "made of"), rows)
    total = f"{len(found)} folder(s), {decimal(sum(entry.size_bytes for entry in found))}"
    if not options.yes and not asked(total):
        return 0
    return delete(found)


def asked(total: str) -> bool:
    """Whether the user says yes; nobody is asked where there is no terminal."""
    if not sys.stdin.isatty():
        say(f"{total}; nothing was deleted. --yes deletes without asking.")
        return False
    try:
        answer = input(f"Delete {total}? What is needed again is built again. [y/N] ")
    except EOFError:
        answer = ""
    if answer.strip().lower() in ("y", "yes"):
        return True
    say("Nothing was deleted.")
    return False


def delete(found: list[Entry]) -> int:
    freed = failures = 0
    for entry in found:
        try:
            if remove(entry):
                freed += entry.size_bytes
            else:
                say(f"{entry.folder}: kept, a build may be at work on it.")
        except FileNotFoundError:
            continue  # another `gregale clean` was first
        except OSError as error:
            failures += 1
            say(f"{entry.folder}: could not be deleted ({error.strerror}).", file=sys.stderr)
    say(f"{decimal(freed)} freed.")
    return 1 if failures else 0


def age(used: float) -> str:
    """`today`, `yesterday`, `12 days ago`."""
    days = int((time.time() - used) // (24 * 3600))
    return {0: "today", 1: "yesterday"}.get(max(days, 0), f"{days} days ago")


COMMAND = Command(main=main, options=CleanOptions, positional=("cache",))
