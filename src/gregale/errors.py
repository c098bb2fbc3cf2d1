"""The one exception for a mistake that the user can mend, and the hint for a missing extra."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


class UserError(ValueError):
    """A mistake in a user's configuration, data or command.

    The message is one clear paragraph: the key or the file, what was found, the arithmetic where there is any, and
    what would work. The command line prints it without a traceback and exits with `exit_code`.
    """

    exit_code = 2


class Busy(UserError):
    """Another process holds what a command needs. It may give it back, so that the same command works later."""

    exit_code = os.EX_TEMPFAIL


class KeyedError(UserError):
    """A mistake in one key, told by who does not know where in a configuration it stands: `key found rest`.

    - `key`: relative to the class that found it (`warmup`); see `below`
    - `found`: what it is (`is -1`), after which a message may say where it was given
    - `rest`: what is wrong with it, with its punctuation (`; it has to be at least 0.`)
    """

    def __init__(self, key: str, found: str, rest: str):
        super().__init__(f"{key} {found}{rest}")
        self.key, self.found, self.rest = key, found, rest


@contextmanager
def below(prefix: str) -> Iterator[None]:
    """Puts a prefix before the key of a mistake that is found inside: `warmup` becomes `optimizer.schedule.warmup`."""
    try:
        yield
    except KeyedError as error:
        raise KeyedError(f"{prefix}.{error.key}", error.found, error.rest) from None


def install_hint(extra: str) -> str:
    """Return a sentence with the command that installs an extra into the environment of this process.

    The command installs from the clone: an index of Python packages has no release of Gregale, and strangers may
    register its name there.
    """
    clone, python = Path(__file__).parents[2], Path(sys.executable)
    if python.is_relative_to(clone):
        python = python.relative_to(clone)
    command = [str(python), "-m", "pip", "install", "--constraint", "constraints.txt", "--editable", f".[{extra}]"]
    return f"Run `{shlex.join(command)}` in your clone of Gregale."
