"""Losses with parts, and buffers: both are those of one device, and evaluation is without auxiliary terms."""

from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from haliax import Axis

from gregale.axes.layout import MeshConfig, make_mesh
from gregale.axes.parameters import Buffer
from gregale.errors import UserError
from gregale.methods.config import DilocoConfig, StreamingDilocoConfig
from gregale.methods.method import StepMetrics
from gregale.model.llama import Llama, LlamaConfig
from gregale.model.losses import Losses
from gregale.programs.runtime.build import set_up
from gregale.programs.runtime.setup import Setup, checked_loss
from gregale.programs.train.step_log import measured
from gregale.training.state import StepReport
from tests.mesh.support import first_state, held, one_device, rarely, token_batch
from tests.mesh.test_mapping import ONE, POSITIONS, ROWS, VOCABULARY

COEFFICIENT = 0.1  # large, so that gradients show it
DECAY = 0.5  # of the running mean


def z_config():
    return replace(ONE.model, z_loss=COEFFICIENT)


@cache
def buffered_config():
    """A z-loss, a term around the running mean of log Z, and counts of the targets, by the model's own rules."""

    class Buffered(Llama):
        log_z: Buffer = eqx.field(default_factory=lambda: Buffer(hax.zeros(())))
        seen: Buffer = eqx.field(default_factory=lambda: Buffer(hax.zeros(Axis("vocab", VOCABULARY), dtype=jnp.int32)))

        def loss(self, batch, execution):
            losses = Llama.loss(self, batch, execution)
            z, mask = hax.nn.logsumexp(self.logits(batch, execution), axis="vocab"), batch["loss_mask"]
            spread = COEFFICIENT * hax.sum(hax.square(z - self.log_z.value) * mask).scalar()
            counts = hax.sum(hax.nn.one_hot(batch["targets"], self.seen.value.axes[0]) * mask, ("batch", "position"))
            total = hax.sum(z * mask)
            metrics = {"log_z": total.scalar()}
            auxiliary = {**losses.auxiliary, "spread": spread}
            return Losses(losses.loss, losses.weight, auxiliary, metrics, {"log_z": total, "targets": counts})

        def update_buffers(self, statistics, weight):
            mean = DECAY * self.log_z.value + (1 - DECAY) * statistics["log_z"] / weight
            counts = self.seen.value + statistics["targets"].astype(jnp.int32)
            return eqx.tree_at(lambda model: (model.log_z, model.seen), self, (Buffer(mean), Buffer(counts)))

    @dataclass(frozen=True)
    class BufferedConfig(LlamaConfig):
        def init(self, Vocab, key):
            return Buffered.init(self, Vocab, key)

        @classmethod
        def get_choice_name(cls, subclass):
            return "buffered"

    return BufferedConfig(**vars(z_config()))


def set_up_on(mesh: MeshConfig, **changes) -> Setup:
    config = replace(ONE, mesh=mesh, model=buffered_config(), **changes)
    return set_up(config, VOCABULARY, make_mesh(mesh, jax.devices()[: mesh.device_count]))


def steps_of(setup: Setup, count: int) -> tuple[list[dict[str, float]], list[np.ndarray], Any]:
    """What each of some steps logs, and the parameters and buffers after them."""
    state, logged = first_state(setup).method, []
    step = jax.jit(setup.method.step)
    for number in range(1, count + 1):
        actions = setup.method.actions(number)
        batch = held(token_batch(ROWS, POSITIONS, VOCABULARY, seed=number), setup.layout)
        state, metrics = step(state, batch, *actions.step_args)
        if actions.post_step is not None:
            state, _ = jax.jit(setup.method.synchronise)(state, actions.post_step)
        logged.append(measured(StepReport(jax.device_get(metrics), 0, 0)))
    inner = getattr(state, "inner", state)  # [replica, ...] if replicas train separately
    return logged, [np.asarray(leaf) for leaf in jax.tree.leaves(inner.parameters)], inner.buffers


def test_a_batch_without_targets_is_logged_with_the_loss_0():
    metrics = StepMetrics(
        np.zeros(2), np.zeros(2), np.ones(2), np.ones(2, bool), named={"margin": np.zeros(2)}, callbacks={}
    )
    logged = measured(StepReport(metrics, 0, 0))
    assert (logged["loss"], logged["margin"], logged["grad_norm"]) == (0, 0, 1)


def microbatched(count: int):
    return replace(ONE.batch, microbatches=count)


STREAMING = StreamingDilocoConfig(period=2, fragments=2, delay=0)
CASES = {
    "one device, four microbatches": (MeshConfig(data=1), {"batch": microbatched(4)}, {}),
    "replica 2 x data 2 x model 2": (MeshConfig(replica=2, data=2, model=2), {"batch": microbatched(1)}, {}),
    "context 2, four microbatches": (MeshConfig(replica=2, context=2, data=2), {"batch": microbatched(4)}, {}),
    "diloco": (MeshConfig(replica=2, data=2, model=2), {}, {"sync": DilocoConfig(period=2)}),
    "streaming": (MeshConfig(replica=2, context=2, data=2), {}, {"sync": STREAMING}),
}


@cache
def exact(sync) -> tuple:
    """The same on as few devices as the method takes: one, or one for each replica."""
    mesh = MeshConfig(replica=2, data=1) if sync else MeshConfig(data=1)
    return steps_of(set_up_on(mesh, **({"sync": sync} if sync else {})), 2 if sync else 3)


@pytest.mark.parametrize("case", rarely(CASES, "diloco"))
def test_auxiliary_terms_and_buffers_are_those_of_one_device(case):
    mesh, changes, method = CASES[case]
    logged, parameters, buffers = steps_of(set_up_on(mesh, **changes, **method), 2 if method else 3)
    expected, exact_parameters, exact_buffers = exact(method.get("sync"))
    for found, right in zip(logged, expected, strict=True):
        for name in ("loss", "z_loss", "spread", "log_z"):
            np.testing.assert_allclose(found[name], right[name], rtol=1e-5, err_msg=name)
    for found, right in zip(parameters, exact_parameters, strict=True):
        np.testing.assert_allclose(found, right, atol=2e-6)
    np.testing.assert_allclose(buffers.log_z.value.array, exact_buffers.log_z.value.array, rtol=1e-5)
    np.testing.assert_array_equal(buffers.seen.value.array, exact_buffers.seen.value.array)


def test_buffers_are_updated_once_a_step_by_the_sums_of_its_microbatches():
    logged, _, buffers = exact(None)
    mean, counts = 0.0, np.zeros(VOCABULARY, int)
    for number, found in enumerate(logged, 1):
        mean = DECAY * mean + (1 - DECAY) * found["log_z"]
        batch = token_batch(ROWS, POSITIONS, VOCABULARY, seed=number)
        counts += np.bincount(batch["targets"].array[batch["loss_mask"].array > 0], minlength=VOCABULARY)
    np.testing.assert_allclose(buffers.log_z.value.array, mean, rtol=1e-6)
    np.testing.assert_array_equal(buffers.seen.value.array, counts)


@pytest.mark.quick
def test_the_gradient_is_that_of_loss_and_z_loss_and_evaluation_is_of_the_loss():
    config, batch, run = z_config(), token_batch(ROWS, POSITIONS, VOCABULARY), one_device()
    model = jax.jit(lambda key: config.init(Axis("vocab", VOCABULARY), key))(jax.random.key(0))
    plain = replace(model, config=ONE.model)

    def by_hand(model):
        loss, _ = replace(model, config=ONE.model).loss(batch, run)
        z = jax.nn.logsumexp(Llama.logits(model, batch, run).rearrange((..., "vocab")).array, axis=-1)
        return loss + COEFFICIENT * jnp.sum(jnp.square(z) * batch["loss_mask"].array)

    own = jax.jit(jax.grad(lambda model: model.loss(batch, run).trained))
    found, expected = own(model), jax.jit(jax.grad(by_hand))(model)
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5 * np.abs(other).max())
    evaluated = jax.jit(lambda model: checked_loss(config, model, batch, replace(run, evaluates=True)))(model)
    assert evaluated.named == {}
    of_loss = jax.jit(lambda model: checked_loss(ONE.model, model, batch, run).loss)(plain)
    np.testing.assert_array_equal(evaluated.loss, of_loss)


@pytest.mark.parametrize(
    ("returned", "words"),
    [
        (lambda one: (one, one, one), "has to return two scalar arrays"),
        (lambda one: Losses(one, one, {"z": one}, {"z": one}), "auxiliary and metrics both have 'z'"),
        (lambda one: Losses(one, one, metrics={"grad_norm": one}), "'grad_norm' is the name of another metric"),
        (lambda one: Losses(one, one, {"z": jnp.ones(3)}), "'z' has the shape \\(3,\\)"),
    ],
)
def test_losses_that_are_refused(returned, words):
    class Wrong:
        def loss(self, batch, execution):
            return returned(jnp.ones(()))

    with pytest.raises(UserError, match=words):
        checked_loss(ONE.model, Wrong(), {}, one_device())
