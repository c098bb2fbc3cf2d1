"""Processes of one run with different settings or another text are refused, all of them, before the first step."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest

from tests.ports import free_port
from tests.programs.tiny import finished, start_train, write_inputs

COMMON = ["--cpu_devices", "2", "--mesh.replica", "1", "--mesh.model", "1", "--steps", "6"]
PROCESS = r"process {} \([\w.-]+, pid \d+\)"


@pytest.fixture(scope="module")
def inputs(tmp_path_factory) -> Path:
    """The inputs of a tiny run, and the same with one word more in `other`."""
    folder = write_inputs(tmp_path_factory.mktemp("inputs"))
    shutil.copytree(folder / "text", folder / "other")
    with (folder / "other" / "3.txt").open("a") as file:
        file.write(" gale")
    return folder


def refused(inputs: Path, *different: str) -> str:
    """What both processes say, the second of which has other arguments; both end with exit code 2."""
    join = ["--distributed.coordinator", f"127.0.0.1:{free_port()}", "--distributed.processes", "2"]
    more = [["--distributed.process", "0"], ["--distributed.process", "1", *different]]
    processes = [start_train(inputs, *COMMON, *join, *each) for each in more]
    try:
        found = [finished(process) for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [code for code, _, _ in found] == [2, 2], found
    errors = [[line for line in err.splitlines() if "error" in line] for _, _, err in found]
    assert errors[0] == errors[1], "both say the same"
    assert len(errors[0]) == 1
    assert not any("Traceback" in err for _, _, err in found)
    assert not (inputs / "runs").exists(), "nothing was begun"
    return errors[0][0]


def test_another_value_is_refused_with_its_key_and_both_values(inputs):
    said = refused(inputs, "--optimizer.learning_rate", "0.02")
    wanted = rf"optimizer\.learning_rate is 0\.01 in {PROCESS.format(0)}, but 0\.02 in {PROCESS.format(1)}"
    assert re.search(wanted, said), said


def test_another_text_is_refused_with_its_source(inputs):
    said = refused(inputs, "--data.sources.words.files", "[other/*.txt]")
    tokens = r"[\d,]+ tokens \(\w+\)"
    wanted = rf"data\.sources\.words is {tokens} in {PROCESS.format(0)}, but {tokens} in {PROCESS.format(1)}"
    assert re.search(wanted, said), said
