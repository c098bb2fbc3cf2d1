"""Adapters on a mesh: what the compiled step sends and multiplies, and DiLoCo beside a plain loop."""

import re
from collections import Counter
from dataclasses import replace
from functools import cache
from math import prod
from typing import Any

import haliax as hax
import jax
import numpy as np
import pytest
from haliax import Axis
from haliax.nn import Linear

from gregale.axes.layout import LORA_RANK, is_named, make_mesh
from gregale.cost import audit
from gregale.errors import UserError
from gregale.huggingface.families import parameters_of
from gregale.huggingface.peft import adapter_slots
from gregale.methods.diloco import Diloco
from gregale.model.adapters import Lora, quantised
from gregale.model.config import MLP_TARGETS, LoraConfig
from gregale.model.execution import Products
from gregale.programs.plan.step import known_trips
from gregale.programs.runtime.build import set_up
from gregale.programs.runtime.setup import Setup
from gregale.runs.config import TrainConfig
from gregale.runs.parsing import load
from tests.axes.test_quantised_weight import dequantised
from tests.mesh.support import held, layout_of, placed, rarely, token_batch
from tests.sent import assert_sends_as_recorded

EMBED, HEADS, MLP, VOCABULARY, RANK, LAYERS = 48, 24, 80, 256, 8, 2
ROWS, POSITIONS = 8, 32
FROZEN = (EMBED * HEADS, EMBED * MLP, EMBED * VOCABULARY)  # values of the frozen matrices of a layer, and of tables
ADAPTERS = {"type": "lora", "rank": RANK, "targets": ["query", "down"]}
QUERY, DOWN = RANK * (EMBED + HEADS), RANK * (MLP + EMBED)  # values of the factors in a layer


# Beside quantised weights: blocks of 64 values divide all inputs but those of `out`, 2 heads of 32.
IN_BLOCKS = {"model": "{hidden: 128, head_size: 32, mlp: 256}", "adapter": "{rank: 8, targets: [query, down]}"}


@cache
def setup_of(mesh: tuple[int, int, int], adapted: bool = True, **changes: Any) -> Setup:
    replica, data, model = mesh
    config = {
        "name": "adapters",
        "steps": 4,
        "cpu_devices": 8,
        "start_from": "the tests make the model",
        "mesh": {"replica": replica, "data": data, "model": model},
        "model": {"layers": LAYERS, "hidden": EMBED, "heads": 2, "kv_heads": 2, "head_size": 12, "mlp": MLP},
        "adapter": ADAPTERS if adapted else None,
        "compute": {"dtype": "float32"},
        "batch": {"size": changes.pop("rows", ROWS), "sequence_length": POSITIONS},
        "optimizer": {"learning_rate": 1e-2, "schedule": {"type": "constant", "warmup": 0}},
        "data": {"sources": {"none": {"type": "text", "files": ["none"]}}},
    }
    arguments = [f"--{key.replace('__', '.')}={value}" for key, value in changes.items()]
    loaded = load(TrainConfig, config, arguments)
    return set_up(loaded, VOCABULARY, make_mesh(loaded.mesh, jax.devices()[: loaded.mesh.device_count]))


@cache
def base(model):
    return jax.device_get(jax.jit(lambda key: model.init(Axis("vocab", VOCABULARY), key))(jax.random.key(0)))


def first_state(setup: Setup):
    form = quantised(base(setup.config.model), getattr(setup.config.adapter, "base", "dtype"))
    return setup.state_from(placed(form, setup.layout, setup.layout.params))


def theta(setup: Setup, state):
    """The outer parameters of DiLoCo."""
    assert isinstance(setup.method, Diloco)
    return setup.method.outer_parameters(state.method)


def batch_of(setup: Setup, step: int, rows: slice = slice(None)):
    whole = token_batch(ROWS, POSITIONS, VOCABULARY, step)
    cut = {name: hax.named(array.array[rows], setup.batch_axes) for name, array in whole.items()}
    return held(cut, setup.layout)


@cache
def compiled(adapted: bool) -> tuple[Setup, str]:
    setup = setup_of((2, 2, 1), adapted)
    with hax.axis_mapping({}):
        lowered = setup.stepper().program.lower(setup.abstract_state(), setup.abstract_batch)
    return setup, lowered.compile().as_text() or ""


def gradients_of_frozen(text: str) -> set[int]:
    """The numbers of values of products that are those of a frozen weight."""
    shapes = re.findall(r"= \w+\[([\d,]*)\]\S* dot\(", text)
    return {prod(map(int, shape.split(","))) for shape in shapes} & {values // n for values in FROZEN for n in (1, 2)}


@pytest.mark.quick
def test_the_scale_of_an_adapter_is_that_of_lora_or_of_rank_stabilised_lora():
    assert LoraConfig(rank=4, alpha=8).scale == 2
    assert LoraConfig(rank=4, alpha=8, scaling="rank_stabilised").scale == 4


def test_no_product_and_no_sum_has_the_size_of_a_frozen_gradient():
    setup, text = compiled(True)
    assert not gradients_of_frozen(text)
    assert gradients_of_frozen(compiled(False)[1]), "the check finds gradients where there are some"
    found = audit(text, setup.layout.mesh, known_trips(setup)).collectives
    sizes = {prod(shape) for each in found if "reduce" in each.kind and each.touched for shape in each.shapes}
    assert max(sizes) <= max(QUERY, DOWN) < min(FROZEN)


def test_replicas_send_adapters_only():
    setup, text = compiled(True)
    found = audit(text, setup.layout.mesh, known_trips(setup)).collectives
    between = [each for each in found if "replica" in each.touched]
    sent = sum(each.bytes_sent * (each.times or 1) for each in between if each.bytes > 64)
    expected = 2 * (1 / 2) * 4 * LAYERS * (QUERY + DOWN) / 2  # both phases on 2 replicas, float32, over data 2
    assert sent == setup.method.bytes_sent(1) == expected
    assert Counter(each.kind for each in between if each.bytes > 64) == {"reduce-scatter": 4, "all-gather": 4}
    state = setup.abstract_state().method
    moments = [leaf.size for leaf in jax.tree.leaves(state.sharded) if leaf.ndim]
    assert sum(moments) == 2 * LAYERS * (QUERY + DOWN)


PIPELINE = {"mesh__stage": 2, "pipeline": "{microbatches: 2}"}
DROPPING = "{rank: 8, targets: [query, down], dropout: 0.3}"
# Both stages and `data` split embed, and they leave blocks whole.
IN_STAGES = {
    "model": "{layers: 4, hidden: 256, head_size: 32, mlp: 128}",
    "adapter": "{rank: 8, targets: [query, down], base: nf4, dropout: 0.3}",
    "compute__unroll": 1,
    "optimizer": "{type: sgd, learning_rate: 1}",
}


@pytest.mark.parametrize(
    ("mesh", "changes"),
    [
        ((2, 2, 2), {}),
        ((2, 2, 1), {"compute__gather": "per_step", "mesh__context": 2, "adapter": DROPPING}),
        ((1, 2, 2), PIPELINE),
        ((2, 2, 1), {**PIPELINE, **IN_STAGES}),
    ],
)
def test_loss_and_gradients_equal_those_of_one_device(mesh, changes):
    norms, trees = [], []
    same = {key: value for key, value in changes.items() if key in IN_STAGES}
    for shape, own in (((1, 1, 1), same), (mesh, changes)):
        setup = setup_of(shape, batch__microbatches=2 if own.get("pipeline") is None else 1, **own)
        state, step = first_state(setup), setup.stepper()
        if "pipeline" in own:
            program: Any = jax.jit(step.program).lower(state, batch_of(setup, 1)).compile()
            step.program = program
            assert_sends_as_recorded(audit(program, setup.layout.mesh, known_trips(setup)))
            gates = re.findall(r"f32\[([\d,]*256,128)\]", program.as_text())
            assert bool(gates) == bool(same)
            assert all(prod(map(int, shape.split(","))) == 256 * 128 for shape in gates), "decoded one layer at a time"
        for number in (1, 2):
            state, report = step(state, batch_of(setup, number), number)
            norms.append((float(report.metrics.loss), float(report.metrics.grad_norm)))
        trees.append(parameters_of(jax.device_get(state.method.parameters)))
    np.testing.assert_allclose(norms[:2], norms[2:], rtol=1e-5)
    assert norms[0][1] > 0, "both factors zero would have no gradient"
    for name, leaf in trees[0].items():
        np.testing.assert_allclose(leaf.array, trees[1][name].array, atol=1e-5 if same else 2e-5, err_msg=name)


@pytest.mark.parametrize("base", ["int8", "nf4"])
def test_a_step_beside_quantised_weights_is_one_beside_the_dequantised_ones(base):
    settings = {**IN_BLOCKS, "compute__dtype": "bfloat16"}
    model = setup_of((2, 2, 1), **settings).config.model
    exact = jax.jit(lambda key: model.init(Axis("vocab", VOCABULARY), key))(jax.random.key(0))
    exact = jax.device_get(jax.tree.map(lambda array: array.astype("bfloat16"), exact))

    def rounded(path, leaf):
        if jax.tree_util.keystr(path[-2:]) not in [
            f".{name}.weight" for name in ("query", "key", "value", *MLP_TARGETS)
        ]:
            return leaf
        return hax.named(dequantised(leaf.array, 1, base).astype(leaf.dtype), leaf.axis_names)

    found = []
    for bits in (base, "dtype"):
        setup = setup_of((2, 2, 1), **settings, adapter__base=bits)
        same = jax.tree_util.tree_map_with_path(rounded, exact, is_leaf=is_named)
        form = quantised(exact, base) if bits == base else same
        state, step = setup.state_from(placed(form, setup.layout, setup.layout.params)), setup.stepper()
        for number in (1, 2):
            state, report = step(state, batch_of(setup, number), number)
        found.append(jax.device_get((report.metrics.loss, report.metrics.grad_norm, state.method.parameters)))
    for first, second in zip(*map(jax.tree.leaves, found), strict=True):
        np.testing.assert_array_equal(first, second)


def test_quantised_weights_are_gathered_in_their_bits_and_blocks_stay_whole():
    setup = setup_of((2, 2, 1), **IN_BLOCKS, adapter__base="nf4", adapter__targets="[query]")
    with hax.axis_mapping({}):
        lowered = setup.stepper().program.lower(setup.abstract_state(), setup.abstract_batch)
    found = audit(lowered.compile().as_text() or "", setup.layout.mesh, known_trips(setup)).collectives
    codes = [each for each in found if each.dtype == "u8"]
    assert {(each.kind, each.axes) for each in codes} == {("all-gather", ("data",))}
    matrices = LAYERS * 128 * (3 * 64 + 3 * 256)  # query, key, value; gate, up, down
    assert sum(each.bytes * (each.times or 1) for each in codes) == 2 * matrices // 2, "in both passes half a byte each"
    floats = [each for each in found if each.kind == "all-gather" and each.dtype != "u8" and each.touched == ("data",)]
    largest = max(prod(shape) for each in floats for shape in each.shapes)
    assert largest == VOCABULARY * 128 // 2, "no matrix of a layer is gathered in floats, but of `out`"
    sizes = {prod(shape) for each in found if "replica" in each.touched for shape in each.shapes}
    assert max(sizes) <= LAYERS * RANK * 128
    with pytest.raises(UserError, match=r"128 of them along embed, which are 2 blocks. .* data 4 = 4 devices"):
        setup_of((1, 4, 1), **IN_BLOCKS, adapter__base="int8")


def test_diloco_equals_a_plain_loop():
    setup = setup_of((2, 1, 1), sync="{type: diloco, period: 2}")
    state, step = first_state(setup), setup.stepper()
    for number in (1, 2):
        state, _ = step(state, batch_of(setup, number), number)
    alone = setup_of((1, 1, 1), rows=ROWS // 2)
    first = jax.device_get(first_state(alone).method.parameters)
    ends, weights, one_step = [], [], alone.stepper()
    for rows in (slice(0, ROWS // 2), slice(ROWS // 2, ROWS)):
        own, seen = first_state(alone), 0.0
        for number in (1, 2):
            own, report = one_step(own, batch_of(alone, number, rows), number)
            seen += float(report.metrics.weight)
        ends.append(jax.device_get(own.method.parameters))
        weights.append(seen)
    assert weights[0] != weights[1]
    outer = jax.device_get(theta(setup, state))
    trees = [parameters_of(tree) for tree in (first, *ends, outer)]
    for name in trees[0]:
        start, *own, found = (tree[name].array for tree in trees)
        average = np.average(own, axis=0, weights=weights)
        expected = start - 0.7 * (start - average)  # the momentum rises from 0
        np.testing.assert_allclose(found, expected, atol=1e-5, err_msg=name)


STREAMING, DILOCO = "{type: streaming_diloco, period: 4, fragments: 2, delay: 1}", "{type: diloco, period: 2}"


@pytest.mark.parametrize("sync", rarely([STREAMING, DILOCO], DILOCO))
def test_fragments_and_codecs_send_adapters(sync):
    setup = setup_of((2, 1, 1), sync=sync, reduce__codec="int4")
    state, step = first_state(setup), setup.stepper()
    before = jax.device_get(theta(setup, state))
    for number in range(1, 7):
        state, _ = step(state, batch_of(setup, number % 3), number)
    after = parameters_of(jax.device_get(theta(setup, state)))
    for name, leaf in parameters_of(before).items():
        moved = np.abs(leaf.array - after[name].array)
        assert (moved.reshape(LAYERS, -1).max(axis=1) > 0).all(), name


def test_of_experts_adapters_need_products_of_their_inputs_in_the_compute_dtype_and_have_no_form_of_peft():
    experts, targets = "{experts: {count: 4, active: 2, width: 16}}", "targets: [query, expert_gate]"
    setup_of((1, 1, 1), model=experts, adapter="{targets: [query], dropout: 0.1}", compute__matmul="int8")
    setup = setup_of((1, 1, 1), model=experts, adapter=f"{{{targets}}}")
    with pytest.raises(UserError, match=r"mlp\.adapters\.gate\.lora_a is of a matrix of each expert"):
        adapter_slots([], setup.model)


def test_dropout_takes_a_share_of_the_inputs_of_a_in_training_only():
    In, Out, run = Axis("embed", 64), Axis("mlp", 64), Products(layout=layout_of().inside_replica())
    same = hax.named(np.eye(64, dtype=np.float32), ("embed", "mlp"))
    plain = Linear(hax.zeros((In, Out)), None, In, Out)
    found = []
    for scale in (1.0, 1.0, 2.0):
        a = Linear(same.rename({"mlp": LORA_RANK}) * scale, None, In, Axis(LORA_RANK, 64))
        b = Linear(same.rename({"embed": LORA_RANK}) / scale, None, Axis(LORA_RANK, 64), Out)
        layer = Lora(plain.weight, None, In, Out, lora_a=a, lora_b=b, scale=3.0, dropout=0.25)
        x = hax.ones((Axis("batch", 8), Axis("position", 8), In))
        np.testing.assert_array_equal(run.project(layer, x).array, 3.0)
        keys = hax.named(jax.random.split(jax.random.key(1), 8), "batch")
        found.append(replace(run, dropout_keys=keys).project(layer, x).array)
    assert set(np.unique(found[0])) == {0.0, np.float32(4.0)}
    assert np.mean(found[0] == 0) == pytest.approx(0.25, abs=0.03)
    assert np.mean(found[0][0] != found[0][1]) > 0.3, "another row drops other values"
    np.testing.assert_array_equal(found[0], found[1])
    assert np.mean(found[0] != found[2]) > 0.3, "another A drops other values"
    setup = setup_of((2, 1, 1), adapter="{targets: [query], dropout: 0.5}")
    step = setup.stepper()
    one, same = (step(first_state(setup), batch_of(setup, 1), 1)[1].metrics.grad_norm for _ in range(2))
    assert float(one) == float(same), "a resume drops the same values"
