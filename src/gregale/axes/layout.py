"""The layout of named axes: a device mesh and three mappings from named axes to its mesh axes."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
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
    `gregale.axes.mapping` has the defaults and checks the rules.
    """

    mesh: Mesh
    compute: AxisMapping
    params: AxisMapping
    opt_state: AxisMapping

    @property
    def replicas(self) -> int:
        """Return the size of the axis `replica`; 1 in the layout of a single replica."""
        return self.axis(REPLICA).size

    @property
    def Replica(self) -> Axis:
        return self.axis(REPLICA)

    def axis(self, name: str) -> Axis:
        """Return the named axis that maps to the mesh axis `name` (`replica`, `island`); size 1 if there is none."""
        return Axis(name, self.mesh.shape[name] if name in self.params else 1)

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
    """Return the named arrays of a tree."""
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
            sizes = [layout.mesh.shape[name] for name in mesh_axes]
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
        """Return the axis of size -1, or none."""
        return [axis for axis, size in self._given.items() if size == -1]

    @property
    def device_count(self) -> int | None:
        """Return the number of devices that the axes need; None if one axis takes the remaining devices."""
        return None if self.free else self.fewest_devices

    @property
    def fewest_devices(self) -> int:
        """Return the product of the sizes, in which one that takes the remaining devices counts as 1."""
        return prod(size for size in self._given.values() if size != -1)

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
                )
            sizes[free[0]] = device_count // given
        elif given != device_count:
            axes = " x ".join(f"{axis} {size}" for axis, size in sizes.items())
            raise UserError(
                f"mesh: {axes} needs {product} = {given} devices, but there are {device_count}. Set one axis to -1 to "
                f"take the devices that are left, or simulate {given} on CPU by `cpu_devices: {given}` (of "
                f"`gregale plan`: `--devices {given}`)."
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
