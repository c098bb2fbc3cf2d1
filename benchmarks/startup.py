"""What `gregale train config/quickstart.yaml` does until its first step is done, beside `import jax`.

    python benchmarks/startup.py [--rounds 3] [--source PATH]

The first start of a round finds an empty folder and an empty cache directory; the second one finds the text encoded and
the programs compiled; the third one goes on from a checkpoint, too. Seconds of the wall and, in brackets, of the
processor (all threads): medians over the rounds. And how many programs were compiled, and how many read.

- `--source`: the `src` of another version, to compare with
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

ROOT = Path(__file__).resolve().parent.parent
CONFIG = str(ROOT / "config" / "quickstart.yaml")
STARTS = ("first start", "second start", "resumed")
PROGRAMS = "programs compiled, read"  # counts, not seconds


def environment_of(folder: Path, source: Path) -> dict[str, str]:
    """A user's own, with the cache directory in the folder."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("JAX", "XLA"))}
    return environment | {"PYTHONPATH": f"{source}:{ROOT / 'benchmarks'}", "XDG_CACHE_HOME": str(folder / "cache_home")}


def start(folder: Path, source: Path, name: str) -> dict[str, tuple[float, float]]:
    """When each part of a start had ended: seconds of the wall and of the processor. And how many programs it took."""
    command = [sys.executable, "-m", "startup_marks", str(time.time()), CONFIG, "--name", name]
    environment = environment_of(folder, source)
    done = subprocess.run(command, cwd=folder, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def save(folder: Path, source: Path, name: str) -> None:
    """Trains until a checkpoint is saved."""
    command = [sys.executable, "-m", "gregale", "train", CONFIG, "--name", name, "--checkpoint.every", "5"]
    run = subprocess.Popen(command, cwd=folder, env=environment_of(folder, source), stdout=subprocess.DEVNULL)
    while not (folder / "runs" / name / "newest_checkpoint.json").exists():
        assert run.poll() is None
        time.sleep(0.1)
    run.terminate()
    run.wait()


def parts(marks: dict[str, tuple[float, float]]) -> dict[str, tuple[float, float]]:
    """What each part took by itself, and all together."""
    before, found = (0.0, 0.0), {}
    for name, (wall, cpu) in marks.items():
        if name == PROGRAMS:
            continue
        found[name] = (wall - before[0], cpu - before[1])
        before = (wall, cpu)
    return found | {"**all**": before, PROGRAMS: marks[PROGRAMS]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--source", type=Path, default=ROOT / "src")
    options = parser.parse_args()
    rounds = {name: [] for name in STARTS}
    for _ in range(options.rounds):
        with tempfile.TemporaryDirectory() as folder:
            place = Path(folder), options.source.resolve()
            for name in STARTS:
                if name == STARTS[-1]:
                    save(*place, name)
                rounds[name].append(parts(start(*place, name.replace(" ", "-"))))
    print(f"| until the first step: s ({options.rounds} rounds) | {' | '.join(STARTS)} |\n|---|{'---|' * len(STARTS)}")
    for part in rounds[STARTS[0]][0]:
        cells = []
        for name in STARTS:
            wall, cpu = (median(found[part][unit] for found in rounds[name]) for unit in (0, 1))
            cells.append(f"{wall:.0f}, {cpu:.0f}" if part == PROGRAMS else f"{wall:.2f} ({cpu:.2f})")
        print(f"| {part} | {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
