"""Provides the mesh positions of a program's devices, and the mesh axes that device groups cross."""

from dataclasses import dataclass
from functools import cached_property

import jax
import numpy as np

from gregale.audit.groups import Groups

UNKNOWN = ("unknown",)
INSIDE, BETWEEN = "inside slice", "between slices"


@dataclass(frozen=True)
class Crossing:
    """Mesh axes of a set of device groups.

    - `axes`: the mesh axes that the groups cross, in mesh order; `("unknown",)` if they are no grid in the mesh.
    - `touched`: all axes along which devices of a group differ, known also if `axes` is not.
    - `group_size`: devices in a group.
    - `link`: `BETWEEN` if a group has devices of more than one slice, else `INSIDE`.
    """

    axes: tuple[str, ...]
    touched: tuple[str, ...]
    group_size: int
    link: str


@dataclass(frozen=True)
class Placement:
    """The devices of a program in a mesh: device i of a jitted program is number i of `mesh.devices`.

    With several TPU slices one program runs in each slice, and its device i is number i of that slice.
    """

    mesh: jax.sharding.Mesh
    program_devices: int

    @cached_property
    def slice_of(self) -> np.ndarray:
        """Return the slice of each device of the flattened mesh; for GPUs the box, which is a process."""
        devices = self.mesh.devices.flat
        slices = "process_index" if getattr(devices[0], "platform", "") == "gpu" else "slice_index"
        return np.array([getattr(device, slices, 0) or 0 for device in devices])

    @cached_property
    def _programs(self) -> list[np.ndarray]:
        """Return for each concurrent program the mesh positions of its devices."""
        if self.program_devices == self.mesh.size:
            return [np.arange(self.mesh.size)]
        return [np.flatnonzero(self.slice_of == index) for index in np.unique(self.slice_of)]

    @property
    def fits(self) -> bool:
        """Return whether the mesh, or each slice of it, has as many devices as the program."""
        return all(len(program) == self.program_devices for program in self._programs)

    def by_number(self, groups: Groups) -> Groups | None:
        """Return groups of mesh positions for groups of the program's device numbers; None for an unknown number."""
        highest = max((number for group in groups for number in group), default=0)
        if any(highest >= len(program) for program in self._programs):
            return None
        return tuple(tuple(int(program[number]) for number in group) for program in self._programs for group in groups)

    def by_id(self, groups: Groups) -> Groups | None:
        """Return groups of mesh positions for groups of `jax.Device.id`; None for an unknown device."""
        positions = {device.id: index for index, device in enumerate(self.mesh.devices.flat)}
        if any(number not in positions for group in groups for number in group):
            return None
        return tuple(tuple(positions[number] for number in group) for group in groups)

    def crossing(self, groups: Groups | None, pairs: bool = False) -> Crossing:
        """Return the mesh axes that groups of mesh positions cross.

        - `groups`: the groups; None: unknown, so that they may cross all axes.
        - `pairs`: the groups are the (source, target) pairs of a permutation, which need not be a grid.
        """
        sizes = self.mesh.devices.shape
        if groups is None:
            everything = tuple(axis for axis, size in enumerate(sizes) if size > 1)
            link = self._link([range(len(self.slice_of))])
            return Crossing(UNKNOWN, self._names(everything), self.program_devices, link)
        touched = touched_axes(groups, sizes)
        names = self._names(touched)
        group_size = max((len(group) for group in groups), default=1)
        known = pairs or are_grids(groups, sizes, touched)
        return Crossing(names if known else UNKNOWN, names, group_size, self._link(groups))

    def _names(self, axes: tuple[int, ...]) -> tuple[str, ...]:
        return tuple(str(self.mesh.axis_names[axis]) for axis in axes)

    def _link(self, groups) -> str:
        far = any(np.ptp(self.slice_of[list(group)]) > 0 for group in groups if len(group))
        return BETWEEN if far else INSIDE


def _coordinates(groups: Groups, sizes: tuple[int, ...]) -> list[np.ndarray]:
    """Return mesh coordinates [axis, group, device], one array for each group size."""
    lengths = sorted({len(group) for group in groups})
    tables = [np.array([group for group in groups if len(group) == length], int) for length in lengths if length]
    return [np.stack(np.unravel_index(table, sizes)) for table in tables]


def touched_axes(groups: Groups, sizes: tuple[int, ...]) -> tuple[int, ...]:
    """Return the axes along which the devices of some group have different coordinates."""
    differs = np.zeros(len(sizes), bool)
    for coordinates in _coordinates(groups, sizes):
        differs |= (coordinates != coordinates[:, :, :1]).any((1, 2))
    return tuple(np.flatnonzero(differs).tolist())


def are_grids(groups: Groups, sizes: tuple[int, ...], axes: tuple[int, ...]) -> bool:
    """Return whether each group is a product of coordinates along `axes`, with equal counts in all groups.

    Whole axes are such grids, and so is a part of an axis, as when the compiler splits a collective into parts inside
    and between slices. A group of (0, 0) and (1, 1) is no grid.
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
