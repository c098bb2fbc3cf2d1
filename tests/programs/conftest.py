"""Runs of the real programs in this process, on its eight devices."""

from collections.abc import Callable
from pathlib import Path

import pytest

from gregale.cli import main
from tests.programs.tiny import EVALUATE, write_inputs


@pytest.fixture(scope="module")
def inputs(tmp_path_factory) -> Path:
    """A folder with the text and `tiny.yaml`, shared by the tests of a module."""
    return write_inputs(tmp_path_factory.mktemp("inputs"))


@pytest.fixture
def gregale(inputs, monkeypatch) -> Callable[..., int]:
    """The command line, run in this process and in the folder of the inputs."""
    monkeypatch.chdir(inputs)
    return lambda *arguments: main([str(argument) for argument in arguments])


@pytest.fixture(scope="module")
def whole(inputs) -> Path:
    """The run directory of the undisturbed run."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(inputs)
        assert main(["train", "tiny.yaml", "--name", "whole", *EVALUATE]) == 0
    return inputs / "runs" / "whole"
