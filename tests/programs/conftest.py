"""Runs of the real programs in this process, on its eight devices."""

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from gregale.cli import main
from gregale.methods.method import Method
from gregale.programs.runtime.setup import Setup
from gregale.training.stepper import Stepper
from tests.programs.tiny import EVALUATE, write_inputs

# What the program of a step follows from.
OF_A_STEP = ["seed", "steps", "model", "mesh", "batch", "optimizer", "sync", "reduce", "compute", "pipeline"]
OF_A_STEP += ["inspect", "callbacks", "adapter", "skip_spikes", "objective", "mapping"]


@pytest.fixture(scope="session", autouse=True)
def traced_steps() -> Iterator[dict[str, Stepper]]:
    """Runs with the same program of a step share it: to trace one takes most of the time of a short run."""
    made: dict[str, Stepper] = {}
    make = Setup.stepper

    def shared(setup: Setup, method: Method | None = None) -> Stepper:
        settings = [getattr(setup.config, name) for name in OF_A_STEP]
        key = repr((settings, setup.Vocab, setup.layout.mesh, (method or setup.method).name))
        return made.get(key) or made.setdefault(key, make(setup, method))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Setup, "stepper", shared)
        yield made


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
    """What the command line says of a mistake, in its last line."""

    def line(*arguments) -> str:
        capsys.readouterr()
        assert gregale(*arguments) == 2
        errors = capsys.readouterr().err.splitlines()
        assert [line for line in errors if line.startswith("gregale: error: ")] == errors[-1:]
        return errors[-1]

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
