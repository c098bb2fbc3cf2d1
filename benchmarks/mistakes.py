"""Plants mistakes in a copy of the sources, one at a time: which test finds each, and after how many seconds.

    python -m benchmarks.mistakes                        # all, half an hour of a processor
    python -m benchmarks.mistakes --only islands costs

First run the quick tests of the area, as `make quick`, then the others. Exit code 1 if a mistake is not found.
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

import yaml

ROOT = Path(__file__).parents[1]
SOURCES = Path("src/gregale")
FOLDERS = ("src", "tests", "benchmarks", "config", "docs", "infra")
FOUND = re.compile(r"^(?:FAILED|ERROR) (\S+)", re.MULTILINE)
KINDS = {"quick": "not slow and not soak", "whole": "slow and not soak"}
TESTS = {
    "methods": "methods mesh/test_psdp.py programs/test_methods.py mesh/test_pipelined_methods.py",
    "communication": "communication methods mesh/test_psdp.py",
    "codecs": "codecs communication methods",
    "optim": "optim methods",
    "model": "model huggingface/test_transformers.py",
    "experts": "model mesh/test_experts.py huggingface/test_transformers.py",
    "data": "data programs/test_stages.py",
    "chat": "data",
    "checkpoint": "checkpoint storage programs/test_trouble.py",
    "adapters": "model mesh/test_adapters.py programs/test_adapters.py",
    "dpo": "objectives programs/test_preferences.py",
    "stages": "data programs/test_stages.py programs/test_train.py",
    "islands": "islands methods/test_island.py programs/island process/test_islands.py",
    "costs": "cost programs/test_plan.py programs/test_plan_search.py programs/test_plan_reported.py "
    "programs/test_model_flops.py programs/test_memory.py programs/test_plan_diloco.py programs/test_plan_topology.py "
    "mesh/test_tpu_step.py programs/test_plugins.py",
}


class Mistake(NamedTuple):
    """A text that occurs once in a file of `src/gregale`, and a wrong one."""

    area: str
    what: str
    file: str
    right: str
    wrong: str


MISTAKES = Path(__file__).with_suffix(".yaml")


def found_by(tests: list[str], marks: str, folder: Path) -> str | None:
    """Return the first failing test of a kind; None if all pass."""
    command = [sys.executable, "-m", "pytest", "-x", "-q", "--tb=line", "-m", marks, *tests]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join((str(folder / "src"), str(folder)))}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    found = FOUND.search(done.stdout)
    if done.returncode not in (0, 1, 5) or (done.returncode == 1) != bool(found):  # 5: there is none of this kind
        sys.exit(f"The tests do not run: {done.stdout[-2000:]}{done.stderr[-2000:]}")
    return found[1] if found else None


def tried(mistake: Mistake, folder: Path) -> tuple[str, str, float]:
    """Return the kind of tests that find a mistake, the first one, and the seconds; the kind is empty if none does."""
    path, began = folder / SOURCES / mistake.file, time.monotonic()
    text = path.read_text(encoding="utf-8")
    path.write_text(text.replace(mistake.right, mistake.wrong), encoding="utf-8")
    try:
        tests = [f"tests/{each}" for each in TESTS[mistake.area].split()]
        for kind, marks in KINDS.items():
            if test := found_by(tests, marks, folder):
                return kind, test, time.monotonic() - began
        return "", "", time.monotonic() - began
    finally:
        path.write_text(text, encoding="utf-8")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=TESTS, default=list(TESTS), help="areas")
    options = parser.parse_args()
    read, kinds = yaml.safe_load(MISTAKES.read_text(encoding="utf-8")), []
    chosen = [Mistake(area, **each) for area in options.only for each in read[area]]
    for mistake in chosen:
        if (ROOT / SOURCES / mistake.file).read_text(encoding="utf-8").count(mistake.right) != 1:
            sys.exit(f"{mistake.file} has not once what is to be wrong: {mistake.what}")
    print("| area | mistake | found by | seconds | first test |\n|---|---|---|---|---|", flush=True)
    with tempfile.TemporaryDirectory() as name:
        for each in FOLDERS:
            shutil.copytree(ROOT / each, Path(name) / each, ignore=shutil.ignore_patterns("__pycache__"))
        for each in ("pyproject.toml", "constraints.txt", "README.md", "Makefile"):
            shutil.copy(ROOT / each, name)
        for mistake in chosen:
            kind, test, seconds = tried(mistake, Path(name))
            kinds.append(kind)
            print(f"| {mistake.area} | {mistake.what} | {kind or '**none**'} | {seconds:.0f} | {test} |", flush=True)
    found = len(kinds) - kinds.count("")
    print(f"\nOf {len(kinds)} mistakes the quick tests find {kinds.count('quick')}, all tests {found}.")
    return int("" in kinds)


if __name__ == "__main__":
    sys.exit(main())
