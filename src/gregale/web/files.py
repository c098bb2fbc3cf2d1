"""Output files of pages."""

from pathlib import Path

from gregale.atomic_files import write_bytes
from gregale.errors import UserError
from gregale.settings import shown

SUFFIXES = (".html", ".htm")


def check_page_path(path: Path, key: str) -> None:
    """Raise `UserError` if a page cannot be written to a path, before anything is computed."""
    if path.suffix.lower() not in SUFFIXES:
        raise UserError(f"{key}: {shown(str(path))} is to be a page; its name has to end with .html.")
    if not path.parent.is_dir():
        raise UserError(
            f"{key}: {shown(str(path))} cannot be written, there is no folder {shown(str(path.parent))}: `mkdir -p`."
        )


def write_page(path: Path, text: str) -> str:
    """Write a page atomically; return its address for a browser."""
    write_bytes(path, text.encode())
    return path.resolve().as_uri()
