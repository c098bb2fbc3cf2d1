"""Make pictures that were drawn before fit light and dark pages: `python benchmarks/recolour.py docs/figures/*.svg`."""

import sys
from pathlib import Path

from gregale.timeline.plot import on_any_page

if __name__ == "__main__":
    for path in map(Path, sys.argv[1:]):
        path.write_text(on_any_page(path.read_text(encoding="utf-8")), encoding="utf-8")
