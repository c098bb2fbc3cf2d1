"""What `gregale train config/quickstart.yaml` does until its first step is done, beside `import jax`.

    python benchmarks/startup.py [--rounds 3] [--source PATH]

The first start of a round finds an empty folder and an empty cache directory; the second one finds the text encoded and
the programs compiled. Seconds of the wall and, in brackets, of the processor (all threads): medians over the rounds.

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
STARTS = ("first start", "second start")


def start(folder: Path, source: Path, name: str) -> dict[str, tuple[float, float]]:
    """When each part of a start had ended: seconds of the wall and of the processor."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("JAX", "XLA"))}
    environment |= {"PYTHONPATH": f"{source}:{ROOT / 'benchmarks'}", "XDG_CACHE_HOME": str(folder / "cache_home")}
    config = str(ROOT / "config" / "quickstart.yaml")
    command = [sys.executable, "-m", "startup_marks", str(time.time()), config, "--name", name]
    done = subprocess.run(command, cwd=folder, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def parts(marks: dict[str, tuple[float, float]]) -> dict[str, tuple[float, float]]:
    """What each part took by itself, and all together."""
    before, found = (0.0, 0.0), {}
    for name, (wall, cpu) in marks.items():
        found[name] = (wall - before[0], cpu - before[1])
        before = (wall, cpu)
    return found | {"**all**": before}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--source", type=Path, default=ROOT / "src")
    options = parser.parse_args()
    rounds = {name: [] for name in STARTS}
    for _ in range(options.rounds):
        with tempfile.TemporaryDirectory() as folder:
            for name in STARTS:
                rounds[name].append(parts(start(Path(folder), options.source.resolve(), name.replace(" ", "-"))))
    print(f"| until the first step: s ({options.rounds} rounds) | {' | '.join(STARTS)} |\n|---|{'---|' * len(STARTS)}")
    for part in rounds[STARTS[0]][0]:
        cells = []
        for name in STARTS:
            wall, cpu = (median(found[part][unit] for found in rounds[name]) for unit in (0, 1))
            cells.append(f"{wall:.2f} ({cpu:.2f})")
        print(f"| {part} | {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
