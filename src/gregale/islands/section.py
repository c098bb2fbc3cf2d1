"""The section `islands` of a run's configuration, and what it changes in a run."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar, Self

from gregale.errors import UserError
from gregale.islands.config import IslandsConfig
from gregale.runs.sections import JoiningCosts, Section
from gregale.settings import Rule

if TYPE_CHECKING:
    from gregale.methods.config import MethodContext, Methods, SyncConfig
    from gregale.methods.method import Method
    from gregale.terminal import Console

LOCKSTEP = "all islands save after the same round, not by time. Give a number of steps."
NO_AVERAGE = "outer parameters of islands are in the memory of hosts, where no average is kept. Leave average out."
NO_COORDINATOR = "planned:0"  # a plan connects to no coordinator


@dataclass(frozen=True)
class IslandsSection(IslandsConfig, Section):
    """The settings of an island; with `lighthouse` the run is one of a fleet."""

    incompatible = (
        Rule("checkpoint.every & islands.lockstep", LOCKSTEP, "checkpoint.seconds"),
        Rule("average & islands.lighthouse", NO_AVERAGE),
    )

    key: ClassVar[str] = "islands"
    help: ClassVar[str] = "training at several sites (`gregale island`)"
    joining_key: ClassVar[str] = "lighthouse"
    naming_keys: ClassVar[tuple[str, ...]] = ("name",)
    host_keys: ClassVar[tuple[str, ...]] = ("bind", "address", "token_file")
    run_keys: ClassVar[tuple[str, ...]] = ("sync", "reduce", "pipeline")  # what the rounds of a fleet consist of
    costs_key: ClassVar[str] = "island"
    costs_note: ClassVar[str] = (
        "an island: the network estimates are for one host and the codecs' bytes, with all islands as members; "
        "outer parameters and the outer optimizer are in host memory."
    )

    def check_alone(self) -> None:
        if self.joins:
            raise UserError(
                "islands.lighthouse is set: this is an island of a fleet, which `gregale island` trains. To train it "
                "alone, or with all replicas in one mesh, leave the key out (`--islands.lighthouse null`)."
            )

    # The programs of islands are imported at their first use: a run without islands needs none.

    def check_stages(self, config: Any, methods: Sequence["Method"]) -> None:
        from gregale.islands.method import as_island
        from gregale.islands.state import stage_rounds

        stage_rounds(config, [as_island(method) for method in methods])

    def build(self, sync: "SyncConfig", parts: "MethodContext") -> "Methods":
        if not self.joins:
            return sync.build(parts)
        from gregale.islands.method import methods_of_island

        return methods_of_island(sync, parts)

    def planned(self, count: int | None) -> Self:
        return self if count is None or self.joins else replace(self, lighthouse=NO_COORDINATOR)

    def costs(self, method: "Method", count: int | None) -> JoiningCosts | None:
        from gregale.islands.plan import island_costs

        return island_costs(self, method, count)

    @classmethod
    def print_costs(cls, costs: dict[str, Any], console: "Console") -> None:
        from gregale.islands.plan import print_costs

        print_costs(costs, console)
