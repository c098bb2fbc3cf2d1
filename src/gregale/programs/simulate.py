"""Provides `gregale simulate`, which estimates the bandwidth that each method needs from a model of the timeline."""

import json
from dataclasses import asdict, dataclass, field, fields, replace

import numpy as np

from gregale.errors import UserError
from gregale.failures import Failures, useful_shares
from gregale.programs.command import Command
from gregale.settings import Range, Settings, between, setting, whole
from gregale.terminal import Console, print_table
from gregale.timeline import (
    GRID_GBIT_PER_SECOND,
    METHODS,
    PAPER_METHODS,
    PAYLOADS,
    PRESETS,
    UTILISATIONS,
    Cadence,
    Ring,
    Run,
    Workload,
    needed_bandwidths,
    run_method,
)

MAX_STEPS = 1_000_000
MAX_EVENTS = 10_000_000  # layers of all passes of all methods: a minute, and 2 GB
SECONDS = Range(0, 1e9, above=True)
GBIT_PER_SECOND = Range(0, 1e9, above=True)


@dataclass(frozen=True)
class SimulateConfig(Settings):
    """Configuration of the simulation and of its output."""

    model: str = setting("1b", "Preset of size, layers and step time.", choices=tuple(PRESETS))
    parameters: float | None = setting(None, "Parameters; in place of the preset's.", range=Range(1, 1e18))
    layers: int | None = setting(None, "Layers; in place of the preset's.", range=whole(1, 100_000))
    step_seconds: float | None = setting(
        None, "Compute time of one step in seconds; in place of the preset's.", range=SECONDS
    )
    microbatches: int = setting(1, "Forward and backward passes in one step.", range=whole(1, MAX_STEPS))
    tokens: int | None = setting(
        None,
        "Tokens of one site's step: at `bandwidth`, the table also has tokens per second of all sites.",
        range=whole(1),
        aliases=("tokens_per_step",),
    )
    methods: list[str] = field(
        default_factory=lambda: list(PAPER_METHODS),
        metadata={
            "help": "Methods to compare; `psdp`, `loco`, `islands`, `islands_4bit` may be added to the default five.",
            "choices": tuple(METHODS),
            "unique": True,
        },
    )
    codec: str | None = setting(
        None, "Wire format of every method, in place of each method's own.", choices=tuple(PAYLOADS)
    )
    phases: int = setting(
        2, "1: a site sends its message to all others (`reduce.phases`); not of `psdp` and the like.", range=whole(1, 2)
    )
    period_steps: int = setting(
        100, "H: steps between two reductions of one parameter.", range=whole(1), aliases=("period",)
    )
    fragment_layers: int = setting(3, "Layers of one streaming fragment.", range=whole(1))
    overlap_steps: int = setting(
        1, "tau: steps that an overlapped transfer may take.", range=whole(0), aliases=("delay", "tau", "overlap")
    )
    steps: int = setting(100, "Steps to simulate, after which the link drains.", range=whole(1, MAX_STEPS))
    bandwidth: list[float] = setting(
        list,
        "Bandwidths between sites in Gbit/s at which to show utilisation.",
        range=GBIT_PER_SECOND,
        unique=True,
        aliases=("bandwidths", "gbit_per_second", "link_gbit_per_second"),
    )
    sites: int = setting(2, "Sites on the ring.", range=whole(1, 10_000), aliases=("replicas", "workers"))
    latency_seconds: float = setting(
        0.0, "Delay of one message over one link.", range=between(0, 1e9), aliases=("latency", "delay_seconds")
    )
    failures: bool = setting(False, "The share of useful steps under failures of chips, in place of bandwidths.")
    chips: list[int] = field(
        default_factory=lambda: [10_000, 100_000, 1_000_000],
        metadata={"help": "Failures: chips of the whole run.", "range": whole(1)},
    )
    islands: list[int] = field(
        default_factory=lambda: [10, 100, 1000],
        metadata={"help": "Failures: islands into which they divide.", "range": whole(1)},
    )
    slice_chips: int = setting(256, "Failures: chips that leave with one that fails.", range=whole(1))
    mtbf_days: float = setting(365.0, "Failures: mean time between failures of a chip.", range=SECONDS)
    restart_seconds: float = setting(
        300.0, "Failures: until the chips that a failure stopped compute again.", range=between(0, 1e9)
    )
    reconfigure_seconds: float = setting(
        30.0, "Failures: wait of an elastic run that loses a slice or has one back.", range=between(0, 1e9)
    )
    repair_seconds: float = setting(3600.0, "Failures: until an elastic run has a slice back.", range=between(0, 1e9))
    save_seconds: float = setting(30.0, "Failures: to save a checkpoint.", range=between(0, 1e9))
    json: bool = setting(False, "Print JSON in place of tables.")


def check_length(config: SimulateConfig, workload: Workload) -> None:
    """Raise `UserError` for a simulation that would take too long."""
    events = config.steps * workload.microbatches * workload.layers * len(config.methods)
    if events > MAX_EVENTS:
        raise UserError(
            f"steps {config.steps} x microbatches {workload.microbatches} x layers {workload.layers} x "
            f"{len(config.methods)} methods = {events:,} events, and {MAX_EVENTS:,} take a minute or so. Fewer steps "
            "show the same: the timeline repeats itself every period_steps."
        )


def main(config: SimulateConfig) -> int:
    """Simulate and print tables or JSON; return 0; raise `UserError` if the simulation has too many events."""
    given = {each.name: getattr(config, each.name) for each in fields(Workload)}
    workload = replace(PRESETS[config.model], **{name: value for name, value in given.items() if value is not None})
    if config.failures:
        show_failures(config, workload)
        return 0
    check_length(config, workload)
    cadence = Cadence(config.steps, config.period_steps, config.fragment_layers, config.overlap_steps)
    ring, rings = Ring(config.sites, config.latency_seconds), {}
    for name in config.methods:  # in one phase all messages are sent at once, which takes one latency
        at_once = config.phases == 1 and METHODS[name].joins_rounds and config.sites > 1
        rings[name] = replace(ring, latency_seconds=ring.latency_seconds / (2 * config.sites - 2)) if at_once else ring

    def runs_at(gbit_per_second: np.ndarray) -> dict[str, Run]:
        wire = {
            name: METHODS[name].bytes_per_parameter(config.codec, config.sites if config.phases == 1 else 2)
            for name in config.methods
        }
        return {name: run_method(name, workload, rings[name], cadence, gbit_per_second, wire[name]) for name in wire}

    asked = runs_at(np.array(config.bandwidth)) if config.bandwidth else {}
    report = report_of(config, workload, runs_at(GRID_GBIT_PER_SECOND), asked)
    if config.json:
        print(json.dumps(report, indent=2))
    else:
        _print_tables(report)
    return 0


def show_failures(config: SimulateConfig, workload: Workload) -> None:
    """Print the share of useful steps by method and number of chips."""
    for count in config.islands:
        if few := [each for each in config.chips if each < count]:
            raise UserError(f"islands has {count:,}, but chips has {few[0]:,}: an island has at least one chip.")
    failures = Failures(
        chip_mtbf=config.mtbf_days * 86_400,
        slice_chips=config.slice_chips,
        restart=config.restart_seconds,
        reconfigure=config.reconfigure_seconds,
        repair=config.repair_seconds,
        save=config.save_seconds,
    )
    heal = 32 * workload.parameters / (min(config.bandwidth, default=np.inf) * 1e9)
    shares = useful_shares(failures, config.chips, config.islands, config.period_steps * workload.step_seconds, heal)
    if config.json:
        print(json.dumps({"chips": config.chips, "heal_seconds": heal, "useful_share": shares}, indent=2))
        return
    rows = [(name, *(f"{share:.1%}" for share in row)) for name, row in shares.items()]
    title = "Share of useful steps (number of islands) by number of chips"
    print_table(Console(), title, ("method", *(f"{each:,}" for each in config.chips)), rows)


def report_of(config: SimulateConfig, workload: Workload, on_grid: dict[str, Run], asked: dict[str, Run]) -> dict:
    """Return the output of `--json`, from the runs on the grid and the runs at the requested bandwidths, if any."""
    tokens = None if config.tokens is None else config.tokens * config.sites * config.steps
    return {
        "model": asdict(workload),
        "sites": config.sites,
        "steps": config.steps,
        "utilisation_goals": list(UTILISATIONS),
        "bandwidth_gbit_per_second": {name: needed_bandwidths(run.utilisation) for name, run in on_grid.items()},
        "sent_bytes_per_site": {name: run.sent_bytes for name, run in on_grid.items()},
        "asked_gbit_per_second": config.bandwidth,
        "asked_utilisation": {name: run.utilisation.tolist() for name, run in asked.items()},
        "asked_tokens_per_second": {
            name: None if tokens is None else (tokens / run.total_seconds).tolist() for name, run in asked.items()
        },
        "asked_total_seconds": {name: run.total_seconds.tolist() for name, run in asked.items()},
    }


def _print_tables(report: dict) -> None:
    needed = {
        name: ["> 1000" if value is None else f"{value:.1f}" for value in values]
        for name, values in report["bandwidth_gbit_per_second"].items()
    }
    _print("Gbit/s between sites for a compute utilisation of", [f"{goal:.0%}" for goal in UTILISATIONS], needed)
    if report["asked_gbit_per_second"]:
        reached = {name: [f"{u:.1%}" for u in row] for name, row in report["asked_utilisation"].items()}
        headings = [f"{gbit_per_second:g}" for gbit_per_second in report["asked_gbit_per_second"]]
        _print("Compute utilisation at Gbit/s between sites", headings, reached)
        speeds = {
            name: [f"{each:,.0f}" for each in row] for name, row in report["asked_tokens_per_second"].items() if row
        }
        if speeds:
            _print("Tokens per second of all sites at Gbit/s between them", headings, speeds)


def _print(title: str, headings: list[str], rows: dict[str, list[str]]) -> None:
    cells = [(METHODS[name].label, *row) for name, row in rows.items()]
    print_table(Console(), title, ("method", *headings), cells)


COMMAND = Command(main=main, options=SimulateConfig)
