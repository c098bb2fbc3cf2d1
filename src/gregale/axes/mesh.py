"""The device mesh: named axes, slowest link first."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh

from gregale.errors import KeyedError, UserError
from gregale.settings import Settings, setting, shortened, whole

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
