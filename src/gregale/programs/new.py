"""Provides `gregale new`, which writes a starter configuration: a copy of an annotated example."""

from dataclasses import dataclass, field
from importlib.resources import files

from gregale.data.sources.base import expand
from gregale.errors import UserError
from gregale.programs.command import Command
from gregale.settings import Settings, setting
from gregale.streams import say

FILES = (files("gregale") / "starters").iterdir()
STARTERS = {path.name.removesuffix(".yaml"): path for path in FILES if path.name.endswith(".yaml")}


@dataclass(frozen=True)
class NewOptions(Settings):
    file: str = field(metadata={"help": "the YAML file to write"})
    starter: str = setting("quickstart", "the example to copy; also `--from`", choices=tuple(sorted(STARTERS)))


def main(options: NewOptions) -> int:
    path = expand(options.file, "file")
    try:
        with open(path, "xb") as file:
            file.write(STARTERS[options.starter].read_bytes())
    except OSError as error:
        raise UserError(f"file: {path} cannot be made: {error.strerror}. Give another name.") from None
    say(f"{path}: a copy of the example {options.starter}. Its first lines say what it trains and on which devices.")
    return 0


COMMAND = Command(main=main, options=NewOptions, positional=("file",), aliases={"from": "starter"})
