"""Which collectives the compiler overlaps with compute: what stands between start and end in the schedule."""

from __future__ import annotations

from collections.abc import Iterator

from gregale.audit.hlo import Computation, Instruction, Module, parse
from gregale.audit.walk import walk

_COMPUTE = {
    "fusion",
    "dot",
    "convolution",
    "custom-call",
    "while",
    "call",
    "scatter",
    "sort",
    "reduce",
    "reduce-window",
}
_RENDEZVOUS = r'_xla_host_transfer_rendezvous="([^"]*)"'
_STARTED, _DONE = "AsyncCollectiveStart", "AsyncCollectiveDone"


def compute_behind(text: str) -> dict[str, int]:
    """For every asynchronous collective of a compiled program, how many computing instructions run meanwhile.

    The program is read in the order that the compiler scheduled. A collective is known by its instruction's name, as in
    `gregale.audit.Collective.name`; one that is not asynchronous is not among them, and one with 0 is waited for at
    once. Loops count as one instruction.

    Args:
        text: `compiled.as_text()`.
    """
    module = parse(text)
    found: dict[str, int] = {}
    computations = {site.frame.computation.name: site.frame.computation for site in walk(module, {})}
    for computation in computations.values():
        for instruction in computation.instructions.values():
            names = _started(module, instruction)
            if names:
                count = _until_done(module, computation, instruction)
                found |= dict.fromkeys(names, count)
    return found


def _started(module: Module, instruction: Instruction) -> list[str]:
    """The names of the collectives that an instruction starts."""
    if instruction.opcode == "send" or (instruction.opcode.endswith("-start") and instruction.opcode != "copy-start"):
        return [instruction.name, *(each.name for each in _inside(module, instruction))]
    if instruction.opcode == "fusion" and (inner := _marked(module, instruction, _STARTED)):
        return [name for each in inner for name in each.operands]
    return []


def _inside(module: Module, instruction: Instruction) -> Iterator[Instruction]:
    """The instructions of the computation that an instruction calls."""
    called = module.computations.get(instruction.called("calls") or "")
    yield from called.instructions.values() if called else ()


def _marked(module: Module, instruction: Instruction, target: str) -> list[Instruction]:
    """The custom calls to `target` in a fusion."""
    return [each for each in _inside(module, instruction) if f'"{target}"' in each.attributes]


def _until_done(module: Module, computation: Computation, start: Instruction) -> int:
    """Computing instructions between the start of a collective and the one that waits for its result."""
    carries, between, passed = {start.name}, 0, False
    rendezvous = start.attribute(_RENDEZVOUS)
    for instruction in computation.instructions.values():
        if not passed:
            passed = instruction is start
            continue
        is_user = bool(carries & set(instruction.operands))
        if _ends(module, instruction, rendezvous, is_user):
            return between
        if is_user:
            carries.add(instruction.name)
        if instruction.opcode in _COMPUTE and not _marked(module, instruction, _STARTED):
            between += 1
    return between


def _ends(module: Module, instruction: Instruction, rendezvous: str | None, is_user: bool) -> bool:
    if rendezvous is not None:
        return instruction.opcode == "recv-done" and instruction.attribute(_RENDEZVOUS) == rendezvous
    if not is_user:
        return False
    return instruction.opcode.endswith("-done") or bool(_marked(module, instruction, _DONE))
