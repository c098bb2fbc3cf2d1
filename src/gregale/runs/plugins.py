"""Import of plugins: the user's modules, which register choices (models, optimizers, sources, callbacks and so on).

plugins: [my_package.my_module]
"""

import hashlib
import importlib
import inspect
import os
import sys
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from types import CodeType

from gregale.errors import UserError, own_frame
from gregale.settings import Settings, setting, shown
from gregale.settings.decoding import known_entries
from gregale.storage import ObjectPath, StoragePath

KEY = "plugins"
LONGEST_MESSAGE = 300
TRUSTED = (0,)  # users whose files may name code: root can run any code anyway


@dataclass(frozen=True)
class PluginOptions(Settings):
    """The option `--plugins` of commands that read the configuration of a run."""

    plugins: list[str] = setting(list, "modules to import first, for a run with plugins")


def import_plugins(names: Sequence[str], origin: str = "") -> None:
    """Import modules in order, before a configuration that uses their choices is decoded.

    The current folder is searched too, after all others, so that none of its files hides an installed package.

    - `origin`: where the names stand, for messages

    Raises `UserError` for a module that does not exist, raises an exception, uses a device, or misspells a method.
    """
    before_all = sys.modules.keys() - names
    folder = str(Path.cwd())
    if names and folder not in sys.path:
        sys.path.append(folder)
    importlib.invalidate_caches()  # a notebook may just have written a module
    for name in names:
        if name in sys.modules:
            continue
        if name.endswith(".py") or not all(part.isidentifier() for part in name.split(".")):
            raise UserError(
                f"`{KEY}`{origin}: {shown(name)} is no name of a module. Write it as `import` has it, without .py and "
                "with dots between folders: my_package.my_module."
            )
        before = _uses_devices()
        try:
            importlib.import_module(name)
        except (Exception, SystemExit) as error:
            raise UserError(f"`{KEY}`{origin}: {_problem(name, error, folder)}") from error
        if _uses_devices() and not before:
            raise UserError(
                f"`{KEY}`{origin}: {shown(name)} computes with JAX when it is imported, before the devices are set up. "
                "Make its arrays in a function."
            )
        known_entries.cache_clear()
    for name in sorted(sys.modules.keys() - before_all):
        for cls in [*getattr(sys.modules[name], "__dict__", {}).values()]:
            if issubclass(type(cls), type) and cls.__module__ == name and not name.startswith("gregale."):
                _check_methods(cls, origin)


def elsewhere(path: StoragePath) -> str | None:
    """Return why a configuration file may not choose code that this process runs; None for the user's own file."""
    if isinstance(path, ObjectPath):
        return "it is in a store"
    owner, user = path.stat().st_uid, os.geteuid()
    return None if owner in (user, *TRUSTED) else f"it belongs to another user ({owner}, you are {user})"


def check_imported(names: Sequence[str], path: StoragePath, why: str) -> None:
    """Raise `UserError` if a file from elsewhere names a module that this process has not imported already.

    - `why`: of `elsewhere`
    """
    if missing := [name for name in names if name not in sys.modules]:
        raise UserError(
            f"{path} names plugins ({', '.join(missing)}), which are code, and {why}. None of them was imported. To "
            f"import your own modules of these names, give them: `--{KEY} {','.join(names)}`."
        )


def code_digests(names: Sequence[str]) -> dict[str, str]:
    """Return a digest of the file of each module; empty for a module without one."""
    files = {name: getattr(sys.modules.get(name), "__file__", None) for name in names}
    return {
        name: hashlib.sha256(Path(file).read_bytes()).hexdigest()[:12] if file else "" for name, file in files.items()
    }


def _uses_devices() -> bool:
    """Return whether JAX has started a backend in this process; JAX has no public function for it."""
    bridge = sys.modules.get("jax._src.xla_bridge")
    return bridge is not None and bridge.backends_are_initialized()


def _methods(cls: type) -> dict[str, CodeType]:
    """Return the code of the public functions and properties in the body of a class."""
    functions = (inspect.unwrap(getattr(each, "fget", each)) for each in vars(cls).values())
    codes = {code.co_name: code for each in functions if (code := getattr(each, "__code__", None))}
    return {n: code for n, code in codes.items() if code.co_qualname == f"{cls.__qualname__}.{n}" and n[0] != "_"}


def _check_methods(cls: type, origin: str) -> None:
    """Raise `UserError` for a method that overrides nothing and has nearly the name of a method of Gregale's bases."""
    bases = [each for each in cls.__mro__[1:] if each.__module__.startswith("gregale.")]
    known = {name: code for each in bases for name, code in _methods(each).items() if name not in vars(cls)}
    for name, code in _methods(cls).items() if bases else ():
        for close in get_close_matches(name, known, 1, 0.75):  # `inti` and `init` have 0.75
            plural = name.removesuffix("s") == close.removesuffix("s")  # no mistake without arguments
            if not hasattr(super(cls, cls), name) and (not plural or code.co_argcount == known[close].co_argcount > 1):
                raise UserError(
                    f"`{KEY}`{origin}: {cls.__name__}.{name} ({code.co_filename}, line {code.co_firstlineno}) "
                    f"overrides no inherited method. Write `{close}`, or `_{name}` for a function of your own."
                )


def _problem(name: str, error: BaseException, folder: str) -> str:
    if isinstance(error, ModuleNotFoundError) and error.name and f"{name}.".startswith(f"{error.name}."):
        return (
            f"there is no module {shown(name)}; it was looked for in the installed packages and in {folder}. A file "
            f"my_module.py in that folder is `{KEY}: [my_module]`."
        )
    if isinstance(error, SyntaxError):
        file, line = error.filename, error.lineno
    else:
        frame = own_frame(error)
        file, line = (frame.filename, frame.lineno) if frame else (None, None)
    place = f" ({file}, line {line})" if file else ""
    message = textwrap.shorten(str(error), LONGEST_MESSAGE, placeholder="...")
    return f"{shown(name)} could not be imported{place}: {type(error).__name__}{f': {message}' if message else '.'}"
