"""The command line `gregale`. Programs are imported only when they are chosen."""

from __future__ import annotations

import gc
import io
import os
import re
import select
import shutil
import sys
import textwrap
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from difflib import get_close_matches
from importlib import import_module
from typing import TextIO

import gregale
from gregale.atomic_files import OF_THE_DISK
from gregale.errors import UserError
from gregale.streams import ResilientStream, abandon, printable


@dataclass(frozen=True)
class Program:
    """A line of the table of commands: where the program is (a module with a `COMMAND`) and what it does."""

    module: str
    summary: str


PROGRAMS = {
    "train": Program("gregale.programs.train.command", "train a language model from a YAML file; run again to resume"),
    "island": Program("gregale.programs.island.command", "train as one island of several that come, go and die"),
    "islands": Program("gregale.programs.local_fleet.command", "train as several islands on this machine, in one view"),
    "lighthouse": Program("gregale.programs.lighthouse", "coordinate islands: who is there, and nothing else"),
    "sample": Program(
        "gregale.programs.sample.command", "continue a prompt, or those of a file, with the model of a run"
    ),
    "eval": Program("gregale.programs.evaluate", "measure a model: loss and bits per byte of text, and tasks"),
    "watch": Program("gregale.programs.watch.command", "follow a run while it trains, in the terminal or on a page"),
    "runs": Program("gregale.programs.runs", "list the runs of a folder: how they stand and what they have come to"),
    "import": Program("gregale.programs.importing", "make a model of the Hugging Face hub one to start from"),
    "export": Program("gregale.programs.exporting", "write the model of a run for transformers, vLLM and others"),
    "tokenize": Program("gregale.programs.tokenize", "build the token store of a YAML file ahead of training"),
    "plan": Program(
        "gregale.programs.plan.command", "show memory, collectives and bytes of a YAML file without training"
    ),
    "report": Program("gregale.programs.report.command", "write a page of runs: curves, rounds, samples, differences"),
    "simulate": Program(
        "gregale.programs.simulate", "tell which bandwidth each method needs, from a model of the timeline"
    ),
}

_OUT_OF_MEMORY = re.compile(r"RESOURCE_EXHAUSTED|[Oo]ut of memory")
_ASKED = re.compile(r"allocat\w+ (\d+) bytes")


def main(arguments: Sequence[str] | None = None, programs: Mapping[str, Program] = PROGRAMS) -> int:
    """Runs a command; returns its exit code.

    A user's mistake, and a disk that does not take or give a file, is one paragraph on standard error and exit code 2
    (75 if the same command may work later).
    """
    _silence_deprecations()
    _write_what_the_locale_lacks()
    try:
        code = _dispatch(_in_unicode(sys.argv[1:] if arguments is None else arguments), programs)
        sys.stdout.flush()  # here, where a failure is still handled
        return code
    except UserError as error:
        _say(f"gregale: error: {error}")
        return error.exit_code
    except BrokenPipeError:
        if not _has_lost_its_reader(sys.stdout):
            raise
        abandon(sys.stdout)  # the reader of a pipe has seen enough (`| head`)
        return 0
    except OSError as error:
        if error.errno not in OF_THE_DISK:
            raise
        ResilientStream(sys.stdout).flush()
        _say(f"gregale: error: {_of_the_disk(error)}")
        return 2
    except KeyboardInterrupt:
        _say("gregale: interrupted")
        return 130
    except Exception as error:
        if (mistake := _of_the_machine(error)) is None:
            raise
        _say(f"gregale: error: {mistake}")
        return 2


def _of_the_disk(error: OSError) -> str:
    place = error.filename2 or error.filename
    what = f"{place} could not be read or written" if place else "a file could not be written"
    return (
        f"{what}: {error.strerror}. Make room for it or give access to it, and give the same command again; a run goes "
        f"on from its newest checkpoint."
    )


def _say(text: str) -> None:
    """Writes a line to standard error, if anybody is there to read it."""
    stream = ResilientStream(sys.stderr)
    stream.write(f"{printable(text)}\n")
    stream.flush()


def _has_lost_its_reader(stream: TextIO) -> bool:
    """Whether a stream is a pipe or a socket that nobody reads any more."""
    watched = select.poll()
    watched.register(stream.fileno(), 0)
    return bool(watched.poll(0))


def _dispatch(arguments: list[str], programs: Mapping[str, Program]) -> int:
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        print(_overview(programs))
        return 0
    name, *rest = arguments
    if name == "--version":
        print(f"gregale {gregale.__version__}")
        return 0
    if name not in programs:
        near = get_close_matches(name, programs, n=1)
        hint = f" Did you mean `{near[0]}`?" if near else ""
        raise UserError(f"there is no command `{name}`.{hint} Commands: {', '.join(programs)}.")
    program = programs[name]
    # Late, so that help and mistakes cost no import of JAX.
    with nullcontext() if program.module in sys.modules else _keeping_all():
        from gregale.cli.invocation import command_help, invoke

        command = import_module(program.module).COMMAND
    for place, word in enumerate(rest):
        if word in ("-h", "--help"):
            print(command_help(name, program.summary, command, next(iter(rest[place + 1 :]), None)), end="")
            return 0
    return invoke(name, command, rest)


@contextmanager
def _keeping_all() -> Iterator[None]:
    """For imports: to look for garbage among what stays would take a fifth of their time, and of JAX's tracing."""
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


def _overview(programs: Mapping[str, Program]) -> str:
    lines = [
        f"gregale {gregale.__version__}: train language models on accelerators joined by links of very different speed",
        "",
        "usage: gregale COMMAND [ARGUMENTS] [--key value ...]",
        "",
        *(f"  {name:<11}{program.summary}" for name, program in programs.items()),
        "",
        "`gregale COMMAND --help` lists the command's options and every key of its configuration.",
    ]
    width = shutil.get_terminal_size((120, 24)).columns
    return "\n".join(
        textwrap.fill(line, width, subsequent_indent=" " * 13 if line[:1] == " " else "") for line in lines
    )


def _write_what_the_locale_lacks() -> None:
    """A character that the terminal's encoding lacks is shown as `?`: no run ends because of it."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")


def _in_unicode(arguments: Sequence[str]) -> list[str]:
    """Arguments as the UTF-8 that was typed, where the locale made half characters of it; no other bytes are text."""
    try:
        return [word if word.isascii() else _repaired(word) for word in arguments]
    except UnicodeDecodeError as error:
        raise UserError(f"the argument {error.object!r} is not UTF-8 at byte {error.start}.") from None


def _repaired(word: str) -> str:
    is_half = any("\udc80" <= character <= "\udcff" for character in word)
    return os.fsencode(word).decode("utf-8") if is_half else word


def _of_the_machine(error: Exception) -> str | None:
    """What to say where not the configuration alone but the machine made a command impossible; None: a bug of ours."""
    if isinstance(error, UnicodeEncodeError):
        return (
            f"the encoding {error.encoding} of this locale cannot write {error.object[error.start : error.end]!r}. "
            "With PYTHONUTF8=1 in the environment, or LC_ALL=C.UTF-8, it is written as UTF-8."
        )
    # By name and text: JAX gives its runtime's errors no classes of their own, and is not imported for a message.
    if isinstance(error, MemoryError) or (
        type(error).__name__ == "JaxRuntimeError" and _OUT_OF_MEMORY.search(str(error))
    ):
        asked = _ASKED.search(str(error))
        return (
            f"the memory does not suffice{f': {int(asked[1]):,} bytes were asked for at once' if asked else ''}. "
            "`gregale plan CONFIG` tells what a step takes; more devices, more batch.microbatches, smaller batches or "
            "a smaller model take less."
        )
    return None


def _silence_deprecations() -> None:
    """Third parties' deprecations are for their developers; `-W` or PYTHONWARNINGS shows them."""
    if not sys.warnoptions:
        for category in (DeprecationWarning, PendingDeprecationWarning, FutureWarning):
            warnings.simplefilter("ignore", category)
