"""Provides the declaration by which the command line runs a program."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Command:
    """Declaration of a program; each command module in `gregale.programs` has one as `COMMAND`.

    - `reads`: the configuration keys that the program reads, or their common prefixes; empty: all keys. Help shows
      only these keys. The YAML file may have keys of other programs
    - `plugins`: whether `--plugins` imports modules first, for the configuration of a run
    - `positional`: names of the arguments without a `--`: `("config",)` is the YAML file, all others are fields of
      `options`. A field with a default is optional. The last field may be a tuple, which takes all remaining words
    - `aliases`: further names of options, each with its field: `from` is no name that a field can have
    """

    main: Callable[..., int]  # takes the options, and the configuration if there is one; returns the exit code
    options: type  # dataclass of the program's own options (`--fresh`)
    config: type | None = None  # dataclass of the YAML file, whose dotted keys can be overridden; None: it reads none
    reads: tuple[str, ...] = ()
    plugins: bool = False
    positional: tuple[str, ...] = ()
    aliases: Mapping[str, str] = field(default_factory=dict)
