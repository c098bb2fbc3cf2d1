"""Layers of several structures: one stack each, run, cut, sharded and saved as layers of one structure are."""

from dataclasses import replace
from functools import cache
from pathlib import Path
from types import SimpleNamespace

import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from haliax import Axis

from gregale.axes.layout import MeshConfig, is_named, make_mesh, named_arrays
from gregale.axes.parameters import in_layer_order
from gregale.communication.pipeline import PipelineConfig
from gregale.communication.reduce import LayerGroups, cut_layers, joined_layers
from gregale.errors import UserError
from gregale.huggingface.families import FAMILIES, parameters_of, path_of, slots_of
from gregale.huggingface.safetensors import read_header
from gregale.huggingface.weights import Writer, plan_files, read_model, slots_by_name
from gregale.methods.config import StreamingDilocoConfig
from gregale.model.llama import LlamaConfig
from gregale.programs.runtime.build import set_up
from tests.mesh.support import layout_of, one_device, placed, token_batch
from tests.mesh.test_pipelined_llama import PLAIN, assert_states_close, trained
from tests.plugins import plugins_from
from tests.sent import assert_sends_as_recorded

VOCABULARY = 64
STREAMING = StreamingDilocoConfig(period=3, fragments=3, delay=0, pattern="sequential")
ALIKE = {"sliding_window": None, "full_layers": ()}  # so that the pattern repeats twice
PIPELINE = PipelineConfig(microbatches=4)


@pytest.fixture(scope="module", autouse=True)
def plugin():
    with plugins_from(Path(__file__).parents[1] / "programs" / "plugins"):
        yield


def widths(wide: int = 96, wide_layers: tuple[int, ...] = (1, 3), **changes):
    from two_widths import TwoWidthsConfig  # type: ignore[import-not-found]

    return TwoWidthsConfig(**{**vars(PLAIN.model), **changes}, wide=wide, wide_layers=wide_layers)


def made(config: LlamaConfig):
    return jax.jit(lambda key: config.init(Axis("vocab", VOCABULARY), key))(jax.random.key(0))


@cache
def exact():
    return trained(replace(PLAIN, model=widths(**ALIKE)))


def streamed(model: LlamaConfig):
    """Setup, losses and last state of a run of Streaming DiLoCo."""
    mesh = MeshConfig(replica=2, data=2, model=2)
    setup = set_up(replace(PLAIN, model=model, steps=3, sync=STREAMING, mesh=mesh), VOCABULARY, make_mesh(mesh))
    state, stepper, losses = setup.initial_state(), setup.stepper(), []
    for step in range(1, 4):
        state, report = stepper(state, placed(token_batch(seed=step), setup.layout, setup.layout.compute), step)
        losses.append(np.asarray(report.metrics.loss))
    return setup, losses, jax.device_get(state.method)


@pytest.mark.parametrize("wide_layers", [(1, 3), pytest.param((0,), marks=pytest.mark.soak), (0, 3)])
def test_it_computes_what_a_plain_loop_over_its_layers_does(wide_layers):
    model, batch = made(widths(wide_layers=wide_layers)), token_batch()
    stacked, plain = (
        jax.jit(jax.value_and_grad(lambda model: model.loss(batch, one_device())[0]))(each)
        for each in (model, model.unstacked())
    )
    np.testing.assert_allclose(stacked[0], plain[0], rtol=1e-6)
    found, expected = (jax.tree.leaves(each) for each in (stacked[1].unstacked(), plain[1]))
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, other, atol=1e-5 * np.abs(other).max())
    assert {leaf.shape["mlp"] for leaf in jax.tree.leaves(model.blocks, is_leaf=is_named) if "mlp" in leaf.shape} == {
        PLAIN.model.mlp,
        96,
    }


def test_on_a_mesh_it_trains_as_on_one_device_and_sends_as_recorded():
    found = trained(replace(PLAIN, model=widths(**ALIKE), mesh=MeshConfig(replica=2, data=2, model=2)))
    assert_states_close(found.states[0], exact().states[0])
    assert_sends_as_recorded(found.audit)


def test_a_pipeline_runs_whole_patterns_of_structures():
    found = trained(replace(PLAIN, model=widths(**ALIKE), mesh=MeshConfig(replica=2, stage=2), pipeline=PIPELINE))
    assert_states_close(found.states[0], exact().states[0])
    with pytest.raises(UserError, match=r"do not repeat: 1 x \[1\], 3 x \[0\]"):
        trained(replace(PLAIN, model=widths(wide_layers=(0,)), mesh=MeshConfig(replica=2, stage=2), pipeline=PIPELINE))


def test_streaming_sends_the_same_fragments_of_structures_with_equal_shapes_as_of_one():
    """Structures of one width are layers of a plain model, so that each fragment has the same values."""
    plain, losses, expected = streamed(PLAIN.model)
    own, own_losses, found = streamed(widths(wide=PLAIN.model.mlp))
    np.testing.assert_allclose(own_losses, losses, rtol=1e-6)
    for one, other in ((found.inner, expected.inner), (found.outer, expected.outer)):
        mine = named_arrays(jax.device_get(jax.jit(in_layer_order)(one.parameters.blocks)))
        for leaf, right in zip(mine, named_arrays(other.parameters.blocks), strict=True):
            order = [leaf.axis_names.index(name) for name in right.axis_names]
            difference = leaf.array.transpose(order) - right.array
            assert np.abs(difference).max() <= 1e-5 * np.abs(right.array).max()
    assert own.method.bytes_sent(3) == plain.method.bytes_sent(3)


def test_the_first_layers_are_cut_off_each_stack():
    model = made(widths(wide_layers=(1, 2)))
    for first, cut in ((1, 1), (2, 2), (3, 1)):
        groups = cut_layers(model, first)
        kinds = {
            path_of(path).split(".")[2]
            for path, leaf in jax.tree_util.tree_flatten_with_path(
                groups, is_leaf=lambda x: isinstance(x, LayerGroups)
            )[0]
            if isinstance(leaf, LayerGroups)
        }
        assert len(kinds) == cut, "a stack that has only first or only later layers stays whole"
        for one, other in zip(jax.tree.leaves(joined_layers(groups)), jax.tree.leaves(model), strict=True):
            np.testing.assert_array_equal(one, other)
    run, batch = one_device(), token_batch()
    whole, apart = (
        jax.jit(lambda model, run=run: model.loss(batch, run)[0])(model) for run in (run, replace(run, first_layers=1))
    )
    np.testing.assert_allclose(apart, whole, rtol=1e-6)


def test_sampling_with_a_cache_sees_what_all_logits_say():
    model, run = made(widths(wide_layers=(0,))), one_device()
    tokens = token_batch(rows=2)["tokens"]
    Position = tokens.resolve_axis("position")
    first = hax.zeros(tokens.resolve_axis("batch"), dtype=jnp.int32)
    positions = hax.arange(Position).broadcast_axis(first.axes)

    @jax.jit
    def logits(model):
        expected = model.logits({"tokens": tokens, "positions": positions}, run)["position", -2:]
        prefilled, caches = model.prefill(tokens["position", :-1], first, Position.size, run)
        decoded, _ = model.decode(tokens["position", -1:], caches, Position.size - 1, first, run)
        return prefilled, decoded, expected["position", 0], expected["position", 1]

    prefilled, decoded, *expected = logits(model)
    np.testing.assert_allclose(prefilled.array, expected[0].array, atol=1e-4)
    np.testing.assert_allclose(decoded.array, expected[1].array, atol=1e-4)


def test_tensors_of_a_folder_have_the_numbers_of_their_layers(tmp_path):
    model, layout = made(widths(wide_layers=(0, 3))), layout_of(data=2)
    model = jax.device_put(model, layout.shardings(model, layout.params))
    family = FAMILIES["mistral"]
    slots = slots_of(model, family)
    dtypes = dict.fromkeys(slots_by_name(slots), np.dtype(np.float32))
    plans = plan_files(tmp_path, {"model.safetensors": list(dtypes)}, slots, dtypes)
    writer, values = Writer(plans, layout, lambda size: None), parameters_of(model)
    for plan in plans:
        plan.make()
    for slot in slots:
        writer.write(slot, values[slot.path])
    writer.finish()
    tensors = read_header(tmp_path / "model.safetensors")
    for layer, block in enumerate(model.unstacked().blocks):
        up = tensors[f"model.layers.{layer}.mlp.up_proj.weight"].mapped()
        np.testing.assert_array_equal(up, np.asarray(block.mlp.up.weight.array).T)
    folder = SimpleNamespace(
        model=SimpleNamespace(vocabulary=VOCABULARY), family=family, tensors=tensors, check=lambda slots: None
    )
    read = read_model(folder, jax.eval_shape(lambda: model), layout)  # type: ignore[arg-type]
    for one, other in zip(jax.tree.leaves(read), jax.tree.leaves(model), strict=True):
        np.testing.assert_array_equal(one, other)
