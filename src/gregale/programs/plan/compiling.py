"""Provides compilation of a program for the planned devices, with memory sizes also for programs that do not fit.

The TPU compiler rejects a program that needs more memory than a device has after it has scheduled the program.
`read_dump` then reads schedule and sizes from the compiler's dump. `gregale.programs.plan.memory_only_compile` stops at
this stage for programs that fit, too.
"""

import re
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import jax

from gregale.audit.estimate import CompilerMemory, compiler_memory
from gregale.errors import UserError
from gregale.formatting import listed
from gregale.programs.plan.devices import Target

# Suffixes of the files that the TPU compiler writes with `DUMPED`, in this order; then it generates code.
SCHEDULE, REPORT, AFTERWARDS = (
    f".after_optimizations{part}.txt" for part in ("", "-memory-usage-report", "_after_buffer_assignment")
)
SHOWN_BUFFERS = 5
SHOWN_SHAPES = 2
_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
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
    text, report = (_written(folder, end) for end in (SCHEDULE, REPORT))
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


def _written(folder: Path, end: str) -> str:
    """Return the content of the largest file with this suffix, because the dump may also have small programs."""
    files = sorted(folder.glob(f"*{end}"), key=lambda path: path.stat().st_size)
    return files[-1].read_text(encoding="utf-8", errors="replace") if files else ""


def _bytes(amount: str, unit: str) -> int:
    return round(float(amount) * _UNITS[unit])
