"""What `gregale plan` says, as a page: memory beside the chip's, bytes by link, schedules, methods over bandwidth."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from gregale.communication.pipeline.schedule import Schedule as PipelineSchedule
from gregale.formatting import format_quantity as in_words
from gregale.methods.schedule import Schedule
from gregale.programs.plan.text import MEMORY_ROWS, size, with_settings
from gregale.programs.report.synchronisation import MOST_SPANS, spans_of
from gregale.services.page import (
    Bars,
    Html,
    Lines,
    Page,
    Row,
    Series,
    Span,
    Spans,
    cards,
    colour_of,
    folded,
    notice,
    section,
    table,
)

NOT_TREES = {"peak", "closed_form", "closed_form_on_accelerator", "chip"}
LINK = ("Gbit/s", "")

Report = Mapping[str, Any]


def plan_page(report: Report) -> str:
    """The plan as one HTML file; `report` is what `--json` prints."""
    mesh = " x ".join(f"{axis} {count}" for axis, count in report["mesh"].items())
    where = f"{report['devices']} devices ({report['device_kind']}{f'; {mesh}' if mesh else ''})"
    page = Page(f"Plan of {report['name']}", f"{where}, compared with {report['chip']}. Written by gregale plan.")
    page.add(notice(*([] if report["fits"] else [_refusal(report)]), *report["notes"]), _glance(report))
    page.add(section("Memory of one device", page.chart(memory_chart(report)), *_remedies(report)))
    page.add(section("What a device sends", page.chart(bytes_chart(report)), _collectives(report)))
    page.add(section("Time of a step, at least", page.chart(time_chart(report))))
    if schedules := [*_pipeline(report), *_outer(report)]:
        page.add(section("Schedule", *(page.chart(each) for each in schedules)))
    if report["methods"]:
        page.add(section("Methods and the link between replicas", page.chart(methods_chart(report)), _methods(report)))
    if report["island"] is not None:
        page.add(section("Rounds over a host's link", page.chart(island_chart(report["island"]))))
    return page.html()


def memory_chart(report: Report) -> Bars:
    """The trees behind one another, the peak of each program, and the chip."""
    memory, programs = report["memory"], report["programs"]
    trees = [(key, label) for key, label in MEMORY_ROWS.items() if key not in NOT_TREES and memory[key]]
    rows = ["memory of the chip", "by tree", *(f"peak: {name}" for name in programs)]
    blank = [0.0] * len(programs)
    beside = memory["outer"] + memory["in_flight"]
    peaks = [each["peak"] + beside for each in programs.values()]
    parts = [
        (f"memory of the chip ({report['chip']})", [memory["chip"], 0.0, *blank]),
        ("the compiler's peak", [0.0, 0.0, *peaks]),
        *((label, [0.0, memory[key], *blank]) for key, label in trees),
    ]
    return Bars("memory", "Memory", rows, parts, "binary")


def bytes_chart(report: Report) -> Bars:
    """By program and link what a device sends in one run, split by mesh axes."""
    sent: dict[str, dict[str, float]] = {}
    for name, program in report["programs"].items():
        for each in program["collectives"]:
            axes = sent.setdefault(", ".join(each["axes"]) or "no axis", {})
            row = f"{name}: {each['link']}"
            axes[row] = axes.get(row, 0.0) + each["bytes"] * (each["times"] or 1)
    rows = sorted({row for axes in sent.values() for row in axes}) or ["nothing"]
    parts = [(axes, [found.get(row, 0.0) for row in rows]) for axes, found in sent.items()] or [("no axis", [0.0])]
    return Bars("bytes", "Payload by link and mesh axes", rows, parts, "binary")


def time_chart(report: Report) -> Bars:
    """The roofline: what each kind of work takes alone, and all of it at once or one after another."""
    bound = report["roofline"]
    rows = {"compute": bound["compute_seconds"], "memory": bound["memory_seconds"]}
    rows |= {f"link {link}": seconds for link, seconds in bound["link_seconds"].items()}
    rows |= {"host": bound["host_seconds"]} if bound["host_seconds"] else {}
    rows |= {
        "all at once": bound["step_seconds_overlapped"],
        "one after another": bound["step_seconds_one_after_another"],
    }
    estimates = {f"compiler: {n}": e["estimate"]["seconds"] for n, e in report["programs"].items() if e["estimate"]}
    rows |= estimates
    help = f"By the peak rates of {report['chip']}; model FLOPs utilisation is at most {bound['mfu_bound']:.1%}."
    return Bars("time", "Roofline", [*rows], [("seconds", [*rows.values()])], "seconds", help)


def methods_chart(report: Report) -> Lines:
    """The share of time in which a method computes, over the link between replicas."""
    series = [
        Series(
            with_settings(name, each),
            np.array(each["curve"]["gbit_per_second"]),
            np.array(each["curve"]["utilisation"]),
            colour=colour_of(place),
            dashed=not each["configured"],
        )
        for place, (name, each) in enumerate(report["methods"].items())
    ]
    here = report["link_gbit_per_second"]
    help = "By the timeline's model, a replica being a site; what is not configured is dashed."
    help += "" if here is None else f" The link planned for has {here:g} Gbit/s."
    return Lines("methods", "Utilisation", series, "share", axis=LINK, log_x=True, help=help)


def island_chart(island: Report) -> Lines:
    """The same of one island, over its host's link."""
    links = sorted((float(link), each["utilisation"]) for link, each in island["links"].items())
    x, y = np.array(links).T
    found = Series("utilisation", x, y, dots=True)
    help = f"With {island['members']} islands; {size(island['bytes_per_period'])} are sent in {island['period']} steps."
    return Lines("island", "Utilisation of an island", [found], "share", axis=LINK, log_x=True, help=help)


def _glance(report: Report) -> Html:
    memory, bound = report["memory"], report["roofline"]
    return cards(
        [
            ("parameters", f"{report['parameters']:,}"),
            ("method", report["sync"]),
            ("tokens a step", f"{report['tokens_per_step']:,}"),
            ("FLOPs a step", f"{report['flops_per_step']:.4g}"),
            ("memory at the peak", f"{size(memory['peak'])} of {size(memory['chip'])}"),
            ("it fits", "yes" if report["fits"] else "no"),
            ("a step takes at least", in_words(bound["step_seconds_overlapped"], "seconds")),
            ("MFU at most", in_words(bound["mfu_bound"], "share")),
        ]
    )


def _refusal(report: Report) -> str:
    memory = report["memory"]
    return f"It does not fit: {size(memory['peak'])} of {size(memory['chip'])} ({memory['peak'] / memory['chip']:.0%})."


def _remedies(report: Report) -> list[Html]:
    """What takes most and what would help, of a plan that does not fit."""
    largest = [[size(each["bytes"]), each["shapes"]] for each in report["memory"]["largest"]]
    found = [table(["bytes", "what takes most, by the compiler"], largest, label="largest")] if largest else []
    rows = [
        [each["change"], size(each["peak_bytes"]), "yes" if each["fits"] else "no", f"{each['step_time']:.2f}"]
        for each in report["remedies"]
    ]
    headings = ["remedy, estimated", "peak", "fits", "times the step time"]
    return [*found, table(headings, rows, numbers=True, label="remedies")] if rows else found


def _collectives(report: Report) -> Html:
    rows = [
        [
            name,
            each["kind"],
            each["dtype"],
            ", ".join(each["axes"]) or "-",
            each["link"],
            "/".join(each["loop"]) or "-",
            str(each["times"] or "?"),
            size(each["bytes"]),
        ]
        for name, program in report["programs"].items()
        for each in program["collectives"]
    ]
    headings = ["program", "kind", "dtype", "axes", "link", "loop", "times", "bytes each time"]
    return folded(f"{len(rows)} collectives", table(headings, rows, label="collectives"))


def _methods(report: Report) -> Html:
    rows = [
        [
            with_settings(name, each),
            size(each["bytes_per_step"]["average"]),
            size(each["bytes_per_step"]["peak"]),
            f"{each['gbit_per_second']['average']:.3g}",
            "> 1000" if each["needed_gbit_per_second"] is None else f"{each['needed_gbit_per_second']:.1f}",
            in_words(each.get("utilisation"), "share"),
        ]
        for name, each in report["methods"].items()
    ]
    headings = ["method", "a step, on average", "in a step at most", "Gbit/s, average", "Gbit/s for 90%", "here"]
    return table(headings, rows, numbers=True, label="methods")


def _pipeline(report: Report) -> list[Spans]:
    """A row for each stage, a colour for each repeat."""
    if (found := report["pipeline"]) is None:
        return []
    schedule = PipelineSchedule(found["stages"], found["microbatches"], found["repeats"], found["forwarding"])
    shown = min(schedule.iterations, MOST_SPANS // schedule.stages)
    rows = []
    for stage in range(schedule.stages):
        items = ((t, schedule.item(stage, t)) for t in range(shown))
        spans = [
            Span(
                t + 0.04,
                t + 0.96,
                item.repeat % 2,
                f"Iteration {t}: microbatch {item.microbatch}, repeat {item.repeat}",
            )
            for t, item in items
            if item is not None
        ]
        rows.append(Row(f"stage {stage}", spans))
    help = f"{schedule.iterations} iterations, {schedule.bubble:.1%} of them idle at each stage."
    return [Spans("pipeline", "Pipeline", rows, ("even repeats", "odd repeats"), ("Iteration", ""), help)]


def _outer(report: Report) -> list[Spans]:
    """When replicas or islands send their fragments."""
    configured = [(name, each) for name, each in report["methods"].items() if each["configured"]]
    name, found = configured[0] if configured else ("islands", report["island"])
    if found is None or found["period"] <= 1:
        return []
    schedule = Schedule(found["period"], found["fragments"], found["delay"], layers=found["fragments"])
    rows = [f"fragment {number}" for number in range(schedule.fragments)]
    return [spans_of(schedule, "outer", name, rows if schedule.fragments > 1 else ["everything"])]
