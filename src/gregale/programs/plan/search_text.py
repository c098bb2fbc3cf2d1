"""What `gregale plan --search` says, for a reader."""

from __future__ import annotations

from typing import Any

from gregale.programs.plan.text import print_remedies, size
from gregale.services.tables import print_table
from gregale.terminal import Console

NOT_COMPILED = 5  # candidates shown beside those that were compiled
CHOICES = ("remat", "microbatches", "unroll", "gather")
HEADINGS = ("remat", "micro\nbatches", "unroll", "gather", "closed\nform", "step", "compiled", "step by\nschedule", "")


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
    for line in lines:
        console.print(line, highlight=False, markup=False)
    if best is None:
        console.print("Nothing fits.", highlight=False)
        print_remedies(report["remedies"], console)
        return
    answer = f"The fastest that fits: {size(best['peak'])}, {best['seconds']:.4g} s a step by the estimate."
    console.print(f"{answer}\n{report['yaml']}", highlight=False, markup=False, end="")


def _row(candidate: dict[str, Any], report: dict[str, Any]) -> tuple[str, ...]:
    peak, seconds = candidate["peak"], candidate["seconds"]
    verdict = "too large" if candidate["closed_form_peak"] > report["memory"] else "-"
    if peak is not None:
        verdict = "fits" if candidate["fits"] else "no"
    return (
        *(str(candidate[key]) for key in CHOICES),
        size(candidate["closed_form_peak"]),
        f"{candidate['closed_form_seconds']:.4g} s",
        "-" if peak is None else size(peak),
        "-" if seconds is None else f"{seconds:.4g} s",
        verdict,
    )
