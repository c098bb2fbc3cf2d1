"""Provides the result of `gregale plan --search` as a table."""

from typing import Any

from gregale.programs.plan.text import print_remedies, size
from gregale.terminal import Console, print_table

NOT_COMPILED = 5  # number of candidates that the table shows without compilation
HEADINGS = ("peak", "step", "tokens/s", "")  # after the settings
MESH = "mesh."


def print_search(report: dict[str, Any], console: Console) -> None:
    """Print the candidates as a table, the fastest first, and the best as YAML; keys that never differ are below it."""
    candidates, best = report["candidates"], report["best"]
    compiled = [each for each in candidates if each["peak"] is not None]
    others = [each for each in candidates if each["peak"] is None]
    shown = sorted(compiled + others[:NOT_COMPILED], key=lambda each: each["seconds"] or each["closed_form_seconds"])
    values = {key: {str(each["settings"][key]) for each in shown} for key in report["configured"]}
    own = [key for key in values if not key.startswith(MESH)]
    keys = [key for key in own if len(values[key]) > 1]
    title = f"Candidates for {report['name']} on {report['chip']}, {size(report['memory'])} a device"
    headings = ("mesh", *(key.replace(".", "\n") for key in keys), *HEADINGS)
    print_table(console, title, headings, [_row(each, keys, report) for each in shown])
    left_out = sum(report["left_out"].values())
    lines = [
        f"{len(candidates)} candidates, {len(compiled)} of them compiled; {left_out} impossible. --json has all.",
        *(f"Left out: {count} x {reason}" for reason, count in report["left_out"].items()),
        f"All in the table: {', '.join(f'{key} {min(values[key])}' for key in own if key not in keys)}.",
        "~: by closed forms; others are by the compiled program and its schedule. *: as configured.",
        f"The best is {report['rule']}.",
    ]
    for line in lines:
        console.print(line)
    if best is None:
        console.print("Nothing fits.")
        print_remedies(report["remedies"], report["memory"], console)
        return
    answer = "The configured settings are the best" if best["settings"] == report["configured"] else "The best"
    rate = f"{best['seconds']:.4g} s a step by the estimate, {best['tokens_per_second']:,.0f} tokens/s"
    console.print(f"{answer}: {size(best['peak'])}, {rate}.\n{report['yaml']}", end="")


def _row(candidate: dict[str, Any], keys: list[str], report: dict[str, Any]) -> tuple[str, ...]:
    peak, seconds = candidate["peak"], candidate["seconds"]
    verdict = "fits" if candidate["fits"] else "no"
    if peak is None:
        low, high = candidate["closed_form_range"]
        certain = candidate["compared"] and high <= report["memory"]
        verdict = "too large" if low > report["memory"] else "-" if certain else "uncertain"
    settings, about = candidate["settings"], "~" if peak is None else ""
    axes = [
        f"{key.removeprefix(MESH)} {count}" for key, count in settings.items() if key.startswith(MESH) and count > 1
    ]
    return (
        " x ".join(axes) or "1 device",
        *(str(settings[key]) for key in keys),
        about + size(peak or candidate["closed_form_peak"]),
        f"{about}{seconds or candidate['closed_form_seconds']:.4g} s",
        f"{candidate['tokens_per_second']:,.0f}",
        verdict + " *" * (settings == report["configured"]),
    )
