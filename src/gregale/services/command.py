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
    - `positional`: names of the arguments without a `--`: `("config",)` is the YAML file, all others are fields of
      `options`, which may be left out if they have a default
    """

    main: Callable[..., int]
    options: type
    config: type | None = None
    positional: tuple[str, ...] = ()
