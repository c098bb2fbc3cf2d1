"""The exceptions for mistakes that a user can correct, and the installation hint for a missing extra."""

import os
import shlex
import sys
import textwrap
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path


class UserError(ValueError):
    """A mistake in a user's configuration, data or command.

    The message is one clear paragraph: the key or the file, the value, the arithmetic if there is any, and valid
    values. The command line prints the message without a traceback and exits with `exit_code`.
    """

    exit_code = 2


class Mistakes(UserError):
    """All mistakes of a configuration; `lines` has one for each.

    - `found`: texts with key, origin, problem and hint, or errors whose keys have no origin yet
    """

    def __init__(self, found: "Sequence[str | KeyedError]"):
        self.found = found
        several = [f"{len(found)} mistakes:", *(f"  {each}" for each in found)]
        self.lines = several if len(found) > 1 else [str(each) for each in found]
        super().__init__(" ".join(line.strip() for line in self.lines))


def multiples_near(size: int, divisor: int) -> str:
    """Return the positive multiples next to a size, for a message: `8 or 16`."""
    below = size // divisor * divisor
    return f"{below} or {below + divisor}" if below > 0 else f"{divisor}"


class Busy(UserError):
    """Another process holds a resource that the command needs. The same command may work later."""

    exit_code = os.EX_TEMPFAIL


class Interrupted(KeyboardInterrupt):
    """A signal ends the command, which has reported it; the argument is the exit code."""


class KeyedError(UserError):
    """A mistake in one key, raised by a class that does not know its own key; the message is `key found rest`.

    - `key`: relative to the class that raises (`warmup`); see `below`
    - `found`: the value (`is -1`); a message may add its origin after it
    - `rest`: the cause and its punctuation (`; it has to be at least 0.`)
    """

    def __init__(self, key: str, found: str, rest: str):
        super().__init__(f"{key} {found}{rest}")
        self.key, self.found, self.rest = key, found, rest


@contextmanager
def below(prefix: str) -> Iterator[None]:
    """Add a prefix to the key of a `KeyedError` from the block: `warmup` becomes `optimizer.schedule.warmup`."""
    try:
        yield
    except KeyedError as error:
        raise KeyedError(f"{prefix}.{error.key}", error.found, error.rest) from None


@contextmanager
def plugin_errors(what: str, owner: type) -> Iterator[None]:
    """Make a `UserError` of an exception of code that is not Gregale's own, with the line of that code.

    - `what`: the part of the configuration and the method: `callbacks: Norms.on_step`
    - `owner`: the class whose code runs
    """
    try:
        yield
    except Exception as error:
        if isinstance(error, UserError) or owner.__module__.partition(".")[0] == "gregale":
            raise
        raise UserError(f"{what} {_raised(error, own_frame(error))}") from error


def own_code_text(error: Exception) -> str | None:
    """Return the message for an exception of a plugin's code; None for one of other code."""
    frame = own_frame(error)
    return None if frame is None else f"{frame.name} of a plugin {_raised(error, frame)}"


def told(error: Exception) -> str:
    """Return an exception in a line: of a plugin's code with its place, of other code with its type."""
    return own_code_text(error) or f"{type(error).__name__}: {error}"


def own_frame(error: BaseException) -> traceback.FrameSummary | None:
    """Return the innermost frame of an exception that is not of Gregale, an installed package or Python itself."""
    others = (str(Path(__file__).parent), sys.prefix, sys.base_prefix, "<")
    frames = (each for each in traceback.extract_tb(error.__traceback__) if not each.filename.startswith(others))
    return next(reversed([*frames]), None)


def _raised(error: Exception, frame: traceback.FrameSummary | None) -> str:
    place = f" ({frame.filename}, line {frame.lineno})" if frame else ""
    text = textwrap.shorten(str(error), 300, placeholder="...").removesuffix(".")
    return f"raised {type(error).__name__}{place}{': ' if text else ''}{text}."


def install_hint(extra: str) -> str:
    """Return a sentence with the command that installs an extra into the environment of this process.

    The command installs from the clone, or the packages of the extra if Gregale was installed from a wheel. A package
    index has no release of Gregale, and anyone may register its name there.
    """
    clone, python = Path(__file__).parents[2], Path(sys.executable)
    if not (clone / "pyproject.toml").is_file():
        from importlib.metadata import requires  # late, because most processes need no hint

        split = [each.replace("'", '"').partition(f'; extra == "{extra}"') for each in requires("gregale") or []]
        packages = [package for package, marker, _ in split if marker]
        return f"Run `{shlex.join([str(python), '-m', 'pip', 'install', *packages])}`."
    if python.is_relative_to(clone):
        python = python.relative_to(clone)
    command = [str(python), "-m", "pip", "install", "--constraint", "constraints.txt", "--editable", f".[{extra}]"]
    return f"Run `{shlex.join(command)}` in your clone of Gregale."
