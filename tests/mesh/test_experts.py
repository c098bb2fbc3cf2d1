"""Experts on meshes: values and gradients are those of a loop over all experts on one device."""

from dataclasses import replace
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from haliax import NamedArray

from gregale.axes.layout import REPLICA
from gregale.axes.mesh import MeshConfig, make_mesh
from gregale.model.config import LlamaConfig
from gregale.model.experts import Experts
from gregale.model.experts_config import BalanceConfig, ExpertsConfig
from gregale.programs.runtime.setup import Setup, set_up
from tests.mesh.test_losses import steps_of
from tests.mesh.test_mapping import ONE, VOCABULARY, step_of

BALANCE = BalanceConfig(loss=0.1, z_loss=0.01, bias=True, bias_rate=0.01)
SHARED = ExpertsConfig(8, 2, width=16, shared=24, shared_gate=True, balance=BALANCE)
GROUPED = ExpertsConfig(
    8, 3, width=16, renormalise=False, score="sigmoid", scale=1.5, groups=4, active_groups=2, balance=BALANCE
)


def model_with(experts: ExpertsConfig, **changes) -> LlamaConfig:
    return replace(ONE.model, layers=3, dense_layers=1, experts=experts, **changes)


def config_on(mesh: MeshConfig, model: LlamaConfig, microbatches: int = 2, **changes):
    return replace(ONE, mesh=mesh, model=model, batch=replace(ONE.batch, microbatches=microbatches), **changes)


def set_up_on(mesh: MeshConfig, model: LlamaConfig, microbatches: int = 2, **changes) -> Setup:
    config = config_on(mesh, model, microbatches, **changes)
    return set_up(config, VOCABULARY, make_mesh(mesh, jax.devices()[: mesh.device_count]))


def dense_loop(self: Experts, x: NamedArray, mask: NamedArray | None, execution):
    """Every expert on every token, from the definition: no sort, no shard_map, no rule of differentiation."""
    c, silu = self.config.experts, jax.nn.silu
    assert c is not None
    tokens = x.rearrange(("batch", "position", "embed")).array
    logits = tokens @ self.router.array
    scores = jax.nn.softmax(logits) if c.score == "softmax" else jax.nn.sigmoid(logits)
    order = np.zeros(c.count) if self.bias is None else self.bias.value.array
    order = jax.lax.stop_gradient(scores) + order
    if c.active_groups < c.groups:
        of_group = jnp.sort(order.reshape(*order.shape[:2], c.groups, -1))[..., -2:].sum(-1)
        least = jnp.sort(of_group)[..., -c.active_groups, None]
        order = jnp.where(jnp.repeat(of_group >= least, c.count // c.groups, -1), order, -jnp.inf)
    chosen = order >= jnp.sort(order)[..., -c.active, None]
    weights = jnp.where(chosen, scores, 0)
    if c.renormalise:
        weights = weights / weights.sum(-1, keepdims=True)
    out = jnp.zeros_like(tokens)
    for e in range(c.count):
        gate, up, down = (each.array[e] for each in (self.gate, self.up, self.down))
        out = out + c.scale * weights[..., e, None] * ((silu(tokens @ gate) * (tokens @ up)) @ down)
    if (shared := self.shared) is not None:
        gate, up, down = (each.weight.array for each in (shared.gate, shared.up, shared.down))
        factor = 1 if self.shared_gate is None else jax.nn.sigmoid(tokens @ self.shared_gate.array)
        out = out + factor * ((silu(tokens @ gate) * (tokens @ up)) @ down)
    found = NamedArray(out, ("batch", "position", "embed"))
    if mask is None:
        return found, {}
    m = mask.rearrange(("batch", "position")).array[..., None]
    likely = scores / scores.sum(-1, keepdims=True)
    load, likely = (chosen * m).sum(1), (likely * m).sum(1)
    balance = c.count * (load * likely).sum(-1) / jnp.maximum(m.sum((1, 2)), 1e-20)
    z = (jnp.square(jax.nn.logsumexp(logits, -1)) * m[..., 0]).sum(1)
    sums = {
        "load": (load, ("batch", "experts")),
        "balance_loss": (balance, ("batch",)),
        "router_z_loss": (z, ("batch",)),
    }
    return found, {name: NamedArray(*each) for name, each in sums.items()}


@cache
def looped(model: LlamaConfig, sync=None):
    """Loss, gradients, and what three steps of one device, or of one for each replica, log and leave."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Experts, "__call__", dense_loop)
        mesh = MeshConfig(replica=2, data=1) if sync else MeshConfig(data=1)
        plain = replace(ONE.compute, remat="none", autodiff_rules="plain")
        setup = set_up_on(mesh, model, compute=plain, **({"sync": sync} if sync else {}))
        return steps_of(setup, 3) if sync else (*step_of(setup)[:2], steps_of(setup, 3))


CASES = {
    "one device": (SHARED, MeshConfig(data=1), 4, {}),
    "2x2x2": (SHARED, MeshConfig(replica=2, data=2, model=2), 1, {}),
    "2x4x1": (GROUPED, MeshConfig(replica=2, data=4), 2, {"gather": "per_step"}),
    "4x2x1": (GROUPED, MeshConfig(replica=4, data=2), 2, {"remat": "projections"}),
    "context": (SHARED, MeshConfig(replica=2, context=2, data=2), 4, {"remat": "none"}),
}


@pytest.mark.parametrize("case", CASES)
def test_gradients_are_those_of_a_loop_over_all_experts(case):
    experts, mesh, microbatches, compute = CASES[case]
    model = model_with(experts)
    setup = set_up_on(mesh, model, microbatches, compute=replace(ONE.compute, **compute))
    loss, gradients, sent = step_of(setup)
    exact_loss, exact, _ = looped(model)
    np.testing.assert_allclose(loss, exact_loss, rtol=1e-5)
    for name, expected in exact.items():
        assert_close(gradients[name], expected, name)
    assert [each for each in sent.over(REPLICA) if each.loop] == []
    assert not [each for each in sent.collectives if each.kind == "collective-permute" and not mesh.context > 1]


def assert_close(found: np.ndarray, expected: np.ndarray, name: str) -> None:
    """Compare each expert's gradient with that expert's own size."""
    if ".mlp." in name and expected.ndim == 4:
        found, expected = (each.reshape(-1, *each.shape[2:]) for each in (found, expected))
        for one, other in zip(found, expected, strict=True):
            assert np.linalg.norm(one - other) <= 1e-5 * np.linalg.norm(other), name
    assert np.linalg.norm(found - expected) <= 1e-5 * np.linalg.norm(expected), name
