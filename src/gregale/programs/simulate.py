"""`gregale simulate`: which bandwidth each method needs, from a model of the timeline."""

import json
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

import numpy as np

from gregale.errors import UserError
from gregale.services.command import Command
from gregale.services.tables import print_table
from gregale.settings import Range, Settings, between, whole
from gregale.terminal import Console
from gregale.timeline.fleet import NEVER, Fleet
from gregale.timeline.methods import METHODS, PAPER_METHODS, Cadence, method
from gregale.timeline.model import PRESETS, Workload
from gregale.timeline.payload import PAYLOADS
from gregale.timeline.plot import check_picture_path, plot_timeline, plot_utilisation
from gregale.timeline.simulate import Run
from gregale.timeline.table import GRID_GBIT_PER_SECOND, UTILISATIONS, needed_bandwidths, run_method

MOST_STEPS = 1_000_000
MOST_EVENTS = 10_000_000  # layers of all passes of all methods: a minute, and 2 GB
SECONDS = Range(0, 1e9, above=True)
GBIT_PER_SECOND = Range(0, 1e9, above=True)


@dataclass(frozen=True)
class SimulateConfig(Settings):
    """What to simulate and what to show of it."""

    model: str = field(
        default="1b", metadata={"help": "Preset of size, layers and step time.", "choices": tuple(PRESETS)}
    )
    parameters: float | None = field(
        default=None, metadata={"help": "Parameters; in place of the preset's.", "range": Range(1, 1e18)}
    )
    layers: int | None = field(
        default=None, metadata={"help": "Layers; in place of the preset's.", "range": whole(1, 100_000)}
    )
    step_seconds: float | None = field(
        default=None,
        metadata={"help": "Compute time of one step in seconds; in place of the preset's.", "range": SECONDS},
    )
    microbatches: int = field(
        default=1, metadata={"help": "Forward and backward passes in one step.", "range": whole(1, MOST_STEPS)}
    )
    tokens: int | None = field(
        default=None,
        metadata={
            "help": "Tokens of one site's step: at `bandwidth`, tokens per second of all sites are told too.",
            "range": whole(1),
            "aliases": ("tokens_per_step",),
        },
    )
    methods: list[str] = field(
        default_factory=lambda: list(PAPER_METHODS),
        metadata={
            "help": "Methods to compare; `psdp`, `loco`, `islands`, `islands_4bit` may be added to the default five.",
            "choices": tuple(METHODS),
        },
    )
    codec: str | None = field(
        default=None,
        metadata={"help": "Wire format of every method, in place of each method's own.", "choices": tuple(PAYLOADS)},
    )
    period_steps: int = field(
        default=100,
        metadata={
            "help": "H: steps between two reductions of one parameter.",
            "range": whole(1),
            "aliases": ("period",),
        },
    )
    fragment_layers: int = field(default=3, metadata={"help": "Layers of one streaming fragment.", "range": whole(1)})
    overlap_steps: int = field(
        default=1,
        metadata={
            "help": "tau: steps that an overlapped transfer may take.",
            "range": whole(0),
            "aliases": ("delay", "tau", "overlap"),
        },
    )
    steps: int = field(
        default=100,
        metadata={"help": "Steps to simulate, after which the link drains.", "range": whole(1, MOST_STEPS)},
    )
    bandwidth: list[float] = field(
        default_factory=list,
        metadata={
            "help": "Bandwidths between sites in Gbit/s at which to show utilisation.",
            "range": GBIT_PER_SECOND,
            "aliases": ("bandwidths", "gbit_per_second", "link_gbit_per_second"),
        },
    )
    sites: int = field(
        default=2,
        metadata={"help": "Sites on the ring.", "range": whole(1, 10_000), "aliases": ("replicas", "workers")},
    )
    latency_seconds: float = field(
        default=0.0,
        metadata={
            "help": "Delay of one message over one link.",
            "range": between(0, 1e9),
            "aliases": ("latency", "delay_seconds"),
        },
    )
    links: Path | None = field(
        default=None,
        metadata={"help": "Text file with a row of numbers a site: each link's speed as a multiple of the bandwidth."},
    )
    site_step_seconds: list[float] = field(
        default_factory=list,
        metadata={"help": "Step time of each site in seconds, to model stragglers.", "range": SECONDS},
    )
    drop_out: list[str] = field(
        default_factory=list, metadata={"help": "SITE:STEP pairs (site from 0): the site is gone from that step on."}
    )
    json: bool = field(default=False, metadata={"help": "Print JSON in place of tables."})
    plot: Path | None = field(default=None, metadata={"help": "Draw utilisation against bandwidth: .svg or .png."})
    timeline: Path | None = field(
        default=None, metadata={"help": "Draw compute and transfers of a few steps: .svg or .png."}
    )
    timeline_steps: int = field(default=4, metadata={"help": "Steps that the timeline shows.", "range": whole(1, 1000)})
    timeline_bandwidth: float = field(
        default=10.0, metadata={"help": "Bandwidth of the timeline in Gbit/s.", "range": GBIT_PER_SECOND}
    )

    def __post_init__(self):
        super().__post_init__()
        for key, path in (("plot", self.plot), ("timeline", self.timeline)):
            if path is not None:
                check_picture_path(path, key)


def workload_of(config: SimulateConfig) -> Workload:
    """The preset, with what the config gives in its place."""
    base = PRESETS[config.model]
    return Workload(
        parameters=base.parameters if config.parameters is None else config.parameters,
        layers=base.layers if config.layers is None else config.layers,
        step_seconds=base.step_seconds if config.step_seconds is None else config.step_seconds,
        microbatches=config.microbatches,
    )


def check_length(config: SimulateConfig, workload: Workload) -> None:
    """Raises `UserError` for a simulation that would take too long."""
    events = config.steps * workload.microbatches * workload.layers * len(config.methods)
    if events > MOST_EVENTS:
        raise UserError(
            f"steps {config.steps} x microbatches {workload.microbatches} x layers {workload.layers} x "
            f"{len(config.methods)} methods = {events:,} events, and {MOST_EVENTS:,} take a minute or so. Fewer steps "
            "show the same: the timeline repeats itself every period_steps."
        )


def fleet_of(config: SimulateConfig, workload: Workload) -> Fleet:
    """The sites and links that the config describes.

    Raises:
        UserError: step times or links do not fit the sites, or a drop-out is not SITE:STEP of a site there is.
    """
    slowness = np.ones(config.sites)
    if config.site_step_seconds:
        slowness = np.array(config.site_step_seconds, dtype=float) / workload.step_seconds
    if len(slowness) != config.sites:
        raise UserError(
            f"site_step_seconds: {len(slowness)} step times are given for {config.sites} sites; give one for each site."
        )
    leaves_at_step = np.full(config.sites, NEVER)
    for pair in config.drop_out:
        site, colon, step = pair.partition(":")
        numbers = colon and all(number.isdecimal() and len(number) < 10 for number in (site, step))
        if not (numbers and int(site) < config.sites and int(step) > 1):
            raise UserError(
                f"drop_out: {pair!r} is not SITE:STEP with a site from 0 to {config.sites - 1} and a step from 2 "
                "(as 1:50 for the second site gone from step 50 on)."
            )
        leaves_at_step[int(site)] = int(step)
    return Fleet(
        slowness, leaves_at_step, config.latency_seconds, None if config.links is None else _read(config.links)
    )


def _read(path: Path) -> np.ndarray:
    try:
        return np.loadtxt(path, ndmin=2)
    except (OSError, ValueError) as error:
        raise UserError(f"links: {path} cannot be read as rows of numbers: {str(error).rstrip('.')}.") from error


def main(config: SimulateConfig) -> int:
    """Simulate, print tables or JSON, draw the pictures that are asked for; 0 when all went well.

    Raises:
        UserError: something in the config does not fit together.
    """
    workload = workload_of(config)
    check_length(config, workload)
    fleet = fleet_of(config, workload)
    cadence = Cadence(config.steps, config.period_steps, config.fragment_layers, config.overlap_steps)

    def runs_at(gbit_per_second: np.ndarray, cadence: Cadence = cadence) -> dict[str, Run]:
        return {
            name: run_method(name, workload, fleet, cadence, gbit_per_second, config.codec) for name in config.methods
        }

    on_grid = runs_at(GRID_GBIT_PER_SECOND)
    report = report_of(config, workload, on_grid, runs_at(np.array(config.bandwidth)) if config.bandwidth else {})
    if config.json:
        print(json.dumps(report, indent=2))
    else:
        _print_tables(report)
    if config.plot is not None:
        curves = {method(name).label: run.utilisation for name, run in on_grid.items()}
        plot_utilisation(config.plot, GRID_GBIT_PER_SECOND, curves, _title(workload, config.sites))
    if config.timeline is not None:
        # A little longer, to show what follows DiLoCo's only reduction.
        longer = replace(cadence, steps=config.steps + config.timeline_steps)
        runs = runs_at(np.array([config.timeline_bandwidth]), longer)
        intervals = {method(name).label: run.intervals for name, run in runs.items()}
        title = f"{_title(workload, config.sites)}, {config.timeline_bandwidth:g} Gbit/s"
        plot_timeline(config.timeline, intervals, config.timeline_steps, title)
    return 0


def _title(workload: Workload, sites: int) -> str:
    return f"{workload.parameters / 1e9:g}B parameters, {workload.step_seconds:g} s a step, {sites} sites"


def report_of(config: SimulateConfig, workload: Workload, on_grid: dict[str, Run], asked: dict[str, Run]) -> dict:
    """What `--json` prints, from the runs on the grid and those at the bandwidths asked for, if any."""
    return {
        "model": asdict(workload),
        "sites": config.sites,
        "steps": config.steps,
        "utilisation_goals": list(UTILISATIONS),
        "bandwidth_gbit_per_second": {name: needed_bandwidths(run.utilisation) for name, run in on_grid.items()},
        "sent_bytes_per_site": {name: float(run.sent_bytes.max()) for name, run in on_grid.items()},
        "asked_gbit_per_second": config.bandwidth,
        "asked_utilisation": {name: run.utilisation.tolist() for name, run in asked.items()},
        "asked_tokens_per_second": {name: _tokens_per_second(config, run) for name, run in asked.items()},
        "asked_total_seconds": {name: run.total_seconds.tolist() for name, run in asked.items()},
    }


def _tokens_per_second(config: SimulateConfig, run: Run) -> list[float] | None:
    """[bandwidth] of all sites together, those that leave counting as long as they are there; None: not asked for."""
    if config.tokens is None:
        return None
    last = [int(pair.partition(":")[2]) - 1 for pair in config.drop_out]
    steps = (config.sites - len(last)) * config.steps + sum(min(each, config.steps) for each in last)
    return (config.tokens * steps / run.total_seconds).tolist()


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
    cells = [(method(name).label, *row) for name, row in rows.items()]
    print_table(Console(), title, ("method", *headings), cells)


COMMAND = Command(main=main, options=SimulateConfig)
