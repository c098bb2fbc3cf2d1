"""Provides the time of a program, and the share of its communication that it hides, by the compiler's estimates.

`schedule_of(text, collectives, rates, {})` simulates the program's schedule with a clock. An instruction takes the
cycles that the compiler estimates; a Pallas kernel, which has no such estimate, takes the time of
`gregale.cost.pallas_cost`. A collective takes the time of `gregale.cost.collectives`, or its bytes sent over the
link's rate, one after another on each link, from its start. At the instruction that waits for its result, the remaining
time is exposed and advances the clock. A synchronous collective is fully exposed. A transfer to the host's memory, or
from it, is timed likewise; each direction has its own link.
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from gregale.cost.collectives import INSIDE, Collective, Grid
from gregale.cost.hlo import Computation, Frame, Instruction, Module, parse, read_loop, walk
from gregale.cost.pallas_cost import Kernels, grouped_of, kernel_of, quantising_of

_RENDEZVOUS = r'_xla_host_transfer_rendezvous="([^"]*)"'
_STARTED, _DONE = "AsyncCollectiveStart", "AsyncCollectiveDone"
HOST = "host"
_HOST_MEMORY = "S(5)"  # in a printed shape
# Asynchronous copies, and the array among those of the printed shape that moves.
_COPIES = {"copy-start": -2, "dynamic-slice-start": -2, "dynamic-update-slice-start": 1}
_CYCLES = re.compile(r'"estimated_cycles":"(\d+)"')


@dataclass(frozen=True)
class Calibration:
    """Seconds of published measurements over this clock's: their geometric mean, the least and the most.

    docs/results/calibration.md has the table, which `benchmarks/calibration.py` makes. The clock has no latencies, no
    stalls of memory, no input and no jitter; of experts no gathers of rows.
    """

    mean: float
    least: float
    most: float


DENSE, MIXTURE = Calibration(1.078, 0.94, 1.20), Calibration(1.217, 1.18, 1.26)


@dataclass(frozen=True)
class Rates:
    """Rates that convert cycles, kernels and bytes to seconds.

    - `cycles_per_second`: a device's clock
    - `bytes_per_second`: a device's send rate over each link, and its rate to its host and from it (`HOST`)
    - `kernels`: time of Pallas kernels
    - `grid`: the chips of a slice; None: their links are not known
    """

    cycles_per_second: float
    bytes_per_second: Mapping[str, float]
    kernels: Kernels
    grid: Grid | None = None

    def seconds(self, each: Collective) -> float:
        """Return the seconds of one run of a collective, whose link has a rate."""
        inside = self.grid.seconds(each) if self.grid is not None and each.link == INSIDE else None
        return each.bytes_sent / self.bytes_per_second[each.link] if inside is None else inside


@dataclass
class Overlap:
    """Seconds of collectives over one link in a run of the program, and the exposed seconds among them."""

    seconds: float = 0.0
    exposed: float = 0.0

    @property
    def hidden(self) -> float:
        return self.seconds - self.exposed


@dataclass
class Schedule:
    """A timed run of a program.

    - `seconds`: total time
    - `kernels`: seconds in Pallas kernels
    - `links`: seconds of collectives by link
    - `unlisted`: kernels whose cycles the table lacks
    """

    seconds: float = 0.0
    kernels: float = 0.0
    links: dict[str, Overlap] = field(default_factory=dict)
    unlisted: set[str] = field(default_factory=set)

    @property
    def exposed(self) -> float:
        """Return the seconds without computation."""
        return sum(link.exposed for link in self.links.values())

    @property
    def compute(self) -> float:
        """Return the seconds of instructions with compiler estimates."""
        return self.seconds - self.kernels - self.exposed


def schedule_of(
    text: str, collectives: Iterable[Collective], rates: Rates, given_times: Mapping[str, int]
) -> Schedule | None:
    """Return a timed run of the program; None if the text has no estimates of cycles, as before code generation.

    - `text`: `compiled.as_text()`.
    - `collectives`: the collectives of its audit; the run omits links without a rate.
    - `rates`: rates of the devices.
    - `given_times`: as for `gregale.cost.audit`.
    """
    if _CYCLES.search(text) is None:
        return None
    module = parse(text)
    timed = _Timed(module, ends(module), _needed(collectives, rates), rates, given_times)
    return timed.run(Frame(module.computations[module.entry]))


def _needed(collectives: Iterable[Collective], rates: Rates) -> dict[str, tuple[str, float]]:
    """Return the link and the seconds of each collective by name; two call paths share a name."""
    parts: dict[str, dict[str, float]] = {}
    links: dict[str, str] = {}
    for each in collectives:
        if each.link in rates.bytes_per_second:
            links[each.name] = each.link
            parts.setdefault(each.name, {})[each.dtype] = rates.seconds(each)
    return {name: (links[name], sum(found.values())) for name, found in parts.items()}


@dataclass
class _Run(Schedule):
    """An execution of a computation so far: when each link is free, and transfers by the instruction that waits."""

    free: dict[str, float] = field(default_factory=dict)
    waited_for: dict[str, list[tuple[str, float]]] = field(default_factory=dict)

    def send(self, link: str, seconds: float) -> float:
        """Queue a transfer on a link, and return its end time."""
        self.links.setdefault(link, Overlap()).seconds += seconds
        self.free[link] = max(self.seconds, self.free.get(link, 0.0)) + seconds
        return self.free[link]

    def wait(self, link: str, until: float) -> None:
        self.links[link].exposed += max(0.0, until - self.seconds)
        self.seconds = max(self.seconds, until)

    def add(self, inner: Schedule, times: int) -> None:
        self.seconds += times * inner.seconds
        self.kernels += times * inner.kernels
        self.unlisted |= inner.unlisted
        for link, found in inner.links.items():
            mine = self.links.setdefault(link, Overlap())
            mine.seconds += times * found.seconds
            mine.exposed += times * found.exposed


@dataclass(frozen=True)
class _Timed:
    """A program with the inputs of its simulation."""

    module: Module
    ends: Mapping[str, str | None]
    needed: Mapping[str, tuple[str, float]]
    rates: Rates
    given_times: Mapping[str, int]

    def run(self, frame: Frame) -> _Run:
        """Simulate a computation; an open transfer does not delay the transfers of a loop."""
        run = _Run()
        for instruction in frame.computation.instructions.values():
            for link, until in run.waited_for.pop(instruction.name, []):
                run.wait(link, until)
            self._execute(run, frame, instruction)
        for link, until in [each for left in run.waited_for.values() for each in left]:
            run.wait(link, until)
        return run

    def _execute(self, run: _Run, frame: Frame, instruction: Instruction) -> None:
        match instruction.opcode:
            case "while":
                times = read_loop(self.module, instruction, frame, self.given_times).times
                run.add(self._called(frame, instruction, instruction.called("body")), 1 if times is None else times)
            case "call":
                run.add(self._called(frame, instruction, instruction.called("to_apply")), 1)
            case "conditional":
                branches = [self._called(frame, instruction, name) for name in instruction.branches]
                run.add(max(branches, key=lambda branch: branch.seconds, default=_Run()), 1)
            case _:
                self._communicate(run, instruction)
                self._copy(run, frame.computation, instruction)
                at = frame.computation, instruction
                kernel = kernel_of(*at)
                if timed := kernel or quantising_of(*at) or grouped_of(*at):
                    run.kernels += (seconds := self.rates.kernels.seconds(timed))
                    run.seconds += seconds
                if kernel:
                    run.unlisted |= {kernel.key} if self.rates.kernels.cycles(kernel) is None else set()
                if cycles := _CYCLES.search(instruction.attributes):
                    run.seconds += int(cycles[1]) / self.rates.cycles_per_second

    def _called(self, frame: Frame, instruction: Instruction, name: str | None) -> _Run:
        return self.run(Frame(self.module.computations[name or ""], instruction, frame))

    def _communicate(self, run: _Run, instruction: Instruction) -> None:
        """Start the collectives of an instruction, and wait at once for the synchronous ones."""
        for name in [instruction.name, *(each.name for each in _inside(self.module, instruction))]:
            if name not in self.needed:
                continue
            link, seconds = self.needed[name]
            until = run.send(link, seconds)
            if name in self.ends:
                run.waited_for.setdefault(self.ends[name] or "", []).append((link, until))
            else:
                run.wait(link, until)

    def _copy(self, run: _Run, computation: Computation, instruction: Instruction) -> None:
        """Start a copy to the host's memory, or from it."""
        rate, opcode, text = self.rates.bytes_per_second.get(HOST), instruction.opcode, instruction.shape_text
        if rate is None or opcode not in _COPIES or _HOST_MEMORY not in text:
            return
        # The first printed array is the result, or the operand that is updated or read in part.
        writes = _HOST_MEMORY in text.partition("}")[0] and opcode != "dynamic-slice-start"
        link = f"{HOST}, {'to' if writes else 'from'}"
        until = run.send(link, instruction.shapes[_COPIES[opcode]].bytes / rate)
        run.waited_for.setdefault(_end(self.module, computation, instruction) or "", []).append((link, until))


def ends(module: Module) -> dict[str, str | None]:
    """Return for each asynchronous collective the instruction that waits for its result, both by name; None: none."""
    found: dict[str, str | None] = {}
    computations = {site.frame.computation.name: site.frame.computation for site in walk(module, {})}
    for computation in computations.values():
        for instruction in computation.instructions.values():
            if names := _started(module, instruction):
                found |= dict.fromkeys(names, _end(module, computation, instruction))
    return found


def _started(module: Module, instruction: Instruction) -> list[str]:
    """Return the names of the collectives that an instruction starts."""
    if instruction.opcode == "send" or (instruction.opcode.endswith("-start") and instruction.opcode != "copy-start"):
        return [instruction.name, *(each.name for each in _inside(module, instruction))]
    if instruction.opcode == "fusion" and (inner := _marked(module, instruction, _STARTED)):
        return [name for each in inner for name in each.operands]
    return []


def _inside(module: Module, instruction: Instruction) -> Iterator[Instruction]:
    """Yield the instructions of the computation that an instruction calls."""
    called = module.computations.get(instruction.called("calls") or "")
    yield from called.instructions.values() if called else ()


def _marked(module: Module, instruction: Instruction, target: str) -> list[Instruction]:
    """Return the custom calls to `target` in a fusion."""
    return [each for each in _inside(module, instruction) if f'"{target}"' in each.attributes]


def _end(module: Module, computation: Computation, start: Instruction) -> str | None:
    """Return the instruction that waits for the result of `start`."""
    carries, passed = {start.name}, False
    rendezvous = start.attribute(_RENDEZVOUS)
    for instruction in computation.instructions.values():
        if not passed:
            passed = instruction is start
            continue
        if instruction.opcode == "recv" and rendezvous is not None:
            if instruction.attribute(_RENDEZVOUS) == rendezvous:
                carries = {instruction.name}  # the receipt of the others' parts waits for the send
        elif carries & set(instruction.operands):
            if rendezvous is not None and instruction.opcode == "send-done":
                continue
            if instruction.opcode.endswith("-done") or _marked(module, instruction, _DONE):
                return instruction.name
            carries.add(instruction.name)
    return None
