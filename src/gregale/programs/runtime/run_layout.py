"""Provides the layout of a run, with the checks of its mesh and mappings against model, batch and pipeline."""

from dataclasses import replace
from math import lcm, prod

import jax
from haliax import Axis
from jax.sharding import Mesh

from gregale.axes.layout import (
    BATCH,
    EMBED,
    ISLAND,
    LORA_RANK,
    POSITION,
    Layout,
    check_divides,
    check_used,
    is_named,
    mesh_axes_of,
)
from gregale.axes.mapping import check_arrays, check_mapping, mapped_layout
from gregale.axes.parameters import QuantisedWeight, is_quantised
from gregale.errors import UserError
from gregale.runs.config import TrainConfig
from gregale.runs.rules import check
from gregale.settings.rules import LAYOUT


def checked_layout(config: TrainConfig, mesh: Mesh, Vocab: Axis) -> Layout:
    """Return the layout of a run; raise `UserError` for sizes that the mesh does not divide, before any compilation."""
    layout = with_rank(mapped_layout(mesh, config.mapping), config)
    check_mapping(config.mapping, layout)
    batch = config.batch
    check_divides(
        layout,
        {
            "batch.size": ("the sequences of a step", Axis(BATCH, batch.size)),
            **config.model.split_axes(),
            "model.vocabulary": (
                "the vocabulary, which model.row_multiple (of type llama, gemma and gpt_oss, as in an import's "
                "config.yaml) fills up,",
                Vocab,
            ),
        },
    )
    check(config, layout, LAYOUT)
    return layout


def rows_multiple(config: TrainConfig, mesh: Mesh) -> int:
    """Return the number of which `batch.size` has to be a multiple, see `checked_layout`; raise `UserError`."""
    layout, columns = mapped_layout(mesh, config.mapping), 1
    if config.pipeline is not None:
        columns = config.pipeline.schedule(mesh.shape["stage"]).columns
    parts = layout.devices((BATCH,), layout.compute) * config.batch.microbatches
    return parts * lcm(config.objective.rows_together, columns)


def with_rank(layout: Layout, config: TrainConfig) -> Layout:
    """Return the layout in which `lora_rank` lies like `embed`, if its devices divide it: it splits factors too."""
    if config.adapter is None or LORA_RANK in layout.params:
        return layout
    params, finest = (mesh_axes_of(mapping.get(EMBED, ())) for mapping in (layout.params, layout.opt_state))
    if config.adapter.rank % prod(layout.mesh.shape[name] for name in (*finest, ISLAND)):
        return layout
    own = {"params": {**layout.params, LORA_RANK: params}, "opt_state": {**layout.opt_state, LORA_RANK: finest}}
    return replace(layout, **own)


def check_axes(config: TrainConfig, layout: Layout, model) -> None:
    """Raise `UserError` if the mesh does not divide an axis of the parameters, or `mapping` does not suit them.

    The axes of Gregale's own models are checked by their keys, see `checked_layout`.
    """
    leaves = jax.tree.leaves(model, is_leaf=lambda leaf: is_named(leaf) or is_quantised(leaf))
    for leaf in filter(is_quantised, leaves):
        check_blocks(layout, leaf)
    named = [leaf.axes for leaf in leaves if is_named(leaf) or is_quantised(leaf)]
    check_arrays(config.mapping, layout, [[axis.name for axis in axes] for axes in named])
    axes = {axis.name: axis for each in named for axis in each}
    if not type(config.model).__module__.startswith("gregale.") or not config.mapping.is_default:
        found = {f"the axis {name} of model": ("parameters of the model", axis) for name, axis in axes.items()}
        check_divides(layout, found)
    check_used(layout, (BATCH, POSITION, *axes))


def check_blocks(layout: Layout, weight: QuantisedWeight) -> None:
    """Raise `UserError` if devices would hold parts of a quantised weight's blocks."""
    (over,) = layout.splits((weight.along,), layout.params)
    blocks, devices = weight.scales.resolve_axis(weight.along).size, layout.devices((weight.along,), layout.params)
    if blocks % devices:
        block = weight.codec.block
        split = " x ".join(f"{name} {layout.mesh.shape[name]}" for name in over if layout.mesh.shape[name] > 1)
        raise UserError(
            f"adapter.base holds weights in blocks of {block} values: a projection has {blocks * block} of them along "
            f"{weight.along}, which are {blocks} blocks. They would be split over {split} = {devices} devices, and "
            f"{blocks} / {devices} = {blocks / devices:.4g} is not a whole number. Use fewer devices along these axes, "
            "or adapter.base dtype."
        )
