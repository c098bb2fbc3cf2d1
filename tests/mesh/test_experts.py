"""Experts on meshes: values and gradients are those of a loop over all experts on one device."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from typing import Any

import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from haliax import NamedArray

from gregale.axes.layout import REPLICA, MappingConfig, MeshConfig, make_mesh, mapped_layout
from gregale.communication.pipeline import PipelineConfig
from gregale.errors import UserError
from gregale.methods.config import DilocoConfig, StreamingDilocoConfig
from gregale.model.adapters import merged_weight
from gregale.model.config import BalanceConfig, ExpertsConfig, LoraConfig
from gregale.model.execution import Execution
from gregale.model.experts import Experts, choose, router_logits
from gregale.model.kernels.grouped import BLOCKED
from gregale.model.llama import GptOssConfig, LlamaConfig
from gregale.optim import MuonConfig
from gregale.programs.runtime.build import set_up
from gregale.programs.runtime.setup import Setup
from gregale.programs.train.step_log import load_figures
from tests.mesh.support import executed, layout_of, one_device, rarely
from tests.mesh.test_losses import steps_of
from tests.mesh.test_mapping import ONE, VOCABULARY, step_of

BALANCE = BalanceConfig(loss=0.1, z_loss=0.01, bias=True, bias_rate=0.01)
SHARED = ExpertsConfig(8, 2, width=16, shared=24, shared_gate=True, balance=BALANCE)
GROUPED = ExpertsConfig(
    8, 3, width=16, renormalise=False, score="sigmoid", scale=1.5, groups=4, active_groups=2, balance=BALANCE
)


def model_with(experts: ExpertsConfig) -> LlamaConfig:
    """Two layers, of which the first is dense if there is a shared MLP."""
    return LlamaConfig(**{**vars(ONE.model), "dense_layers": int(experts.shared > 0), "experts": experts})


def config_on(mesh: MeshConfig, model: LlamaConfig, microbatches: int = 2, **changes):
    return replace(ONE, mesh=mesh, model=model, batch=replace(ONE.batch, microbatches=microbatches), **changes)


def set_up_on(mesh: MeshConfig, model: LlamaConfig, microbatches: int = 2, **changes) -> Setup:
    config = config_on(mesh, model, microbatches, **changes)
    return set_up(config, VOCABULARY, make_mesh(mesh, jax.devices()[: mesh.device_count]))


def dense_loop(self: Experts, x: NamedArray, mask: NamedArray | None, execution: Any = None):
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
    gate, up = (jnp.einsum("bpe,rem->bprm", tokens, each.array) for each in (self.gate, self.up))
    out = c.scale * jnp.einsum("bpr,bprm,rme->bpe", weights, silu(gate) * up, self.down.array)
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
        "load": (load, ("batch", "router")),
        "balance_loss": (balance, ("batch",)),
        "router_z_loss": (z, ("batch",)),
    }
    return found, {name: NamedArray(*each) for name, each in sums.items()}


@contextmanager
def loops() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Experts, "with_sums", dense_loop)
        yield


EMPTY, EXCHANGED = MappingConfig(), MappingConfig(compute={"experts": "data"})
PLAIN = replace(ONE.compute, remat="none", autodiff_rules="plain")


@cache
def looped_step(model: LlamaConfig) -> tuple[float, dict[str, np.ndarray]]:
    with loops():
        return step_of(set_up_on(MeshConfig(data=1), model, compute=PLAIN))[:2]


CASES = {
    "one device": (SHARED, MeshConfig(data=1), 4, {}),
    "4x2x1, experts over data": (GROUPED, MeshConfig(replica=4, data=2), 2, {"remat": "projections"}),
    "2x2x2, exchanged": (SHARED, MeshConfig(replica=2, data=2, model=2), 1, {"remat": "full"}),
    "context, exchanged": (GROUPED, MeshConfig(replica=2, context=2, data=2), 2, {}),
    "context": (SHARED, MeshConfig(replica=2, context=2, data=2), 4, {"remat": "none", "gather": "per_step"}),
    "pipeline": (GROUPED, MeshConfig(replica=2, stage=2, data=2), 2, {}),
    "2x2x2": (SHARED, MeshConfig(replica=2, data=2, model=2), 1, {}),
    "2x4x1": (GROUPED, MeshConfig(replica=2, data=4), 2, {"gather": "per_step"}),
    "2x4x1, exchanged": (GROUPED, MeshConfig(replica=2, data=4), 2, {}),
}


@pytest.mark.parametrize("case", rarely(CASES, "2x2x2", "2x4x1", "2x4x1, exchanged"))
def test_gradients_are_those_of_a_loop_over_all_experts(case):
    experts, mesh, microbatches, compute = CASES[case]
    model = model_with(experts)
    mapping = EXCHANGED if "exchanged" in case else EMPTY
    if "experts over data" in case:
        mapping = MappingConfig(params={"experts": "data", "embed": None})
    changes = {"compute": replace(ONE.compute, **compute), "mapping": mapping}
    if mesh.stage > 1:
        changes["pipeline"] = PipelineConfig(microbatches=2)
    setup = set_up_on(mesh, model, microbatches, **changes)
    loss, gradients, sent = step_of(setup)
    exact_loss, exact = looped_step(model)
    np.testing.assert_allclose(loss, exact_loss, rtol=1e-5)
    for name, expected in exact.items():
        assert_close(gradients[name], expected, name)
    assert [each for each in sent.over(REPLICA) if each.loop] == []
    sends_rings = [each for each in sent.collectives if each.kind == "collective-permute"]
    assert mesh.context * mesh.stage > 1 or not sends_rings, "the router's gradient is no ring of sends"


def assert_close(found: np.ndarray, expected: np.ndarray, name: str) -> None:
    """Compare each expert's gradient with that expert's own size."""
    if ".mlp." in name and expected.ndim == 4:
        found, expected = (each.reshape(-1, *each.shape[2:]) for each in (found, expected))
        for one, other in zip(found, expected, strict=True):
            assert np.linalg.norm(one - other) <= 1e-5 * np.linalg.norm(other), name
    assert np.linalg.norm(found - expected) <= 1e-5 * np.linalg.norm(expected), name


METHODS = {
    "psdp": (MeshConfig(replica=2, data=2, model=2), {}),
    "diloco": (MeshConfig(replica=2, data=2, model=2), {"sync": DilocoConfig(period=2)}),
    "streaming": (
        MeshConfig(replica=2, context=2, data=2),
        {"sync": StreamingDilocoConfig(period=2, fragments=2, delay=0)},
    ),
    "muon": (MeshConfig(replica=2, data=2, model=2), {"optimizer": MuonConfig(learning_rate=0.02)}),
}


@pytest.mark.parametrize("method", rarely(METHODS, "psdp", "diloco"))
def test_steps_log_and_leave_what_a_loop_over_all_experts_does(method):
    mesh, changes = METHODS[method]
    model, few = model_with(SHARED), MeshConfig(replica=2 if "sync" in changes else 1, data=1)
    logged, parameters, buffers = steps_of(set_up_on(mesh, model, 4, **changes), 3)
    with loops():
        expected, exact, exact_buffers = steps_of(set_up_on(few, model, compute=PLAIN, **changes), 3)
    for found, right in zip(logged, expected, strict=True):
        for name in ("loss", "balance_loss", "router_z_loss", "expert_imbalance"):
            np.testing.assert_allclose(found[name], right[name], rtol=1e-5, err_msg=name)
    for found, right in zip(parameters, exact, strict=True):
        assert np.linalg.norm(found - right) <= 1e-5 * np.linalg.norm(right)
    mine, right = (buffers.blocks.parts[1].mlp for buffers in (buffers, exact_buffers))
    np.testing.assert_allclose(mine.load.value.array, right.load.value.array, rtol=1e-6)
    np.testing.assert_array_equal(mine.bias.value.array, right.bias.value.array)
    assert np.abs(mine.bias.value.array.mean(-1)).max() < 1e-8, "biases are centred"
    assert np.abs(mine.bias.value.array).max() > 0.01


@cache
def layer_of(**changes) -> Experts:
    config = LlamaConfig(layers=1, hidden=16, heads=2, init_scale=0.3, experts=replace(SHARED, **changes))
    return Experts.init(config, jax.random.key(0))


@pytest.mark.quick
def test_the_bias_of_a_busy_expert_falls_and_biases_are_centred():
    """By hand: the mean load is 2 and the rate 0.01; the mean of the moves is 0.00125."""
    moved = layer_of().after(NamedArray(jnp.asarray([4.0, 1.0, 1.0, *5 * [2.0]]), ("router",)))
    assert moved.bias is not None
    expected = [-0.01125, 0.00875, 0.00875, *5 * [-0.00125]]
    np.testing.assert_allclose(moved.bias.value.array, expected, atol=1e-8)


def alone(layer: Experts, router: np.ndarray | None, execution: Execution, rows: int = 4):
    """Value and gradients of a layer on random tokens, and those of the loop."""
    if router is not None:
        layer = replace(layer, router=NamedArray(jnp.asarray(router, jnp.float32), layer.router.axis_names))
    x = np.random.default_rng(1).normal(size=(rows, 13, 16))
    tokens = NamedArray(jnp.asarray(np.concatenate([x[..., :15], np.ones((rows, 13, 1))], -1), jnp.float32), AXES)

    def out(layer):
        return hax.sum(hax.square(layer.with_sums(tokens, None, execution)[0])).scalar()

    def looped(layer):
        return hax.sum(hax.square(dense_loop(layer, tokens, None)[0])).scalar()

    return jax.jit(jax.value_and_grad(out))(layer), jax.value_and_grad(looped)(layer)


AXES = ("batch", "position", "embed")


def routed_to(*experts: int) -> np.ndarray:
    """A router of 8 experts whose logits are 50 for some, by the last value of a token, which is 1."""
    router = np.random.default_rng(2).normal(size=(16, 8)) * 0.1
    router[-1, list(experts)] += 50
    return router


ROUTINGS = {"uneven": None, "all to two": routed_to(1, 6), "all to one of one": routed_to(5)}


@pytest.mark.parametrize("exchanged", [False, True])
@pytest.mark.parametrize("routing", ROUTINGS)
def test_any_routing_has_the_gradients_of_the_definition_and_an_idle_expert_none(routing, exchanged):
    """With all tokens to one expert, an exchange takes three rounds."""
    mesh = make_mesh(MeshConfig(data=4), jax.devices()[:4])
    execution = executed(mapped_layout(mesh, EXCHANGED).inside_replica()) if exchanged else one_device()
    layer = layer_of(active=1 if routing == "all to one of one" else 2, renormalise=False)
    (value, found), (exact_value, exact) = alone(layer, ROUTINGS[routing], execution)
    np.testing.assert_allclose(value, exact_value, rtol=1e-5)
    for name in ("gate", "up", "down", "router"):
        mine, right = (getattr(each, name).array for each in (found, exact))
        for expert in range(8) if name != "router" else [slice(None)]:
            assert np.linalg.norm(mine[expert] - right[expert]) <= 1e-5 * np.linalg.norm(right), name
    if routing != "uneven":
        idle = [expert for expert in range(8) if not np.any(exact.gate.array[expert])]
        assert len(idle) >= 6
        assert not np.any(found.gate.array[np.asarray(idle)])


ADAPTERS = LoraConfig(rank=4, alpha=6.0, targets=("expert_gate", "expert_up", "expert_down"))


def with_random_b(layer: Experts, config: LoraConfig = ADAPTERS) -> Experts:
    adapted: Any = layer.with_adapters(config, jax.random.key(1))
    keys = iter(jax.random.split(jax.random.key(2), 3))
    return replace(
        adapted,
        adapters={
            name: replace(each, lora_b=hax.random.normal(next(keys), each.lora_b.axes))
            for name, each in adapted.adapters.items()
        },
    )


def merged(layer: Experts) -> Experts:
    found = {
        name: merged_weight(getattr(layer, name), each.lora_a, each.lora_b, each.scale)
        for name, each in layer.adapters.items()
    }
    return replace(layer, adapters={}, **found)


@cache
def biased_layer() -> Experts:
    config = GptOssConfig(layers=1, hidden=16, heads=2, init_scale=0.3, experts=ExpertsConfig(8, 2, width=16))
    layer, keys = Experts.init(config, jax.random.key(0)), iter(jax.random.split(jax.random.key(4), 4))
    names = ("router_bias", "gate_bias", "up_bias", "down_bias")
    return replace(layer, **{name: hax.random.normal(next(keys), getattr(layer, name).axes) for name in names})


@pytest.mark.parametrize(
    ("mapping", "mesh", "targets", "biased"),
    [
        (EMPTY, MeshConfig(data=1), ("expert_gate", "expert_down"), False),
        (EMPTY, MeshConfig(data=2, model=2), ADAPTERS.targets, False),
        (EXCHANGED, MeshConfig(data=2, model=2), ADAPTERS.targets, True),
    ],
)
def test_adapters_of_experts_have_the_gradients_of_merged_matrices(mapping, mesh, targets, biased):
    layer = with_random_b(biased_layer() if biased else layer_of(), replace(ADAPTERS, targets=targets))
    layout = mapped_layout(make_mesh(mesh, jax.devices()[: mesh.device_count]), mapping).inside_replica()
    x = NamedArray(jax.random.normal(jax.random.key(3), (4, 13, 16)), AXES)

    def gradients(compute):
        def out(adapters, x):
            return hax.sum(hax.square(compute(replace(layer, adapters=adapters), x)[0])).scalar()

        return jax.device_get(jax.tree.leaves(jax.jit(jax.value_and_grad(out, (0, 1)))(layer.adapters, x)))

    def exact(layer, x):
        return merged(layer).with_sums(x, None, one_device()) if biased else dense_loop(merged(layer), x, None)

    found, expected = gradients(lambda layer, x: layer.with_sums(x, None, executed(layout))), gradients(exact)
    assert len(found) == 2 + 2 * len(targets)
    for mine, right in zip(found, expected, strict=True):
        assert np.linalg.norm(mine - right) <= 1e-5 * np.linalg.norm(right)


def test_beside_adapters_of_experts_no_gradient_of_a_matrix_is_computed_and_at_first_they_change_nothing():
    plain = layer_of(shared=0, shared_gate=False, width=24)
    layer, run = plain.with_adapters(ADAPTERS, jax.random.key(1)), one_device()
    x = NamedArray(jax.random.normal(jax.random.key(3), (4, 13, 16)), AXES)

    def program(of):
        def out(trained):
            return hax.sum(hax.square(of(trained).with_sums(x, None, run)[0])).scalar()

        return jax.value_and_grad(out)

    beside = program(lambda adapters: replace(layer, adapters=adapters))
    whole = program(lambda gate: replace(plain, gate=gate))
    given = (beside, layer.adapters), (whole, plain.gate)
    programs = [jax.jit(one).lower(own).compile() for one, own in given]
    sums = [len(re.findall(r"= f32\[8,16,24\]\S* dynamic-update-slice", each.as_text())) for each in programs]
    assert sums[0] == 0 < sums[1], "loops over groups add to a buffer of the gradient's size"
    losses = [float(program(own)[0]) for program, (_, own) in zip(programs, given, strict=True)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)


@pytest.mark.parametrize("mapping", [EMPTY, EXCHANGED])
def test_products_of_8_bits_are_those_of_one_device_wherever_experts_lie(mapping):
    layer = layer_of(shared=0, shared_gate=False)
    x = NamedArray(jax.random.normal(jax.random.key(1), (4, 13, 16)), AXES)
    layout = mapped_layout(make_mesh(MeshConfig(data=4), jax.devices()[:4]), mapping).inside_replica()

    def results(execution: Execution):
        def out(layer):
            return hax.sum(hax.square(execution.gathered_layer(layer).with_sums(x, None, execution)[0])).scalar()

        return jax.device_get(jax.tree.leaves(jax.jit(jax.value_and_grad(out))(layer)))

    exact, found = (results(executed(each, matmul="int8")) for each in (layout_of(), layout))
    for mine, right in zip(found, exact, strict=True):
        assert np.linalg.norm(mine - right) <= 1e-5 * np.linalg.norm(right)


def test_of_experts_with_equal_scores_the_first_are_taken():
    x = NamedArray(jnp.ones((1, 2, 16)), AXES)
    router = NamedArray(jnp.zeros((16, 8)), ("embed", "router"))
    logits = router_logits(x, router, "dtype", one_device())
    choice, scores = choose(logits, None, SHARED, one_device())
    np.testing.assert_array_equal(choice.experts, np.broadcast_to([0, 1], (1, 2, 2)))
    np.testing.assert_allclose(choice.weights, 0.5)
    np.testing.assert_allclose(scores.array, 1 / 8)


@pytest.mark.parametrize("sizes", [[5, 0, 130, 1, 0, 40], [0, 0, 0, 0, 0, 7], [0] * 6])
def test_grouped_products_are_those_of_each_group_whatever_follows_the_last(sizes):
    total, generator = 190, np.random.default_rng(3)
    rows, cotangents = generator.normal(size=(total, 24)), generator.normal(size=(total, 40))
    rows[sum(sizes) :] = cotangents[sum(sizes) :] = np.nan
    weights = generator.normal(size=(6, 24, 40))
    left, right, stack = (jnp.asarray(each, jnp.float32) for each in (rows, cotangents, weights))
    found = BLOCKED.product(left, stack, jnp.asarray(sizes))
    turned = BLOCKED.product(left, stack.swapaxes(1, 2), jnp.asarray(sizes), transposed=True)
    gradients = BLOCKED.weight_gradients(left, right, jnp.asarray(sizes))
    for group, (end, size) in enumerate(zip(np.cumsum(sizes), sizes, strict=True)):
        own = slice(end - size, end)
        for each in (found, turned):
            np.testing.assert_allclose(each[own], rows[own] @ weights[group], rtol=1e-5, atol=1e-5)
        np.testing.assert_allclose(gradients[group], rows[own].T @ cotangents[own], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("experts", "words"),
    [
        ({"groups": 3}, "groups have equally many experts, and 8 / 3 is not a whole number"),
        ({"groups": 4, "active_groups": 5}, "active_groups is 5, and there are 4 groups"),
        ({"groups": 8, "active_groups": 1}, "active is 2, and a token can choose among 1 experts"),
        ({"shared": 0}, "shared_gate is true, but shared is 0"),
    ],
)
def test_experts_that_cannot_be_are_refused(experts, words):
    with pytest.raises(UserError, match=words):
        replace(SHARED, **experts)


def test_inspection_has_the_loads_of_layers_with_experts():
    found = load_figures(np.array([[np.nan] * 4, [0.0, 0.0, 2.0, 2.0], [1.0, 1.0, 1.0, 1.0]]))
    assert found["expert_load_max"] == 2
    assert found["expert_load_min"] == 0
    assert "expert_load_max/layer.0" not in found
    assert found["expert_load_max/layer.2"] == 1
    np.testing.assert_allclose(found["expert_load_entropy/layer.1"], 0.5)
    np.testing.assert_allclose(found["expert_load_entropy/layer.2"], 1)


def test_dense_layers_leave_a_layer_with_experts():
    with pytest.raises(UserError, match="dense_layers is 2, and there are 2 layers"):
        replace(model_with(SHARED), dense_layers=2)
