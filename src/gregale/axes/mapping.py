"""The configured mappings from named axes to mesh axes: their defaults, and the rules that they obey."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from types import SimpleNamespace
from typing import Any

import jax
from jax.sharding import Mesh

from gregale.axes.layout import (
    BATCH,
    CONTEXT,
    EMBED,
    EXPERTS,
    ISLAND,
    LORA_RANK,
    MODEL,
    POSITION,
    REPLICA,
    AxisMapping,
    Layout,
    Tree,
    check_divides,
    check_used,
    is_layers,
    is_named,
    mesh_axes_of,
)
from gregale.axes.parameters import QuantisedWeight, is_quantised
from gregale.errors import UserError
from gregale.settings import Settings, setting

MAPPINGS = ("compute", "params", "opt_state")
TENSOR_PARALLEL = ("heads", "kv_heads", "mlp", "vocab")
BETWEEN_REPLICAS = (ISLAND, REPLICA)
MeshAxes = list[str] | str | None
EXCHANGED, AUTO = "data", "auto"  # of experts in `compute`; auto: closed forms choose


@dataclass(frozen=True)
class MappingConfig(Settings):
    """The mesh axes over which arrays are split, by the names of their axes: one, a list in order, or null for none.

    An axis that is not given has its default. The default of `params` follows `compute`, that of `opt_state` `params`.
    """

    compute: dict[str, MeshAxes] = setting(dict, "activations, batches, and weights in use", by_topic=True)
    params: dict[str, MeshAxes] = setting(dict, "parameters and gradient buffers", by_topic=True)
    opt_state: dict[str, MeshAxes] = setting(
        dict, "optimizer state, reduced gradients, outer parameters", by_topic=True
    )

    @classmethod
    def explanation(cls) -> str:
        """Return the default mappings as a table, for the help text."""
        every: Any = SimpleNamespace(shape=dict.fromkeys((ISLAND, REPLICA, "stage", CONTEXT, "data", MODEL), 2))
        rows = [("axis", *MAPPINGS), *mapping_rows(standard_layout(every))]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = ("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows)
        return "The defaults, on a mesh whose axes are all larger than 1:\n" + "\n".join(
            f"  {line}".rstrip() for line in lines
        )

    @property
    def is_default(self) -> bool:
        return self == MappingConfig()

    @property
    def has_closed_forms(self) -> bool:
        """Return whether the closed forms of memory and time are for this mapping: only experts may lie elsewhere."""
        others = {name: axes for name, axes in self.compute.items() if name != EXPERTS}
        place = mesh_axes_of(self.compute.get(EXPERTS) or ())
        return replace(self, compute=others).is_default and place in ((), (EXCHANGED,), (AUTO,))

    @property
    def leaves_experts_open(self) -> bool:
        """Return whether the place of experts is to be chosen."""
        return mesh_axes_of(self.compute.get(EXPERTS) or ()) == (AUTO,)


def mapped_layout(mesh: Mesh, config: MappingConfig) -> Layout:
    """Return the layout of a configuration; `check_mapping` and `check_arrays` check it.

    The defaults split `TENSOR_PARALLEL` axes over `model`. Outside of the layers, rows and parameters are also split
    over the stages of a pipeline: no stage repeats another's embedding, head or optimizer. Parameters keep the plain
    order of layers in any pipeline. Devices that share a replica's rows or sequences share its parameters: `params`
    splits `embed` over the mesh axes of `position` and `batch`. `opt_state` splits `embed` over `replica` too.
    """
    data = ("data", "stage") if mesh.shape["stage"] > 1 else ("data",)
    positions = {POSITION: (CONTEXT,)} if mesh.shape[CONTEXT] > 1 else {}
    tensor_parallel = dict.fromkeys(TENSOR_PARALLEL, (MODEL,))
    compute = _changed({BATCH: (*BETWEEN_REPLICAS, *data), **positions, **tensor_parallel}, config.compute)
    rows = (axis for axis in compute.get(BATCH, ()) if axis not in BETWEEN_REPLICAS)
    of_weights = {name: axes for name, axes in compute.items() if name not in (BATCH, POSITION)}
    params = _changed({EMBED: (*compute.get(POSITION, ()), *rows), **of_weights}, config.params)
    opt_state = _changed({**params, EMBED: (*params.get(EMBED, ()), REPLICA)}, config.opt_state)
    between = {axis: axis for axis in BETWEEN_REPLICAS}
    return Layout(mesh=mesh, compute={**compute, **between}, params={**params, **between}, opt_state=opt_state)


def _changed(default: Mapping[str, tuple[str, ...]], given: Mapping[str, MeshAxes]) -> dict[str, tuple[str, ...]]:
    changed = {**default, **{name: mesh_axes_of(axes or ()) for name, axes in given.items()}}
    return {name: axes for name, axes in changed.items() if axes}


def standard_layout(mesh: Mesh) -> Layout:
    """Return the layout with the default mappings."""
    return mapped_layout(mesh, MappingConfig())


def with_rank(layout: Layout, rank: int) -> Layout:
    """Return the layout in which `lora_rank` lies like `embed`, if its devices divide it: it splits factors too."""
    if LORA_RANK in layout.params:
        return layout
    params, finest = (mesh_axes_of(mapping.get(EMBED, ())) for mapping in (layout.params, layout.opt_state))
    if rank % prod(layout.mesh.shape[name] for name in (*finest, ISLAND)):
        return layout
    own = {"params": {**layout.params, LORA_RANK: params}, "opt_state": {**layout.opt_state, LORA_RANK: finest}}
    return replace(layout, **own)


def check_mapping(config: MappingConfig, layout: Layout) -> None:
    """Raise `UserError` for the first rule that the mappings of a configuration break, with its reason."""
    if config.is_default:
        return
    for broken in _broken_rules(config, layout):
        raise UserError(f"mapping.{broken}")


def _broken_rules(config: MappingConfig, layout: Layout) -> Iterator[str]:
    yield from _of_names(config, layout)
    yield from _of_replicas(layout)
    yield from _of_activations(layout)
    for coarse, fine in (("compute", "params"), ("params", "opt_state")):
        yield from _of_refinement(layout, coarse, fine)


def _of_names(config: MappingConfig, layout: Layout) -> Iterator[str]:
    for mapping in MAPPINGS:
        for name, axes in getattr(config, mapping).items():
            key, given = f"{mapping}.{name}", mesh_axes_of(axes or ())
            if unknown := [axis for axis in given if axis not in layout.mesh.shape]:
                known = ", ".join(layout.mesh.shape)
                yield f"{key} names {unknown[0]!r}, which is no mesh axis; mesh axes: {known} (own ones: mesh.axes)."
            if len(set(given)) < len(given):
                yield f"{key} is {shown(given)}: one mesh axis can split an array only once."
            if name in BETWEEN_REPLICAS:
                yield f"{key}: the axis {name} always lies on the mesh axis {name}; remove this line."
            if is_layers(name) and given:
                yield f"{key} is {shown(given)}: layers run one after another, so all devices hold a part of each."
            if name in (BATCH, POSITION) and mapping != "compute":
                yield f"{key}: no parameter has the axis {name}; give it in mapping.compute."
            if name == POSITION and given not in ((), (CONTEXT,)):
                yield f"{key} is {shown(given)}: attention exchanges keys over the mesh axis {CONTEXT}, no other."


def _of_replicas(layout: Layout) -> Iterator[str]:
    rows = mesh_axes_of(layout.compute.get(BATCH, ()))
    if rows[:2] != BETWEEN_REPLICAS:
        yield (
            f"compute.{BATCH} is {shown(rows)}; it has to begin with {', '.join(BETWEEN_REPLICAS)}, because each "
            "replica trains on its own rows."
        )
    for mapping in ("compute", "params"):
        for name, axes in getattr(layout, mapping).items():
            found = [axis for axis in mesh_axes_of(axes) if axis in BETWEEN_REPLICAS]
            if found and name not in (BATCH, *BETWEEN_REPLICAS):
                yield (
                    f"{mapping}.{name} is {shown(mesh_axes_of(axes))}: {found[0]} splits nothing in {mapping}, because "
                    "every replica has all weights, so that its microbatches send nothing over the slow link."
                )


def _of_activations(layout: Layout) -> Iterator[str]:
    compute = layout.compute
    if axes := mesh_axes_of(compute.get(EMBED, ())):
        yield f"compute.{EMBED} is {shown(axes)}: norms, embedding and loss take whole hidden vectors."
    if axes := mesh_axes_of(compute.get("head_size", ())):
        yield f"compute.head_size is {shown(axes)}: attention takes whole heads; split heads and kv_heads."
    rows = [axis for axis in mesh_axes_of(compute.get(BATCH, ())) if axis not in BETWEEN_REPLICAS]
    if {*(axes := mesh_axes_of(compute.get(EXPERTS, ())))} - {*rows}:
        yield (
            f"compute.{EXPERTS} is {shown(axes)}, and {BATCH} is split over {shown(rows)} in a replica: devices send "
            f"tokens to the experts of others, so that they need rows of their own; split {EXPERTS} over these."
        )
    queries, keys = (mesh_axes_of(compute.get(name, ())) for name in ("heads", "kv_heads"))
    if queries != keys:
        yield (
            f"compute.heads is {shown(queries)} and compute.kv_heads {shown(keys)}: queries attend on the device of "
            "their keys, so both lie on the same mesh axes."
        )
    taken = {axis: name for name in (BATCH, POSITION) for axis in mesh_axes_of(compute.get(name, ()))}
    for name, axes in compute.items():
        for axis in mesh_axes_of(axes):
            if name not in (BATCH, POSITION, EXPERTS, *BETWEEN_REPLICAS) and axis in taken:
                yield (
                    f"compute.{name} is {shown(mesh_axes_of(axes))}, but {axis} splits {taken[axis]} already, and one "
                    f"mesh axis splits an array once: activations have both axes."
                )


def _of_refinement(layout: Layout, coarse: str, fine: str) -> Iterator[str]:
    """Yield the axes of weights whose split in `fine` does not begin with that in `coarse`."""
    reason = {
        "params": "a device gathers weights that its own part belongs to",
        "opt_state": "a device's part of the state is a slice of its part of the parameter, so that the reduction over "
        "replica is a reduce-scatter",
    }[fine]
    for name, axes in getattr(layout, coarse).items():
        first, second = mesh_axes_of(axes), mesh_axes_of(getattr(layout, fine).get(name, ()))
        if name not in (BATCH, POSITION, *BETWEEN_REPLICAS) and second[: len(first)] != first:
            yield (f"{fine}.{name} is {shown(second)}; it has to begin with {coarse}.{name}, {shown(first)}: {reason}.")


def check_arrays(config: MappingConfig, layout: Layout, model: Tree, divides: bool) -> None:
    """Raise `UserError` if the mesh does not divide an axis of the parameters, or the mappings do not suit them.

    - `divides`: whether the mesh divides the axes with the default mappings
    """
    leaves = jax.tree.leaves(model, is_leaf=lambda leaf: is_named(leaf) or is_quantised(leaf))
    named = [leaf.axes for leaf in leaves if is_named(leaf) or is_quantised(leaf)]
    _check_names(config, layout, [[axis.name for axis in axes] for axes in named])
    axes = {axis.name: axis for each in named for axis in each}
    if not divides or not config.is_default:
        found = {f"the axis {name} of model": ("parameters of the model", axis) for name, axis in axes.items()}
        check_divides(layout, found)
    check_used(layout, (BATCH, POSITION, *axes))
    for leaf in filter(is_quantised, leaves):
        _check_blocks(layout, leaf)


def _check_names(config: MappingConfig, layout: Layout, weights: Sequence[Sequence[str]]) -> None:
    """Raise `UserError` for a name that no array has, or a mesh axis that splits one array twice."""
    if config.is_default:
        return
    known = {name for names in weights for name in names}
    for mapping in MAPPINGS:
        for name in getattr(config, mapping):
            if name not in known | {BATCH, POSITION}:
                axes = ", ".join(sorted(each for each in known if not is_layers(each)))
                raise UserError(
                    f"mapping.{mapping}.{name}: no array has the axis {name}; axes of this model: {axes}, and of its "
                    f"batches: {BATCH}, {POSITION}."
                )
        for names in weights:
            _check_once(layout, mapping, names)


def _check_once(layout: Layout, mapping: str, names: Sequence[str]) -> None:
    owner: dict[str, str] = {}
    for name in names:
        for axis in layout.mesh_axes((name,), getattr(layout, mapping)):
            if axis in owner and not {EXPERTS, LORA_RANK} & {name, owner[axis]}:  # the first has it
                raise UserError(
                    f"mapping.{mapping} splits both {owner[axis]} and {name} over {axis}, and an array has both "
                    f"({', '.join(names)}); one mesh axis splits an array once."
                )
            owner[axis] = name


def _check_blocks(layout: Layout, weight: QuantisedWeight) -> None:
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


def mapping_rows(layout: Layout) -> list[tuple[str, ...]]:
    """Return a table of the mappings: names of axes, and their mesh axes larger than 1 under each of `MAPPINGS`.

    Axes that lie on the same mesh axes share a row.
    """
    mappings: list[AxisMapping] = [getattr(layout, each) for each in MAPPINGS]
    rows: dict[tuple[str, ...], list[str]] = {}
    for name in dict.fromkeys(name for mapping in mappings for name in mapping if name not in BETWEEN_REPLICAS):
        found = (layout.mesh_axes((name,), mapping) for mapping in mappings)
        cells = tuple(", ".join(axis for axis in axes if layout.mesh.shape[axis] > 1) for axes in found)
        rows.setdefault(cells, []).append(name)
    return [(", ".join(names), *cells) for cells, names in rows.items() if any(cells)]


def shown(axes: Sequence[str]) -> str:
    """Return mesh axes as in YAML."""
    return f"[{', '.join(axes)}]" if axes else "null"
