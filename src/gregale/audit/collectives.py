"""Provides the collectives of a program, with their payloads, device groups and counts."""

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from gregale.audit.call_graph import Site, walk
from gregale.audit.device_axes import Crossing, Placement
from gregale.audit.groups import Groups, parse_groups, parse_pairs, parse_slice_target
from gregale.audit.hlo import Module, Shape
from gregale.audit.loops import Loop

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


def find_collectives(module: Module, placement: Placement, given_times: Mapping[str, int]) -> tuple[Collective, ...]:
    """Return all collectives that the program runs, in schedule order; see `gregale.audit.audit`."""
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


def _crossing(site: Site, kind: str, module: Module, placement: Placement) -> Crossing:
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


def _records(site: Site, kind: str, module: Module, placement: Placement) -> Iterator[Collective]:
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
