"""The stages of an island: the rounds after which they begin, and the state that goes from one to the next."""

from typing import Any

import haliax as hax
import jax
import numpy as np
import pytest

from gregale.axes.layout import make_mesh
from gregale.errors import UserError
from gregale.islands.method import Island
from gregale.islands.outer import HostOuter
from gregale.islands.run import compile_programs, moved
from gregale.islands.state import stage_rounds
from gregale.programs.runtime.build import set_up
from gregale.programs.runtime.setup import Setup
from gregale.programs.train.stages import PreparedStage
from gregale.runs.config import TrainConfig
from gregale.runs.parsing import load
from tests.programs.tiny import CONFIG, compilations

nothing: Any = None
FLEET = {
    "islands": {"lighthouse": "host:1"},
    "mesh": {"data": 4},
    "sync": {"type": "streaming_diloco", "period": 4, "fragments": 2, "delay": 1},
    "reduce": {"codec": "int4"},
}


def staged(*stages: dict[str, Any]) -> tuple[TrainConfig, list[Setup]]:
    config = load(TrainConfig, {**CONFIG, **FLEET, "stages": list(stages)})
    configs = [stage.config for stage in config.each_stage]
    return config, [set_up(each, 256, make_mesh(each.mesh, jax.devices()[:4])) for each in configs]


def rounds_of(*stages: dict[str, Any]) -> tuple[int, ...]:
    config, setups = staged(*stages)
    return stage_rounds(config, [setup.method for setup in setups])  # type: ignore[misc]


def test_a_stage_begins_with_a_round_of_its_own_and_keeps_the_shards():
    assert rounds_of() == ()
    longer = {"batch": {"sequence_length": 64}, "mesh": {"data": 2, "context": 2}}
    assert rounds_of({"from": 4}, {"from": 7, **longer}) == (2, 3)
    for stages, message in (
        ([{"from": 1}], r"stages\.0\.from is step 1, by which the fleet makes 0 rounds; .* after 0 of the 6 rounds"),
        ([{"from": 4}, {"from": 5}], r"stages\.1\.from is step 5, .* makes 2 rounds; the stage before it begins aft"),
        ([{"from": 4, "mesh": {"data": 2, "model": 2}}], r"stages\.0\.mesh: the outer parameters of an island stay"),
    ):
        with pytest.raises(UserError, match=message):
            rounds_of(*stages)


def test_a_state_goes_to_the_next_stage_and_its_mesh(monkeypatch):
    """There it finds its programs, which were compiled from shapes."""
    spikes = {"skip_spikes": {"window": 4}}
    _, (before, setup) = staged({"from": 4, "mesh": {"data": 2, "context": 2}, **spikes})
    assert isinstance(before.method, Island)
    assert isinstance(setup.method, Island)
    state = before.initial_state()
    outer = HostOuter(before.method)
    outer.begin(state.method.psdp.parameters)
    digest, kept = outer.digest, jax.device_get(state.method.psdp)
    new = moved(state, before, setup, 4)
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(new.method.psdp), kept)
    assert {array.sharding.mesh.shape["context"] for array in jax.tree.leaves(new.method)} == {2}
    assert (before.method.spikes, new.spikes.losses.shape) == (None, (4,))
    outer.follow(setup.method)
    assert outer.digest == digest
    theta = outer.theta(0)
    assert {array.sharding.mesh.shape["context"] for array in jax.tree.leaves(theta)} == {2}

    monkeypatch.setattr(PreparedStage, "evaluator", None)  # there is no text
    stage = PreparedStage(setup, nothing, 12)
    compile_programs(stage)
    batch = {
        key: hax.named(jax.device_put(np.ones(each.array.shape, each.array.dtype), each.array.sharding), each.axes)
        for key, each in setup.abstract_batch.items()
    }

    with compilations() as compiled:
        new, _ = stage.stepper(setup.method)(new, batch, 5)
        for index in range(2):
            theta, fragment = outer.theta(index), setup.method.fragment(index)
            _, error = setup.method.depart(new.method, theta, fragment)
            setup.method.norm(new.method, theta, fragment)
            new = new._replace(method=setup.method.arrive(new.method, theta, fragment, 0.5, error))
    assert compiled == []
