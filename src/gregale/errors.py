"""The one exception for a mistake that the user can mend."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager


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
