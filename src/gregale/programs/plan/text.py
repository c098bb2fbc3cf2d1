"""Provides the report of `gregale plan` as tables."""

from collections import Counter
from typing import Any

from gregale.axes.layout import MAPPINGS
from gregale.cost.collectives import BETWEEN
from gregale.formatting import listed
from gregale.programs.plan.step import STEP
from gregale.runs.sections import section_classes
from gregale.terminal import Console, print_table

COUNTS = 1024  # bytes up to which `counters` are counts of steps and tokens alone
UNITS = ("B", "KiB", "MiB", "GiB", "TiB")
MEMORY_ROWS = {
    "parameters": "parameters",
    "frozen": "frozen weights",
    "optimizer": "optimizer state",
    "outer_parameters": "outer parameters",
    "outer_optimizer": "outer optimizer state",
    "average": "average of the parameters",
    "counters": "further state of the method",
    "gradients": "gradient buffers",
    "activations": "activations and all else",
    "in_flight": "a round's fragment and message",
    "peak": "compiler's peak",
    "chip": "memory of the device",
}
UTILISATION = {"utilisation": "causal", "utilisation_full_attention": "full"}  # attention


def size(count: float | None) -> str:
    if count is None:
        return "unknown"
    unit = 0
    while abs(count) >= 1024 and unit < len(UNITS) - 1:
        count, unit = count / 1024, unit + 1
    return f"{count:,.0f} {UNITS[unit]}" if unit == 0 else f"{count:,.2f} {UNITS[unit]}"


def print_report(report: dict[str, Any], console: Console) -> None:
    """Print the report as tables, and whether the run fits."""
    _head(report, console)
    if report["mapping"]:
        print_table(console, "Mappings: the mesh axes that split named axes", ("axis", *MAPPINGS), report["mapping"])
    if report["parameter_groups"]:
        _parameter_groups(report["parameter_groups"], console)
    if report["pipeline"] is not None:
        _pipeline(report["pipeline"], console)
    memory = report["memory"]
    rows = [
        (label, size(memory[key])) for key, label in MEMORY_ROWS.items() if memory[key] > COUNTS * (key == "counters")
    ]
    if len(report["programs"]) > 1:
        rows[-1:-1] = [(f"  of {name}", size(each["peak"])) for name, each in report["programs"].items()]
    print_table(console, f"Memory of one device ({report['chip']})", ("", "bytes"), rows)
    _verdict(report, console)
    for name, each in report["programs"].items():
        _collectives(name, each["collectives"], console)
    _payload(report["programs"], console)
    _overlap(report["programs"], console)
    _estimate(report["programs"], console)
    _speed(report, console)
    _methods(report, console)
    for kind in section_classes().values():
        if costs := report[kind.costs_key]:
            kind.print_costs(costs, console)
    for note in report["notes"]:
        console.print(f"Note: {note}")


def _parameter_groups(groups: list[dict[str, Any]], console: Console) -> None:
    rows = [
        (listed(each["parameters"], 12), each["algorithm"], f"{each['rate']:.4g}", f"{each['weight_decay']:.4g}")
        for each in groups
    ]
    print_table(console, "Groups of parameters", ("parameters", "optimizer", "peak rate", "weight decay"), rows)


def _head(report: dict[str, Any], console: Console) -> None:
    mesh = " x ".join(f"{axis} {count}" for axis, count in report["mesh"].items())
    kernels = report["kernels"]
    others = "; ".join([kernels["rules"], *(f"{key}: {form}" for key, form in kernels.items() if key != "rules")])
    active, frozen = report["active_parameters"], report["frozen_parameters"]
    of_a_token = f", of which a token uses {active:,}," if active != report["parameters"] else ""
    if frozen:
        of_a_token = f"{' of adapters' * (frozen > report['parameters'])} beside {frozen:,} frozen ones"
    console.print(
        f"{report['name']}: {report['parameters']:,} parameters{of_a_token} on {report['devices']} devices "
        f"({report['device_kind']}{f'; {mesh}' if mesh else ''}), {report['sync']}, {report['tokens_per_step']:,} "
        f"tokens a step\n{_flops(report)}\n"
        f"Rules of differentiation: {others}"
    )
    if report["experts"] is not None:
        console.print(experts_line(report["experts"]))
    if report["compiler_options"]:
        options = ", ".join(f"{name} {value}" for name, value in report["compiler_options"].items())
        console.print(f"Compiler options: {options}")


def experts_line(found: dict[str, Any]) -> str:
    """Return the line about the place of experts, with the bytes of both places."""

    def figures(place: str) -> str:
        return f"{place}: {found['refused']}" if found[place] is None else f"{place} {size(found[place])}"

    place, other = ("gathered", "exchanged") if found["place"] == "gathered" else ("exchanged", "gathered")
    why = "by the rule of bytes" if found["auto"] else "as configured"
    return (
        f"Experts: {place}, {why}. A device sends in a step, with one round of an exchange (more depend on the "
        f"routing): {figures(place)}; {figures(other)}"
    )


def _flops(report: dict[str, Any]) -> str:
    """Return the line about FLOPs: those of the model, and the compiler's count."""
    flops = report["compiler_flops_per_device"]
    counted = "" if flops is None else f"the compiler counts {flops:.4g} on a device, each loop's body once"
    own = f"{report['flops_per_token']:.4g} FLOPs a token, {report['flops_per_step']:.4g} a step"
    return f"{own}{'; ' * bool(counted)}{counted}"


def _pipeline(p: dict[str, Any], console: Console) -> None:
    """Print the schedule without line wraps: a row is a stage, a column an iteration."""
    console.print(
        f"\nPipeline: {p['stages']} stages x {p['repeats']} repeats, {p['microbatches']} microbatches, "
        f"{p['iterations']} iterations, {p['bubble']:.1%} of them idle at each stage\n"
        "(microbatch and, by letter, repeat; `.` is idle)"
    )
    console.print(p["picture"], soft_wrap=True)


def _verdict(report: dict[str, Any], console: Console) -> None:
    memory = report["memory"]
    share = f"{size(memory['peak'])} of {size(memory['chip'])} ({memory['peak'] / memory['chip']:.0%})"
    if report["fits"]:
        console.print(f"It fits: {share}.")
        return
    console.print(f"It does not fit: {share}.")
    if memory["largest"]:
        console.print(f"The compiler rejects {memory['peak_program']!r}. Its largest buffers:")
    for each in memory["largest"]:
        console.print(f"  {size(each['bytes'])}: {each['shapes']}")
    print_remedies(report["remedies"], console)


def print_remedies(remedies: list[dict[str, Any]], console: Console) -> None:
    """Print each remedy after its effect."""
    if remedies:
        console.print("The cheapest compiled remedies:")
    for remedy in remedies:
        fits = "fits" if remedy["fits"] else "does not fit"
        effect = f"{size(remedy['peak_bytes'])}, {fits}; {remedy['step_time']:.2f} times the step time"
        console.print(f"  {effect}: {remedy['change']}")


def _collectives(name: str, collectives: list[dict[str, Any]], console: Console) -> None:
    """Print collectives, one row for those that differ only in size; for other programs only those between slices."""
    counts: Counter = Counter()
    payloads: Counter = Counter()
    for each in collectives:
        if name != STEP and each["link"] != BETWEEN:
            continue
        inside = "/".join(each["loop"]) or "-"
        axes = ", ".join(each["axes"]) or "-"
        times = "?" if each["times"] is None else str(each["times"])
        key = (each["kind"], each["dtype"], axes, each["link"], inside, times)
        counts[key] += 1
        payloads[key] += each["bytes"]
    rows = [(*key, str(counts[key]), size(payloads[key])) for key in counts]
    title = "Collectives" if name == STEP else f"Collectives of {name} between slices"
    print_table(console, title, ("kind", "dtype", "axes", "link", "loop", "times", "count", "bytes each time"), rows)


def _payload(programs: dict[str, dict[str, Any]], console: Console) -> None:
    rows = []
    for name, program in programs.items():
        for axes, count in program["bytes_per_step"]["axes"].items():
            rows.append((name, axes.replace(",", ", ") or "none", size(count)))
    print_table(console, "Payload of a program on one device, by mesh axes", ("program", "axes", "bytes"), rows)


def _overlap(programs: dict[str, dict[str, Any]], console: Console) -> None:
    rows = [
        (
            name,
            link,
            *("-" if each[key] is None else size(each[key]) for key in ("bytes", "asynchronous")),
            *("-" if each[key] is None else f"{each[key]:.4g} s" for key in ("hidden_seconds", "exposed_seconds")),
        )
        for name, program in programs.items()
        for link, each in program["overlap"].items()
    ]
    headings = ("program", "link", "bytes", "asynchronous", "hidden", "exposed")
    print_table(console, "Overlap in the compiled programs", headings, rows)


def _estimate(programs: dict[str, dict[str, Any]], console: Console) -> None:
    """Print the time and the utilisation of each program with a compiler estimate: from below, and calibrated."""
    keys = ("compute_seconds", "kernel_seconds", "exposed_seconds", "seconds")
    rows = [
        (
            name,
            *(f"{found[key]:.4g} s" for key in keys),
            "{:.4g} s ({:.3g} to {:.3g})".format(found["calibrated"]["seconds"], *found["calibrated"]["range_seconds"]),
            *(f"{_percent(found['calibrated'][key])} to {_percent(found[key])}" for key in UTILISATION),
        )
        for name, program in programs.items()
        if (found := program["estimate"]) is not None
    ]
    if rows:
        headings = ("program", "compute", "kernels", "exposed", "at least", "calibrated", *UTILISATION.values())
        print_table(console, "What the compiler estimates", headings, rows)


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{share:.1%}"


def _speed(report: dict[str, Any], console: Console) -> None:
    bound = report["roofline"]
    rows = [("compute", f"{bound['compute_seconds']:.4g} s"), ("memory", f"{bound['memory_seconds']:.4g} s")]
    rows += [(f"link {link}", f"{seconds:.4g} s") for link, seconds in bound["link_seconds"].items()]
    rows += [("to the host and back", f"{bound['host_seconds']:.4g} s")] if bound["host_seconds"] else []
    rows += [
        ("step, all at once", f"{bound['step_seconds_overlapped']:.4g} s"),
        ("step, one after another", f"{bound['step_seconds_one_after_another']:.4g} s"),
        ("tokens a second, at most", f"{report['tokens_per_step'] / bound['step_seconds_overlapped']:,.0f}"),
        *((f"utilisation, {name} attention, at most", _percent(bound[key])) for key, name in UTILISATION.items()),
    ]
    print_table(console, f"Roofline ({report['chip']})", ("", "at least"), rows)


def _methods(report: dict[str, Any], console: Console) -> None:
    methods, link = report["methods"], report["link_gbit_per_second"]
    if not methods:
        return
    rows = [
        (
            with_settings(name, each),
            size(each["bytes_per_step"]["average"]),
            size(each["bytes_per_step"]["peak"]),
            f"{each['gbit_per_second']['average']:.3g}",
            f"{each['gbit_per_second']['peak']:.3g}",
        )
        for name, each in methods.items()
    ]
    headings = ("method", "on average", "in a step at most", "Gbit/s, average", "Gbit/s, at most")
    print_table(console, "What a device sends over the slow axis a step, and a replica a second of it", headings, rows)
    rows = []
    for name, each in methods.items():
        needed, here = each["needed_gbit_per_second"], each.get("utilisation")
        needed = "> 1000" if needed is None else f"{needed:.1f}"
        rows.append((with_settings(name, each), needed, "-" if here is None else f"{here:.1%}"))
    here = "utilisation" if link is None else f"utilisation at {link:g} Gbit/s"
    print_table(console, "Methods for the link between replicas", ("method", "Gbit/s for 90%", here), rows)
    console.print("Methods that the configuration does not name have its period, if it has one, and else defaults.")


def with_settings(name: str, method: dict[str, Any]) -> str:
    """Return a method with its H, P and tau, and a mark for the configured method."""
    settings = [f"H {method['period']}"] if method["period"] > 1 else []
    settings += [f"P {method['fragments']}", f"tau {method['delay']}"] if method["fragments"] > 1 else []
    settings += ["configured"] if method["configured"] else []
    return f"{name} ({', '.join(settings)})" if settings else name


NOT_COMPILED = 5  # number of candidates that the table shows without compilation
CANDIDATE_HEADINGS = ("peak", "step", "tokens/s", "")  # after the settings
MESH_KEYS = "mesh."


def print_search(report: dict[str, Any], console: Console) -> None:
    """Print the candidates as a table, the fastest first, and the best as YAML; keys that never differ are below it."""
    candidates, best = report["candidates"], report["best"]
    compiled = [each for each in candidates if each["peak"] is not None]
    others = [each for each in candidates if each["peak"] is None]
    shown = sorted(compiled + others[:NOT_COMPILED], key=lambda each: each["seconds"] or each["bound_seconds"])
    values = {key: {str(each["settings"][key]) for each in shown} for key in report["configured"]}
    own = [key for key in values if not key.startswith(MESH_KEYS)]
    keys = [key for key in own if len(values[key]) > 1]
    title = f"Candidates for {report['name']} on {report['chip']}, {size(report['memory'])} a device"
    headings = ("mesh", *(key.replace(".", "\n") for key in keys), *CANDIDATE_HEADINGS)
    print_table(console, title, headings, [_candidate_row(each, keys, report) for each in shown])
    left_out = sum(report["left_out"].values())
    lines = [
        f"{len(candidates)} candidates, {len(compiled)} of them compiled; {left_out} impossible. --json has all.",
        *(f"Left out: {count} x {reason}" for reason, count in report["left_out"].items()),
        f"All in the table: {', '.join(f'{key} {min(values[key])}' for key in own if key not in keys)}.",
        ">: a lower bound; others are by the compiled program and its schedule. *: as configured.",
        f"The best is {report['rule']}.",
    ]
    for line in lines:
        console.print(line)
    if best is None:
        console.print(f"Nothing fits. The smallest:\n{report['smallest']}", end="")
        print_remedies(report["remedies"], console)
        return
    answer = "The configured settings are the best" if best["settings"] == report["configured"] else "The best"
    rate = f"{best['seconds']:.4g} s a step by the estimate, {best['tokens_per_second']:,.0f} tokens/s"
    console.print(f"{answer}: {size(best['peak'])}, {rate}.\n{report['yaml']}", end="")


def _candidate_row(candidate: dict[str, Any], keys: list[str], report: dict[str, Any]) -> tuple[str, ...]:
    peak, seconds = candidate["peak"], candidate["seconds"]
    verdict = "not compiled" if peak is None else "fits" if candidate["fits"] else "no"
    settings, above = candidate["settings"], "> " if seconds is None else ""
    sizes = {key.removeprefix(MESH_KEYS): count for key, count in settings.items() if key.startswith(MESH_KEYS)}
    axes = [f"{axis} {count}" for axis, count in sizes.items() if count > 1]
    return (
        " x ".join(axes) or "1 device",
        *(str(settings[key]) for key in keys),
        f"> {size(candidate['bound_bytes'])}" if peak is None else size(peak),
        f"{above}{seconds or candidate['bound_seconds']:.4g} s",
        "-" if seconds is None else f"{candidate['tokens_per_second']:,.0f}",
        verdict + " *" * (settings == report["configured"]),
    )
