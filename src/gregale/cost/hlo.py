"""Provides the parser of a compiled program's text: instructions in execution order, trip counts, and device groups.

XLA prints one instruction per line, `%name = shape opcode(operands), attributes`, and one computation between
`%name (parameters) -> shape {` and `}`. The metadata of a Pallas kernel continues on further lines, which may also
begin with `}`. The parser splits only the parts that the audit needs; the rest of an instruction stays text.

Groups have three forms: explicit `{{0,1},{2,3}}`, iota `[4,2]<=[2,2,2]T(1,0,2)`, and by the compiler's mesh
`mesh['a'=2,'b'=4] {'a'}`. The numbers are the program's device
numbers; `gregale.cost.collectives` maps them to a mesh.

XLA:CPU and XLA:GPU print `known_trip_count`. XLA:TPU does not, so this module derives the count from the loop: a
counter in the loop's tuple that starts at a constant, grows by a constant and is compared with a constant.
"""

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import NamedTuple

import numpy as np

from gregale.scopes import times_of

_COMPUTATION = re.compile(r"(ENTRY )?%?([\w.\-]+) (?:\(.*-> .*)?\{\s*$")
_NAME = re.compile(r"\s+(ROOT )?%?([\w.\-]+) = ")
_OPCODE = re.compile(r"\s*([\w\-]+)\(")
_OPERAND = re.compile(r"%([\w.\-]+)")
_SHAPE = re.compile(r"\b(pred|token|opaque|[a-z]+\d\w*)\[([\d,<=]*)\]")
_PARENTHESIS = re.compile(r"[()]")
_OP_NAME = re.compile(r'metadata=\{[^}]*?op_name="((?:[^"\\]|\\.)*)"')
_BITS = re.compile(r"\d+")
_DEVICES = re.compile(r"\b(?:replica_count|num_partitions)=(\d+)")
_STRING = re.compile(r'"(?:[^"\\]|\\.)*"')


@dataclass(frozen=True)
class Shape:
    """An array on one device: the dtype as XLA prints it, and the sizes."""

    dtype: str
    sizes: tuple[int, ...]

    @property
    def bytes(self) -> int:
        """Return the bytes of the elements without padding; types narrower than a byte are packed."""
        return math.ceil(math.prod(self.sizes) * bits(self.dtype) / 8)


def bits(dtype: str) -> int:
    """Return the bits of an element: 16 for `bf16`, 4 for `u4`, 8 for `f8e4m3fn` and `pred`."""
    if dtype == "pred":
        return 8
    width = _BITS.search(dtype)
    return int(width.group()) if width else 0


def shapes_in(text: str) -> tuple[Shape, ...]:
    """Return the arrays of a printed shape in order, with flattened tuples and without tokens."""
    return tuple(
        Shape(dtype, tuple(int(size.removeprefix("<=")) for size in sizes.split(",") if size))
        for dtype, sizes in _SHAPE.findall(text)
        if dtype not in ("token", "opaque")
    )


@dataclass
class Instruction:
    """One instruction of a computation; `attributes` is the text after the operands."""

    name: str
    opcode: str
    shape_text: str
    operand_text: str
    attributes: str

    @cached_property
    def shapes(self) -> tuple[Shape, ...]:
        """Return the arrays of the result."""
        return shapes_in(self.shape_text)

    @cached_property
    def operands(self) -> tuple[str, ...]:
        """Return the names of the operands."""
        if "%" in self.operand_text or not self.operand_text:
            return tuple(_OPERAND.findall(self.operand_text))
        return tuple(part.split()[-1] for part in self.operand_text.split(",") if part.strip())

    @property
    def op_name(self) -> str:
        """Return the scope in the traced program, such as `jit(step)/while/body/dot_general`."""
        match = _OP_NAME.search(self.attributes)
        return match.group(1) if match else ""

    def attribute(self, pattern: str) -> str | None:
        """Return the first group of a regular expression in the attributes."""
        match = re.search(pattern, self.attributes)
        return match.group(1) if match else None

    def called(self, key: str) -> str | None:
        """Return the computation that an attribute such as `body` or `calls` names."""
        return self.attribute(rf"\b{key}=%?([\w.\-]+)")

    @property
    def branches(self) -> list[str]:
        """Return the computations of a `conditional`, one of which runs."""
        listed = self.attribute(r"branch_computations=\{([^}]*)\}") or ""
        either = [self.called("true_computation"), self.called("false_computation")]
        return re.findall(r"[\w.\-]+", listed) + [name for name in either if name]


@dataclass
class Computation:
    """A named list of instructions in schedule order."""

    name: str
    instructions: dict[str, Instruction] = field(default_factory=dict)
    root: Instruction | None = None

    def operand_shapes(self, instruction: Instruction) -> tuple[Shape, ...]:
        """Return the arrays that the instruction reads."""
        named = [self.instructions[name] for name in instruction.operands if name in self.instructions]
        if named:
            return tuple(shape for operand in named for shape in operand.shapes)
        return shapes_in(instruction.operand_text)


@dataclass
class Module:
    """A compiled program: its computations, its entry, and its number of devices."""

    computations: dict[str, Computation]
    entry: str
    devices: int


def _closing(text: str, start: int) -> int:
    """Return the index of the parenthesis that closes the one at `start`."""
    depth = 0
    for match in _PARENTHESIS.finditer(text, start):
        depth += 1 if match.group() == "(" else -1
        if depth == 0:
            return match.start()
    return len(text) - 1


def _parse_instruction(line: str) -> tuple[Instruction, bool] | None:
    head = _NAME.match(line)
    if not head:
        return None
    shape_start = head.end()
    is_tuple = line.startswith("(", shape_start)
    shape_end = _closing(line, shape_start) + 1 if is_tuple else line.find(" ", shape_start)
    opcode = _OPCODE.match(line, shape_end)
    if not opcode:
        return None
    closing = _closing(line, opcode.end() - 1)
    instruction = Instruction(
        name=head.group(2),
        opcode=opcode.group(1),
        shape_text=line[shape_start:shape_end],
        operand_text=line[opcode.end() : closing],
        attributes=line[closing + 1 :],
    )
    return instruction, head.group(1) is not None


def _instructions(text: str) -> Iterator[str]:
    """Yield the lines of a text, with the lines of one instruction joined until its braces are closed."""
    parts: list[str] = []
    depth = 0
    for line in text.splitlines():
        begins = bool(parts) or _NAME.match(line) is not None
        if not begins:
            yield line
            continue
        parts.append(line)
        depth += _opened(line)
        if depth <= 0:
            yield "\n".join(parts)
            parts, depth = [], 0


def _opened(line: str) -> int:
    """Return the number of braces that a line leaves open, without those in strings."""
    bare = _STRING.sub("", line) if '"' in line else line
    return bare.count("{") - bare.count("}")


def parse(text: str) -> Module:
    """Parse the text of `compiled.as_text()`. The time is linear in the length of the text."""
    computations: dict[str, Computation] = {}
    entry, current = "", None
    for line in _instructions(text):
        if current is None:
            header = _COMPUTATION.match(line)
            if header:
                current = computations[header.group(2)] = Computation(header.group(2))
                entry = header.group(2) if header.group(1) else entry
        elif line.startswith("}"):
            current = None
        else:
            parsed = _parse_instruction(line)
            if parsed:
                instruction, is_root = parsed
                current.instructions[instruction.name] = instruction
                current.root = instruction if is_root else current.root
    return Module(computations, entry, math.prod(map(int, _DEVICES.findall(text[: text.find("\n")]))))


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
    """Return the numbers 0, 1, ... reshaped to `source`, transposed by `order` and reshaped to `shape`."""
    sizes = _integers(source or shape)
    numbers = np.arange(math.prod(sizes)).reshape(sizes)
    if order:
        numbers = numbers.transpose(_integers(order))
    return numbers.reshape(_integers(shape))


def _mesh_groups(mesh: re.Match) -> Groups:
    """Return the groups over the axes in the braces; `'a':(2)4` is the factor 4 of axis `a` after a factor 2."""
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
    factors, inside = [], []
    for name, size in sizes.items():
        done = 1
        for before, part in sorted(_uses(mesh.group(3), name, size)):
            factors += [before // done, part]
            inside.append(len(factors) - 1)
            done = before * part
        factors.append(size // done)
    outside = [index for index in range(len(factors)) if index not in inside]
    arranged = numbers.reshape(factors).transpose(outside + inside)
    return tuple(map(tuple, arranged.reshape(-1, math.prod(factors[index] for index in inside)).tolist()))


def _uses(used: str, axis: str, size: int) -> list[tuple[int, int]]:
    """Return (size before it, size) of each part of an axis in the groups; a whole axis is (1, size)."""
    uses = [(before, part) for name, before, part in _AXIS_USE.findall(used) if name == axis]
    return [(int(before or 1), int(part or size)) for before, part in uses]


def parse_groups(text: str, devices: int) -> Groups:
    """Return the groups of a `replica_groups` attribute in any of the three forms; `{}` is one group of all."""
    text = text.strip()
    if mesh := _MESH.match(text):
        return _mesh_groups(mesh)
    if iota := _IOTA.match(text):
        return tuple(map(tuple, _iota(*iota.groups()).tolist()))
    groups = tuple(_integers(group) for group in _NUMBERED.findall(text))
    return groups or (tuple(range(devices)),)


def parse_pairs(text: str) -> Groups:
    """Return the (source, target) pairs of a permutation, printed `{{0,1},{1,0}}` or `{{0->1},{1->0}}`."""
    return tuple((int(source), int(target)) for source, target in _PAIR.findall(text))


def parse_slice_target(text: str) -> Groups:
    """Return the groups of `jax.Device.id` of a transfer between TPU slices.

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


_PASSES_THROUGH = {"copy", "bitcast", "convert", "reshape", "copy-start", "copy-done", "optimization-barrier"}
_TRIPS_PRINTED = r'"known_trip_count":\{"n":"(\d+)"'
_FLIPPED = {"LT": "GT", "LE": "GE", "GT": "LT", "GE": "LE", "NE": "NE"}


@dataclass(frozen=True)
class Loop:
    """A `while` of the program: its printed name, its traced scope, and its trip count.

    `times` is for one execution of the loop, and None if unknown.
    """

    name: str
    scope: str
    times: int | None


@dataclass(frozen=True)
class Frame:
    """A computation with its call path from the entry: the calling instruction, and that instruction's frame."""

    computation: Computation
    call: Instruction | None = None
    caller: "Frame | None" = None


class Affine(NamedTuple):
    """An integer of the program: a constant, or an element of the loop's tuple plus a constant."""

    slot: int | None
    offset: int


def _affine(module: Module, computation: Computation, name: str, arguments: tuple[Affine | None, ...] = ()):
    """Return the named value as an `Affine`, or None for any other value.

    In a loop's body or condition the only parameter is the loop's tuple; in a fused computation `arguments` are the
    values of the parameters.
    """
    instruction = computation.instructions.get(name)
    if instruction is None:
        return None
    match instruction.opcode:
        case "constant":
            text = instruction.operand_text.strip()
            return Affine(None, int(text)) if re.fullmatch(r"-?\d+", text) else None
        case "parameter":
            index = int(instruction.operand_text)
            return arguments[index] if index < len(arguments) else None
        case "get-tuple-element":
            source = computation.instructions.get(instruction.operands[0])
            if source is not None and source.opcode == "parameter" and not arguments:
                return Affine(int(instruction.attribute(r"index=(\d+)") or 0), 0)
            return None
        case "add" | "subtract":
            left, right = (_affine(module, computation, operand, arguments) for operand in instruction.operands)
            return _combine(left, right, 1 if instruction.opcode == "add" else -1)
        case "fusion":
            inner = module.computations[instruction.called("calls") or ""]
            values = tuple(_affine(module, computation, operand, arguments) for operand in instruction.operands)
            return _affine(module, inner, inner.root.name, values) if inner.root else None
        case opcode if opcode in _PASSES_THROUGH:
            return _affine(module, computation, instruction.operands[0], arguments)
    return None


def _combine(left: Affine | None, right: Affine | None, sign: int) -> Affine | None:
    if left is None or right is None or (right.slot is not None and (left.slot is not None or sign < 0)):
        return None
    return Affine(left.slot if right.slot is None else right.slot, left.offset + sign * right.offset)


def _initial(module: Module, loop: Instruction, frame: Frame, slot: int) -> int | None:
    """Return the initial constant of an element of a loop's tuple, resolved through the enclosing loops."""
    initial = frame.computation.instructions.get(loop.operands[0])
    if initial is None or initial.opcode != "tuple":
        return None
    value = _affine(module, frame.computation, initial.operands[slot])
    if value is None or value.slot is None:
        return value.offset if value else None
    if frame.call is None or frame.caller is None or frame.call.opcode != "while":
        return None
    if _after_one_iteration(module, frame.call, value.slot) != Affine(value.slot, 0):
        return None
    outer = _initial(module, frame.call, frame.caller, value.slot)
    return None if outer is None else outer + value.offset


def _after_one_iteration(module: Module, loop: Instruction, slot: int) -> Affine | None:
    """Return an element of the loop's tuple after the body, in terms of the tuple before it."""
    body = module.computations[loop.called("body") or ""]
    if body.root is None or body.root.opcode != "tuple":
        return None
    return _affine(module, body, body.root.operands[slot])


def _comparison(module: Module, loop: Instruction) -> tuple[str, Affine | None, Affine | None] | None:
    """Return direction and both sides of the comparison that continues the loop."""
    condition = module.computations[loop.called("condition") or ""]
    computation, root, arguments = condition, condition.root, ()
    if root is not None and root.opcode == "fusion":
        arguments = tuple(_affine(module, condition, operand) for operand in root.operands)
        computation = module.computations[root.called("calls") or ""]
        root = computation.root
    if root is None or root.opcode != "compare":
        return None
    left, right = (_affine(module, computation, operand, arguments) for operand in root.operands)
    return root.attribute(r"direction=(\w+)") or "", left, right


def _iterations(direction: str, start: int, step: int, limit: int) -> int | None:
    """Return how often `counter DIRECTION limit` holds for counter = start, start + step, ..."""
    distance = limit - start
    if step == 0 or (direction in ("LT", "LE") and step < 0) or (direction in ("GT", "GE") and step > 0):
        return None
    match direction:
        case "LT" | "GT":
            return max(0, math.ceil(distance / step))
        case "LE" | "GE":
            return max(0, distance // step + 1)
        case "NE" if distance % step == 0 and distance // step >= 0:
            return distance // step
    return None


def _derived_times(module: Module, loop: Instruction, frame: Frame) -> int | None:
    comparison = _comparison(module, loop)
    if comparison is None:
        return None
    direction, left, right = comparison
    if direction not in _FLIPPED:
        return None
    for relation, counter, limit in ((direction, left, right), (_FLIPPED[direction], right, left)):
        if counter is None or counter.slot is None or limit is None:
            continue
        turned = _after_one_iteration(module, loop, counter.slot)
        if turned is None or turned.slot != counter.slot or turned.offset == 0:
            continue
        start, end = _initial(module, loop, frame, counter.slot), limit.offset
        if limit.slot is not None:
            fixed = _after_one_iteration(module, loop, limit.slot) == Affine(limit.slot, 0)
            first = _initial(module, loop, frame, limit.slot) if fixed else None
            end = None if first is None else first + limit.offset
        if start is not None and end is not None:
            return _iterations(relation, start + counter.offset, turned.offset, end)
    return None


def _scope(module: Module, loop: Instruction) -> str:
    """Return the loop's traced scope; a loop that the compiler rewrote still has it in its condition."""
    if loop.op_name:
        return loop.op_name
    root = module.computations[loop.called("condition") or ""].root
    return root.op_name.rpartition("/cond/")[0] if root else ""


def read_loop(module: Module, loop: Instruction, frame: Frame, given: Mapping[str, int]) -> Loop:
    """Return the loop of a `while` instruction.

    - `module`: the program.
    - `loop`: the `while`.
    - `frame`: the computation with the `while`, and its call path.
    - `given`: counts for loops whose count is neither printed nor derivable, nor told by `gregale.scopes`, by the
      loop's printed name or by a part of its own scope (`microbatches` for `jit(step)/microbatches/while`, not for a
      loop inside that one).
    """
    scope = _scope(module, loop)
    printed = loop.attribute(_TRIPS_PRINTED)
    times = int(printed) if printed else _derived_times(module, loop, frame)
    if times is None:
        own_parts = {loop.name, *scope.rpartition("/body/")[2].split("/")}
        times = next((count for key, count in given.items() if key in own_parts), None)
        times = times_of("/".join(own_parts)) if times is None else times
    return Loop(loop.name, scope, times)


_CALLING = ("fusion", "call", "async-start", "custom-call")


@dataclass(frozen=True)
class Context:
    """Surroundings of a computation: loops (outermost first), a conditional branch, an asynchronous call."""

    loops: tuple[Loop, ...] = ()
    conditional: bool = False
    is_async: bool = False


@dataclass(frozen=True)
class Site:
    """An instruction with its call path from the entry. An instruction with two call paths has two sites."""

    instruction: Instruction
    frame: Frame
    context: Context


def walk(module: Module, given_times: Mapping[str, int]) -> Iterator[Site]:
    """Yield the instructions that the program runs, in schedule order; `given_times` as for `read_loop`."""
    yield from _inside(module, Frame(module.computations[module.entry]), Context(), given_times)


def _inside(module: Module, frame: Frame, context: Context, given: Mapping[str, int]) -> Iterator[Site]:
    for instruction in frame.computation.instructions.values():
        site = Site(instruction, frame, context)
        yield site
        for name, inner in _calls(module, site, given):
            yield from _inside(module, Frame(module.computations[name], instruction, frame), inner, given)


def _calls(module: Module, site: Site, given: Mapping[str, int]) -> list[tuple[str, Context]]:
    """Return the computations that an instruction runs, each with its context."""
    instruction, context = site.instruction, site.context
    match instruction.opcode:
        case "while":
            loop = read_loop(module, instruction, site.frame, given)
            tested = replace(loop, times=None if loop.times is None else loop.times + 1)
            return [
                (instruction.called(key) or "", replace(context, loops=(*context.loops, inner)))
                for key, inner in (("condition", tested), ("body", loop))
            ]
        case "conditional":
            return [(name, replace(context, conditional=True)) for name in instruction.branches]
        case opcode if opcode in _CALLING:
            inner = replace(context, is_async=True) if opcode == "async-start" else context
            listed = instruction.attribute(r"called_computations=\{([^}]*)\}") or ""
            names = {instruction.called("calls"), instruction.called("to_apply"), *re.findall(r"[\w.\-]+", listed)}
            return [(name, inner) for name in sorted(name for name in names if name in module.computations)]
    return []
