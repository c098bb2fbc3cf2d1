"""Find every collective of a program, with what it moves, between which devices, and how often."""

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from gregale.audit.groups import Crossing, Placement, parse_groups, parse_pairs, parse_slice_target
from gregale.audit.hlo import Computation, Instruction, Module, Shape
from gregale.audit.loops import Frame, Loop, read_loop

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
_SLICE_KINDS = {"ONE_TO_ONE": "collective-permute"}
_CALLING = ("fusion", "call", "async-start", "custom-call")


@dataclass(frozen=True)
class Collective:
    """One collective operation of a compiled program, for the payload of one dtype.

    An operation that carries several arrays is one record; with several dtypes it is one record for each dtype.

    Attributes:
        kind: `all-reduce`, `reduce-scatter`, `all-gather`, `all-to-all`, `ragged-all-to-all`, `collective-permute`,
            `collective-broadcast`, or `send` for a transfer between devices that none of these describes.
        dtype: of the payload, as XLA prints it (`f32`, `bf16`, `u8`).
        shapes: sizes of the arrays that one device puts in, before the collective.
        bytes: payload on one device for one execution: the operand, except for `all-gather`, where it is the gathered
            result. So each kind counts the full (not the scattered) array once.
        bytes_sent: what one device sends in one execution by a ring of n devices: 2 (n-1)/n of `bytes` for
            `all-reduce`, (n-1)/n for `reduce-scatter`, `all-gather` and `all-to-all`, all of it for the others.
        axes: mesh axes that it crosses, in mesh order; `("unknown",)` where its groups are no product of axes; `()`
            where no device talks to another.
        touched: every mesh axis along which devices that talk to each other differ, known also if `axes` is not.
        loops: the `while` loops around it, outermost first; `()` outside of loops.
        link: `inside slice` or `between slices`.
        group_size: devices that take part together.
        conditional: it runs only if a branch is taken (`times` then is an upper bound).
        is_async: it is started and finished apart, so that other work may run meanwhile.
        name: of the instruction.
        op_name: where it was traced, such as `jit(step)/while/body/psum`.
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
    group_size: int
    conditional: bool
    is_async: bool
    name: str
    op_name: str

    @property
    def loop(self) -> tuple[str, ...]:
        """Names of the loops around it, outermost first."""
        return tuple(loop.name for loop in self.loops)

    @property
    def times(self) -> int | None:
        """Executions in one run of the program: the product of the loops' trip counts; None if one is unknown."""
        counts = [loop.times for loop in self.loops]
        return None if None in counts else math.prod(count for count in counts if count is not None)

    def to_dict(self) -> dict:
        """The keys that other tools rely on."""
        return {
            "kind": self.kind,
            "dtype": self.dtype,
            "bytes": self.bytes,
            "axes": list(self.axes),
            "loop": list(self.loop),
            "times": self.times,
            "link": self.link,
        }


@dataclass(frozen=True)
class Site:
    """An instruction as it is reached from the entry."""

    instruction: Instruction
    frame: Frame
    loops: tuple[Loop, ...] = ()
    conditional: bool = False
    is_async: bool = False


def find_collectives(module: Module, placement: Placement, given_times: Mapping[str, int]) -> tuple[Collective, ...]:
    """Every collective that the program runs, in the order of its schedule; see `gregale.audit.audit`."""
    frame = Frame(module.computations[module.entry])
    found: list[Collective] = []
    for site in _walk(module, frame, given_times, Site(Instruction("", "", "", "", ""), frame)):
        found += _records(site, module, placement)
    return tuple(found)


def _walk(module: Module, frame: Frame, given: Mapping[str, int], outer: Site) -> Iterator[Site]:
    """The collectives of a computation and of all that it calls; `outer` is the call that led here."""
    for instruction in frame.computation.instructions.values():
        site = Site(instruction, frame, outer.loops, outer.conditional, outer.is_async)
        if _kind(site) is not None:
            if not _is_continuation(site):
                yield site
            continue
        for name, inside in _calls(module, site, given):
            yield from _walk(module, Frame(module.computations[name], instruction, frame), given, inside)


def _calls(module: Module, site: Site, given: Mapping[str, int]) -> Iterator[tuple[str, Site]]:
    """The computations that an instruction runs, each with the site that its contents inherit from."""
    instruction = site.instruction
    if instruction.opcode == "while":
        loops = (*site.loops, read_loop(module, instruction, site.frame, given))
        for key in ("condition", "body"):
            name = instruction.called(key) or ""
            yield name, Site(instruction, site.frame, loops, site.conditional, site.is_async)
    elif instruction.opcode == "conditional":
        listed = instruction.attribute(r"branch_computations=\{([^}]*)\}") or ""
        branches = [name.strip().removeprefix("%") for name in listed.split(",") if name.strip()]
        branches += [name for key in ("true", "false") if (name := instruction.called(f"{key}_computation"))]
        for name in branches:
            yield name, Site(instruction, site.frame, site.loops, True, site.is_async)
    elif instruction.opcode in _CALLING:
        is_async = site.is_async or instruction.opcode == "async-start"
        names = {instruction.called("calls"), instruction.called("to_apply")}
        names |= set(re.findall(r"[\w.\-]+", instruction.attribute(r"called_computations=\{([^}]*)\}") or ""))
        for name in sorted(name for name in names if name in module.computations):
            yield name, Site(instruction, site.frame, site.loops, site.conditional, is_async)


def _kind(site: Site) -> str | None:
    """Which collective an instruction starts, or None. A transfer to the host is none."""
    instruction = site.instruction
    kind = instruction.opcode.removesuffix("-start")
    if kind == "send":
        if "xla_megascale" in instruction.attributes:
            transfer = instruction.attribute(_SLICE_KIND) or ""
            kind = _SLICE_KINDS.get(transfer, transfer.lower().replace("_", "-"))
            return kind if kind in KINDS else "send"
        return None if "is_host_transfer=true" in instruction.attributes else "send"
    if kind == "all-reduce" and _is_scattered(site):
        return "reduce-scatter"
    return kind if kind in KINDS else None


def _is_scattered(site: Site) -> bool:
    """XLA:TPU writes a reduce-scatter as a fusion of an all-reduce and the slice that the device keeps."""
    computation, call = site.frame.computation, site.frame.call
    if call is None or call.opcode != "fusion" or computation.root is None:
        return False
    source: Instruction | None = computation.root
    sliced = False
    while source is not None and source.opcode in ("bitcast", "copy", "reshape", "dynamic-slice"):
        sliced = sliced or source.opcode == "dynamic-slice"
        source = computation.instructions.get(source.operands[0])
    return sliced and source is site.instruction


def _is_continuation(site: Site) -> bool:
    """Whether the collective was started elsewhere.

    XLA:TPU repeats an overlapped collective in the fusion that starts it, in those that go on with it and in the one
    that ends it, all with one channel. It runs once, so only the start counts.
    """
    if "async_collective_fusion_config" not in site.instruction.attributes:
        return False
    return not _has_start(site.frame.computation)


def _has_start(computation: Computation) -> bool:
    return any("AsyncCollectiveStart" in other.attributes for other in computation.instructions.values())


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
    everyone = module.replicas * module.partitions
    groups = parse_groups(text, everyone)
    replica_numbers = (
        "channel_id=" in instruction.attributes and "use_global_device_ids=true" not in instruction.attributes
    )
    if kind in ("all-reduce", "all-gather", "reduce-scatter") and replica_numbers and groups == ((0,),):
        # Groups of replicas, over all partitions of each: a partitioned program has one replica.
        groups = (tuple(range(everyone)),)
    return placement.crossing(placement.by_number(groups))


def _sent_share(kind: str, group_size: int) -> float:
    """The part of the payload that one device of a ring sends."""
    match kind:
        case "all-reduce":
            return 2 * (group_size - 1) / group_size
        case "reduce-scatter" | "all-gather" | "all-to-all" | "ragged-all-to-all":
            return (group_size - 1) / group_size
    return 1.0 if group_size > 1 else 0.0


def _payloads(site: Site, kind: str) -> dict[str, list[Shape]]:
    """The arrays that one device puts in, by dtype."""
    shapes = site.frame.computation.operand_shapes(site.instruction)
    if kind == "ragged-all-to-all":
        shapes = shapes[:1]  # then come the output buffer, offsets and sizes
    payloads: dict[str, list[Shape]] = {}
    for shape in shapes:
        payloads.setdefault(shape.dtype, []).append(shape)
    return payloads


def _records(site: Site, module: Module, placement: Placement) -> Iterator[Collective]:
    instruction = site.instruction
    kind = _kind(site) or ""
    crossing = _crossing(site, kind, module, placement)
    is_fused_async = "async_collective_fusion_config" in instruction.attributes
    for dtype, shapes in _payloads(site, kind).items():
        size = sum(shape.bytes for shape in shapes) * (crossing.group_size if kind == "all-gather" else 1)
        yield Collective(
            kind=kind,
            dtype=dtype,
            shapes=tuple(shape.sizes for shape in shapes),
            bytes=size,
            bytes_sent=size * _sent_share(kind, crossing.group_size),
            axes=crossing.axes,
            touched=crossing.touched,
            loops=site.loops,
            link=crossing.link,
            group_size=crossing.group_size,
            conditional=site.conditional,
            is_async=site.is_async
            or is_fused_async
            or instruction.opcode.endswith("-start")
            or instruction.opcode == "send",
            name=instruction.name,
            op_name=instruction.op_name,
        )
