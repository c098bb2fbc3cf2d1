"""`gregale simulate --failures`: what failures cost islands, beside data-parallel."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from gregale.errors import UserError
from gregale.islands.failures.data_parallel import Checkpoints, best_interval, data_parallel
from gregale.islands.failures.fleet import Fleet, Site, draw_outages, draw_sites
from gregale.islands.failures.outcome import IslandsOutcome, Outcome, Recovery
from gregale.islands.failures.world import World
from gregale.islands.protocol.settings import LAN, WAN, Timing
from gregale.methods.schedule import Schedule
from gregale.services.islands import NETWORKS
from gregale.services.tables import print_table
from gregale.settings import Range, Settings, between, whole
from gregale.terminal import Console
from gregale.timeline.model import Workload
from gregale.timeline.payload import bytes_per_parameter
from gregale.timeline.plot import plot_goodput, short

MOST_ISLAND_ROUNDS = 300_000  # a minute or two
MOST_DEATHS = 20_000
FACTORS = tuple(10 ** (each / 3) for each in range(-3, 4))  # of the hours between failures, in a plot
OUTER_BYTES = 8  # a parameter: itself and the outer momentum, float32
SECONDS = Range(0, 1e9, above=True)


@dataclass(frozen=True)
class FleetConfig(Settings):
    """The fleet that `--failures` simulates."""

    rounds: int = field(
        default=40, metadata={"help": "Rounds to simulate, at the pace of the fastest island.", "range": whole(1)}
    )
    fragments: int = field(
        default=1, metadata={"help": "P: fragments that take turns; 1 is DiLoCo, more stream.", "range": whole(1, 1000)}
    )
    speed_spread: float = field(
        default=0.3,
        metadata={"help": "Step times are drawn from 1 to 1 + this times the model's.", "range": between(0, 1000)},
    )
    link_spread: float = field(
        default=1.0,
        metadata={"help": "Links are drawn from 1 / (1 + this) to 1 of the bandwidth.", "range": between(0, 1000)},
    )
    restart_seconds: float = field(
        default=600.0, metadata={"help": "From a death until a new process of the island is there.", "range": SECONDS}
    )
    state_bytes: float = field(
        default=16.0,
        metadata={
            "help": "Bytes a parameter that a joiner fetches: 8 of the outer state, the rest of the inner optimizer.",
            "range": between(OUTER_BYTES, 1000),
        },
    )
    network: str = field(
        default="wan",
        metadata={"help": "Whose seconds the protocol waits; see `islands.network`.", "choices": NETWORKS},
    )
    minimum: int = field(default=1, metadata={"help": "Islands that a round takes.", "range": whole(1)})
    checkpoint_seconds: float | None = field(
        default=None,
        metadata={
            "help": "Data-parallel: training between two checkpoints; null: the best for these failures (Young).",
            "range": SECONDS,
        },
    )
    save_seconds: float = field(
        default=30.0, metadata={"help": "Data-parallel: what saving one takes.", "range": between(0, 1e9)}
    )
    reform_seconds: float = field(
        default=120.0,
        metadata={
            "help": "Data-parallel: from a death, or a member taken in, to the next step of all.",
            "range": between(0, 1e9),
        },
    )
    seed: int = field(default=0, metadata={"help": "Of all that is drawn.", "range": whole(0)})


@dataclass(frozen=True)
class Scenario:
    """What `gregale simulate` knows of the fleet apart from its failures.

    - `period_steps`, `overlap_steps`: H and tau
    - `gbit_per_second`: a run of islands for each
    """

    workload: Workload
    islands: int
    period_steps: int
    overlap_steps: int
    codec: str
    gbit_per_second: Sequence[float]
    latency_seconds: float


def main(config: FleetConfig, mtbf_hours: float, scenario: Scenario, as_json: bool, plot: Path | None = None) -> int:
    """Simulates, prints tables or JSON, and draws goodput against the hours between failures if asked to; 0.

    Raises:
        UserError: something does not fit together, or would take too long.
    """
    hours = [mtbf_hours * factor for factor in FACTORS] if plot else [mtbf_hours]
    islands, bandwidths = scenario.islands, scenario.gbit_per_second
    if islands * config.rounds * len(bandwidths) * len(hours) > MOST_ISLAND_ROUNDS:
        curves = f" x {len(hours)} times between failures, for the plot," if plot else ""
        raise UserError(
            f"fleet.rounds {config.rounds} x sites {islands} x {len(bandwidths)} bandwidths{curves} are more than "
            f"{MOST_ISLAND_ROUNDS:,}, which take a minute or two. Fewer rounds show the same, less exactly."
        )
    schedule = _schedule(config, scenario)
    spreads = config.speed_spread, config.link_spread
    sites = draw_sites(islands, scenario.workload.step_seconds, 1e9 / 8, spreads, config.seed)
    seconds = schedule.round_step(config.rounds - 1) * min(site.step_seconds for site in sites)
    deaths = islands * seconds / (3600 * min(hours) + config.restart_seconds)
    if deaths > MOST_DEATHS:
        raise UserError(
            f"failures: {islands} islands, each failing every {min(hours):g} hours, are about {deaths:,.0f} deaths in "
            f"{seconds / 3600:.1f} hours; up to {MOST_DEATHS:,} are simulated. Fewer fleet.rounds, or rarer failures."
        )
    fleets = {f"islands, {each:g} Gbit/s": _fleet(config, scenario, schedule, _at(sites, each)) for each in bandwidths}
    runs = {each: _runs(config, each, fleets, seconds) for each in hours}
    found = runs[mtbf_hours]
    report = {
        "model": asdict(scenario.workload),
        "sites": islands,
        "mtbf_hours": mtbf_hours,
        "seconds": seconds,
        "codec": scenario.codec,
        "checkpoint_seconds": _checkpoints(config, mtbf_hours, islands).interval_seconds,
        "period_seconds": schedule.period * min(site.step_seconds for site in sites),
        "heal_seconds": {name: _heal_seconds(fleet) for name, fleet in fleets.items()},
        "runs": {name: asdict(outcome) for name, outcome in found.items()},
    }
    if plot:
        goodput = {name: [runs[each][name].goodput for each in hours] for name in found}
        report |= {"plot_mtbf_hours": hours, "plot_goodput": goodput}
        title = f"{islands:,} islands, {scenario.workload.parameters / 1e9:g}B parameters"
        plot_goodput(plot, hours, goodput, title)
    if as_json:
        print(json.dumps(report, indent=2))
    else:
        _print(report, found)
    return 0


def _checkpoints(config: FleetConfig, mtbf_hours: float, islands: int) -> Checkpoints:
    interval = config.checkpoint_seconds or best_interval(max(config.save_seconds, 1.0), 3600 * mtbf_hours / islands)
    return Checkpoints(interval, config.save_seconds, config.reform_seconds)


def _runs(config: FleetConfig, mtbf_hours: float, fleets: dict[str, Fleet], seconds: float) -> dict[str, Outcome]:
    """Every way of training with the same failures: islands by their links, and data-parallel."""
    first = next(iter(fleets.values()))  # links cost data-parallel nothing
    islands = len(first.sites)
    outages = draw_outages(islands, 3600 * mtbf_hours, config.restart_seconds, seconds, config.seed)
    checkpoints = _checkpoints(config, mtbf_hours, islands)
    found: dict[str, Outcome] = {name: World(fleet, outages, seconds).run() for name, fleet in fleets.items()}
    for name, elastic in (("elastic data-parallel", True), ("plain data-parallel", False)):
        found[name] = data_parallel(first, outages, seconds, checkpoints, elastic)
    return found


def _schedule(config: FleetConfig, scenario: Scenario) -> Schedule:
    period, delay, layers = scenario.period_steps, scenario.overlap_steps, scenario.workload.layers
    if delay >= period:
        raise UserError(f"overlap_steps: {delay} must be below period_steps = {period}, or a message would overtake.")
    most = min(period, layers + 1)
    if config.fragments > most:
        raise UserError(
            f"fleet.fragments: {config.fragments} are too many for {layers} layers (one fragment is what is not in "
            f"layers) and {period} steps (one is sent a step); at most {most}."
        )
    return Schedule(period, config.fragments, delay, layers)


def _at(sites: tuple[Site, ...], gbit_per_second: float) -> tuple[Site, ...]:
    return tuple(site._replace(bytes_per_second=site.bytes_per_second * gbit_per_second) for site in sites)


def _fleet(config: FleetConfig, scenario: Scenario, schedule: Schedule, sites: tuple[Site, ...]) -> Fleet:
    parameters = scenario.workload.parameters
    fleet = Fleet(
        sites=sites,
        schedule=schedule,
        message_bytes=bytes_per_parameter(scenario.codec) * parameters / schedule.fragments,
        outer_bytes=OUTER_BYTES * parameters,
        inner_bytes=(config.state_bytes - OUTER_BYTES) * parameters,
        latency_seconds=scenario.latency_seconds,
        minimum=config.minimum,
    )
    return replace(fleet, timing=_timing(config.network, fleet))


def _timing(network: str, fleet: Fleet) -> Timing:
    """The network's, but long enough for this fleet's steps and transfers, as one would set them.

    The coordinator has to wait for those in the middle of a step: a view without them makes a reduce that is made again
    with them.
    """
    base = LAN if network == "lan" else WAN
    slowest = max(site.step_seconds for site in fleet.sites)
    transfer = 2 * fleet.message_bytes / min(site.bytes_per_second for site in fleet.sites)
    join = base.join_seconds + slowest + 4 * fleet.latency_seconds
    return replace(
        base,
        join_seconds=join,
        reduce_seconds=max(base.reduce_seconds, 2 * transfer + 4 * fleet.latency_seconds),
        most_grace_seconds=max(base.most_grace_seconds, slowest),
    )


def _heal_seconds(fleet: Fleet) -> float:
    return (fleet.outer_bytes + fleet.inner_bytes) / min(site.bytes_per_second for site in fleet.sites)


def _print(report: dict, found: dict[str, Outcome]) -> None:
    console = Console()
    first = next(iter(found.values()))
    title = (
        f"{report['sites']} islands, each fails every {report['mtbf_hours']:g} hours: {first.deaths} deaths in "
        f"{report['seconds'] / 3600:.1f} hours"
    )
    headings = ("", "goodput", "tokens/s", "lost", "down", "joining", "waiting")
    rows = [
        (name, *(f"{each:.1%}" for each in (o.goodput, o.tokens, o.lost, o.down, o.joining, o.waiting)))
        for name, o in found.items()
    ]
    print_table(console, title, headings, rows)
    console.print(f"Data-parallel saves a checkpoint every {report['checkpoint_seconds']:,.0f} s.", highlight=False)
    headings = ("", "rounds", "failed", "again", "GB sent", "commit s", "return s", "out")
    rows = [
        (
            name,
            str(o.rounds),
            str(o.failed_reduces),
            str(o.repeated_reduces),
            f"{o.bytes_per_round / 1e9:,.2f}",
            _seconds(o.commit),
            _seconds(o.rejoin),
            str(o.rejoin.open),
        )
        for name, o in found.items()
        if isinstance(o, IslandsOutcome)
    ]
    title = "Rounds; from a death to the others' next commit and to its own next contribution (mean / 95%)"
    print_table(console, title, headings, rows)
    if "plot_goodput" in report:
        headings = ("", *(short(each) for each in report["plot_mtbf_hours"]))
        rows = [(name, *(f"{each:.1%}" for each in curve)) for name, curve in report["plot_goodput"].items()]
        print_table(console, "Goodput, by the hours between two failures of an island", headings, rows)
    for name, seconds in report["heal_seconds"].items():
        if seconds > report["period_seconds"]:
            console.print(
                f"{name}: the slowest link takes {seconds:,.0f} s for a joiner's state, all of which changes every "
                f"{report['period_seconds']:,.0f} s: such an island hardly comes back. Use a faster link, or a longer "
                "period_steps.",
                style="yellow",
                highlight=False,
            )


def _seconds(recovery: Recovery) -> str:
    if recovery.mean_seconds is None:
        return "-"
    return f"{recovery.mean_seconds:,.0f} / {recovery.percentile_95_seconds:,.0f}"
