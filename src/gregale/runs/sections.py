"""Sections of a run's configuration that guests and plugins register, and what general code asks of them.

`section_classes` has them, and `add_section` makes them fields of the configuration. A section that joins the run with
other runs over a network (`joins`) writes the entry `SECTION: {"complete": ..., "stage": ...}` into the metadata of its
checkpoints: whether all runs are complete, and the number of the stage.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import make_dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any, ClassVar, Self

from gregale.settings import Settings, setting
from gregale.settings.decoding import types_of

if TYPE_CHECKING:
    from gregale.cost.roofline import Roofline
    from gregale.methods.config import MethodContext, Methods, SyncConfig
    from gregale.methods.method import Method
    from gregale.terminal import Console


class JoiningCosts(ABC):
    """What it costs to join a run with others, besides the steps of the run."""

    @abstractmethod
    def device_bytes_in_flight(self) -> int:
        """Return the maximum of additional memory on a device."""

    @abstractmethod
    def to_dict(self, bound: "Roofline", gbit_per_second: float | None) -> dict[str, Any]:
        """Return all estimates for JSON.

        - `gbit_per_second`: the requested link of one host, if any
        """


class Section(Settings):
    """The base of registered sections. By default a section changes nothing in a run.

    - `key`, `help`: its key in the configuration, and a line about it
    - `joining_key`: the key below it that has a value if it joins the run with others
    - `naming_keys`: keys that name a run, in which runs differ anyway
    - `host_keys`: keys in which the processes of a run may differ
    - `run_keys`: keys of the configuration that no stage can change if it joins the run with others
    - `costs_key`, `costs_note`: the key of its costs in the report of `gregale plan`, and a note beside them
    """

    key: ClassVar[str] = ""
    help: ClassVar[str] = ""
    joining_key: ClassVar[str] = ""
    naming_keys: ClassVar[tuple[str, ...]] = ()
    host_keys: ClassVar[tuple[str, ...]] = ()
    run_keys: ClassVar[tuple[str, ...]] = ()
    costs_key: ClassVar[str] = ""
    costs_note: ClassVar[str] = ""

    @property
    def joins(self) -> bool:
        """Whether it joins the run with others over a network: each has its own mesh and makes its own steps."""
        return bool(self.joining_key) and vars(self)[self.joining_key] is not None

    def check_alone(self) -> None:
        """Raise `UserError` if `gregale train` cannot train the run."""

    def check_stages(self, config: Any, methods: Sequence["Method"]) -> None:
        """Raise `UserError` if it cannot join a run of these stages; `methods`: the method of each."""

    def build(self, sync: "SyncConfig", parts: "MethodContext") -> "Methods":
        """Return the methods of the run."""
        return sync.build(parts)

    def planned(self, count: int | None) -> Self:
        """Return the section with which `gregale plan` plans one run of `count`; None: the section unchanged."""
        del count
        return self

    def costs(self, method: "Method", count: int | None) -> JoiningCosts | None:
        """Return the costs of joining `count` runs (None: the configured number); None if there are none."""
        del method, count

    @classmethod
    def print_costs(cls, costs: dict[str, Any], console: "Console") -> None:
        """Print the result of `JoiningCosts.to_dict`."""


# By key: a module and the name of its `Section`, which are imported at their first use; those of plugins.
GUESTS = {"islands": ("gregale.islands.section", "IslandsSection")}
OF_PLUGINS: dict[str, type[Section]] = {}


def section_classes() -> dict[str, type[Section]]:
    return {key: getattr(import_module(module), name) for key, (module, name) in GUESTS.items()} | OF_PLUGINS


def add_section(config_class: type, section: type[Section]) -> None:
    """Add a section to a frozen configuration class, in place, as its last field."""
    added = [(section.key, section, setting(section(), section.help))]
    extended = make_dataclass(config_class.__name__, added, bases=(config_class,), frozen=True)
    for name in (section.key, "__dataclass_fields__", "__match_args__", "__init__", "__repr__", "__eq__", "__hash__"):
        setattr(config_class, name, vars(extended)[name])
    config_class.__annotations__[section.key] = section
    types_of.cache_clear()
