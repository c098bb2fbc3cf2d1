"""What `gregale plan` says, as tables for a reader."""

from __future__ import annotations

from collections import Counter
from typing import Any

from rich.console import Console
from rich.table import Table

UNITS = ("B", "KiB", "MiB", "GiB", "TiB")
MEMORY_ROWS = {
    "parameters": "parameters",
    "optimizer": "optimizer state",
    "gradients": "gradient buffers",
    "activations": "activations and all else",
    "peak": "compiler's peak",
    "closed_form": "the same in closed form",
    "closed_form_on_accelerator": "closed form on an accelerator",
    "chip": "memory of the device",
}


def size(count: float | None) -> str:
    """Bytes for a reader, in binary units."""
    if count is None:
        return "unknown"
    unit = 0
    while abs(count) >= 1024 and unit < len(UNITS) - 1:
        count, unit = count / 1024, unit + 1
    return f"{count:,.0f} {UNITS[unit]}" if unit == 0 else f"{count:,.2f} {UNITS[unit]}"


def print_report(report: dict[str, Any], console: Console) -> None:
    """The report as tables, and the verdict."""
    _head(report, console)
    memory = report["memory"]
    rows = [(label, size(memory[key])) for key, label in MEMORY_ROWS.items()]
    _table(console, f"Memory of one device ({report['chip']})", ("", "bytes"), rows)
    _verdict(report, console)
    _collectives(report, console)
    _traffic(report, console)
    _speed(report, console)
    _methods(report, console)
    for note in report["notes"]:
        console.print(f"Note: {note}", highlight=False)


def _table(console: Console, title: str, headings: tuple[str, ...], rows: list[tuple[str, ...]]) -> None:
    console.print(f"\n{title}", highlight=False)
    table = Table()
    for number, heading in enumerate(headings):
        table.add_column(heading, justify="left" if number == 0 else "right")
    for row in rows:
        table.add_row(*row)
    console.print(table)


def _head(report: dict[str, Any], console: Console) -> None:
    mesh = " x ".join(f"{axis} {count}" for axis, count in report["mesh"].items())
    console.print(
        f"{report['name']}: {report['parameters']:,} parameters on {report['devices']} devices "
        f"({report['device_kind']}{f'; {mesh}' if mesh else ''}), {report['sync']}, {report['tokens_per_step']:,} "
        f"tokens a step\n{report['flops_per_token']:.4g} FLOPs a token, {report['flops_per_step']:.4g} a step; the "
        f"compiler counts {report['compiler_flops_per_device']:.4g} on a device, each loop's body once",
        highlight=False,
    )


def _verdict(report: dict[str, Any], console: Console) -> None:
    memory = report["memory"]
    share = f"{size(memory['peak'])} of {size(memory['chip'])} ({memory['peak'] / memory['chip']:.0%})"
    if report["fits"]:
        console.print(f"It fits: {share}.", highlight=False)
        return
    console.print(f"It does not fit: {share}. The cheapest remedies, estimated:", highlight=False)
    for remedy in report["remedies"]:
        fits = "fits" if remedy["fits"] else "does not fit alone"
        effect = f"{size(remedy['peak_bytes'])}, {fits}; {remedy['step_time']:.2f} times the step time"
        console.print(f"  {remedy['change']}: {effect}", highlight=False)


def _collectives(report: dict[str, Any], console: Console) -> None:
    """Collectives that differ only in their size, in one row."""
    counts: Counter = Counter()
    payloads: Counter = Counter()
    for each in report["collectives"]:
        inside = "/".join(each["loop"]) or "-"
        axes = ", ".join(each["axes"]) or "-"
        key = (each["kind"], each["dtype"], axes, each["link"], inside, str(each["times"] or "?"))
        counts[key] += 1
        payloads[key] += each["bytes"]
    rows = [(*key, str(counts[key]), size(payloads[key])) for key in counts]
    _table(console, "Collectives", ("kind", "dtype", "axes", "link", "loop", "times", "count", "bytes each time"), rows)


def _traffic(report: dict[str, Any], console: Console) -> None:
    expected = report["closed_form_bytes_per_step"] or {}
    rows = [
        (axes.replace(",", ", ") or "none", size(count), size(expected[axes]) if axes in expected else "-")
        for axes, count in report["bytes_per_step"]["axes"].items()
    ]
    _table(console, "Payload of a step on one device, by mesh axes", ("axes", "compiled", "closed form"), rows)
    rows = [
        (link, size(each["bytes"]), size(each["asynchronous"]), size(each["behind_compute"]))
        for link, each in report["overlap"].items()
    ]
    _table(console, "What the compiler overlaps", ("link", "bytes", "asynchronous", "behind compute"), rows)


def _speed(report: dict[str, Any], console: Console) -> None:
    bound = report["roofline"]
    rows = [("compute", f"{bound['compute_seconds']:.4g} s"), ("memory", f"{bound['memory_seconds']:.4g} s")]
    rows += [(f"link {link}", f"{seconds:.4g} s") for link, seconds in bound["link_seconds"].items()]
    rows += [
        ("step, all at once", f"{bound['step_seconds_overlapped']:.4g} s"),
        ("step, one after another", f"{bound['step_seconds_one_after_another']:.4g} s"),
        ("model FLOPs utilisation, at most", f"{bound['mfu_bound']:.1%}"),
    ]
    _table(console, f"Roofline ({report['chip']})", ("", "at least"), rows)


def _methods(report: dict[str, Any], console: Console) -> None:
    if not report["methods"]:
        return
    rows = []
    for name, each in report["methods"].items():
        needed = each["needed_gbit_per_second"]
        here = each.get("utilisation")
        rows.append(
            (name, "> 1000" if needed is None else f"{needed:.1f}", "-" if here is None else f"{here:.1%}"),
        )
    link = report["link_gbit_per_second"]
    here = "utilisation" if link is None else f"utilisation at {link:g} Gbit/s"
    _table(console, "Methods for the link between replicas", ("method", "Gbit/s for 90%", here), rows)
