"""Provides `gregale new`, which writes a starter configuration: a copy of an annotated example."""

from dataclasses import dataclass, field
from importlib.resources import files
from pathlib import Path

from gregale.data.sources.base import expand
from gregale.errors import UserError
from gregale.programs.command import Command
from gregale.settings import Settings, setting
from gregale.storage.paths import create
from gregale.streams import say

STARTERS = {
    path.name.removesuffix(".yaml"): path
    for path in sorted((files("gregale") / "starters").iterdir(), key=lambda path: path.name)
    if path.name.endswith(".yaml")
}


@dataclass(frozen=True)
class NewOptions(Settings):
    earlier = {"from": "starter"}  # noqa: RUF012 -- no field of a class can have this name

    file: str = field(metadata={"help": "the YAML file to write"})
    starter: str = setting("quickstart", "the example to copy; also `--from`", choices=tuple(STARTERS))


def main(options: NewOptions) -> int:
    path = Path(expand(options.file, "file"))
    if not path.parent.is_dir():
        raise UserError(f"file: {path} cannot be written, there is no folder {path.parent}.")
    if not create(path, STARTERS[options.starter].read_bytes()):
        raise UserError(f"file: {path} exists already, and would be overwritten. Give another name, or remove it.")
    say(f"{path}: a copy of the example {options.starter}. Its first lines say what it trains and on which devices.")
    return 0


COMMAND = Command(main=main, options=NewOptions, positional=("file",))
