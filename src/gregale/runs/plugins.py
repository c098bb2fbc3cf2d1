"""Import of plugins: the user's modules, which register choices (models, optimizers, sources, callbacks and so on).

plugins: [my_package.my_module]
"""

from __future__ import annotations

import hashlib
import importlib
import sys
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from gregale.errors import UserError
from gregale.settings import Settings, setting, shortened, shown

KEY = "plugins"


@dataclass(frozen=True)
class PluginOptions(Settings):
    """The option `--plugins` of commands that read the configuration of a run."""

    plugins: list[str] = setting(list, "modules to import first, for a run with plugins")


def import_plugins(names: Sequence[str], origin: str = "") -> None:
    """Import modules in order, before a configuration that uses their choices is decoded.

    The current folder is searched too, after all others, so that none of its files hides an installed package.

    - `origin`: where the names stand, for messages

    Raises `UserError` for a module that does not exist or raises an exception.
    """
    folder = str(Path.cwd())
    if names and folder not in sys.path:
        sys.path.append(folder)
    for name in names:
        try:
            importlib.import_module(name)
        except Exception as error:
            raise UserError(f"`{KEY}`{origin}: {_problem(name, error, folder)}") from error


def check_imported(names: Sequence[str], run: str, why: str) -> None:
    """Raise `UserError` if a run from elsewhere would import a module that this process has not imported already.

    - `why`: why the run is from elsewhere
    """
    if missing := [name for name in names if name not in sys.modules]:
        raise UserError(
            f"{run} uses plugins ({', '.join(missing)}), which are code, and {why}. Nothing of them was imported. To "
            f"import your own modules of these names, give them: `--{KEY} '[{', '.join(names)}]'`."
        )


def code_digests(names: Sequence[str]) -> dict[str, str]:
    """Return a digest of the file of each module; empty for a module without one."""
    files = {name: getattr(sys.modules[name], "__file__", None) for name in names}
    return {
        name: hashlib.sha256(Path(file).read_bytes()).hexdigest()[:12] if file else "" for name, file in files.items()
    }


def _problem(name: str, error: Exception, folder: str) -> str:
    if isinstance(error, ModuleNotFoundError) and error.name and f"{name}.".startswith(f"{error.name}."):
        return (
            f"there is no module {shown(name)}; it was looked for in the installed packages and in {folder}. A file "
            f"my_module.py in that folder is `{KEY}: [my_module]`."
        )
    if isinstance(error, TypeError | ValueError) and (name.startswith(".") or not name):
        return f"{shown(name)} is no name of a module; write it as `import` has it: my_package.my_module."
    frames = [each for each in traceback.extract_tb(error.__traceback__) if "importlib" not in each.filename]
    last = [each for each in frames if each.filename != __file__ and "/gregale/" not in each.filename]
    place = f" ({last[-1].filename}, line {last[-1].lineno})" if last else ""
    return f"{shown(name)} could not be imported{place}: {type(error).__name__}: {shortened(str(error))}."
