"""The command line `gregale`. Programs are imported only when they are chosen."""

from __future__ import annotations

import select
import sys
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from importlib import import_module
from typing import TextIO

import gregale
from gregale.errors import UserError
from gregale.files import OF_THE_DISK
from gregale.streams import LastingStream, abandon


@dataclass(frozen=True)
class Program:
    """A line of the table of commands: where the program is (a module with a `COMMAND`) and what it does."""

    module: str
    summary: str


PROGRAMS = {
    "train": Program("gregale.programs.train.command", "train a language model from a YAML file; run again to resume"),
    "sample": Program("gregale.programs.sample", "continue a prompt with the model of a run"),
    "eval": Program("gregale.programs.evaluate", "measure a run's held-out loss and bits per byte"),
    "tokenize": Program("gregale.programs.tokenize", "build the token store of a YAML file ahead of training"),
    "plan": Program(
        "gregale.programs.plan.command", "show memory, collectives and bytes of a YAML file without training"
    ),
    "simulate": Program(
        "gregale.programs.simulate", "tell which bandwidth each method needs, from a model of the timeline"
    ),
}


def main(arguments: Sequence[str] | None = None, programs: Mapping[str, Program] = PROGRAMS) -> int:
    """Runs a command; returns its exit code.

    A user's mistake, and a disk that does not take or give a file, is one paragraph on standard error and exit code 2.
    """
    _silence_deprecations()
    try:
        code = _dispatch(list(sys.argv[1:] if arguments is None else arguments), programs)
        sys.stdout.flush()  # here, where a failure is still handled
        return code
    except UserError as error:
        _say(f"gregale: error: {error}")
        return 2
    except BrokenPipeError:
        if not _has_lost_its_reader(sys.stdout):
            raise
        abandon(sys.stdout)  # the reader of a pipe has seen enough (`| head`)
        return 0
    except OSError as error:
        if error.errno not in OF_THE_DISK:
            raise
        LastingStream(sys.stdout).flush()
        _say(f"gregale: error: {_of_the_disk(error)}")
        return 2
    except KeyboardInterrupt:
        _say("gregale: interrupted")
        return 130


def _of_the_disk(error: OSError) -> str:
    place = error.filename2 or error.filename
    what = f"{place} could not be read or written" if place else "a file could not be written"
    return (
        f"{what}: {error.strerror}. Make room for it or give access to it, and give the same command again; a run goes "
        f"on from its newest checkpoint."
    )


def _say(text: str) -> None:
    """Writes to standard error, if anybody is there to read it."""
    stream = LastingStream(sys.stderr)
    stream.write(f"{text}\n")
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
    # Late, so that help and mistakes cost no import of JAX.
    from gregale.cli.invocation import command_help, invoke

    program = programs[name]
    command = import_module(program.module).COMMAND
    for place, word in enumerate(rest):
        if word in ("-h", "--help"):
            print(command_help(name, program.summary, command, next(iter(rest[place + 1 :]), None)), end="")
            return 0
    return invoke(name, command, rest)


def _overview(programs: Mapping[str, Program]) -> str:
    lines = [
        f"gregale {gregale.__version__}: train language models on accelerators joined by links of very different speed",
        "",
        "usage: gregale COMMAND [ARGUMENTS] [--key value ...]",
        "",
        *(f"  {name:<10}{program.summary}" for name, program in programs.items()),
        "",
        "`gregale COMMAND --help` lists the command's options and every key of its configuration.",
    ]
    return "\n".join(lines)


def _silence_deprecations() -> None:
    """Third parties' deprecations are for their developers; `-W` or PYTHONWARNINGS shows them."""
    if not sys.warnoptions:
        for category in (DeprecationWarning, PendingDeprecationWarning, FutureWarning):
            warnings.simplefilter("ignore", category)
