"""Small meshes, a small model and batches that the tests of axes, model, communication and methods share."""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from types import SimpleNamespace

import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from haliax import Axis, NamedArray

from gregale.axes.layout import BATCH, Layout, MeshConfig, make_mesh, standard_layout
from gregale.axes.parameters import position_order
from gregale.model.execution import Execution
from gregale.model.kernels.cpu import cpu_kernels
from gregale.model.kernels.dispatch import KernelRequest, kernels_for
from gregale.model.kernels.operations import Kernels
from gregale.model.llama import Llama, LlamaConfig
from gregale.programs.runtime.setup import Setup
from gregale.training.state import TrainState

ROWS, POSITIONS, VOCABULARY = 32, 16, 64
SMALL = LlamaConfig(layers=2, hidden=32, heads=8, mlp=64, init_scale=0.2)


@dataclass(frozen=True)
class Device:
    """What is read of a device that is not there."""

    id: int = 0
    process_index: int = 0
    slice_index: int | None = None
    platform: str = "gpu"
    device_kind: str = ""
    compute_capability: str = ""
    num_cores: int = 1


def layout_of(replica: int = 1, data: int = 1, model: int = 1, stage: int = 1, context: int = 1) -> Layout:
    """The standard mappings on the first simulated devices, as many as the axes need."""
    config = MeshConfig(replica=replica, stage=stage, context=context, data=data, model=model)
    return standard_layout(make_mesh(config, jax.devices()[: config.device_count]))


def bare_layout(replica: int = 1, data: int = 1, model: int = 1) -> Layout:
    """A layout of a mesh of any size, without devices: only the sizes are read."""
    shape = {"island": 1, "replica": replica, "stage": 1, "context": 1, "data": data, "model": model}
    return standard_layout(SimpleNamespace(shape=shape))


def executed(layout: Layout, **options) -> Execution:
    """A float32 execution with the kernels that CPU devices get."""
    return Execution(**{"layout": layout, "kernels": cpu_kernels(), **options})


def kernels_of(layout: Layout) -> Kernels:
    """The kernels that CPU devices get on a layout."""
    return kernels_for(KernelRequest(jax.devices()[0], "auto", jnp.dtype("float32"), 4, None, layout.context), "auto")


def one_device(**options) -> Execution:
    """The same on a single device."""
    return executed(layout_of().inside_replica(), **options)


def rarely(cases: Iterable[str], *soak: str) -> list:
    """The names of cases; some, whose parts others have, are for `make soak`."""
    return [pytest.param(name, marks=pytest.mark.soak) if name in soak else name for name in cases]


@cache
def small_model(config: LlamaConfig = SMALL, vocabulary: int = VOCABULARY, seed: int = 0) -> Llama:
    return jax.jit(lambda key: Llama.init(config, Axis("vocab", vocabulary), key))(jax.random.key(seed))


def token_batch(
    rows: int = ROWS, positions: int = POSITIONS, vocabulary: int = VOCABULARY, seed: int = 0, uneven: bool = True
) -> dict[str, NamedArray]:
    """Random tokens in two documents a row; with `uneven`, the first rows lose most of their tokens to the mask."""
    generator = np.random.default_rng(seed)
    Rows, Position = Axis(BATCH, rows), Axis("position", positions)
    tokens = generator.integers(0, vocabulary, (rows, positions + 1), dtype=np.int32)
    split = generator.integers(1, positions, (rows, 1))
    place = np.broadcast_to(np.arange(positions), (rows, positions))
    segments = place >= split
    kept = np.linspace(0.05, 1.0, rows)[:, None] if uneven else 1.0
    arrays = {
        "tokens": tokens[:, :-1],
        "targets": tokens[:, 1:],
        "loss_mask": (generator.random((rows, positions)) < kept).astype(np.float32),
        "positions": np.where(segments, place - split, place).astype(np.int32),
        "segment_ids": segments.astype(np.int32),
    }
    return {name: hax.named(array, (Rows, Position)) for name, array in arrays.items()}


def first_state(setup: Setup) -> TrainState:
    """The state before the first step: arrays that `initial_state` made on one mesh, placed on this one."""
    shapes = setup.abstract_state()
    key = repr((setup.config.model, setup.config.seed, jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), shapes)))
    _first_states[key] = _first_states.get(key) or jax.device_get(setup.initial_state())
    return jax.device_put(_first_states[key], jax.tree.map(lambda leaf: leaf.sharding, shapes))


_first_states: dict[str, TrainState] = {}


def placed(tree, layout: Layout, mapping):
    """The arrays of a tree on the devices that a mapping gives them; NumPy cuts them without compiling anything."""
    return jax.device_put(jax.device_get(tree), layout.shardings(tree, mapping))


def held(batch, layout: Layout):
    """A batch on its devices, positions in the order in which those that share a sequence hold them."""
    order = position_order(batch["tokens"].axes[1].size, layout.context)
    arrays = {name: NamedArray(x.array[:, order], x.axis_names) for name, x in batch.items()}
    return placed(arrays, layout, layout.compute)


def assert_trees_close(actual, expected, atol: float, rtol: float = 0.0) -> None:
    """Same structure, and every array within `atol + rtol * |expected|`; the worst array is named."""
    paths = jax.tree_util.tree_flatten_with_path(expected)[0]
    leaves = jax.tree.leaves(actual)
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    for (path, right), left in zip(paths, leaves, strict=True):
        np.testing.assert_allclose(
            np.asarray(left, np.float32),
            np.asarray(right, np.float32),
            rtol=rtol,
            atol=atol,
            err_msg=jax.tree_util.keystr(path),
        )
