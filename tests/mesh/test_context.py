"""Sequences that devices share: the gradients of whole sequences, and what the compiled step sends."""

from dataclasses import replace

import jax
import numpy as np
import pytest

from gregale.axes.layout import MeshConfig, make_mesh
from gregale.codecs.codec import FeedbackConfig, ReduceConfig
from gregale.cost import Audit, audit
from gregale.methods.config import DilocoConfig, StreamingDilocoConfig
from gregale.model.config import ComputeConfig
from gregale.model.execution import execution
from gregale.model.llama import GemmaConfig
from gregale.optim import AdamWConfig, ConstantSchedule
from gregale.programs.runtime.build import set_up
from gregale.programs.runtime.setup import Setup
from gregale.runs.config import BatchConfig, TrainConfig
from tests.mesh.support import first_state, held, rarely, token_batch
from tests.sent import assert_sends_as_recorded

ROWS, POSITIONS, VOCABULARY = 16, 32, 64
# Layers with a window that ends inside of a chunk, and some that see all tokens, with another base; scores capped.
MIXED = GemmaConfig(
    layers=4,
    hidden=32,
    heads=4,
    kv_heads=2,
    mlp=64,
    init_scale=0.2,
    sliding_window=6,
    full_layers=(1, 3),
    window_rotary_base=100.0,
    score_softcap=20.0,
    qk_norm=True,
)
ALIKE = replace(MIXED, layers=2, full_layers=())  # one kind, half as much to compile
WHOLE = TrainConfig(
    name="context",
    steps=2,
    mesh=MeshConfig(data=1),
    model=MIXED,
    compute=ComputeConfig(dtype="float32", remat="full", unroll=1, loss_block=16),
    batch=BatchConfig(size=ROWS, sequence_length=POSITIONS, microbatches=2),
    optimizer=AdamWConfig(learning_rate=1e-3, schedule=ConstantSchedule()),
)


def set_up_on(mesh: MeshConfig, **changes) -> Setup:
    config = replace(WHOLE, mesh=mesh, **changes)
    return set_up(config, VOCABULARY, make_mesh(mesh, jax.devices()[: mesh.device_count]))


def summed(setup: Setup, batch) -> tuple[float, dict[str, np.ndarray], Audit]:
    """The loss and its gradients, before anything is divided, and what the program sends."""
    state = first_state(setup).method
    held_batch = held(batch, setup.layout)
    psdp = setup.psdp
    program = (
        jax.jit(lambda state, batch: psdp.accumulate_gradients(psdp.gathered_params(state), batch))
        .lower(state, held_batch)
        .compile()
    )
    found = jax.device_get(program(state, held_batch))
    gradients = {
        jax.tree_util.keystr(path): leaf.sum(0) for path, leaf in jax.tree_util.tree_leaves_with_path(found.gradients)
    }
    return float(found.loss.array.sum()), gradients, audit(program, setup.layout.mesh)


@pytest.fixture(scope="module")
def whole():
    return summed(set_up_on(MeshConfig(data=1)), token_batch(ROWS, POSITIONS, VOCABULARY))


@pytest.mark.parametrize(
    "mesh",
    [
        MeshConfig(context=4, data=1),
        MeshConfig(replica=2, context=2, data=2),
        MeshConfig(replica=2, context=2, data=1, model=2),
        pytest.param(MeshConfig(context=2, data=2, model=2), marks=pytest.mark.soak),
    ],
    ids=lambda mesh: "-".join(f"{axis}{size}" for axis, size in mesh.sizes(mesh.device_count).items() if size > 1),
)
def test_gradients_are_those_of_whole_sequences(mesh, whole):
    setup = set_up_on(mesh)
    loss, gradients, sent = summed(setup, token_batch(ROWS, POSITIONS, VOCABULARY))
    np.testing.assert_allclose(loss, whole[0], rtol=1e-6)
    for name, expected in whole[1].items():
        assert np.linalg.norm(gradients[name] - expected) <= 1e-5 * np.linalg.norm(expected), name
    assert_sends_as_recorded(sent)
    run = execution(setup.config.compute, setup.layout, setup.config.model)
    assert run.splits(POSITIONS) == (mesh.model > 1), "positions are split over context x model between products"


STEPS = 20
METHODS = {
    "psdp": {},
    "psdp in 4 bits": {"reduce": ReduceConfig(codec="int4", gather_codec="int4", feedback=FeedbackConfig())},
    "diloco": {"sync": DilocoConfig(period=2)},
    "streaming": {"sync": StreamingDilocoConfig(period=3, fragments=2, delay=1)},
}


@pytest.mark.parametrize("name", rarely(METHODS, "psdp", "diloco"))
def test_methods_train_as_with_whole_sequences(name):
    """On meshes that split parameters alike, so that codecs have equal blocks: nearly all codes are the same.

    The second run shares sequences, goes on with whole ones in the middle, and shares them again.
    """
    meshes = MeshConfig(replica=2, data=4), MeshConfig(replica=2, context=2, data=2)
    # Adam divides a gradient that is nearly zero by itself: with a small epsilon its rounding, which is that of a
    # processor, is a whole update.
    changes = {"optimizer": replace(WHOLE.optimizer, epsilon=1e-5), **METHODS[name]}
    setups = [set_up_on(mesh, steps=STEPS, model=ALIKE, **changes) for mesh in meshes]
    steppers, places = [setup.stepper() for setup in setups], [setup.abstract_state() for setup in setups]
    losses, parameters = [], []
    for shares in (lambda step: False, lambda step: not 7 < step <= 14):
        state, found = first_state(setups[0]), []
        for step in range(1, STEPS + 1):
            index = shares(step)
            batch = held(token_batch(ROWS, POSITIONS, VOCABULARY, seed=step), setups[index].layout)
            state = jax.tree.map(lambda array, place: jax.device_put(array, place.sharding), state, places[index])
            state, report = steppers[index](state, batch, step)
            found.append(np.asarray(report.metrics.loss))
        losses.append(found)
        parameters.append(jax.tree.leaves(jax.device_get(setups[0].method.trees(state.method)["parameters"])))
    tolerance = 1e-3 if "bits" in name else 1e-5
    np.testing.assert_allclose(losses[1], losses[0], rtol=tolerance)
    assert np.ptp(losses[0]) > 0.1, "it learns"
    for left, right in zip(*parameters, strict=True):
        moved = np.abs(left - right) > 20 * tolerance
        assert np.mean(moved) < (0.02 if "bits" in name else 1e-9)
