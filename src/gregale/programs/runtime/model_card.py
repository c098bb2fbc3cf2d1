"""Provides the model card of an exported model: architecture, data, method and evaluation."""

from __future__ import annotations

from dataclasses import dataclass

import yaml

import gregale
from gregale.huggingface.families import Family
from gregale.model.llama import parameter_count
from gregale.programs.runtime.setup import Setup
from gregale.runs.history import Figures
from gregale.runs.run_directory import RunDirectory

FIGURES = {"eval_loss": ("held-out loss", "{:.4f} nats a token"), "bits_per_byte": ("held-out bits per byte", "{:.4f}")}


@dataclass(frozen=True)
class Exported:
    run: RunDirectory
    setup: Setup
    step: int
    family: Family
    dtype: str


def model_card(exported: Exported, figures: Figures) -> str:
    """Return README.md: the hub's header, and a table of facts; `figures`: of the run."""
    config, step = exported.run.read_config(), exported.step
    facts = {
        "architecture": f"{exported.family.architecture}, {parameter_count(exported.setup.model):,} parameters in "
        f"{exported.dtype}",
        "trained by": f"Gregale {gregale.__version__}",
    }
    if config.start_from:
        facts["started from"] = config.start_from
    if step:
        facts["steps"] = f"{step:,} of {config.batch.tokens:,} tokens, {step * config.batch.tokens:,} tokens in all"
        facts["data"] = ", ".join(config.data.sources)
        facts["method"] = config.sync.get_choice_name(type(config.sync))
        facts["optimizer"] = config.optimizer.get_choice_name(type(config.optimizer))
        facts |= last_evaluation(figures, step)
    header = yaml.safe_dump({"library_name": "transformers", "pipeline_tag": "text-generation", "tags": ["gregale"]})
    rows = "\n".join(f"| {name} | {value} |" for name, value in facts.items())
    return f"---\n{header}---\n\n# {config.name}\n\n| | |\n|---|---|\n{rows}\n"


def last_evaluation(figures: Figures, step: int) -> dict[str, str]:
    """Return the held-out metrics that the run logged at a step, formatted."""
    found = {key: figures[key].at(step) for key in FIGURES if key in figures}
    return {FIGURES[key][0]: FIGURES[key][1].format(value) for key, value in found.items() if value is not None}
