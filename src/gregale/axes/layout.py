"""The layout of named axes: a device mesh and three mappings from named axes to its mesh axes."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from types import SimpleNamespace
from typing import Any, TypeVar

import haliax as hax
import jax
import numpy as np
from haliax import Axis, NamedArray
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from gregale.errors import KeyedError, UserError, multiples_near
from gregale.settings import Settings, setting, shortened, whole

T = TypeVar("T")
Tree = Any
"""A pytree of arrays, named or plain."""
AxisMapping = Mapping[str, str | tuple[str, ...]]

REPLICA = "replica"
ISLAND = "island"
BATCH = "batch"
POSITION = "position"
CONTEXT = "context"
MODEL = "model"
EMBED = "embed"
LAYERS = "layers"
EXPERTS = "experts"  # of the weights of experts
ROUTER = "router"  # a value for each expert, wherever its weights lie
SHARED_GATE = "shared_gate"
LORA_RANK = "lora_rank"


@dataclass(frozen=True)
class Layout:
    """A mesh and the three mappings of named axes to mesh axes (docs/design.md, "Mesh and mappings").

    - `compute`: activations and batches, and weights while they are used
    - `params`: parameters and gradient buffers
    - `opt_state`: optimizer state, reduced gradients, outer parameters

    For each axis `opt_state` begins with the mesh axes of `params`, so that a device's shard of the optimizer state is
    a slice of its own parameter shard: "average over replica and reshard" is one reduce-scatter over `replica`.
    `gregale.axes.layout` has the defaults and checks the rules.
    """

    mesh: Mesh
    compute: AxisMapping
    params: AxisMapping
    opt_state: AxisMapping
    replicas_per_device: int = 1  # replicas on each index of the mesh axis `replica`

    @property
    def replicas(self) -> int:
        return self.axis(REPLICA).size

    @property
    def Replica(self) -> Axis:
        return self.axis(REPLICA)

    def axis(self, name: str) -> Axis:
        """Return the named axis that maps to the mesh axis `name` (`replica`, `island`); size 1 if there is none."""
        return Axis(name, self.parts(name) if name in self.params else 1)

    def per_device(self, name: str) -> int:
        """Return the indices of the named axis `name` on each index of the mesh axis of that name."""
        return self.replicas_per_device if name == REPLICA and name in self.params else 1

    def parts(self, name: str) -> int:
        """Return the parts that a mesh axis cuts rows and messages into: `replica` one for each replica."""
        return self.mesh.shape[name] * self.per_device(name)

    @property
    def context(self) -> int:
        """Return the number of devices that share a sequence: they hold its positions in `position_order`."""
        return self.devices((POSITION,), self.compute)

    def inside(self, name: str) -> "Layout":
        """Return the layout of one index of the axis `name` under `vmap_over`: nothing maps to that mesh axis."""

        def without(mapping: AxisMapping) -> AxisMapping:
            left = {key: tuple(axis for axis in mesh_axes_of(axes) if axis != name) for key, axes in mapping.items()}
            return {key: axes for key, axes in left.items() if axes}

        return replace(self, **{key: without(getattr(self, key)) for key in ("compute", "params", "opt_state")})

    def inside_replica(self) -> "Layout":
        return self.inside(REPLICA)

    def splits(self, axes: Sequence[Axis | str], mapping: AxisMapping) -> list[tuple[str, ...]]:
        """Return, for each axis of an array, the mesh axes that split it.

        A mesh axis splits an array once, by the first axis that is mapped to it: experts over `data` leave `embed` of
        their weights the other mesh axes.
        """
        found: list[tuple[str, ...]] = []
        for axis in axes:
            own = mesh_axes_of(mapping.get(_key(axis if isinstance(axis, str) else axis.name), ()))
            taken = {name for names in found for name in names}
            found.append(tuple(name for name in own if name not in taken))
        return found

    def spec(self, axes: Sequence[Axis | str], mapping: AxisMapping) -> PartitionSpec:
        """Return the partition of an array with these named axes, in this order."""
        return PartitionSpec(*(names or None for names in self.splits(axes, mapping)))

    def mesh_axes(self, axes: Sequence[Axis | str], mapping: AxisMapping) -> tuple[str, ...]:
        """Return the mesh axes over which an array with these named axes is split."""
        return tuple(name for names in self.splits(axes, mapping) for name in names)

    def devices(self, axes: Sequence[Axis | str], mapping: AxisMapping) -> int:
        """Return the number of devices over which an array with these named axes is split."""
        return prod(self.mesh.shape[name] for name in self.mesh_axes(axes, mapping))

    def cut_into(self, axes: Sequence[Axis | str], mapping: AxisMapping) -> int:
        """Return the parts that an array is cut into: as `devices`, but one for each replica of a device."""
        return prod(self.parts(name) for name in self.mesh_axes(axes, mapping))

    def gathers(self, axes: Sequence[Axis | str]) -> bool:
        """Return whether a weight with these named axes is gathered for use: `params` splits it further."""
        return self.devices(axes, self.params) > self.devices(axes, self.compute)

    def sharding(self, axes: Sequence[Axis | str], mapping: AxisMapping) -> NamedSharding:
        return NamedSharding(self.mesh, self.spec(axes, mapping))

    def shardings(self, tree: T, mapping: AxisMapping) -> T:
        """Return the shardings of a tree's arrays in the same structure; unnamed arrays are replicated."""

        def one(leaf):
            if isinstance(leaf, NamedArray):
                sharding = self.sharding(leaf.axes, mapping)
                return jax.tree.map(lambda _: sharding, leaf)
            return NamedSharding(self.mesh, PartitionSpec())

        return jax.tree.map(one, tree, is_leaf=is_named)

    def abstract(self, tree: T, mapping: AxisMapping) -> T:
        """Return the tree as `jax.ShapeDtypeStruct`s with their shardings, to compile for or to restore into."""
        return with_shardings(tree, self.shardings(tree, mapping))

    def constrain(self, tree: T, mapping: AxisMapping) -> T:
        """Inside jit: shard every named array of the tree by `mapping`; the compiler places unnamed arrays."""

        def one(leaf):
            if not isinstance(leaf, NamedArray):
                return leaf
            sharding = self.sharding(leaf.axes, mapping)
            return NamedArray(jax.lax.with_sharding_constraint(leaf.array, sharding), leaf.axis_names)

        return jax.tree.map(one, tree, is_leaf=is_named)

    def shard_map(self, function: Callable, in_specs: Any, out_specs: Any) -> Callable[..., Any]:
        """Return `jax.shard_map` of a function over the whole mesh; what is equal on which devices is not checked."""
        return jax.shard_map(function, mesh=self.mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)


def with_shardings(tree: T, shardings: T) -> T:
    """Return `jax.ShapeDtypeStruct`s of a tree's arrays, with the shardings of a second tree."""
    return jax.tree.map(lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), tree, shardings)


def is_named(leaf) -> bool:
    return isinstance(leaf, NamedArray)


def named_arrays(tree) -> list[NamedArray]:
    return [leaf for leaf in jax.tree.leaves(tree, is_leaf=is_named) if is_named(leaf)]


def is_layers(name: str) -> bool:
    """Return whether an axis stacks layers: `layers`, or `layers_1` and so on, see `gregale.axes.parameters`."""
    return name == LAYERS or name.removeprefix(f"{LAYERS}_").isdecimal()


def _key(name: str) -> str:
    """Return an axis's name in mappings: all stacks of layers lie alike."""
    return LAYERS if is_layers(name) else name


def check_divides(layout: Layout, axes: Mapping[str, tuple[str, Axis]]) -> None:
    """Reject an axis that its mesh axes do not divide.

    - `layout`: the mesh and the mappings
    - `axes`: configuration key -> (the meaning of the axis, the axis), for all axes of the model and the batch

    Raises `UserError` with the arithmetic and the nearest valid sizes.
    """
    for key, (meaning, axis) in axes.items():
        # `opt_state` first: its split is the finest, so the sizes in its message suit the other mappings too.
        for mapping in (layout.opt_state, layout.params, layout.compute):
            mesh_axes = mesh_axes_of(mapping.get(_key(axis.name), ()))
            sizes = [layout.parts(name) for name in mesh_axes]
            if axis.size % prod(sizes):
                raise UserError(_does_not_divide(key, meaning, axis.size, mesh_axes, sizes))


def check_used(layout: Layout, axes: Sequence[Axis | str]) -> None:
    """Raise `UserError` for a mesh axis larger than 1 that splits none of the named axes of parameters and batch."""
    used = {axis for mapping in (layout.opt_state, layout.compute) for axis in layout.mesh_axes(axes, mapping)}
    for name, size in layout.mesh.shape.items():
        if size > 1 and name not in used:
            raise UserError(
                f"mesh.{name} is {size}, but nothing in this configuration is split over `{name}`: its devices would "
                f"repeat the same work. Set mesh.{name} to 1 and give the devices to another axis."
            )


def _does_not_divide(key: str, meaning: str, size: int, mesh_axes: tuple[str, ...], sizes: list[int]) -> str:
    divisor = prod(sizes)
    product = " x ".join(f"{name} {n}" for name, n in zip(mesh_axes, sizes, strict=True))
    return (
        f"{key} is {size}: {meaning} would be split over {product} = {divisor} devices, and {size} / {divisor} = "
        f"{size / divisor:.4g} is not a whole number. {key} {multiples_near(size, divisor)} would work, or a "
        "smaller mesh."
    )


def mesh_axes_of(axes: str | Sequence[str]) -> tuple[str, ...]:
    """Return the mesh axes of one entry of a mapping."""
    return (axes,) if isinstance(axes, str) else tuple(axes)


def vmap_over(function: Callable, name: str, layout: Layout) -> Callable:
    """Return `hax.vmap` of a function over the axis `name` (`replica`, `island`), which maps to the mesh axis of that
    name.

    Arguments with that axis, and plain arrays (over their first axis), are mapped; use a closure for other values.
    Haliax reads the mesh axis of a vmapped axis from the ambient axis mapping, and would also place products by it. So
    the mapping exists only for the vmap, and the function itself sees none.
    """
    Mapped = layout.axis(name)
    lives_on = {name: name} if name in layout.params else {}

    def unmapped(*arguments):
        with hax.axis_mapping({}):
            return function(*arguments)

    def mapped(*arguments):
        with hax.axis_mapping(lives_on):
            return hax.vmap(unmapped, Mapped)(*arguments)

    return mapped


def unmapped_if_one(function: Callable) -> Callable:
    """Return a function to which `jax.vmap` over an axis of size 1 adds no axis.

    XLA:TPU fuses less with that axis, and kernels do not take it.
    """
    called = jax.custom_batching.custom_vmap(function)

    @called.def_vmap
    def mapped(size, is_mapped, *arguments):
        if size > 1:
            result = jax.vmap(function, jax.tree.map(lambda each: 0 if each else None, is_mapped))(*arguments)
        else:
            one = jax.tree.map(lambda x, each: x[0] if each else x, arguments, tuple(is_mapped))
            result = jax.tree.map(lambda x: x[None], function(*one))
        return result, jax.tree.map(lambda _: True, result)

    return called


Device = Any  # a `jax.Device`; tests also pass descriptions of devices

AXIS_SIZE = whole(1, also=(-1,))  # -1: the remaining devices
AXES = ("island", "replica", "stage", "context", "data", "model")


@dataclass(frozen=True)
class MeshConfig(Settings):
    """The sizes of the mesh axes, slowest link first; at most one is -1 and takes the remaining devices.

    The axes of `axes` lie after `model`, or where `order` has them.
    """

    island: int = setting(1, "groups of replicas that DiLoCo joins; 1: it joins the replicas", range=AXIS_SIZE)
    replica: int = setting(
        1,
        "replicas: groups of devices joined by the slow link",
        range=AXIS_SIZE,
        aliases=("replicas", "dp_replicate", "num_replicas", "slices"),
    )
    stage: int = setting(
        1, "pipeline stages", range=AXIS_SIZE, aliases=("stages", "pipeline", "pipeline_parallel", "pp")
    )
    context: int = setting(
        1,
        "devices that split each sequence",
        range=AXIS_SIZE,
        aliases=("cp", "context_parallel", "sequence_parallel", "mesh.sequence"),
    )
    data: int = setting(
        -1,
        "devices that share a replica's batch and parameters (FSDP)",
        range=AXIS_SIZE,
        aliases=("fsdp", "dp", "data_parallel", "dp_shard"),
    )
    model: int = setting(
        1,
        "devices that split each layer (tensor parallelism)",
        range=AXIS_SIZE,
        aliases=("tensor", "tp", "tensor_parallel", "model_parallel"),
    )
    replicas_per_device: int = setting(
        1,
        "replicas that share the devices of each index of `replica`: 8 on one GPU train as 8 GPUs would",
        range=whole(1),
        by_topic=True,
        aliases=("virtual_replicas", "num_virtual_replicas"),
    )
    axes: dict[str, int] = setting(dict, "mesh axes of your own, for `mapping`", range=AXIS_SIZE, by_topic=True)
    order: list[str] = setting(list, "all mesh axes, slowest link first; default: your own ones last", by_topic=True)

    def __post_init__(self):
        super().__post_init__()
        self._check_names()
        if len(free := self.free) > 1:
            others = " and ".join(f"mesh.{axis}" for axis in free[:-1])
            raise KeyedError(
                free[-1],
                "is -1",
                f", and so is {others}: more than one -1, but only one axis can take the devices that are left. Give "
                f"the others their sizes, for example mesh.{free[0]} 1.",
            )

    def _check_names(self) -> None:
        for name in self.axes:
            if name in AXES or not name.isidentifier():
                why = "is a mesh axis already" if name in AXES else "is no name of letters, digits and `_`"
                raise KeyedError(f"axes.{name}", f"is {self.axes[name]}", f", but {name!r} {why}.")
        known = (*AXES, *self.axes)
        if self.order and (sorted(self.order) != sorted(known) or tuple(self.order[:2]) != AXES[:2]):
            rest = f"; it has to be all of {', '.join(known)}, in any order that begins with {' and '.join(AXES[:2])}."
            raise KeyedError("order", f"is [{shortened(', '.join(self.order))}]", rest)

    @property
    def names(self) -> tuple[str, ...]:
        """Return the names of all mesh axes, slowest link first."""
        return tuple(self.order) or (*AXES, *self.axes)

    @property
    def _given(self) -> dict[str, int]:
        return {name: self.axes[name] if name in self.axes else getattr(self, name) for name in self.names}

    @property
    def free(self) -> list[str]:
        return [axis for axis, size in self._given.items() if size == -1]

    @property
    def device_count(self) -> int | None:
        """Return the number of devices that the axes need; None if one axis takes the remaining devices."""
        return None if self.free else self.fewest_devices

    @property
    def fewest_devices(self) -> int:
        """Return the product of the sizes, in which one that takes the remaining devices counts as 1."""
        return prod(size for size in self._given.values() if size != -1)

    @property
    def _shared(self) -> str:
        several = f" Or let the replicas share devices: mesh.replica 1 and mesh.replicas_per_device {self.replica}."
        return several if self.replica > 1 else ""

    def sizes(self, device_count: int) -> dict[str, int]:
        """Return the axis sizes with -1 replaced, so that their product is `device_count`."""
        sizes = self._given
        given = self.fewest_devices
        product = " * ".join(str(size) for size in sizes.values() if size != -1)
        if free := self.free:
            if device_count % given:
                raise UserError(
                    f"mesh.{free[0]} is -1, but the other axes need {product} = {given} devices, which does not divide "
                    f"the {device_count} there are; sizes whose product divides {device_count} would work."
                    + self._shared
                )
            sizes[free[0]] = device_count // given
        elif given != device_count:
            axes = " x ".join(f"{axis} {size}" for axis, size in sizes.items())
            raise UserError(
                f"mesh: {axes} needs {product} = {given} devices, but there are {device_count}. Set one axis to -1 to "
                f"take the devices that are left, or simulate {given} on CPU by `cpu_devices: {given}` (of "
                f"`gregale plan`: `--devices {given}`).{self._shared}"
            )
        return sizes


def make_mesh(config: MeshConfig, devices: Sequence[Device] | None = None) -> Mesh:
    """Return the mesh with the axes `config.names`, by default (island, replica, stage, context, data, model), in this
    device order.

    Of all axes `island` and then `replica` cross slices first (`slice_index` on TPU), then hosts (`process_index`).
    Every other axis stays in the smallest possible group of close devices. On TPU the devices of one slice keep the
    order of its torus (`jax.experimental.mesh_utils`).
    """
    devices = list(jax.devices() if devices is None else devices)
    sizes = config.sizes(len(devices))
    shape = tuple(sizes.values())
    array = arrange(devices, (shape[0] * shape[1], *shape[2:])).reshape(shape)
    return Mesh(array, config.names, axis_types=(AxisType.Auto,) * len(sizes))


def slice_of(device: Device) -> int:
    """Return the slice of a device: TPU's `slice_index`; 0 if the platform has no slices."""
    return getattr(device, "slice_index", 0) or 0


def arrange(devices: Sequence[Device], shape: tuple[int, ...]) -> np.ndarray:
    """Return the devices as an array of `shape`, whole slices along the first axis (islands x replicas).

    Raises `UserError` if neither the number of slices nor the first axis divides the other.
    """
    slices: dict[int, list[Device]] = {}
    for device in sorted(devices, key=lambda d: (slice_of(d), d.process_index, d.id)):
        slices.setdefault(slice_of(device), []).append(device)
    replicas, count = shape[0], len(slices)
    if len({len(members) for members in slices.values()}) > 1:
        found = ", ".join(f"slice {name}: {len(members)}" for name, members in slices.items())
        raise UserError(f"mesh: the slices have different numbers of devices ({found}); use slices of one size.")
    if replicas % count:
        raise UserError(
            f"mesh: island x replica is {replicas}, but the devices are {count} slices: only these two axes may cross "
            f"slices, so their product must be a multiple of {count}."
        )
    inside = (replicas // count, *shape[1:])
    return np.concatenate([_arrange_slice(members, inside) for members in slices.values()])


def _arrange_slice(devices: list[Device], shape: tuple[int, ...]) -> np.ndarray:
    if devices[0].platform == "tpu":
        from jax.experimental import mesh_utils

        return mesh_utils.create_device_mesh(shape, devices=devices, allow_split_physical_axes=True)
    array = np.empty(len(devices), dtype=object)
    array[:] = devices
    return array.reshape(shape)


MAPPINGS = ("compute", "params", "opt_state")
TENSOR_PARALLEL = ("heads", "kv_heads", "mlp", "vocab")
BETWEEN_REPLICAS = (ISLAND, REPLICA)
MeshAxes = list[str] | str | None
EXCHANGED, AUTO = "data", "auto"  # of experts in `compute`; auto: their bytes choose


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
    def leaves_experts_open(self) -> bool:
        """Return whether the place of experts is to be chosen."""
        return mesh_axes_of(self.compute.get(EXPERTS) or ()) == (AUTO,)


def mapped_layout(mesh: Mesh, config: MappingConfig, replicas_per_device: int = 1) -> Layout:
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
    return Layout(mesh, {**compute, **between}, {**params, **between}, opt_state, replicas_per_device)


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
    if rank % prod(layout.parts(name) for name in (*finest, ISLAND)):
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


def check_arrays(config: MappingConfig, layout: Layout, weights: Sequence[Sequence[Axis]], divides: bool) -> None:
    """Raise `UserError` if the mesh does not divide an axis of the parameters, or the mappings do not suit them.

    - `weights`: the axes of each parameter
    - `divides`: whether the mesh divides the axes with the default mappings
    """
    _check_names(config, layout, [[axis.name for axis in axes] for axes in weights])
    axes = {axis.name: axis for each in weights for axis in each}
    if not divides or not config.is_default:
        found = {f"the axis {name} of model": ("parameters of the model", axis) for name, axis in axes.items()}
        check_divides(layout, found)
    check_used(layout, (BATCH, POSITION, *axes))


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
