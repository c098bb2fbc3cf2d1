"""Makes .venv, or mends it, and says how far it is: `python infra/environment.py core|dev STEPS`, from the Makefile.

What has been installed is noted inside of .venv, so that a .venv that is complete costs one start of its Python. One
whose Python is gone, that was interrupted or that was made in another folder is made anew. A .venv that is a link
belongs to somebody else: it is used, and never changed.
"""

from __future__ import annotations

import fcntl
import hashlib
import re
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
INSTALLING = ".installing"  # in .venv while pip puts files there: what an interrupted pip leaves is of no use
INTERVAL_SECONDS = 5.0
# In a line of pip: the name of a package, or of its file.
PACKAGE = re.compile(r"\s*(?:Collecting|Requirement already satisfied:|Processing) (?:\S*/)?(\w+(?:[-.][A-Za-z]\w*)*)")


# What is installed, each with those before it; the packages (counted by `tests/infra`) and megabytes for the progress.
SETS = {"core": (".", 59, 182), "docs": (".[docs]", 87, 210), "dev": (".[dev,docs,tpu]", 138, 797)}


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
    pins = [(ROOT / name).read_bytes() for name in ("pyproject.toml", "constraints.txt")]
    return f"{ROOT}\n{hashlib.sha256(b''.join(pins)).hexdigest()}\n"


def is_complete(venv: Path, name: str) -> bool:
    """Whether all of a set is there; `dev` has all of `core`."""
    names = list(SETS)[list(SETS).index(name) :]
    return any(path.read_text() == stamp() for path in stamps(venv) if path.name[1:] in names)


def install(venv: Path, name: str, steps: str) -> int:
    target, packages, megabytes = SETS[name]
    most = f"{packages} packages, at most {megabytes} MB to download"
    print(f"2/{steps} installing {most} (what pip has kept from before is not downloaded again)", flush=True)
    pip = [venv / "bin" / "python", "-m", "pip", "--disable-pip-version-check", "install", "--progress-bar", "off"]
    command = [*pip, "--constraint", "constraints.txt", "--editable", target]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, errors="replace") as process:
        assert process.stdout is not None
        follow(process.stdout, packages, venv / INSTALLING)
    if process.returncode:
        print("pip stopped; its own words are above. The same command goes on from there.", file=sys.stderr)
        return 1
    (venv / f".{name}").write_text(stamp())
    (venv / INSTALLING).unlink(missing_ok=True)
    return 0


def follow(output: Iterable[str], most: int, marker: Path) -> None:
    """Tells every few seconds how far pip is, from what it prints; `marker` exists from when it begins to install."""
    names: set[str] = set()
    last = time.monotonic()
    for line in output:
        if found := PACKAGE.match(line):
            names.add(re.sub("[-_.]+", "-", found[1]).lower())
        if line.startswith("Installing collected packages:"):
            marker.touch()
            print(f"    all {len(names)} are here; putting {line.count(',') + 1} in place", flush=True)
        elif time.monotonic() - last >= INTERVAL_SECONDS:
            last = time.monotonic()
            print(f"    {len(names)} of {most} packages: {' '.join(line.split()[:2])}", flush=True)


if __name__ == "__main__":
    try:
        sys.exit(main(*sys.argv[1:]))
    except KeyboardInterrupt:
        sys.exit(130)
