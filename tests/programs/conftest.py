"""Runs of the real programs in this process, on its eight devices."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import jax
import pytest

from gregale.cli import main
from tests.programs.tiny import EVALUATE, write_inputs

CACHE = {
    "jax_compilation_cache_dir": None,
    "jax_persistent_cache_min_compile_time_secs": 0.1,
    "jax_persistent_cache_min_entry_size_bytes": -1,
}


@pytest.fixture(scope="module", autouse=True)
def compile_once(tmp_path_factory) -> Iterator[None]:
    """Every run traces its step anew; this keeps what XLA made of it from one run to the next."""
    settings = CACHE | {"jax_compilation_cache_dir": str(tmp_path_factory.getbasetemp() / "compiled")}
    before = {name: getattr(jax.config, name) for name in settings}
    for name, value in settings.items():
        jax.config.update(name, value)
    yield
    for name, value in before.items():
        jax.config.update(name, value)


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
