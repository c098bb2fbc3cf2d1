"""Short runs have the losses that they had, so that a change of the code alone proves itself.

`RECORD_GOLDEN=1 pytest tests/programs/test_golden.py` makes the records anew. `benchmarks.golden` compares all runs of
two commits to the bit, on one machine.
"""

import json
import os
from pathlib import Path

import numpy as np
import pytest

from benchmarks.golden import CONFIG, write_run
from tests.programs.tiny import losses

RECORDS = Path(__file__).with_name("golden.json")
STEPS = {"diloco": 34, "pipeline": 14, "experts exchanged": 10, "muon": 14}  # DiLoCo has an outer step


@pytest.mark.parametrize("name", STEPS)
def test_a_run_has_the_recorded_losses(name, inputs, gregale):
    config = write_run(inputs, name, STEPS[name])
    assert gregale("train", CONFIG) == 0
    found = [loss for _, loss in losses(inputs / "runs" / config["name"])]
    records = json.loads(RECORDS.read_text())
    if os.environ.get("RECORD_GOLDEN"):
        records[name] = [round(loss, 6) for loss in found]
        RECORDS.write_text(json.dumps(dict(sorted(records.items())), indent=1) + "\n")
    np.testing.assert_allclose(found, records[name], rtol=1e-4)
