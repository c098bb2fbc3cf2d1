"""Provides the parser of a compiled program's text into computations and instructions.

XLA prints one instruction per line, `%name = shape opcode(operands), attributes`, and one computation between
`%name (parameters) -> shape {` and `}`. The metadata of a Pallas kernel continues on further lines, which may also
begin with `}`. The parser splits only the parts that the audit needs; the rest of an instruction stays text.
"""

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property

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
