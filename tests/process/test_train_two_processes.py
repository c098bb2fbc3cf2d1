"""Two processes whose settings differ train nothing."""

import re

from tests.process.two import gregale_in_two
from tests.programs.tiny import write_inputs


def test_what_has_to_be_equal_is_refused_by_both_before_the_first_step(tmp_path):
    inputs = write_inputs(tmp_path / "inputs")
    common = ("--cpu_devices", "2", "--mesh.replica", "1", "--mesh.model", "1", "--runs", "refused")
    different = ("--optimizer.learning_rate", "0.02")
    found = gregale_in_two(inputs, "train", "tiny.yaml", *common, different=different)
    assert [code for code, _, _ in found] == [2, 2], found
    errors = [[line for line in err.splitlines() if "error" in line] for _, _, err in found]
    assert errors[0] == errors[1], "both give the same reason"
    assert not any("Traceback" in err for _, _, err in found)
    names = [rf"process {number} \([\w.-]+, pid \d+\)" for number in range(2)]
    (said,) = errors[0]
    assert re.search(r"optimizer\.learning_rate is 0\.01 in {}, but 0\.02 in {}".format(*names), said), said
    assert not (inputs / "refused").exists(), "nothing was begun"
