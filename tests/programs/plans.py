"""Small plans of the quickstart, and their tables."""

from dataclasses import replace
from io import StringIO
from pathlib import Path
from typing import Any

import jax

from gregale.axes.layout import make_mesh
from gregale.cost.chips import chip
from gregale.programs.plan.devices import simulated_target
from gregale.programs.plan.search import Compiler
from gregale.programs.plan.step import Plan, plan_step
from gregale.programs.plan.text import print_report
from gregale.programs.runtime.build import set_up
from gregale.programs.runtime.setup import Setup
from gregale.runs.config import TrainConfig
from gregale.runs.parsing import load
from gregale.terminal import Console
from tests.programs.tiny import SMALL_QUICKSTART

CONFIGS = Path(__file__).parents[2] / "config"
QUICKSTART = str(CONFIGS / "quickstart.yaml")
SMALL = [*SMALL_QUICKSTART, "--model.layers=3"]
FOUR_BITS = ["--reduce.codec=int4", "--reduce.gather_codec=int4"]


def config_of(*arguments: str) -> TrainConfig:
    return load(TrainConfig, QUICKSTART, [*SMALL, *arguments])


def setup_of(*arguments: str) -> Setup:
    config = config_of(*arguments)
    return set_up(config, 257, make_mesh(config.mesh, jax.devices("cpu")))


def plan_of(config: TrainConfig) -> Plan:
    """A plan for simulated devices."""
    return plan_step(config, 257, simulated_target(config, None, None))


def compiler_for(plan: Plan) -> Compiler:
    return Compiler(257, plan.target, None, None, str)


def too_large(plan: Plan) -> Plan:
    """The plan for a chip with a byte too little."""
    tight = replace(chip("H100"), memory_bytes=plan.memory.peak - 1)
    return replace(plan, target=replace(plan.target, chip=tight))


def compiled_bytes(program: dict[str, Any]) -> dict[str, int]:
    """What a program of a report sends in a run, by the mesh axes that it crosses."""
    return {axes: size for axes, size in program["bytes_per_step"]["axes"].items() if axes}


def tables(report: dict[str, Any]) -> str:
    written = StringIO()
    print_report(report, Console(file=written, width=110))
    return written.getvalue()
