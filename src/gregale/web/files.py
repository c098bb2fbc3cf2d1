"""Where a page is written."""

from __future__ import annotations

from pathlib import Path

from gregale.atomic_files import write_bytes
from gregale.errors import UserError
from gregale.settings import shown

SUFFIXES = (".html", ".htm")


def check_page_path(path: Path, key: str) -> None:
    """Raises `UserError` for a path that is no place for a page, before anything is computed."""
    if path.suffix.lower() not in SUFFIXES:
        raise UserError(f"{key}: {shown(str(path))} is to be a page; its name has to end with .html.")
    if not path.parent.is_dir():
        raise UserError(
            f"{key}: {shown(str(path))} cannot be written, there is no folder {shown(str(path.parent))}: `mkdir -p`."
        )


def write_page(path: Path, text: str) -> str:
    """Writes a page, whole or not at all; returns its address for a browser."""
    write_bytes(path, text.encode())
    return path.resolve().as_uri()
