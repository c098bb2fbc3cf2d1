"""Provides the plan of a run: the programs of `train`, compiled from shapes alone, and their joint estimates.

The TPU compiler rejects a program that needs more memory than a device has after it has scheduled the program.
`read_dump` then reads schedule and sizes from the compiler's dump.

The TPU compiler has no option to stop at the memory report. With `xla_dump_to` it writes, in this order, the schedule,
the memory report and the schedule again, and then generates code, which takes ten times as long. Therefore a separate
process can compile (`gregale.programs.plan.compile_worker`). This process kills it when the third file exists, because
the other two are then complete. The separate process also ends when this process ends.
"""

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import haliax as hax
import jax

from gregale.axes.layout import make_mesh
from gregale.cost import Audit, audit
from gregale.cost.collectives import BETWEEN, INSIDE, Collective, Grid, grid_of
from gregale.cost.memory import CompilerMemory, compiler_memory
from gregale.cost.overlap import HOST, Rates, Schedule, schedule_of
from gregale.cost.pallas_cost import Kernels
from gregale.cost.roofline import DeviceWork, Roofline, link_rates, roofline
from gregale.cost.work import Work, work_of
from gregale.errors import UserError
from gregale.formatting import listed
from gregale.methods.schedule import SYNCHRONISE
from gregale.programs.plan.devices import Target, for_accelerators
from gregale.programs.plan.estimates import FAR_AXES, parameter_use, tree_bytes
from gregale.programs.runtime.build import set_up
from gregale.programs.runtime.model_flops import ModelFlops, model_flops
from gregale.programs.runtime.setup import Setup
from gregale.runs.config import TrainConfig
from gregale.runs.parsing import dump
from gregale.runs.rules import check
from gregale.settings import TRAINING
from gregale.training.state import abstract_state

# Suffixes of the files that the TPU compiler writes with `DUMPED`, in this order; then it generates code.
SCHEDULE, MEMORY_REPORT, AFTERWARDS = (
    f".after_optimizations{part}.txt" for part in ("", "-memory-usage-report", "_after_buffer_assignment")
)
SHOWN_BUFFERS = 5
SHOWN_SHAPES = 2
_BYTES_OF_UNIT = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
_SIZE = r"([\d.]+)([KMGT]?)"
_REFUSALS = (
    re.compile(rf"HLO temporaries \({_SIZE}\) exceeds available HBM \({_SIZE}\)"),
    re.compile(rf"Used {_SIZE} of {_SIZE} hbm"),
)
_TOTAL = re.compile(r"^Total bytes: (\d+)", re.MULTILINE)
# XLA:CPU plans memory and communication before the passes that these options skip, which take most of its time.
WITHOUT_OPTIMISED_CODE = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}
DUMPED: dict[str, Any] = {"xla_dump_hlo_as_text": True}
_BUFFER = re.compile(r"^ *[\d.]+\w+\( *\d+%\); +([\d.]+)([KMGT]?)i?B; +\d+; +\d+; (.*)$", re.MULTILINE)


@dataclass(frozen=True)
class DoesNotFit:
    """The reason why the compiler rejects a program; a buffer holds several arrays at different times."""

    offered: int  # bytes of a device that the compiler can use for programs
    largest: list[tuple[int, str]] = field(default_factory=list)  # bytes and shapes of the largest buffers


@dataclass(frozen=True)
class Outcome:
    """The compiler's report about a program."""

    text: str  # the scheduled program; it has estimates of cycles only after code generation
    memory: CompilerMemory
    flops: float | None  # on a device, each loop's body once; None without code generation, and on GPUs
    shortage: DoesNotFit | None  # None: the program fits


def compiled_for(
    target: Target, name: str, lowered: jax.stages.Lowered, arguments: int, options: dict[str, Any] | None = None
) -> Outcome:
    """Compile a program; return the report also if it does not fit.

    - `arguments`: bytes of the program's arguments on a device
    - `options`: compiler options

    Raises `UserError` if the compiler rejects the program for another reason than the devices' memory.
    """
    try:
        compiled = lowered.compile(compiler_options=options)
    except jax.errors.JaxRuntimeError as error:
        return _refused(lowered, arguments, str(error), name)
    costs = compiled.cost_analysis() or {}
    memory = compiler_memory(compiled, has_peak=not target.simulated)
    return Outcome(compiled.as_text() or "", memory, costs.get("flops") or None, None)


def refused_sizes(message: str) -> tuple[int, int] | None:
    """Return the bytes needed and offered in the compiler's message; None for another message."""
    for pattern in _REFUSALS:
        if found := pattern.search(message):
            return _bytes(found[1], found[2]), _bytes(found[3], found[4])
    return None


def largest_buffers(report: str) -> list[tuple[int, str]]:
    """Return bytes and shapes of the largest buffers in the compiler's memory report."""
    found = []
    for amount, unit, shapes in _BUFFER.findall(report.partition("Memory Space: vmem")[0])[:SHOWN_BUFFERS]:
        found.append((_bytes(amount, unit), listed(re.split(r", (?![^(]*\))", shapes), SHOWN_SHAPES)))
    return found


def read_dump(folder: Path, arguments: int, message: str | None, name: str) -> Outcome:
    """Return the report that the TPU compiler has written to a folder before code generation.

    - `arguments`: bytes of the program's arguments on a device
    - `message`: the compiler's error for a rejected program; None: it accepted the program
    - `name`: name of the program

    Raises `UserError` if the compiler rejected the program for another reason than memory, or its files are incomplete.
    """
    shortage, needed = None, 0
    text, report = (_dumped_text(folder, end) for end in (SCHEDULE, MEMORY_REPORT))
    if message is not None:
        sizes = refused_sizes(message)
        if sizes is None:
            reason = " ".join(message.partition("\n\n")[0].split())  # the first paragraph
            raise UserError(f"the compiler rejects the program {name!r}: {reason}")
        needed, offered = sizes
        shortage = DoesNotFit(offered, largest_buffers(report))
    if total := _TOTAL.search(report):
        needed = int(total[1])
    elif message is None:
        raise UserError(
            f"the compiler has ended without an error, and has written no memory report of the program {name!r} to "
            f"{folder}: the disk may be full. TMPDIR in the environment names another folder."
        )
    return Outcome(text, CompilerMemory(arguments, 0, max(0, needed - arguments), 0, needed), None, shortage)


def _refused(lowered: jax.stages.Lowered, arguments: int, message: str, name: str) -> Outcome:
    """Compile again with a dump to a folder, which the compiler writes before it rejects the program."""
    with TemporaryDirectory(prefix="gregale-plan-") as folder:
        with suppress(jax.errors.JaxRuntimeError):
            if refused_sizes(message) is not None:
                lowered.compile(compiler_options={"xla_dump_to": folder, **DUMPED})
        return read_dump(Path(folder), arguments, message, name)


def _dumped_text(folder: Path, end: str) -> str:
    """Return the content of the largest file with this suffix, because the dump may also have small programs."""
    files = sorted(folder.glob(f"*{end}"), key=lambda path: path.stat().st_size)
    return files[-1].read_text(encoding="utf-8", errors="replace") if files else ""


def _bytes(amount: str, unit: str) -> int:
    return round(float(amount) * _BYTES_OF_UNIT[unit])


CONFIG, REQUEST, DUMP, REFUSED, LOG = "config.yaml", "request.json", "dump", "refused", "log"
POLL_SECONDS = 0.05
SHOWN_LINES = 3
# Log lines without the cause: stack frames, addresses, and the TPU library's report about itself.
_NOISE = re.compile(r"^\s*@ |^https://symbolize|^\*\*\* |\] RAW: |^=== Source Location Trace|^learning/")
_FATAL = re.compile(r"F\d{4} ")  # the compiler's mark of a fatal error
_LOG_PREFIX = re.compile(r"[A-Z]\d{4} \S+ +\d+ ")


@dataclass(frozen=True)
class Request:
    """Input of the compiling process."""

    config: TrainConfig  # of the run
    tokens: int  # the tokenizer's vocabulary size
    topology: str  # as for `gregale.programs.plan.devices.topology_target`
    slices: int  # likewise


def reported(request: Request, program: str, arguments: int) -> Outcome:
    """Return the compiler's report about a run's program, by its name, without code generation.

    - `arguments`: bytes of the program's arguments on a device

    Raises:
        UserError: the compiler rejects the program for another reason than the devices' memory, or its process fails.
    """
    with tempfile.TemporaryDirectory(prefix="gregale-plan-") as name:
        folder = Path(name)
        (folder / CONFIG).write_text(dump(request.config), encoding="utf-8")
        content = {"program": program, **{key: getattr(request, key) for key in ("tokens", "topology", "slices")}}
        (folder / REQUEST).write_text(json.dumps(content), encoding="utf-8")
        with _compiling_process(folder) as process:
            while (status := process.poll()) is None and not any((folder / DUMP).glob(f"*{AFTERWARDS}")):
                time.sleep(POLL_SECONDS)
        if status:
            raise crashed(status, (folder / LOG).read_text(encoding="utf-8", errors="replace"), program)
        refused = folder / REFUSED
        message = refused.read_text(encoding="utf-8") if refused.exists() else None
        return read_dump(folder / DUMP, arguments, message, program)


@contextmanager
def _compiling_process(folder: Path) -> Iterator[subprocess.Popen]:
    """Yield the compiling process and kill it at the end; it gets no signals from the terminal."""
    command = [sys.executable, "-m", "gregale.programs.plan.compile_worker", str(folder), str(os.getpid())]
    with (folder / LOG).open("wb") as log:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
        )
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def crashed(status: int, log: str, program: str) -> UserError:
    """Return the error for a compiling process that crashed, and save its complete log to a file.

    - `status`: as in `subprocess`: the exit status, or minus the number of the signal
    """
    number, kept = tempfile.mkstemp(prefix="gregale-plan-", suffix=".log")
    with open(number, "w", encoding="utf-8") as file:
        file.write(log)
    shown_lines = " / ".join(last_lines(log)).rstrip(".") or "none"
    how = f"with exit status {status}" if status > 0 else f"by signal {-status}"
    if -status in set(signal.Signals):
        how = f"by {signal.Signals(-status).name} (signal {-status})"
    advice = (
        "This is a fault of the compiler or of Gregale, not of the devices' memory. Other "
        "compute.compiler_options, or another compute.remat or compute.attention, may avoid it."
    )
    if -status == signal.SIGKILL:
        advice = (
            "A system that runs out of memory sends SIGKILL: more memory, or one compilation at a time, would work."
        )
    return UserError(
        f"the process that compiles the program {program!r} ended {how} before the compiler's memory report. "
        f"Its last lines: {shown_lines}. The whole log is in {kept}. {advice}"
    )


def last_lines(log: str) -> list[str]:
    """Return the compiler's fatal errors, or the last lines of a log that may have the cause."""
    lines = [line.strip() for line in log.splitlines() if line.strip() and not _NOISE.search(line)]
    fatal = [line for line in lines if _FATAL.match(line)]
    return [*dict.fromkeys(_LOG_PREFIX.sub("", line) for line in fatal or lines)][-SHOWN_LINES:]


STEP, WARM_UP = "step", "warm_up"
FIRST_STEPS = 10_000
CODE, MEMORY = "code", "memory"
UNTIL = (CODE, MEMORY)  # full compilation; compilation to the schedule and the memory report, which is faster


@dataclass(frozen=True)
class Program(Outcome):
    """A compiled program with its audit.

    - `work`: that of all devices in one run, by its jaxpr
    - `share`: of the steps, that run it
    """

    audit: Audit
    work: Work
    share: float


@dataclass(frozen=True)
class Lowering:
    """A program to compile: its name, its trace from shapes alone, and the share of the steps that run it."""

    name: str
    trace: Callable[[], jax.stages.Traced]
    share: float


Compile = Callable[[Lowering, jax.stages.Traced], Outcome]


def programs_of(
    setup: Setup, target: Target, compile_: Compile, report: Callable[[str], None] = lambda line: None
) -> dict[str, Program]:
    """Return the compiled programs of `train` by name, without allocation.

    - `step`: the step of PSDP, or of DiLoCo's replicas without SEND or APPLY
    - the method's other programs, by the names of its traffic's `kinds`; for a method that does not tell its traffic
      those of the first steps, such as `step_30`, by the first step that runs the program
    - `warm_up`: the PSDP step before another method begins

    `report` gets a line before each is compiled, which may take minutes.
    """
    found = {}
    with hax.axis_mapping({}):
        for each in lowerings(setup):
            report(f"Compiling the program `{each.name}` for {setup.layout.mesh.size} devices ...")
            traced = each.trace()
            found[each.name] = _audited(setup, target, compile_(each, traced), each, traced)
    return found


def lowerings(setup: Setup) -> Iterator[Lowering]:
    method, batch = setup.method, setup.abstract_batch
    state, stepper = setup.abstract_state(), setup.stepper()
    step, synchronise = partial(stepper.program.trace, state, batch), partial(stepper.synchronise.trace, state)
    traffic = method.traffic()
    if traffic is None:
        first = [method.actions(number) for number in range(1, min(setup.config.steps, FIRST_STEPS) + 1)]
        for name, during, share in _kinds(STEP, [each.step_args for each in first]):
            yield Lowering(name, partial(step, *during), share)
        for name, after, share in _kinds(SYNCHRONISE, [each.post_step for each in first]):
            if after is not None:
                yield Lowering(name, partial(synchronise, after), share)
    else:
        others = [(name, kind.share, method.actions(kind.step)) for name, kind in traffic.kinds.items()]
        inside = sum(share for _, share, actions in others if actions.post_step is None)
        yield Lowering(STEP, partial(step, *method.actions(1).step_args), 1 - inside)
        for name, share, actions in others:
            after = actions.post_step
            own = partial(step, *actions.step_args) if after is None else partial(synchronise, after)
            yield Lowering(name, own, share)
    if setup.method_after(0) is not method:
        program, start = setup.stepper(setup.psdp).program, abstract_state(setup.psdp, setup.model)
        yield Lowering(WARM_UP, partial(program.trace, start, batch), 0)


def step_work(setup: Setup) -> Work:
    """Return the work of all devices in a step by its jaxpr."""
    with hax.axis_mapping({}):
        return work_of(next(lowerings(setup)).trace().jaxpr)


def _kinds(name: str, given: list[Any]) -> list[tuple[str, Any, float]]:
    """Return the kinds of arguments in the first steps: a program's name, arguments, and their share of the steps.

    Arguments of equal structure, shapes and dtypes have one program.
    """
    found: dict[Any, list[int]] = {}
    for index, arguments in enumerate(given):
        leaves, structure = jax.tree.flatten(arguments)
        found.setdefault((structure, *map(jax.typeof, leaves)), []).append(index)
    first = [(indices[0], len(indices) / len(given)) for indices in found.values()]
    return [(f"{name}_{index + 1}" if index else name, given[index], share) for index, share in first]


def _audited(setup: Setup, target: Target, outcome: Outcome, lowering: Lowering, traced: jax.stages.Traced) -> Program:
    found = audit(outcome.text, setup.layout.mesh, known_trips(setup))
    if target.simulated:
        # Simulated devices have no slices, so `replica` counts as the slow link.
        far = [BETWEEN if set(each.touched) & set(FAR_AXES) else INSIDE for each in found.collectives]
        pairs = zip(found.collectives, far, strict=True)
        found = Audit(tuple(replace(collective, link=link) for collective, link in pairs))
    return Program(**vars(outcome), audit=found, work=work_of(traced.jaxpr), share=lowering.share)


def known_trips(setup: Setup) -> dict[str, int]:
    """Return the trip counts, by scope, of loops whose counts a compiled program may lack."""
    return {"microbatches": setup.config.batch.microbatches}


@dataclass(frozen=True)
class Plan:
    """The compiled programs of a run."""

    setup: Setup
    target: Target
    programs: dict[str, Program]  # programs by name, see `programs_of`; always includes `step`
    model: ModelFlops
    until: str = CODE  # last compiler stage, one of `UNTIL`

    @property
    def step(self) -> Program:
        return self.programs[STEP]

    @property
    def largest(self) -> str:
        return max(self.programs, key=lambda name: self.programs[name].memory.peak)

    @property
    def memory(self) -> CompilerMemory:
        return self.programs[self.largest].memory

    @property
    def memory_bytes(self) -> int:
        """Return a device's bytes for programs: from the compiler's error if one does not fit, else from the chip."""
        offered = [each.shortage.offered for each in self.programs.values() if each.shortage is not None]
        return min([*offered, self.target.memory_bytes])

    @property
    def link_bytes(self) -> dict[str, float]:
        """Return the bytes that a device sends over each link in a step, on average, by the compiled programs.

        If a method's programs are those of its largest fragments, its traffic has the average between slices.
        """
        sent = {INSIDE: 0.0, BETWEEN: 0.0}
        for program in self.programs.values():
            for collective in program.audit.collectives:
                sent[collective.link] += program.share * collective.bytes_sent * collective.counted
        traffic = self.setup.method.traffic()
        if traffic is not None and traffic.kinds and sent[BETWEEN]:
            sent[BETWEEN] = traffic.average
        return sent

    @property
    def work(self) -> DeviceWork:
        """Return the work of one device in a step, on average; all devices share the work of a program alike."""
        setup, devices, trees = self.setup, self.setup.layout.mesh.size, tree_bytes(self.setup)
        tokens, own = setup.config.batch.tokens / devices, trees.parameters + trees.optimizer + trees.counters

        def average(name: str) -> float:
            return sum(each.share * vars(each.work)[name] for each in self.programs.values()) / devices

        return DeviceWork(
            model_flops=tokens * self.model.visible,
            full_flops=tokens * self.model.full,
            flops=average("flops"),
            memory_bytes=average("memory_bytes") + parameter_use(setup).memory + 2 * own + trees.frozen,
            link_bytes=self.link_bytes,
            host_bytes=average("host_bytes"),
            eight_bit_flops=average("eight_bit_flops"),
        )

    def schedule(self, program: Program, between_bytes_per_second: float | None) -> Schedule | None:
        """Return the timed run of a program by the compiler's cycle estimates; None without those of its whole code."""
        target, cycles = self.target, self.target.chip.cycles_per_second
        without_code = self.until == MEMORY or program.shortage is not None
        if target.simulated or cycles is None or without_code:
            return None
        kernels = Kernels(target.chip, target.devices_a_chip)
        links = link_rates(target.chip, target.devices_a_chip, between_bytes_per_second)
        links[HOST] = target.chip.host_bytes_per_second / target.devices_a_chip
        rates = Rates(cycles, links, kernels, self.grid)
        return schedule_of(program.text, program.audit.collectives, rates, known_trips(self.setup))

    @property
    def grid(self) -> Grid | None:
        """Return the links of a slice; None: unknown."""
        target = self.target
        return None if target.simulated else grid_of(self.setup.layout.mesh, target.chip, target.devices_a_chip)

    def roofline(self, between_bytes_per_second: float | None) -> Roofline:
        """Return the bounds of a step's time."""
        return roofline(self.work, self.target.chip, self.target.devices_a_chip, between_bytes_per_second)

    def seconds(self, between_bytes_per_second: float | None) -> float:
        """Return a step's time by the roofline and the schedule of its transfers.

        Asynchronous transfers inside a slice hide behind other work. Synchronous ones, and those between slices, which
        little work could hide, add their full time.
        """
        bound, target, grid = self.roofline(between_bytes_per_second), self.target, self.grid
        rate = link_rates(target.chip, target.devices_a_chip, between_bytes_per_second)[INSIDE]

        def total(some: Iterable[Collective]) -> float:
            return sum(each.counted * ((grid and grid.seconds(each)) or each.bytes_sent / rate) for each in some)

        inside = [each for each in self.step.audit.collectives if each.link == INSIDE]
        sent, hidden = total(inside), total(each for each in inside if each.is_async)
        far = sum(bound.links.values()) - bound.links[INSIDE]
        return max(bound.compute, bound.memory, bound.host, hidden) + sent - hidden + far


def plan_step(
    config: TrainConfig,
    tokens: int,
    target: Target,
    until: str = CODE,
    report: Callable[[str], None] = lambda line: None,
) -> Plan:
    """Compile the programs of a configuration for the target and return the plan.

    - `until`: last compiler stage, one of `UNTIL`
    - `report`: gets a line before each program is compiled

    Raises `UserError` if the configuration does not fit the devices.
    """
    setup = setup_for(config, tokens, target)
    programs = programs_of(setup, target, _compiler(setup, tokens, target, until), report)
    return Plan(setup, target, programs, model_flops(setup), until)


def setup_for(config: TrainConfig, tokens: int, target: Target) -> Setup:
    """Return the setup of a configuration for the target. Raises `UserError` as `plan_step`."""
    config = for_accelerators(config, target)
    setup = set_up(config, tokens, make_mesh(config.mesh, target.devices))
    check(config, setup.layout, TRAINING)
    return setup


def _compiler(setup: Setup, tokens: int, target: Target, until: str) -> Compile:
    arguments = tree_bytes(setup).arguments
    if until == MEMORY and target.topology is not None:
        request = Request(setup.config, tokens, *target.topology)
        return lambda each, _: reported(request, each.name, arguments)
    options = WITHOUT_OPTIMISED_CODE if until == MEMORY and target.simulated else None
    return lambda each, traced: compiled_for(target, each.name, traced.lower(), arguments, options)
