"""Provides the layout of a run, with the checks of its mesh and mappings against model, batch and pipeline."""

from collections.abc import Sequence
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
    REPLICA,
    Layout,
    check_divides,
    check_used,
    is_named,
    mesh_axes_of,
)
from gregale.axes.mapping import check_arrays, check_mapping, mapped_layout
from gregale.axes.parameters import QuantisedWeight, is_quantised
from gregale.communication.reduce import further_splits, rows_per_part
from gregale.errors import UserError, multiples_near
from gregale.runs.config import TrainConfig


def checked_layout(config: TrainConfig, mesh: Mesh, Vocab: Axis) -> Layout:
    """Return the layout of a run; raise `UserError` for sizes that the mesh does not divide, before any compilation."""
    layout = with_rank(mapped_layout(mesh, config.mapping), config)
    check_mapping(config.mapping, layout)
    check_messages(config, layout)
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
    check_context(config, layout)
    rows = rows_per_part(batch.size, layout, batch.microbatches)
    check_together(config, rows)
    check_pipeline(config, layout, rows)
    return layout


def rows_multiple(config: TrainConfig, mesh: Mesh) -> int:
    """Return the number of which `batch.size` has to be a multiple, see `checked_layout`; raise `UserError`."""
    layout, columns = mapped_layout(mesh, config.mapping), 1
    if config.pipeline is not None:
        columns = config.pipeline.schedule(mesh.shape["stage"]).columns
    parts = layout.devices((BATCH,), layout.compute) * config.batch.microbatches
    return parts * lcm(config.objective.rows_together, columns)


def check_together(config: TrainConfig, rows: int) -> None:
    """Raise `UserError` if rows that belong together would be in two parts; `rows`: of a microbatch on a device."""
    together, size = config.objective.rows_together, config.batch.size
    if rows % together:
        kind = config.objective.get_choice_name(type(config.objective))
        raise UserError(
            f"batch.size is {size}: each of {config.batch.microbatches} microbatches has {rows} rows on a device, and "
            f"objective.type {kind} needs a multiple of {together}, because a pair is {together} rows. batch.size "
            f"{multiples_near(size, size // rows * together)} would work, or fewer microbatches."
        )


def with_rank(layout: Layout, config: TrainConfig) -> Layout:
    """Return the layout in which `lora_rank` lies like `embed`, if its devices divide it: it splits factors too."""
    if config.adapter is None or LORA_RANK in layout.params:
        return layout
    params, finest = (mesh_axes_of(mapping.get(EMBED, ())) for mapping in (layout.params, layout.opt_state))
    if config.adapter.rank % prod(layout.mesh.shape[name] for name in (*finest, ISLAND)):
        return layout
    own = {"params": {**layout.params, LORA_RANK: params}, "opt_state": {**layout.opt_state, LORA_RANK: finest}}
    return replace(layout, **own)


def check_messages(config: TrainConfig, layout: Layout) -> None:
    """Raise `UserError` if messages are of values that `opt_state` splits more than once further than `params`."""
    if not config.reduce.quantised and not config.fleet.joins:
        return
    for name in layout.opt_state:
        (further,) = further_splits((name,), layout)
        if more := [axis for axis in further if axis != REPLICA and layout.mesh.shape[axis] > 1]:
            raise UserError(
                f"mapping.opt_state.{name} splits {name} over {more[0]}, which mapping.params does not: messages of "
                f"{config.fleet.key or 'reduce.codec'} are a replica's part of a shard of "
                f"`params`. Split {name} over {more[0]} in params too, or leave it out of opt_state."
            )


def check_pipeline(config: TrainConfig, layout: Layout, rows: int) -> None:
    """Raise `UserError` if stages, layers and rows do not divide as the pipeline requires.

    `rows`: rows of one of `batch.microbatches` on one device
    """
    stages = layout.mesh.shape["stage"]
    if config.pipeline is None:
        if stages > 1:
            raise UserError(
                f"mesh.stage is {stages}, but there is no `pipeline`, so nothing would run in stages. Give one "
                "(`pipeline: {repeats: 1}`). Set mesh.stage to 1 to give the devices to another axis."
            )
        return
    for mapping in (config.mapping.compute, config.mapping.params, config.mapping.opt_state):
        if own := [name for name in (BATCH, EMBED) if name in mapping]:
            raise UserError(
                f"mapping has {own[0]} of its own, but there is a pipeline, whose stages pass rows on in the default "
                "order of `batch` and `embed`. Leave these two out of mapping, or remove the pipeline."
            )
    schedule = config.pipeline.schedule(stages)
    if config.model.layers is not None:
        schedule.layers_per_stage(config.model.layers)
    if config.compute.gather == "per_step":
        raise UserError(
            "compute.gather is per_step, but a pipeline has its own window of gathered weights. Use compute.gather "
            "per_layer, and pipeline.gather once to gather all layers before the first iteration."
        )
    parts, size = schedule.columns, config.batch.size
    if rows % parts:
        raise UserError(
            f"batch.size is {size}: each of {config.batch.microbatches} microbatches has {rows} rows on a device, "
            f"which pipeline.microbatches {schedule.microbatches} / mesh.stage {stages} = {parts} does not divide. "
            f"batch.size {-(-rows // parts) * parts * size // rows} would work, or another pipeline.microbatches."
        )


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


def check_context(config: TrainConfig, layout: Layout) -> None:
    """Raise `UserError` for a run whose sequences cannot be split over `mesh.context`."""
    devices, model = layout.context, config.model
    if devices == 1:
        return
    _check_lengths("batch.sequence_length", [config.batch.sequence_length], devices)
    _check_lengths("evaluation.sequence_lengths", config.evaluation.sequence_lengths, devices)
    if not model.splits_positions:
        kind = model.get_choice_name(type(model))
        reason = f"model.type is {kind}, whose loss does not know the order of split positions (splits_positions)"
    elif config.pipeline is not None:
        reason = "there is a pipeline, whose stages hold whole sequences"
    else:
        return
    raise UserError(
        f"mesh.context is {devices}, but {reason}. Set mesh.context to 1; to save memory, give its devices to "
        "mesh.data or mesh.model."
    )


def _check_lengths(key: str, lengths: Sequence[int], devices: int) -> None:
    """Raise `UserError` for a length, in tokens, that the devices' chunks do not divide."""
    chunks = 2 * devices
    for length in lengths:
        if length % chunks:
            raise UserError(
                f"{key} is {length}: mesh.context {devices} cuts a sequence into 2 x {devices} = {chunks} chunks, and "
                f"{length} / {chunks} = {length / chunks:.4g} is not a whole number of tokens. {key} "
                f"{multiples_near(length, chunks)} would work."
            )
