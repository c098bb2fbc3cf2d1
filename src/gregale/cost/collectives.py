"""Provides the collectives of a program: payloads, mesh axes, counts and sums, and their time on links.

    Grid(chip.ici, sizes, coordinates, devices_a_chip).seconds(collective)

A slice is a grid of chips with links between neighbours. An axis is a ring or a line (`gregale.cost.chips.Ici`). All
times are lower bounds: the busiest link at the compiler's best use of all axes, without latency.
"""

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import jax
import numpy as np
from jax.sharding import Mesh

from gregale.cost.chips import Chip, Ici
from gregale.cost.hlo import (
    Groups,
    Loop,
    Module,
    Shape,
    Site,
    parse,
    parse_groups,
    parse_pairs,
    parse_slice_target,
    walk,
)
from gregale.errors import UserError

UNKNOWN = ("unknown",)
INSIDE, BETWEEN = "inside slice", "between slices"


@dataclass(frozen=True)
class Crossing:
    """Mesh axes of a set of device groups.

    - `axes`: the mesh axes that the groups cross, in mesh order; `("unknown",)` if they are no grid in the mesh.
    - `touched`: all axes along which devices of a group differ, known also if `axes` is not.
    - `group_size`: devices in a group.
    - `link`: `BETWEEN` if a group has devices of more than one slice, else `INSIDE`.
    - `groups`: the groups of mesh positions; `()` if they are unknown.
    """

    axes: tuple[str, ...]
    touched: tuple[str, ...]
    group_size: int
    link: str
    groups: Groups = ()


@dataclass(frozen=True)
class DeviceCoordinates:
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
        return Crossing(names if known else UNKNOWN, names, group_size, self._link(groups), groups)

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


KINDS = (
    "all-reduce",
    "reduce-scatter",
    "all-gather",
    "all-to-all",
    "ragged-all-to-all",
    "collective-permute",
    "collective-broadcast",
    "send",
)
_REPLICA_GROUPS = r"replica_groups=(@?mesh[\[<][^{]*\{[^}]*\}|\{\{[\d,{}\s]*\}\}|\{\s*\}|\[[\d,]+\][^\s]*?(?=,\s|$))"
_PAIRS = r"source_target_pairs=\"?(\{[\d,{}\s]*\})"
_SLICE_TARGET = r"_xla_megascale_target=(\"[^\"]*\"|\{\{.*?\}\})"
_SLICE_KIND = r'_xla_megascale_transfer_type="(\w+)"'
_OVERLAPPED = "async_collective_fusion_config"
_WAITED_FOR = re.compile(r'"is_sync": ?true')  # XLA:GPU also splits synchronous collectives into start and done
_RING_PASSES = {"all-reduce": 2, "reduce-scatter": 1, "all-gather": 1, "all-to-all": 1, "ragged-all-to-all": 1}
_SLICE_KINDS = {"ONE_TO_ONE": "collective-permute"}


@dataclass(frozen=True)
class Collective:
    """One collective operation of a compiled program, for the payload of one dtype.

    An operation that carries several arrays is one record; with several dtypes it is one record for each dtype.

    - `kind`: `all-reduce`, `reduce-scatter`, `all-gather`, `all-to-all`, `ragged-all-to-all`, `collective-permute`,
      `collective-broadcast`, or `send` for a transfer between devices that none of these describes.
    - `dtype`: payload dtype as XLA prints it (`f32`, `bf16`, `u8`).
    - `shapes`: sizes of one device's input arrays.
    - `bytes`: payload on one device for one execution: the operand, except for `all-gather`, where it is the gathered
      result. So each kind counts the full (not the scattered) array once.
    - `bytes_sent`: bytes that one device sends in one execution in a ring of n devices: 2 (n-1)/n of `bytes` for
      `all-reduce`, (n-1)/n for `reduce-scatter`, `all-gather` and `all-to-all`, all of it for the others.
    - `axes`: mesh axes that it crosses, in mesh order; `("unknown",)` if its groups are no grid in the mesh; `()`
      without communication between devices.
    - `touched`: all mesh axes along which devices of a group differ, known also if `axes` is not.
    - `loops`: the `while` loops around it, outermost first.
    - `link`: `inside slice` or `between slices`.
    - `conditional`: it runs only if a branch is taken (`times` then is an upper bound).
    - `is_async`: it is started and finished apart, so that other work may run meanwhile.
    - `op_name`: where it was traced, such as `jit(step)/while/body/psum`.
    - `groups`: mesh positions of its groups of devices, or of (source, target) pairs; `()` if unknown.
    """

    kind: str
    dtype: str
    shapes: tuple[tuple[int, ...], ...]
    bytes: int
    bytes_sent: float
    axes: tuple[str, ...]
    touched: tuple[str, ...]
    loops: tuple[Loop, ...]
    link: str
    conditional: bool
    is_async: bool
    name: str
    op_name: str
    groups: Groups = field(default=(), repr=False)

    @property
    def loop(self) -> tuple[str, ...]:
        """Return the names of the loops around it, outermost first."""
        return tuple(loop.name for loop in self.loops)

    @property
    def times(self) -> int | None:
        """Return executions per run of the program, the product of the loops' trip counts; None if one is unknown."""
        counts = [loop.times for loop in self.loops]
        return None if None in counts else math.prod(count for count in counts if count is not None)

    @property
    def counted(self) -> int:
        """Return `times`; 1 if they are unknown."""
        return 1 if self.times is None else self.times

    def to_dict(self) -> dict:
        """Return the JSON keys that other tools rely on."""
        return {
            "kind": self.kind,
            "dtype": self.dtype,
            "bytes": self.bytes,
            "axes": list(self.axes),
            "loop": list(self.loop),
            "times": self.times,
            "link": self.link,
        }


def find_collectives(
    module: Module, placement: DeviceCoordinates, given_times: Mapping[str, int]
) -> tuple[Collective, ...]:
    """Return all collectives that the program runs, in schedule order; see `gregale.cost.audit`."""
    found: list[Collective] = []
    for site in walk(module, given_times):
        kind = _kind(site)
        if kind is not None and not _is_continuation(site):
            found += _records(site, kind, module, placement)
    return tuple(found)


def _kind(site: Site) -> str | None:
    """Return the kind of the collective that an instruction starts, or None, also for a transfer to the host."""
    instruction = site.instruction
    kind = instruction.opcode.removesuffix("-start")
    if kind == "send":
        if "xla_megascale" in instruction.attributes:
            transfer = instruction.attribute(_SLICE_KIND) or ""
            kind = _SLICE_KINDS.get(transfer, transfer.lower().replace("_", "-"))
            return kind if kind in KINDS else "send"
        if "is_host_transfer=true" in instruction.attributes:
            return None
        return "collective-permute" if instruction.attribute(_PAIRS) else "send"
    if kind == "all-reduce" and _is_scattered(site):
        return "reduce-scatter"
    return kind if kind in KINDS else None


def _is_scattered(site: Site) -> bool:
    """Return whether XLA:TPU wrote a reduce-scatter as a fusion of an all-reduce and the slice that a device keeps."""
    computation, call = site.frame.computation, site.frame.call
    if call is None or call.opcode != "fusion" or computation.root is None:
        return False
    pending = [(computation.root, False)]
    while pending:
        source, sliced = pending.pop()
        if source is site.instruction:
            return sliced
        if source.opcode in ("tuple", "get-tuple-element", "bitcast", "copy", "reshape", "dynamic-slice"):
            operands = source.operands if source.opcode == "tuple" else source.operands[:1]
            sliced = sliced or source.opcode == "dynamic-slice"
            pending += [(computation.instructions[name], sliced) for name in operands]
    return False


def _is_continuation(site: Site) -> bool:
    """Return whether another instruction started the collective.

    XLA:TPU repeats an overlapped collective in the fusions that start, continue and end it, all with one channel. It
    runs once, so only the start counts.
    """
    instruction = site.instruction
    if _OVERLAPPED not in instruction.attributes:
        return False
    return not any(
        "AsyncCollectiveStart" in other.attributes and instruction.name in other.operands
        for other in site.frame.computation.instructions.values()
    )


def _is_async(site: Site) -> bool:
    instruction = site.instruction
    if _WAITED_FOR.search(instruction.attributes):
        return False
    started = instruction.opcode == "send" or instruction.opcode.endswith("-start")
    return started or site.context.is_async or _OVERLAPPED in instruction.attributes


def _crossing(site: Site, kind: str, module: Module, placement: DeviceCoordinates) -> Crossing:
    instruction = site.instruction
    if (target := instruction.attribute(_SLICE_TARGET)) is not None:
        return placement.crossing(placement.by_id(parse_slice_target(target)), pairs="->" in target)
    if kind in ("collective-permute", "send"):
        pairs = instruction.attribute(_PAIRS)
        moves = None if pairs is None else tuple(pair for pair in parse_pairs(pairs) if pair[0] != pair[1])
        return placement.crossing(None if moves is None else placement.by_number(moves), pairs=True)
    text = instruction.attribute(_REPLICA_GROUPS)
    if text is None:
        return placement.crossing(None)
    groups = parse_groups(text, module.devices)
    replica_numbers = (
        "channel_id=" in instruction.attributes and "use_global_device_ids=true" not in instruction.attributes
    )
    if kind in ("all-reduce", "all-gather", "reduce-scatter") and replica_numbers and groups == ((0,),):
        # Groups of replicas, over all partitions of each: a partitioned program has one replica.
        groups = (tuple(range(module.devices)),)
    return placement.crossing(placement.by_number(groups))


def _payloads(site: Site, kind: str) -> dict[str, list[Shape]]:
    """Return one device's input arrays by dtype."""
    shapes = site.frame.computation.operand_shapes(site.instruction)
    if kind == "ragged-all-to-all":
        shapes = shapes[:1]  # the others are the output buffer, offsets and sizes
    payloads: dict[str, list[Shape]] = {}
    for shape in shapes:
        payloads.setdefault(shape.dtype, []).append(shape)
    return payloads


def _records(site: Site, kind: str, module: Module, placement: DeviceCoordinates) -> Iterator[Collective]:
    instruction = site.instruction
    crossing = _crossing(site, kind, module, placement)
    devices = crossing.group_size
    # The share of the payload that one device of a ring sends.
    share = _RING_PASSES[kind] * (devices - 1) / devices if kind in _RING_PASSES else float(devices > 1)
    for dtype, shapes in _payloads(site, kind).items():
        size = sum(shape.bytes for shape in shapes) * (devices if kind == "all-gather" else 1)
        yield Collective(
            kind=kind,
            dtype=dtype,
            shapes=tuple(shape.sizes for shape in shapes),
            bytes=size,
            bytes_sent=size * share,
            axes=crossing.axes,
            touched=crossing.touched,
            loops=site.context.loops,
            link=crossing.link,
            conditional=site.context.conditional,
            is_async=_is_async(site),
            name=instruction.name,
            op_name=instruction.op_name,
            groups=crossing.groups,
        )


@dataclass(frozen=True)
class Audit:
    """All collectives of a compiled program, in schedule order."""

    collectives: tuple[Collective, ...]

    def over(self, axis: str) -> tuple[Collective, ...]:
        """Return the collectives between devices that differ along a mesh axis, also if they cross other axes.

        They include those with unknown axes if a group has devices that differ along the axis.
        """
        return tuple(collective for collective in self.collectives if axis in collective.touched)

    def unknown(self) -> tuple[Collective, ...]:
        """Return the collectives whose groups are no grid in the mesh."""
        return tuple(collective for collective in self.collectives if collective.axes == UNKNOWN)

    def bytes_per_step(self, axis: str | None = None) -> int:
        """Return payload bytes on one device in one run of the program, including trip counts, over one axis or all.

        Raises `UserError` if a loop around one of the collectives has an unknown trip count.
        """
        total = 0
        for collective in self.collectives if axis is None else self.over(axis):
            if collective.times is None:
                unknown = ", ".join(f"{loop.name} ({loop.scope})" for loop in collective.loops if loop.times is None)
                raise UserError(
                    f"the compiled program has no trip count for a loop around {collective.name!r}: {unknown}; "
                    "give its count in loop_trips, by the loop's name or by a part of its scope"
                )
            total += collective.bytes * collective.times
        return total

    def to_dict(self) -> dict:
        """Return for JSON `collectives`, and payload bytes in one run, `bytes_per_step`, by `axes` and by `link`.

        Axes are joined with commas. Bytes are None if a loop has an unknown trip count.
        """
        return {
            "collectives": [each.to_dict() for each in self.collectives],
            "bytes_per_step": {
                "axes": _sums((",".join(each.axes), each) for each in self.collectives),
                "link": _sums((each.link, each) for each in self.collectives),
            },
        }

    def table(self) -> str:
        """Return the collectives as a text table."""
        header = ("kind", "dtype", "bytes", "axes", "loop", "times", "link", "name")
        rows: list[tuple[str, ...]] = [header]
        for each in self.collectives:
            axes, loop = ",".join(each.axes) or "-", "/".join(each.loop) or "-"
            times = "?" if each.times is None else str(each.times)
            name = ("async " if each.is_async else "") + ("if " if each.conditional else "") + each.name
            rows.append((each.kind, each.dtype, f"{each.bytes:,}", axes, loop, times, each.link, name))
        widths = [max(len(row[column]) for row in rows) for column in range(len(header))]
        return "\n".join(
            "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
        )


def _sums(keyed: Iterable[tuple[str, Collective]]) -> dict[str, int | None]:
    sums: dict[str, int | None] = {}
    for key, each in keyed:
        before = sums.get(key, 0)
        sums[key] = None if before is None or each.times is None else before + each.bytes * each.times
    return sums


def audit(
    compiled: jax.stages.Compiled | str, mesh: jax.sharding.Mesh, loop_trips: Mapping[str, int] | None = None
) -> Audit:
    """Return all collectives of a compiled program.

    - `compiled`: the program, or its text (`compiled.as_text()`), as XLA prints it for CPU, GPU or TPU.
    - `mesh`: the mesh of the compilation, with its devices in the same order.
    - `loop_trips`: trip counts of loops for which the program has none, by the name of the `while` or by a part of its
      traced scope (such as a `jax.named_scope` around a scan).

    Raises `UserError` if the text is not a compiled program, or its number of devices differs from the mesh's.
    """
    text = compiled if isinstance(compiled, str) else compiled.as_text()
    module = parse(text or "")
    if not module.entry:
        raise UserError(
            "the audit reads the text of a compiled program (compiled.as_text()); "
            f"found {(text or '')[:60]!r}, which has no ENTRY computation"
        )
    placement = DeviceCoordinates(mesh, module.devices)
    found = find_collectives(module, placement, loop_trips or {})
    if found and not placement.fits:
        raise UserError(
            f"the program was compiled for {placement.program_devices} devices and communicates among them, "
            f"but the mesh {dict(mesh.shape)} has {mesh.size} in {len(set(placement.slice_of.tolist()))} slice(s); "
            "audit it with the mesh that it was compiled for"
        )
    return Audit(found)


@dataclass(frozen=True)
class Grid:
    """The chips of each slice.

    - `sizes`: of the axes
    - `coordinates`: [device, axis] of all devices of the mesh, in its order
    - `devices_a_chip`: devices that share a chip's links
    """

    ici: Ici
    sizes: tuple[int, ...]
    coordinates: np.ndarray
    devices_a_chip: int = 1

    def seconds(self, each: Collective) -> float | None:
        """Return the seconds of one run of a collective inside a slice; None if its groups are unknown."""
        return self.seconds_of(each.kind, each.bytes, each.bytes_sent, each.groups)

    def seconds_of(self, kind: str, size: int, sent: float, groups: Groups) -> float | None:
        """Return the seconds of one run of a collective; arguments as of `Collective`.

        - reductions and gathers: the bytes that a device sends, over the links of a group's corner
        - all-to-all: the bytes across the middle of the axis with the fewest links for its chips
        - permutations: the bytes over the links between a pair, which other pairs at that distance share
        """
        if not groups:
            return None
        rate = self.ici.bytes_per_second / self.devices_a_chip
        if kind in ("collective-permute", "send"):
            return sent * self._hops(groups) / rate
        spans = self.spans(max(groups, key=len))
        links = sum(own for _, own in spans)
        if not links:
            return None
        bound = sent / links
        if kind in ("all-to-all", "ragged-all-to-all"):
            # Of `count` devices each sends an equal part to each other: floor(count^2 / 4) parts cross the middle.
            bound = max(bound, max(size * (count**2 // 4) / count / own for count, own in spans))
        return bound / rate

    def spans(self, group: Sequence[int]) -> list[tuple[int, float]]:
        """Return for each axis along which a group's devices differ their number, and the first one's own links.

        A group with a stride shares the links with as many others.
        """
        found = []
        for axis, (size, links) in enumerate(zip(self.sizes, self.ici.links(self.sizes), strict=True)):
            values = np.unique(self.coordinates[list(group), axis])
            if (count := len(values)) > 1:
                stride = int(values[-1] - values[0]) // (count - 1)
                found.append((count, (links if stride * count == size else 1) / stride))
        return found

    def _hops(self, pairs: Sequence[Sequence[int]]) -> int:
        """Return the median distance of the pairs, at least 1: if all chips send as far, each link carries so many."""
        ends, rings = self.coordinates[np.array(pairs)], np.array(self.ici.links(self.sizes)) == 2
        apart = np.abs(ends[:, 0] - ends[:, 1])
        around = np.where(rings, np.array(self.sizes) - apart, apart)
        return max(1, int(np.median(np.minimum(apart, around).max(1))))


def grid_of(mesh: Mesh, chip: Chip, devices_a_chip: int) -> Grid | None:
    """Return the grid of a mesh's devices; None if they have no coordinates, or the chip no ICI."""
    devices = list(mesh.devices.flat)
    if chip.ici is None or not all(hasattr(device, "coords") for device in devices):
        return None
    coordinates = np.array([device.coords for device in devices])
    coordinates = coordinates - coordinates.min(0)
    return Grid(chip.ici, tuple(int(size) + 1 for size in coordinates.max(0)), coordinates, devices_a_chip)
