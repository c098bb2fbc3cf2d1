"""Makes .venv, or mends it, and says how far it is: `python infra/environment.py core|dev STEPS`, from the Makefile.

What has been installed is noted inside of .venv, so that a .venv that is complete costs one start of its Python. One
whose Python is gone, that was interrupted or that was made in another folder is made anew. A .venv that is a link
belongs to somebody else: it is used, and never changed.
"""

from __future__ import annotations

import fcntl
import hashlib
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
INSTALLING = ".installing"  # in .venv while pip puts files there: what an interrupted pip leaves is of no use
PLAIN_INTERVAL_SECONDS = 5.0
# Lines of pip.
NAME = re.compile(r"\s*(?:Collecting|Requirement already satisfied:) ([\w.-]+)")
LOCAL_FILE = re.compile(r"\s*Processing (?:\S*/)?(\w+)")
DOWNLOAD = re.compile(r"\s*(?:Downloading|Using cached) ([\w.]+)\S*(?:\.whl|\.tar\.gz) \(([\d.]+) (\w+)\)")
MEGABYTES = {"kB": 1e-3, "MB": 1.0, "GB": 1e3}


class PackageSet(NamedTuple):
    """What is installed; its numbers are for the progress alone. (`tests/infra` counts the packages.)"""

    target: str
    packages: int
    megabytes: int


# Each contains those before it.
SETS = {
    "core": PackageSet(".", 59, 182),
    "docs": PackageSet(".[docs]", 87, 210),
    "dev": PackageSet(".[dev,docs,tpu]", 138, 797),
}


def main(name: str, steps: str) -> int:
    with open(ROOT / "constraints.txt") as held:  # which keeps a second `make` from the same .venv
        try:
            fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print("Waiting for another `make` that works on .venv.", flush=True)
            fcntl.flock(held, fcntl.LOCK_EX)
        return prepare(ROOT / ".venv", name, steps)


def prepare(venv: Path, name: str, steps: str) -> int:
    """Makes what is missing; returns the exit code."""
    fault = fault_of(venv)
    if venv.is_symlink():
        if fault:
            link = f".venv is a link to {venv.resolve()}"
            print(f"{link}, which {fault}. Remove the link, or mend that.", file=sys.stderr)
        return 1 if fault else 0
    if fault is None and is_complete(venv, name):
        return 0
    if fault is not None:
        if venv.exists():
            print(f".venv {fault}; it is made anew.", flush=True)
        version = ".".join(map(str, sys.version_info[:3]))
        print(f"1/{steps} creating .venv with Python {version} ({sys.executable})", flush=True)
        made = subprocess.run([sys.executable, "-m", "venv", "--clear", str(venv)])
        if made.returncode:
            print(f"{sys.executable} could not make .venv; its own words are above.", file=sys.stderr)
            return 1
    return install(venv, name, steps)


def fault_of(venv: Path) -> str | None:
    """What keeps .venv from being used, if anything."""
    if not venv.exists():
        return "does not exist"
    if (venv / INSTALLING).exists():
        return "was being filled when something stopped it"
    try:
        check = [venv / "bin" / "python", "-c", "import pip, sys; sys.exit(sys.version_info < (3, 11))"]
        if subprocess.run(check, capture_output=True).returncode:
            return "has a Python before 3.11, or one without pip"
    except OSError:
        return "has no Python that runs"
    places = {stamp.read_text().partition("\n")[0] for stamp in stamps(venv)} - {""}
    return None if places <= {str(ROOT)} else f"was made in another folder ({', '.join(places)})"


def stamps(venv: Path) -> list[Path]:
    return [path for path in (venv / f".{name}" for name in SETS) if path.is_file()]


def stamp() -> str:
    """Where this is, and a hash of what is to be installed."""
    digest = hashlib.sha256()
    for name in ("pyproject.toml", "constraints.txt"):
        digest.update((ROOT / name).read_bytes())
    return f"{ROOT}\n{digest.hexdigest()}\n"


def is_complete(venv: Path, name: str) -> bool:
    """Whether all of a set is there; `dev` has all of `core`."""
    names = list(SETS)[list(SETS).index(name) :]
    return any(path.read_text() == stamp() for path in stamps(venv) if path.name[1:] in names)


def install(venv: Path, name: str, steps: str) -> int:
    packages = SETS[name]
    most = f"{packages.packages} packages, at most {packages.megabytes} MB to download"
    print(f"2/{steps} installing {most} (what pip has kept from before is not downloaded again)", flush=True)
    pip = [venv / "bin" / "python", "-m", "pip", "--disable-pip-version-check", "install", "--progress-bar", "off"]
    command = [*pip, "--constraint", "constraints.txt", "--editable", packages.target]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, errors="replace") as process:
        assert process.stdout is not None
        progress = Progress(packages, venv / INSTALLING)
        for line in process.stdout:
            progress.take(line)
    if process.returncode:
        print("pip stopped; its own words are above. The same command goes on from there.", file=sys.stderr)
        return 1
    (venv / f".{name}").write_text(stamp())
    (venv / INSTALLING).unlink(missing_ok=True)
    return 0


class Progress:
    """Shows how far pip is, from what it prints; `marker` exists from when it begins to install.

    On a terminal one line is redrawn; elsewhere there is a line every few seconds.
    """

    def __init__(self, packages: PackageSet, marker: Path):
        self._wanted, self._marker = packages, marker
        self._names: set[str] = set()
        self._megabytes, self._latest = 0.0, ""
        self._start = self._last = time.monotonic()

    def take(self, line: str) -> None:
        if line.startswith("Installing collected packages:"):
            self._marker.touch()
            self._show(f"all {len(self._names)} are here; putting {line.count(',') + 1} in place", always=True)
            return
        if line.startswith("Successfully installed"):
            self._show("installed", always=True)
            return
        if found := NAME.match(line) or LOCAL_FILE.match(line):
            self._latest = re.sub("[-_.]+", "-", found[1]).lower()
            self._names.add(self._latest)
        elif found := DOWNLOAD.match(line):
            self._megabytes += float(found[2]) * MEGABYTES.get(found[3], 1e-6)
            self._latest = f"{found[1]}, {found[2]} {found[3]}"
        counts = f"{len(self._names)} of {self._wanted.packages} packages"
        self._show(f"{counts}, {self._megabytes:.0f} of {self._wanted.megabytes} MB: {self._latest}")

    def _show(self, text: str, always: bool = False) -> None:
        now = time.monotonic()
        text = f"    {text}  {now - self._start:.0f} s"
        if sys.stdout.isatty():
            width = shutil.get_terminal_size().columns - 1
            print(f"\r\033[K{text[:width]}", end="\n" if always else "", flush=True)
        elif always or now - self._last >= PLAIN_INTERVAL_SECONDS:
            self._last = now
            print(text, flush=True)


if __name__ == "__main__":
    try:
        sys.exit(main(*sys.argv[1:]))
    except KeyboardInterrupt:
        sys.exit(130)
