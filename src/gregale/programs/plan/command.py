"""Provides `gregale plan`, which estimates a run's memory, traffic and time from the programs that it would compile."""

import json
from contextlib import nullcontext, suppress
from dataclasses import dataclass, replace
from pathlib import Path

from gregale.atomic_files import write_bytes
from gregale.cost.chips import CHIPS
from gregale.data.sources.base import expand
from gregale.data.tokenizers import vocabulary_size
from gregale.errors import UserError
from gregale.programs.command import Command
from gregale.programs.plan.devices import Target, simulated_target, topology_target
from gregale.programs.plan.report import joining_costs, report_of
from gregale.programs.plan.search import Compiler, remedies, search
from gregale.programs.plan.step import CODE, STEP, UNTIL, plan_step
from gregale.programs.plan.text import print_report, print_search, size
from gregale.programs.runtime.default_sizes import MODEL, USUAL, with_default_sizes, with_origin_model
from gregale.runs.config import TrainConfig
from gregale.settings import Settings, above, setting, whole
from gregale.streams import say_beside
from gregale.terminal import Console

DOES_NOT_FIT = 3


@dataclass(frozen=True)
class PlanOptions(Settings):
    """Options besides the configuration. Raises `UserError` if they exclude one another, or a number is invalid."""

    topology: str | None = setting(None, "plan for TPUs or GPUs, such as v5p:4x4x4 or h100:8")
    slices: int = setting(1, "number of slices of the topology; for GPUs, of boxes", range=whole(1, 4096))
    devices: int | None = setting(None, "number of simulated devices; null: the size of the mesh", range=whole(1, 4096))
    count: int | None = setting(
        None,
        "number of islands of a fleet, to plan one; null: two if islands.lighthouse is set, else none",
        range=whole(1, 10_000),
    )
    chip: str | None = setting(None, f"the chip to assume: {', '.join(CHIPS)}; null: the topology's, or H100")
    link_gbit_per_second: float | None = setting(
        None,
        "link of a replica, or of an island's host, to the others; null: its chips' share of the network",
        range=above(0),
    )
    until: str = setting(
        CODE, "last compiler stage; memory is faster: it reports memory and traffic, but no overlap", choices=UNTIL
    )
    search: bool = setting(False, "find the fastest mesh x remat x microbatches x gather that fits, and print its YAML")
    json: bool = setting(False, "print JSON in place of tables")
    hlo: Path | None = setting(None, "write the compiled step's text to this file, and other programs next to it")
    require_fit: bool = setting(False, "exit with 3 if the step does not fit")

    def __post_init__(self):
        super().__post_init__()
        if self.topology is not None and self.devices is not None:
            raise UserError("topology and devices are both given: a topology has its own devices. Leave one out.")
        if self.search and self.hlo is not None:
            raise UserError("search and hlo are both given: a search compiles many programs. Leave one out.")
        if self.topology is None and self.slices != 1:
            raise UserError(f"slices is {self.slices}, but without a topology there are none; give --topology too.")


def main(options: PlanOptions, config: TrainConfig) -> int:
    """Compile the programs of a run, print the report; return 3 if they do not fit and `require_fit` is set, else 0."""
    config = planned(config, options.count)
    if options.topology is None:
        target = simulated_target(config, options.devices, options.chip)
    else:
        target = topology_target(options.topology, options.slices, options.chip)
    config = with_what_is_left_out(config, target)
    tokens = tokens_of(config)
    if options.search:
        if config.stages:
            raise UserError("stages is given, and a search is of one stage. Leave it out: `--stages []`.")
        return DOES_NOT_FIT if not searched(options, config, tokens, target) and options.require_fit else 0
    plans = [plan_step(stage.config, tokens, target, options.until, say_beside) for stage in config.each_stage]
    plan = max(plans, key=lambda each: each.memory.peak)
    if len(plans) > 1:
        needs = ", ".join(size(each.memory.peak) for each in plans)
        say_beside(f"The stages need {needs} of a device. This is the plan of stage {plans.index(plan) + 1}.")
    if options.hlo is not None:
        for name, program in plan.programs.items():
            path = options.hlo if name == STEP else options.hlo.with_stem(f"{options.hlo.stem}.{name}")
            write_text(path, program.text)
    report = report_of(plan, tokens, options.link_gbit_per_second, joining_costs(plan.setup, options.count))
    if not report["fits"]:
        report["remedies"] = [vars(each) for each in remedies(plan, compiler_for(options, tokens, target))]
    if options.json:
        print(json.dumps(report, indent=2))
    else:
        print_report(report, Console())
    return DOES_NOT_FIT if options.require_fit and not report["fits"] else 0


def planned(config: TrainConfig, count: int | None) -> TrainConfig:
    """Return the configuration of one of `count` runs that a network joins; None: as configured."""
    sections = {key: (each, each.planned(count)) for key, each in config.sections.items()}
    changed = {key: now for key, (before, now) in sections.items() if now is not before}
    return replace(config, **changed) if changed else config


def with_what_is_left_out(config: TrainConfig, target: Target) -> TrainConfig:
    """Return a configuration with what it leaves out of `model` and `batch`, as `train` has it, and report it.

    Without `cpu_devices` a plan is for accelerators, and their sizes. A model that is given may have its origin
    elsewhere.
    """
    notes = []
    if config.start_from is not None:
        with nullcontext() if config.model is USUAL[MODEL] else suppress(UserError):
            config, note = with_origin_model(config)
            notes.append(note)
    if config.cpu_devices is not None and target.simulated:
        config, note = with_default_sizes(config, target.devices, tokens_of)
        notes.append(note)
    for note in filter(None, notes):
        say_beside(note)
    return config


def searched(options: PlanOptions, config: TrainConfig, tokens: int, target: Target) -> bool:
    """Search and print the result; return whether a candidate fits."""
    found = search(config, compiler_for(options, tokens, target))
    report = {"name": config.name, "chip": target.chip.name, **found.to_dict()}
    if options.json:
        print(json.dumps(report, indent=2))
    else:
        print_search(report, Console())
    return found.best is not None


def compiler_for(options: PlanOptions, tokens: int, target: Target) -> Compiler:
    return Compiler(tokens, target, options.link_gbit_per_second, options.count, say_beside)


def tokens_of(config: TrainConfig) -> int:
    """Return the tokenizer's number of tokens; without its file, the configured number of rows of the model."""
    tokenizer, rows = config.data.tokenizer, config.model.vocabulary
    if rows is not None and tokenizer.json_path is not None and not Path(expand(tokenizer.json_path)).exists():
        return rows
    return vocabulary_size(tokenizer)


def write_text(path: Path, text: str) -> None:
    """Write a file atomically."""
    try:
        write_bytes(path, text.encode())
    except OSError as error:
        raise UserError(f"hlo: cannot write {path}: {error.strerror}.") from error


COMMAND = Command(main=main, options=PlanOptions, config=TrainConfig, positional=("config",))
