"""Provides the steps whose closed form of memory was compared with the TPU compiler's peak.

`benchmarks/memory_sweep.py` writes `compared.json`: the kind, the sizes and the peak in bytes of each step.
"""

import json
from functools import cache
from importlib.resources import files
from typing import Any

from gregale.audit.step import TPU, Backend, StepShape


@cache
def compared_steps() -> dict[str, dict[str, Any]]:
    """Return the steps by name."""
    return json.loads(files("gregale.audit").joinpath("compared.json").read_text(encoding="utf-8"))


def kind_of(step: StepShape) -> str:
    """Return the properties that closed forms treat apart: policy, gather, numbers, attention, windows, others."""
    words = [step.remat, "per_step" if step.per_step else "per_layer", step.matmul]
    words += ["scores" if step.scores else "kernel", f"{len(set(step.windows))} windows"]
    words += ["experts"] * (step.active > 0) + ["adapters"] * step.adapts
    return " ".join(words + [axis for axis, size in step.mesh.items() if size > 1 and axis not in ("replica", "data")])


def sizes_of(step: StepShape) -> list[int]:
    """Return layers, width, vocabulary, tokens of a device, microbatches, and bytes of a value."""
    return [step.layers, step.embed, step.vocabulary, step.tokens, step.microbatches, step.compute_bytes]


def is_compared(step: StepShape, backend: Backend) -> bool:
    """Return whether each size of a step lies between those of compared steps of its kind."""
    columns = zip(*(each["sizes"] for each in compared_steps().values() if each["kind"] == kind_of(step)), strict=True)
    between = [min(column) <= size <= max(column) for column, size in zip(columns, sizes_of(step), strict=False)]
    return backend == TPU and bool(between) and all(between)
