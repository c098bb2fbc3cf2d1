"""Which devices talk to each other in a collective, and which mesh axes that crosses.

XLA prints groups in three forms: explicit `{{0,1},{2,3}}`, iota `[4,2]<=[2,2,2]T(1,0,2)`, and by mesh
`mesh['a'=2,'b'=4] {'a'}`. The numbers are the program's own device numbers, which `Placement` maps to the mesh.
"""

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

import jax
import numpy as np

UNKNOWN = ("unknown",)
INSIDE, BETWEEN = "inside slice", "between slices"

Groups = tuple[tuple[int, ...], ...]

_IOTA = re.compile(r"\[([\d,]+)\](?:<=\[([\d,]+)\])?(?:T\(([\d,]+)\))?")
_MESH = re.compile(r"@?mesh[\[<]([^\]>]*)[\]>](?:\s*,?\s*device_ids=\(([^)]*(?:T\([\d,]+\))?)\))?\s*\{([^}]*)\}")
_AXIS = re.compile(r"'?([^',=\s]+)'?=(\d+)")
_AXIS_USE = re.compile(r"'?([^',:\s]+)'?(?::\((\d+)\)(\d+))?")
_NUMBERED = re.compile(r"\{([\d,\s]+)\}")
_PAIR = re.compile(r"(\d+)\s*(?:,|->)\s*(\d+)")
_PRODUCT = re.compile(r"((?:\{[\d,{}\s]*\}))x\{?(\d+):(\d+)\}?")


def _integers(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(",") if part.strip())


def _iota(shape: str, source: str | None, order: str | None) -> np.ndarray:
    """The numbers 0, 1, ... reshaped to `source`, transposed by `order` and reshaped to `shape`."""
    sizes = _integers(source or shape)
    numbers = np.arange(math.prod(sizes)).reshape(sizes)
    if order:
        numbers = numbers.transpose(_integers(order))
    return numbers.reshape(_integers(shape))


def _mesh_groups(mesh: re.Match) -> Groups:
    """The groups that vary over the axes in the braces; `'a':(2)4` is the factor 4 of `a` after a factor 2."""
    sizes = {name: int(size) for name, size in _AXIS.findall(mesh.group(1))}
    count = math.prod(sizes.values())
    listed = mesh.group(2)
    if listed is None:
        numbers = np.arange(count)
    elif iota := _IOTA.match(listed):
        # `[4,16]T(1,0)` is the transpose of the numbers laid out as 4 x 16.
        numbers = _iota(str(count), iota.group(2) or iota.group(1), iota.group(3)).reshape(-1)
    else:
        numbers = np.array(_integers(listed))
    used = {name: (int(before or 1), int(size or 0)) for name, before, size in _AXIS_USE.findall(mesh.group(3))}
    factors, inside = [], []
    for name, size in sizes.items():
        before, part = used.get(name, (1, 1))
        part = part or size
        factors += [before, part, size // (before * part)]
        inside.append(len(factors) - 2)
    outside = [place for place in range(len(factors)) if place not in inside]
    arranged = numbers.reshape(factors).transpose(outside + inside)
    return tuple(map(tuple, arranged.reshape(-1, math.prod(factors[place] for place in inside)).tolist()))


def parse_groups(text: str, devices: int) -> Groups:
    """The groups that a `replica_groups` attribute lists, in any of the three forms; `{}` is one group of all."""
    text = text.strip()
    if mesh := _MESH.match(text):
        return _mesh_groups(mesh)
    if iota := _IOTA.match(text):
        return tuple(map(tuple, _iota(*iota.groups()).tolist()))
    groups = tuple(_integers(group) for group in _NUMBERED.findall(text))
    return groups or (tuple(range(devices)),)


def parse_pairs(text: str) -> Groups:
    """The (source, target) pairs of a permutation, printed `{{0,1},{1,0}}` or `{{0->1},{1->0}}`."""
    return tuple((int(source), int(target)) for source, target in _PAIR.findall(text))


def parse_slice_target(text: str) -> Groups:
    """The device ids of a transfer between TPU slices, by `jax.Device.id`.

    Printed as lists of ids, as pairs `{{100000->200000}}`, or as `{1,2}x{0:3}`: for each device 0 to 3 of a slice, the
    group of that device in slices 1 and 2. A device id is 100000 times the slice (from one) plus the device.
    """
    if "->" in text:
        return parse_pairs(text)
    product = _PRODUCT.search(text)
    if product is None:
        return tuple(_integers(group) for group in _NUMBERED.findall(text))
    first, last = int(product.group(2)), int(product.group(3))
    slices = [_integers(group) for group in _NUMBERED.findall(product.group(1))]
    return tuple(tuple(100000 * s + device for s in group) for group in slices for device in range(first, last + 1))


@dataclass(frozen=True)
class Crossing:
    """What a set of groups means on a mesh.

    Attributes:
        axes: the mesh axes that the groups span, in mesh order; `("unknown",)` where no set of axes gives these groups.
        touched: every axis along which members of a group differ. Known also where `axes` is not.
        group_size: devices in a group.
        link: whether a group has devices of more than one slice.
    """

    axes: tuple[str, ...]
    touched: tuple[str, ...]
    group_size: int
    link: str


@dataclass(frozen=True)
class Placement:
    """Where the devices of a program stand in the mesh: device i of a jitted program is the i-th of `mesh.devices`.

    With several TPU slices one program runs in each slice, and its device i is the i-th of that slice.
    """

    mesh: jax.sharding.Mesh
    program_devices: int

    @cached_property
    def slice_of(self) -> np.ndarray:
        """The slice of each device of the mesh, flattened."""
        return np.array([getattr(device, "slice_index", 0) or 0 for device in self.mesh.devices.flat])

    @cached_property
    def _position_of_id(self) -> dict[int, int]:
        return {device.id: place for place, device in enumerate(self.mesh.devices.flat)}

    @cached_property
    def _programs(self) -> list[np.ndarray]:
        """For each program that runs at the same time: the mesh position of each of its devices."""
        if self.program_devices == self.mesh.size:
            return [np.arange(self.mesh.size)]
        return [np.flatnonzero(self.slice_of == index) for index in np.unique(self.slice_of)]

    def by_number(self, groups: Groups) -> Groups | None:
        """Groups of mesh positions for groups of the program's device numbers; None where the mesh has no such one."""
        if any(number >= len(program) for program in self._programs for group in groups for number in group):
            return None
        return tuple(tuple(int(program[number]) for number in group) for program in self._programs for group in groups)

    def by_id(self, groups: Groups) -> Groups | None:
        """Groups of mesh positions for groups of `jax.Device.id`."""
        places = self._position_of_id
        if any(number not in places for group in groups for number in group):
            return None
        return tuple(tuple(places[number] for number in group) for group in groups)

    def crossing(self, groups: Groups | None, pairs: bool = False) -> Crossing:
        """What groups of mesh positions cross. `pairs` are the moves of a permutation: they need not be whole axes."""
        names = tuple(self.mesh.axis_names)
        if groups is None:
            everything = tuple(name for name in names if self.mesh.shape[name] > 1)
            far = len(set(self.slice_of.tolist())) > 1
            return Crossing(UNKNOWN, everything, self.program_devices, BETWEEN if far else INSIDE)
        touched = touched_axes(groups, self.mesh.devices.shape)
        spans = pairs or is_product(groups, self.mesh.devices.shape, touched)
        far = any(len({int(self.slice_of[place]) for place in group}) > 1 for group in groups)
        touched_names = tuple(names[axis] for axis in touched)
        size = max((len(group) for group in groups), default=1)
        return Crossing(touched_names if spans else UNKNOWN, touched_names, size, BETWEEN if far else INSIDE)


def touched_axes(groups: Iterable[Sequence[int]], sizes: tuple[int, ...]) -> tuple[int, ...]:
    """The axes along which the members of some group have different coordinates."""
    touched: set[int] = set()
    for group in groups:
        coordinates = np.stack(np.unravel_index(np.asarray(group, int), sizes)) if sizes else np.zeros((0, 1))
        touched |= set(np.flatnonzero((coordinates != coordinates[:, :1]).any(1)).tolist())
    return tuple(sorted(touched))


def is_product(groups: Iterable[Sequence[int]], sizes: tuple[int, ...], axes: tuple[int, ...]) -> bool:
    """Whether every group is all the devices that share the coordinates outside `axes`."""
    size = math.prod(sizes[axis] for axis in axes)
    return all(
        len(group) == size and len(set(group)) == size and set(touched_axes([group], sizes)) <= set(axes)
        for group in groups
    )
