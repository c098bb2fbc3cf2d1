"""The command line `gregale`. It imports a program only when a command needs it."""

import gc
import io
import os
import re
import select
import shutil
import signal
import sys
import textwrap
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from difflib import get_close_matches
from glob import glob
from importlib import import_module
from importlib.metadata import entry_points
from importlib.util import find_spec
from threading import enumerate as enumerate_threads
from typing import TYPE_CHECKING, TextIO

from gregale.atomic_files import DISK_ERRORS
from gregale.errors import Interrupted, Mistakes, UserError, own_code_text
from gregale.streams import LEFT_AT_EXIT, ResilientStream, abandon, exit_at_once, say_beside
from gregale.version import __version__

if TYPE_CHECKING:
    from gregale.programs.command import Command


@dataclass(frozen=True)
class Program:
    """An entry of the table of commands: the program's module, a summary, and the name of the module's `Command`."""

    module: str
    summary: str
    name: str = "COMMAND"

    @property
    def command(self) -> "Command":
        """The program's declaration; its module is imported at the first use."""
        return getattr(import_module(self.module), self.name)


NAMES_ELSEWHERE = {  # of commands in other projects
    "chat": "sample --chat",
    "generate": "sample",
    "pretrain": "train",
    "finetune": "train",
    "fit": "train",
    "evaluate": "eval",
    "convert": "import",
    "merge": "export",
    "init": "new",
}
PROGRAMS = {
    "new": Program("gregale.programs.new", "write a starter configuration"),
    "train": Program("gregale.programs.train.command", "train a language model from a YAML file; run again to resume"),
    "island": Program("gregale.islands.run", "train as one of several islands, which may join and leave"),
    "islands": Program("gregale.islands.local_fleet", "train as several islands on this machine, in one view"),
    "islands key": Program("gregale.islands.keys", "make the key of one island, from the fleet's token", "KEY"),
    "islands revoke": Program("gregale.islands.keys", "end the keys of one island", "REVOKE"),
    "lighthouse": Program("gregale.islands.lighthouse", "run the coordinator for islands"),
    "sample": Program("gregale.programs.sample", "continue prompts with the model of a run, or converse with it"),
    "eval": Program("gregale.programs.evaluate", "measure a model: loss and bits per byte of text, and tasks"),
    "watch": Program("gregale.programs.watch", "follow a run while it trains, in the terminal or on a page"),
    "runs": Program("gregale.programs.runs", "list runs with state and results"),
    "import": Program("gregale.programs.importing", "import a model of the Hugging Face hub to start a run from"),
    "export": Program("gregale.programs.exporting", "write the model of a run for transformers, vLLM and others"),
    "tokenize": Program("gregale.programs.tokenize", "build the token store of a YAML file ahead of training"),
    "plan": Program(
        "gregale.programs.plan.command", "show memory, collectives and bytes of a YAML file without training"
    ),
    "report": Program("gregale.programs.report", "write a page of runs: curves, rounds, samples, differences"),
    "simulate": Program("gregale.programs.simulate", "estimate the bandwidth that each method needs"),
}


def register_command(name: str, program: Program) -> None:
    """Add a plugin's command, of one word or two."""
    if name in PROGRAMS:
        raise ValueError(f"Cannot register the command {name}: the name is taken")
    PROGRAMS[name] = program


YAML = (".yaml", ".yml")
_OUT_OF_MEMORY = re.compile(r"RESOURCE_EXHAUSTED|[Oo]ut of memory")
_REQUESTED_BYTES = re.compile(r"allocat\w+ (\d+) bytes")


def main(arguments: Sequence[str] | None = None, programs: Mapping[str, Program] = PROGRAMS) -> int:
    """Run a command; return its exit code.

    A user's mistake or a disk error gives one paragraph on standard error and exit code 2 (75 if the same command may
    work later). Without `arguments` the process's own are read, and Ctrl-C ends the process once the command has ended.
    The end of the process does not wait for threads of the name `LEFT_AT_EXIT`.
    """
    code = _run(arguments, programs)
    if arguments is None and any(thread.name == LEFT_AT_EXIT for thread in enumerate_threads()):
        exit_at_once(code)
    return code


def is_without_accelerator() -> bool:
    """Return whether libtpu is installed on a machine without a TPU, and no other accelerator is JAX's.

    At each start libtpu would print what it lacks, before JAX takes the processor.
    """
    chips = (*glob("/dev/accel*"), *glob("/dev/vfio/[0-9]*"))
    others = find_spec("jax_plugins") or list(entry_points(group="jax_plugins"))
    return find_spec("libtpu") is not None and not chips and not others


def _run(arguments: Sequence[str] | None, programs: Mapping[str, Program]) -> int:
    _silence_deprecations()
    if arguments is None and is_without_accelerator():
        os.environ.setdefault("JAX_PLATFORMS", "cpu")
    _replace_unencodable()
    try:
        with _stops_reported() if arguments is None else nullcontext():
            run = _dispatch(_decoded(sys.argv[1:] if arguments is None else arguments), programs)
        code = run()
        sys.stdout.flush()  # here, where a failure is still handled
        return code
    except UserError as error:
        first, *others = error.lines if isinstance(error, Mistakes) else [str(error)]
        for line in (f"gregale: error: {first}", *others):
            say_beside(line)
        return error.exit_code
    except BrokenPipeError:
        if not _is_without_reader(sys.stdout):
            raise
        abandon(sys.stdout)  # the reader of a pipe has ended (`| head`)
        return 0
    except OSError as error:
        if error.errno not in DISK_ERRORS:
            raise
        ResilientStream(sys.stdout).flush()
        say_beside(f"gregale: error: {_disk_error_text(error)}")
        return 2
    except Interrupted as error:
        return error.args[0]
    except KeyboardInterrupt:
        say_beside("gregale: interrupted")
        return 130
    except Exception as error:
        if (message := _machine_error_text(error) or own_code_text(error)) is None:
            raise
        say_beside(f"gregale: error: {message}")
        return 2
    finally:
        if arguments is None and signal.getsignal(signal.SIGINT) == signal.default_int_handler:
            signal.signal(signal.SIGINT, signal.SIG_DFL)  # no traceback of whatever Python runs at its end


def _disk_error_text(error: OSError) -> str:
    path = error.filename2 or error.filename
    problem = f"{path} could not be read or written" if path else "a file could not be written"
    return (
        f"{problem}: {error.strerror}. Free space or grant access, then run the same command again; a run continues "
        f"from its newest checkpoint."
    )


def _is_without_reader(stream: TextIO) -> bool:
    """Return whether a stream is a pipe or a socket whose reader has closed it."""
    poll = select.poll()
    poll.register(stream.fileno(), 0)
    return bool(poll.poll(0))


@contextmanager
def _stops_reported() -> Iterator[None]:
    """Report SIGTERM and SIGHUP, where nobody handles or ignores them, and end the process.

    This is for imports and the configuration. A program decides itself what a signal means to it, and a handler in
    Python would wait for a compiler.
    """

    def end(number: int, _: object) -> None:
        say_beside(f"gregale: {signal.Signals(number).name}: there is nothing to save, and the command ends.")
        exit_at_once(128 + number)

    caught = [each for each in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(each) == signal.SIG_DFL]
    for number in caught:
        signal.signal(number, end)
    try:
        yield
    finally:
        for number in caught:
            if signal.getsignal(number) == end:  # not a plugin's
                signal.signal(number, signal.SIG_DFL)


def _dispatch(arguments: list[str], programs: Mapping[str, Program]) -> Callable[[], int]:
    """Return what the arguments ask for, ready to run; it returns the exit code. The help is printed at once."""
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        print(_overview(programs))
        return lambda: 0
    if arguments[0] == "--version":
        print(f"gregale {__version__}")
        return lambda: 0
    name, rest = split_name(arguments, programs)
    if name not in programs and any(each.startswith("--plugins") or each.endswith(YAML) for each in rest):
        _import_plugins(rest)
        name, rest = split_name(arguments, programs)
    if name not in programs:
        near = [NAMES_ELSEWHERE[name]] if name in NAMES_ELSEWHERE else get_close_matches(name, programs, n=1)
        hint = f" Did you mean `{near[0]}`?" if near else ""
        raise UserError(f"there is no command `{name}`.{hint} Commands: {', '.join(programs)}.")
    program = programs[name]
    # Imported late, so that help and errors need no import of JAX.
    with nullcontext() if program.module in sys.modules else _without_gc():
        from gregale.cli.invocation import bound, command_help

        command = program.command
    for index, word in enumerate(rest):
        if word in ("-h", "--help"):
            topic = next(iter(rest[index + 1 :]), None)
            print(command_help(name, program.summary, command, topic, rest[:index]), end="")
            return lambda: 0
    return bound(name, command, rest)


def _import_plugins(arguments: Sequence[str]) -> None:
    """Import the plugins that `--plugins` or a YAML file among the arguments names: one may register the command."""
    from gregale.runs.parsing import load_plugins, split_arguments

    words, pairs = split_arguments(arguments)
    load_plugins([word for word in words if word.endswith(YAML)], pairs)


def split_name(arguments: Sequence[str], programs: Mapping[str, Program] = PROGRAMS) -> tuple[str, list[str]]:
    """Return the name of a command, of one word or two, and its arguments."""
    count = 2 if " ".join(arguments[:2]) in programs else 1
    return " ".join(arguments[:count]), list(arguments[count:])


@contextmanager
def _without_gc() -> Iterator[None]:
    """Disable garbage collection, which takes a fifth of the import time, then freeze the imported objects."""
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


def _overview(programs: Mapping[str, Program]) -> str:
    lines = [
        f"gregale {__version__}: train language models on accelerators joined by links of very different speed",
        "",
        "usage: gregale COMMAND [ARGUMENTS] [--key value ...]",
        "",
        *(f"  {name:<16}{program.summary}" for name, program in programs.items()),
        "",
        "`gregale COMMAND --help` lists the command's options and every key of its configuration.",
    ]
    width = shutil.get_terminal_size((120, 24)).columns
    return "\n".join(
        textwrap.fill(line, width, subsequent_indent=" " * 18 if line[:1] == " " else "") for line in lines
    )


def _replace_unencodable() -> None:
    """Make standard output and error write `?` for a character that their encoding lacks, so that no run ends."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")


def _decoded(arguments: Sequence[str]) -> list[str]:
    """Return the arguments decoded as UTF-8, where the locale produced surrogates; raise `UserError` if invalid."""
    try:
        return [
            os.fsencode(word).decode("utf-8") if any("\udc80" <= each <= "\udcff" for each in word) else word
            for word in arguments
        ]
    except UnicodeDecodeError as error:
        raise UserError(f"the argument {error.object!r} is not UTF-8 at byte {error.start}.") from None


def _machine_error_text(error: Exception) -> str | None:
    """Return the message for an error of the machine (memory, encoding); None for a defect of this program."""
    if isinstance(error, UnicodeEncodeError):
        return (
            f"the encoding {error.encoding} of this locale cannot write {error.object[error.start : error.end]!r}. "
            "With PYTHONUTF8=1 in the environment, or LC_ALL=C.UTF-8, it is written as UTF-8."
        )
    # Recognised by name and text: JAX has no class for this runtime error, and a message must not import JAX.
    if isinstance(error, MemoryError) or (
        type(error).__name__ == "JaxRuntimeError" and _OUT_OF_MEMORY.search(str(error))
    ):
        asked = _REQUESTED_BYTES.search(str(error))
        return (
            f"the memory does not suffice{f': {int(asked[1]):,} bytes were asked for at once' if asked else ''}. "
            "`gregale plan CONFIG` tells the memory of a step; more devices, more batch.microbatches, smaller batches "
            "or a smaller model need less."
        )
    return None


def _silence_deprecations() -> None:
    """Hide deprecation warnings of third-party packages; `-W` or PYTHONWARNINGS shows them."""
    if not sys.warnoptions:
        for category in (DeprecationWarning, PendingDeprecationWarning, FutureWarning):
            warnings.simplefilter("ignore", category)
