"""Runs of the real programs in this process, on its eight devices."""

import json
import shutil
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


@pytest.fixture
def refused(gregale, capsys) -> Callable[..., str]:
    """What the command line says of a mistake, in one line."""

    def line(*arguments) -> str:
        capsys.readouterr()
        assert gregale(*arguments) == 2
        (error,) = capsys.readouterr().err.splitlines()
        assert error.startswith("gregale: error: ")
        return error

    return line


@pytest.fixture
def evaluated(gregale, capsys) -> Callable[..., dict[str, float]]:
    """The figures of `gregale eval`; standard output is nothing else."""

    def figures(*arguments) -> dict[str, float]:
        capsys.readouterr()
        assert gregale("eval", *arguments, "--json") == 0
        return json.loads(capsys.readouterr().out)

    return figures


@pytest.fixture(scope="session")
def whole_anywhere(tmp_path_factory) -> Path:
    """The folder in which the undisturbed run was trained."""
    folder = write_inputs(tmp_path_factory.mktemp("whole"))
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        assert main(["train", "tiny.yaml", "--name", "whole", *EVALUATE]) == 0
    return folder


@pytest.fixture(scope="module")
def whole(inputs, whole_anywhere) -> Path:
    """The run directory of the undisturbed run."""
    for name in ("runs/whole", "cache"):
        shutil.copytree(whole_anywhere / name, inputs / name, dirs_exist_ok=True)
    return inputs / "runs" / "whole"
