"""Draw the pictures of docs/simulate.md: `python benchmarks/simulate_figures.py docs/figures`."""

import sys
from dataclasses import replace
from pathlib import Path

from gregale.programs.simulate import SimulateConfig, main


def draw(folder: Path, suffix: str = ".svg") -> None:
    """Draw utilisation for the paper's three models, and one timeline."""
    for model in ("1b", "10b", "100b"):
        main(SimulateConfig(model=model, plot=folder / f"simulate-{model}{suffix}"))
    # 20 Gbit/s: a fragment of three layers takes one step to send.
    timeline = SimulateConfig(timeline=folder / f"simulate-timeline{suffix}", timeline_bandwidth=20.0, timeline_steps=5)
    main(replace(timeline, model="1b"))


if __name__ == "__main__":
    draw(Path(sys.argv[1]))
