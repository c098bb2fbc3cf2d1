"""What `gregale plan --search` says, for a reader."""

from __future__ import annotations

from typing import Any

from rich.console import Console

from gregale.programs.plan.text import print_remedies, size
from gregale.services.tables import print_table

NOT_COMPILED = 5  # candidates shown beside those that were compiled
CHOICES = ("remat", "microbatches", "unroll", "gather")
HEADINGS = (*CHOICES, "closed form", "step", "compiled", "scheduled", "verdict")


def print_search(report: dict[str, Any], console: Console) -> None:
    """The candidates as a table, the fastest first, and the answer as YAML."""
    candidates, best = report["candidates"], report["best"]
    compiled = [each for each in candidates if each["peak"] is not None]
    others = [each for each in candidates if each["peak"] is None]
    shown = sorted(compiled + others[:NOT_COMPILED], key=lambda each: each["seconds"] or each["closed_form_seconds"])
    title = f"Candidates for {report['name']} on {report['chip']}, {size(report['memory'])} a device"
    print_table(console, title, HEADINGS, [_row(each, report) for each in shown])
    lines = [f"{len(others) - NOT_COMPILED} more are in --json."] if len(others) > NOT_COMPILED else []
    lines += [f"Left out: {reason}" for reason in report["left_out"]]
    lines += [f"Configured: {', '.join(f'{key} {value}' for key, value in report['configured'].items())}."]
    lines += (
        [] if best is None else [f"It fits: {size(best['peak'])}. A step takes {best['seconds']:.4g} s, estimated."]
    )
    for line in lines:
        console.print(line, highlight=False)
    if best is None:
        console.print("Nothing fits.", highlight=False)
        print_remedies(report["remedies"], console)
        return
    console.print(report["yaml"], highlight=False, markup=False, end="")


def _row(candidate: dict[str, Any], report: dict[str, Any]) -> tuple[str, ...]:
    peak, seconds = candidate["peak"], candidate["seconds"]
    verdict = "too large" if candidate["closed_form_peak"] > report["memory"] else "-"
    if peak is not None:
        verdict = "fits" if candidate["fits"] else "does not fit"
    return (
        *(str(candidate[key]) for key in CHOICES),
        size(candidate["closed_form_peak"]),
        f"{candidate['closed_form_seconds']:.4g} s",
        "-" if peak is None else size(peak),
        "-" if seconds is None else f"{seconds:.4g} s",
        verdict,
    )
