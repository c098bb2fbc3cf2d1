"""What a program declares so that the command line can run it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Command:
    """A program: each module in `gregale.programs` that is a command has one of these as `COMMAND`.

    - `main`: called with the options, and with the configuration if there is one; returns the exit code
    - `options`: dataclass of the program's own options (`--fresh`)
    - `config`: dataclass of the YAML file, whose dotted keys can be overridden; None if the program reads none
    - `reads`: the keys of the configuration that the program reads, or what they lie below; empty: all of them. Help
      shows only these; the YAML file may have the others too, which are another program's
    - `positional`: names of the arguments without a `--`: `("config",)` is the YAML file, all others are fields of
      `options`, which may be left out if they have a default. The last one may be a tuple, of all words that are left
    """

    main: Callable[..., int]
    options: type
    config: type | None = None
    reads: tuple[str, ...] = ()
    positional: tuple[str, ...] = ()
