"""Runs of the real programs in this process, on its eight devices."""

import json
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import Mesh

from gregale.cli import main
from gregale.cost.work import Work
from gregale.methods.method import Method
from gregale.programs.plan import candidates, search
from gregale.programs.plan.devices import Target
from gregale.programs.plan.step import Plan
from gregale.programs.runtime import setup as setup_module
from gregale.programs.runtime.evaluation import EvaluationText, Evaluator
from gregale.programs.runtime.setup import Setup
from gregale.runs.config import TrainConfig
from gregale.training.state import Stepper, TrainState
from tests.programs.tiny import EVALUATE, trained, write_inputs

# What the program of a step follows from.
OF_A_STEP = ["seed", "steps", "model", "mesh", "batch", "optimizer", "sync", "reduce", "compute", "pipeline"]
OF_A_STEP += ["inspect", "callbacks", "adapter", "skip_spikes", "objective", "mapping"]
# Settings from which neither a model nor a method follows.
OF_NO_METHOD = {"name", "runs", "log_every", "max_skipped", "checkpoint", "export", "evaluation", "samples", "trackers"}


@pytest.fixture(scope="session", autouse=True)
def traced_programs() -> Iterator[dict[tuple[str, str], Any]]:
    """Runs with the same programs share them: to trace them takes most of the time of a short run."""
    made: dict[tuple[str, str], Any] = {}
    stepper, initial_state, place, begin = Setup.stepper, Setup.initial_state, setup_module.placed, Evaluator.__init__

    def of_a_step(setup: Setup, method: Method) -> str:
        settings = [getattr(setup.config, name) for name in OF_A_STEP]
        return repr((settings, setup.Vocab, setup.layout.mesh, method.name))

    def shared_stepper(setup: Setup, method: Method | None = None) -> Stepper:
        key = "stepper", of_a_step(setup, method or setup.method)
        return made.get(key) or made.setdefault(key, stepper(setup, method))

    def shared_state(setup: Setup) -> TrainState:
        """The first state from the host's memory, to donate."""
        key = "state", of_a_step(setup, setup.method_after(0))
        if key not in made:
            state = initial_state(setup)
            made[key] = jax.device_get(state), jax.tree.map(lambda leaf: leaf.sharding, state)
        return jax.device_put(*made[key])

    def shared_setup(config: TrainConfig, tokens: int, mesh: Mesh) -> Setup:
        if config.plugins:  # their classes and callbacks are those of one test
            return place(config, tokens, mesh)
        settings = {name: value for name, value in vars(config).items() if name not in OF_NO_METHOD}
        key = "setup", repr((settings, tokens, mesh, list(mesh.devices.flat)))
        made[key] = made.get(key) or place(config, tokens, mesh)
        return replace(made[key], config=config)

    def shared_sums(evaluator: Evaluator, setup: Setup, text: EvaluationText, token_bytes: np.ndarray) -> None:
        begin(evaluator, setup, text, token_bytes)
        own = evaluator.objective, setup.config.evaluation.by_position, token_bytes.tobytes()
        key = "sums", repr((of_a_step(setup, setup.method), own))
        evaluator._sums, evaluator._named = made.setdefault(key, (evaluator._sums, evaluator._named))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Setup, "stepper", shared_stepper)
        patch.setattr(Setup, "initial_state", shared_state)
        patch.setattr(setup_module, "placed", shared_setup)
        patch.setattr(Evaluator, "__init__", shared_sums)
        yield made


@pytest.fixture(scope="session", autouse=True)
def planned_programs() -> Iterator[None]:
    """Searches and remedies share plans and traced work of equal configurations: a chip only says what is too much."""
    plans: dict[str, Plan] = {}
    works: dict[str, Work] = {}
    plan, work = search.plan_step, candidates.step_work

    def shared_plan(config: TrainConfig, tokens: int, target: Target, until: str) -> Plan:
        if config.plugins:
            return plan(config, tokens, target, until)
        key = repr((config, tokens, target.devices, target.topology, until))
        plans[key] = plans.get(key) or plan(config, tokens, target, until)
        return replace(plans[key], target=target)

    def shared_work(setup: Setup) -> Work:
        if setup.config.plugins:
            return work(setup)
        key = repr((setup.config, setup.Vocab, setup.layout.mesh, list(setup.layout.mesh.devices.flat)))
        works[key] = works.get(key) or work(setup)
        return works[key]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(search, "plan_step", shared_plan)
        patch.setattr(candidates, "step_work", shared_work)
        yield


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
def refusal(gregale, capsys) -> Callable[..., str]:
    """The one line on standard error of a command that is refused."""

    def line(*arguments, code: int = 2) -> str:
        capsys.readouterr()
        assert gregale(*arguments) == code
        out, err = capsys.readouterr()
        assert err.startswith("gregale: error: ")
        assert err.count("\n") == 1, err
        assert "Done." not in out
        return err

    return line


@pytest.fixture
def printed(gregale, capsys) -> Callable[..., str]:
    """What a command that succeeds writes to standard output."""

    def out(*arguments) -> str:
        capsys.readouterr()
        assert gregale(*arguments) == 0
        return capsys.readouterr().out

    return out


@pytest.fixture
def evaluated(printed) -> Callable[..., dict[str, float]]:
    """The figures of `gregale eval`; standard output is nothing else."""
    return lambda *arguments: json.loads(printed("eval", *arguments, "--json"))


@pytest.fixture(scope="session")
def whole_anywhere(tmp_path_factory) -> Path:
    """The folder in which the undisturbed run was trained."""
    folder = write_inputs(tmp_path_factory.mktemp("whole"))
    trained(folder, "tiny.yaml", "whole", *EVALUATE)
    return folder


@pytest.fixture
def copied(whole, tmp_path) -> Path:
    """The run directory of a copy of that run."""
    return shutil.copytree(whole, tmp_path / "runs" / "whole")


@pytest.fixture(scope="module")
def whole(inputs, whole_anywhere) -> Path:
    """The run directory of the undisturbed run."""
    for name in ("runs/whole", "cache"):
        shutil.copytree(whole_anywhere / name, inputs / name, dirs_exist_ok=True)
    return inputs / "runs" / "whole"
