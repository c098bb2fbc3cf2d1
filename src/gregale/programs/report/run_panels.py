"""Provides the parts of a run's page besides its charts: main metrics, samples, configuration, machine."""

import json
from collections.abc import Mapping
from typing import Any

from gregale.formatting import NONE, format_quantity, format_setting
from gregale.programs.report.comparison import MEASURES, last, median, method
from gregale.programs.report.runs import ReportRun
from gregale.runs.history import Sample
from gregale.web.markup import Html, cards, element, folded, table

MAX_SAMPLES = 20  # number of steps
MAX_CHARACTERS = 4000  # of a text


def glance(run: ReportRun) -> Html:
    steps = run.config("steps")
    done = f"{run.history.figures.last_step:,}" + (f" of {steps:,}" if type(steps) is int else "")
    found = [(each, each.of(run)) for each in MEASURES if each.heading != "steps"]
    known = [(each.heading, format_quantity(value, each.unit)) for each, value in found if value is not None]
    return cards([("steps", done), ("method", method(run)), *known])


def samples_of(run: ReportRun) -> list[Html]:
    """Return the samples by step, the newest open; at most `MAX_SAMPLES` steps, evenly spaced."""
    samples = run.history.samples
    if len(samples) > MAX_SAMPLES:
        indices = {round(index * (len(samples) - 1) / (MAX_SAMPLES - 1)) for index in range(MAX_SAMPLES)}
        samples = [samples[index] for index in sorted(indices)]
    parts = [_sample(sample, sample is samples[-1]) for sample in reversed(samples)]
    if len(run.history.samples) > MAX_SAMPLES:
        note = f"{len(samples)} of {len(run.history.samples):,} steps are shown; samples.txt has all."
        parts.append(element("p", note, class_="help"))
    return parts


def configuration(run: ReportRun) -> Html | None:
    rows = [[element("code", key), format_setting(value)] for key, value in run.history.config.items()]
    title = f"The {len(rows)} settings of {run.label}"
    return folded(title, table(["setting", "value"], rows, label=title)) if rows else None


def machine(run: ReportRun) -> Html | None:
    """Return a table of the run's starts: time, devices, versions."""
    rows = [
        [
            f"{start.get('step', NONE)}",
            start.get("time", NONE),
            f"{start.get('devices', NONE)} {start.get('device_kind', '')}",
            _sizes(start.get("mesh")),
            f"gregale {start.get('gregale', NONE)}, jax {start.get('jax', NONE)}",
            _pairs(start.get("kernels")),
            _pairs(start.get("compiler_options")),
        ]
        for start in run.history.starts
    ]
    headings = ["after step", "time", "devices", "mesh", "versions", "kernels", "compiler options"]
    return table(headings, rows, label="starts") if rows else None


def changes(run: ReportRun) -> Html | None:
    """Return a table of the settings that changed at a resumption."""
    rows = [
        [f"{entry.get('step', NONE)}", entry.get("time", NONE), element("code", key), *map(format_setting, both)]
        for entry in run.history.changes
        if isinstance(entry.get("changes"), Mapping)
        for key, change in entry["changes"].items()
        for both in [change if isinstance(change, list) and len(change) == 2 else [None, change]]
    ]
    return table(["after step", "time", "setting", "before", "since"], rows, label="changes") if rows else None


def beside_plan(run: ReportRun, plan: Mapping[str, Any]) -> Html:
    """Return the plan's estimates beside the run's measurements."""
    seconds, tokens = median("step_seconds")(run), plan.get("tokens_per_step")
    names = [name for name in run.history.figures if "memory" in name and "host" not in name]  # of a device
    memory = max((value for name in names if (value := last(name)(run)) is not None), default=None)
    sent = run.axes.get("bytes")
    sent_a_step = None if sent is None else sent.values[-1] / max(sent.steps[-1], 1)
    bound, estimate = plan.get("roofline") or {}, plan.get("estimate") or {}
    estimated = estimate.get("seconds") or bound.get("step_seconds_one_after_another")
    configured = [each for each in (plan.get("methods") or {}).values() if each.get("configured")]
    bytes_a_step = configured[0]["bytes_per_step"]["average"] if configured else None
    estimated_tokens = tokens / estimated if tokens and estimated else None
    compared = [
        ("time of a step", estimated, seconds, "seconds"),
        ("tokens a second", estimated_tokens, median("tokens_per_second")(run), ""),
        (
            "model FLOPs utilisation",
            estimate.get("utilisation") or bound.get("utilisation"),
            median("mfu")(run),
            "share",
        ),
        ("memory of a device at the peak", (plan.get("memory") or {}).get("peak"), memory, "bytes"),
        ("sent over the slow link in a step", bytes_a_step, sent_a_step, "bytes"),
    ]
    rows = [
        [
            name,
            format_quantity(planned, unit),
            format_quantity(found, unit),
            f"{found / planned:.2f}" if found and planned else NONE,
        ]
        for name, planned, found, unit in compared
    ]
    on = (
        f"the plan is for {plan.get('devices')} devices ({plan.get('device_kind')}), compared with a {plan.get('chip')}"
    )
    return element(
        "div",
        table(["", "plan", "measured, median", "measured / plan"], rows, kinds="numbers", label="plan beside run"),
        element("p", f"Of the run {run.label}; {on}.", class_="help"),
    )


def _sample(sample: Sample, opened: bool) -> Html:
    shortened = (text if len(text) <= MAX_CHARACTERS else f"{text[:MAX_CHARACTERS]}…" for text in sample.texts)
    texts = (element("pre", text, class_="text") for text in shortened)
    return folded(f"Step {sample.step:,}", *texts, opened=opened)


def _sizes(mesh: Any) -> str:
    if not isinstance(mesh, Mapping):
        return NONE
    return " x ".join(f"{axis} {size}" for axis, size in mesh.items() if size != 1) or "one device"


def _pairs(found: Any) -> str:
    if not isinstance(found, Mapping) or not found:
        return NONE
    return ", ".join(
        f"{name} {value if isinstance(value, str) else json.dumps(value)}" for name, value in found.items()
    )
