"""What `benchmarks/startup.py` times is there: it looks into the command at places that are no one else's."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from itertools import pairwise
from pathlib import Path

from tests.programs.tiny import FAST_TO_COMPILE, write_inputs

ROOT = Path(__file__).parent.parent.parent


def test_every_part_of_a_start_has_its_mark(tmp_path):
    write_inputs(tmp_path)
    command = [sys.executable, "-m", "startup_marks", str(time.time()), "tiny.yaml", "--cpu_devices", "8"]
    source = f"{ROOT / 'src'}:{ROOT / 'benchmarks'}"
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": FAST_TO_COMPILE, "PYTHONPATH": source}
    done = subprocess.run(command, cwd=tmp_path, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    marks = json.loads(done.stdout.splitlines()[-1])
    programs = marks.pop("programs compiled, read")
    parts = "import jax, imports, set up, text, initial state, step traced, step compiled, first step"
    assert list(marks) == parts.split(", ")
    assert all(
        before <= after for one, other in pairwise(marks.values()) for before, after in zip(one, other, strict=True)
    )
    assert sum(programs) > 0
