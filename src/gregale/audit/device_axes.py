"""Where the devices of a program stand in a mesh, and which mesh axes a group of them crosses."""

import math
from dataclasses import dataclass
from functools import cached_property

import jax
import numpy as np

from gregale.audit.groups import Groups

UNKNOWN = ("unknown",)
INSIDE, BETWEEN = "inside slice", "between slices"


@dataclass(frozen=True)
class Crossing:
    """What a set of groups means on a mesh.

    Attributes:
        axes: the mesh axes that the groups cross, in mesh order; `("unknown",)` where they are no grid in the mesh.
        touched: every axis along which members of a group differ, known also where `axes` is not.
        partial: the groups cover only a part of some axis.
        group_size: devices in a group.
        link: whether a group has devices of more than one slice.
    """

    axes: tuple[str, ...]
    touched: tuple[str, ...]
    partial: bool
    group_size: int
    link: str


@dataclass(frozen=True)
class Placement:
    """The devices of a program in a mesh: device i of a jitted program is the i-th of `mesh.devices`.

    With several TPU slices one program runs in each slice, and its device i is the i-th of that slice.
    """

    mesh: jax.sharding.Mesh
    program_devices: int

    @cached_property
    def slice_of(self) -> np.ndarray:
        """The slice of each device of the mesh, flattened; of GPUs, which have none, the box, which is a process."""
        devices = self.mesh.devices.flat
        slices = "process_index" if getattr(devices[0], "platform", "") == "gpu" else "slice_index"
        return np.array([getattr(device, slices, 0) or 0 for device in devices])

    @cached_property
    def _position_of_id(self) -> dict[int, int]:
        return {device.id: place for place, device in enumerate(self.mesh.devices.flat)}

    @cached_property
    def _programs(self) -> list[np.ndarray]:
        """For each program that runs at the same time: the mesh position of each of its devices."""
        if self.program_devices == self.mesh.size:
            return [np.arange(self.mesh.size)]
        return [np.flatnonzero(self.slice_of == index) for index in np.unique(self.slice_of)]

    @property
    def fits(self) -> bool:
        """Whether the mesh, or each slice of it, has as many devices as the program."""
        return all(len(program) == self.program_devices for program in self._programs)

    def by_number(self, groups: Groups) -> Groups | None:
        """Groups of mesh positions for groups of the program's device numbers; None where the mesh has no such one."""
        highest = max((number for group in groups for number in group), default=0)
        if any(highest >= len(program) for program in self._programs):
            return None
        return tuple(tuple(int(program[number]) for number in group) for program in self._programs for group in groups)

    def by_id(self, groups: Groups) -> Groups | None:
        """Groups of mesh positions for groups of `jax.Device.id`; None where the mesh has no such device."""
        places = self._position_of_id
        if any(number not in places for group in groups for number in group):
            return None
        return tuple(tuple(places[number] for number in group) for group in groups)

    def crossing(self, groups: Groups | None, pairs: bool = False) -> Crossing:
        """What groups of mesh positions cross.

        Args:
            groups: the groups, or None where they are not known: then they may cross anything.
            pairs: they are the moves of a permutation, each from one device to another, which need be no grid.
        """
        sizes = self.mesh.devices.shape
        if groups is None:
            everything = tuple(axis for axis, size in enumerate(sizes) if size > 1)
            return Crossing(
                UNKNOWN, self._names(everything), False, self.program_devices, self._link([range(len(self.slice_of))])
            )
        touched = touched_axes(groups, sizes)
        names = self._names(touched)
        group_size = max((len(group) for group in groups), default=1)
        known = pairs or are_grids(groups, sizes, touched)
        partial = not pairs and group_size < math.prod(sizes[axis] for axis in touched)
        return Crossing(names if known else UNKNOWN, names, partial, group_size, self._link(groups))

    def _names(self, axes: tuple[int, ...]) -> tuple[str, ...]:
        return tuple(str(self.mesh.axis_names[axis]) for axis in axes)

    def _link(self, groups) -> str:
        far = any(np.ptp(self.slice_of[list(group)]) > 0 for group in groups if len(group))
        return BETWEEN if far else INSIDE


def _coordinates(groups: Groups, sizes: tuple[int, ...]) -> list[np.ndarray]:
    """Mesh coordinates [axis, group, member], one array for each size of group."""
    lengths = sorted({len(group) for group in groups})
    tables = [np.array([group for group in groups if len(group) == length], int) for length in lengths if length]
    return [np.stack(np.unravel_index(table, sizes)) for table in tables]


def touched_axes(groups: Groups, sizes: tuple[int, ...]) -> tuple[int, ...]:
    """The axes along which the members of some group have different coordinates."""
    differs = np.zeros(len(sizes), bool)
    for coordinates in _coordinates(groups, sizes):
        differs |= (coordinates != coordinates[:, :, :1]).any((1, 2))
    return tuple(np.flatnonzero(differs).tolist())


def are_grids(groups: Groups, sizes: tuple[int, ...], axes: tuple[int, ...]) -> bool:
    """Whether every group is a product of as many coordinates along each of `axes` as every other group.

    Whole axes are such grids, and so is a part of an axis, into which the compiler cuts a collective between and
    inside slices. A group of (0, 0) and (1, 1) is none.
    """
    tables = _coordinates(groups, sizes)
    if not axes:
        return True
    if len(tables) != 1:
        return False
    ordered = np.sort(tables[0][list(axes)], axis=2)
    different = 1 + (np.diff(ordered, axis=2) != 0).sum(2)  # [axis, group]
    distinct = all(len(set(group)) == len(group) for group in groups)
    alike = (different == different[:, :1]).all()
    return bool(distinct and alike and different[:, 0].prod() == ordered.shape[2])
