"""The chart library uPlot: its files from the package `youplot`.

This module reads two files of that package and runs none of its code. It rejects files that differ from the release.
"""

from __future__ import annotations

import hashlib
from functools import cache
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

from gregale.errors import UserError

PACKAGE = "youplot"
RELEASE = "1.6.31"
# SHA-256 of dist/uPlot.iife.min.js and dist/uPlot.min.css of that release.
FILES = {
    "youplot/vendor/uplot.iife.min.js": "2d27e8ad3d228164525ce213f9dc716f39b4e3aee0cc773fb3491c96cf4921a2",
    "youplot/vendor/uplot.min.css": "df630c6a8d6f8eeaff264b50f73ce5b114f646ffd9a0bb74f049b0a00135fa04",
}


@cache
def uplot() -> tuple[str, str]:
    """Return script and style of uPlot; raise `UserError` if they are absent or differ from the release."""
    script, style = (_checked(name, digest) for name, digest in FILES.items())
    return script, style


def _checked(name: str, digest: str) -> str:
    try:
        content = Path(str(distribution(PACKAGE).locate_file(name))).read_bytes()
    except (PackageNotFoundError, FileNotFoundError):
        raise UserError(
            f"a page needs the package {PACKAGE}, which brings uPlot {RELEASE} for its charts; it is not installed. "
            f"`make setup` installs it, or `pip install {PACKAGE}==1.0.0`."
        ) from None
    if hashlib.sha256(content).hexdigest() != digest:
        raise UserError(
            f"{name} of the package {PACKAGE} is not that of uPlot {RELEASE}, and no page is made with another one. "
            f"`pip install --force-reinstall {PACKAGE}==1.0.0` brings it back."
        )
    return content.decode()
