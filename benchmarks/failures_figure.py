"""Draw what failures cost 1,000 islands for docs/islands.md: `python benchmarks/failures_figure.py docs/figures`.

It is the command that the page shows, and takes a minute or two.
"""

import sys
from pathlib import Path

from gregale.programs.simulate import SimulateConfig, main


def draw(path: Path) -> None:
    """Draw goodput against the hours between failures, and print the tables."""
    main(SimulateConfig(model="100b", sites=1000, failures=100.0, bandwidth=[100.0], codec="int4", plot=path))


if __name__ == "__main__":
    draw(Path(sys.argv[1]) / "failures.svg")
