"""Provides the trip counts of `while` loops from the compiled text.

XLA:CPU and XLA:GPU print `known_trip_count`. XLA:TPU does not, so this module derives the count from the loop: a
counter in the loop's tuple that starts at a constant, grows by a constant and is compared with a constant.
"""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from gregale.audit.hlo import Computation, Instruction, Module

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
    - `given`: counts for loops whose count is neither printed nor derivable, by the loop's printed name or by a part
      of its own scope (`microbatches` for `jit(step)/microbatches/while`, not for a loop inside that one).
    """
    scope = _scope(module, loop)
    printed = loop.attribute(_TRIPS_PRINTED)
    times = int(printed) if printed else _derived_times(module, loop, frame)
    if times is None:
        own_parts = {loop.name, *scope.rpartition("/body/")[2].split("/")}
        times = next((count for key, count in given.items() if key in own_parts), None)
    return Loop(loop.name, scope, times)
