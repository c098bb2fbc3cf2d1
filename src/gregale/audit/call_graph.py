"""Provides the instructions of a program in execution order, from the entry into all called computations."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from gregale.audit.hlo import Instruction, Module
from gregale.audit.loops import Frame, Loop, read_loop

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
