"""What the TPU compiler makes of Llamas of four sizes, on a machine without a TPU: a table, before and now.

    python benchmarks/tpu_programs.py --rows rows.json                                  # memory and traffic of all rows
    python benchmarks/tpu_programs.py --rows rows.json --until code --sizes 8b --lengths 8192    # and seconds, of some

Each row is a run of `gregale plan` with two sequences a chip and step, one at a time. `before`: attention by XLA, plain
rules of differentiation and no options of the compiler, with `remat: full`. `now`: the defaults, with the first of
`POLICIES` that fits with memory left for transfers behind the computation. A row takes ten to sixty seconds of a
processor until its memory is known, and some minutes until its code is there. Rows are kept in `--rows` and not
compiled again; the table is made of all that are there.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from typing import Any

from gregale.training.compiler_options import DEFAULTS

SIZES = {
    "1b": {"layers": 16, "hidden": 2048, "heads": 32, "kv_heads": 8, "mlp": 8192, "tied_head": True},
    "3b": {"layers": 28, "hidden": 3072, "heads": 24, "kv_heads": 8, "mlp": 8192, "tied_head": True},
    "8b": {"layers": 32, "hidden": 4096, "heads": 32, "kv_heads": 8, "mlp": 14336},
    "70b": {"layers": 80, "hidden": 8192, "heads": 64, "kv_heads": 8, "mlp": 28672},
}
TOPOLOGIES = {  # of one slice
    "v5e": {"1b": "4x4", "3b": "4x8", "8b": "8x8", "70b": "16x16"},
    "v6e": {"1b": "4x4", "3b": "4x8", "8b": "8x8", "70b": "16x16"},
    "v5p": {"1b": "2x2x4", "3b": "2x4x4", "8b": "4x4x4", "70b": "4x8x8"},
}
KINDS = {"v5e": "TPU v5 lite", "v6e": "TPU v6 lite", "v5p": "TPU v5"}
UNSET = {
    "xla_tpu_scoped_vmem_limit_kib": {"v5e": 16384, "v6e": 32768, "v5p": 16384}
}  # what the compiler takes by itself
LENGTHS = (4096, 8192, 32768)
POLICIES = ("context", "full", "offload")
MICROBATCHES = 2
DOES_NOT_FIT = 3
GIB = 2**30


@dataclass(frozen=True)
class Row:
    """A program to compile."""

    size: str
    chip: str
    slices: int
    length: int

    @property
    def topology(self) -> str:
        return f"{self.chip}:{TOPOLOGIES[self.chip][self.size]}"

    @property
    def chips(self) -> int:
        """Of a slice."""
        count = 1
        for each in TOPOLOGIES[self.chip][self.size].split("x"):
            count *= int(each)
        return count

    @property
    def key(self) -> str:
        return f"{self.size} {self.topology} x {self.slices}, {self.length}"

    def config(self) -> dict[str, Any]:
        return {
            "name": f"llama-{self.size}",
            "steps": 1000,
            "mesh": {"replica": self.slices, "data": self.chips},
            "model": {"type": "llama", "vocabulary": 128256, "rotary_base": 500000, **SIZES[self.size]},
            "compute": {"dtype": "bfloat16", "gather": "per_layer"},
            "data": {
                "sources": {"text": {"type": "text", "files": ["*.txt"]}},
                "tokenizer": {"type": "file", "path": "tokenizer.json", "end_of_document": "<|end_of_text|>"},
            },
            "batch": {
                "size": self.slices * self.chips * MICROBATCHES,
                "sequence_length": self.length,
                "microbatches": MICROBATCHES,
            },
            "optimizer": {"type": "adamw", "learning_rate": 3e-4},
        }


def planned(row: Row, until: str, folder: Path, *overrides: str) -> dict[str, Any]:
    """The report of `gregale plan`."""
    path = folder / f"{row.key.replace(' ', '-').replace(':', '-').replace(',', '')}.json"
    path.write_text(json.dumps(row.config()))  # JSON is YAML
    command = [sys.executable, "-m", "gregale", "plan", str(path), "--topology", row.topology, "--json"]
    command += ["--slices", str(row.slices), "--until", until, *overrides]
    finished = subprocess.run(command, stdout=subprocess.PIPE, text=True, cwd=folder, check=False)
    if finished.returncode:
        raise SystemExit(f"{row.key}: gregale plan ended with exit code {finished.returncode}")
    return json.loads(finished.stdout)


def figures(report: dict[str, Any], remat: str) -> dict[str, Any]:
    """What the table has of a report."""
    overlap, memory = report["overlap"].values(), report["memory"]
    sent, hidden = (sum(each[key] for each in overlap) for key in ("bytes", "asynchronous"))
    return {
        "remat": remat,
        "fits": report["fits"],
        "peak": memory["peak"],
        "closed_form": memory["closed_form"],
        "synchronous": sent - hidden,
        "overlaps": 2 * hidden >= sent,
        "least": least(report["roofline"], sent - hidden),
        "estimate": report["estimate"],
    }


def least(bound: dict[str, Any], synchronous: int) -> dict[str, float]:
    """Seconds of a step with its products at the chip's peak, waiting for what is synchronous or between slices.

    And the utilisation that it could have so. No compiler is asked what the products take in fact.
    """
    sent, links = bound["sent_bytes"], bound["link_seconds"]
    waited = synchronous * links["inside slice"] / max(1.0, sent["inside slice"]) + links["between slices"]
    seconds = max(bound["compute_seconds"], bound["memory_seconds"], bound["host_seconds"]) + waited
    return {"seconds": seconds, "utilisation": bound["mfu_bound"] * bound["step_seconds_overlapped"] / seconds}


def before(row: Row, until: str, folder: Path) -> dict[str, Any]:
    """With what there was before: of all that is chosen for TPUs nothing."""
    options = {name: UNSET.get(name, {}).get(row.chip, "false") for name in DEFAULTS.get(KINDS[row.chip], {})}
    off = [f"--compute.compiler_options.{name}={value}" for name, value in options.items()]
    plain = ["--compute.remat", "full", "--compute.attention", "xla", "--compute.rules", "plain"]
    return figures(planned(row, until, folder, *plain, *off), "full")


def now(row: Row, until: str, folder: Path) -> dict[str, Any]:
    """With the first policy that fits and overlaps; else with the first that fits, and else with the last.

    A program that all but fills the memory fits because the compiler has its transfers waited for.
    """
    found: dict[str, Any] = {}
    for remat in POLICIES:
        tried = figures(planned(row, "memory", folder, "--compute.remat", remat), remat)
        if tried["fits"] and tried["overlaps"]:
            found = tried
            break
        found = found if found.get("fits") else tried
    if until == "code" and found["fits"]:
        return figures(planned(row, until, folder, "--compute.remat", found["remat"]), found["remat"])
    return found


def wanted(options: argparse.Namespace) -> Iterator[Row]:
    for size in options.sizes:
        for chip in options.chips:
            for slices in options.slices:
                for length in options.lengths:
                    yield Row(size, chip, slices, length)


def table(rows: dict[str, dict[str, Any]]) -> str:
    """As Markdown; before and now in a cell."""

    def peak(found: dict[str, Any]) -> str:
        return f"{found['peak'] / GIB:.1f}{'' if found['fits'] else ', **no**'}"

    def estimated(found: dict[str, Any], key: str, form: str) -> str:
        return "" if found["estimate"] is None else form.format(found["estimate"][key])

    def both(of: dict[str, Any], show) -> str:
        return " / ".join(show(of[when]) or "-" for when in ("before", "now"))

    timed = any(of[when]["estimate"] for of in rows.values() for when in ("before", "now"))
    headings = [
        "model",
        "slices",
        "tokens",
        "remat now",
        "peak GiB (fits)",
        "synchronous GB",
        "s at least",
        "utilisation at most",
    ]
    headings += ["seconds", "utilisation"] if timed else []
    lines = [f"| {' | '.join(headings)} |", "|---" * len(headings) + "|"]
    for of in rows.values():
        cells = (
            of["size"].upper(),
            f"{of['slices']} x {of['topology']}",
            f"{of['length']:,}",
            f"`{of['now']['remat']}`",
            both(of, peak),
            both(of, lambda found: f"{found['synchronous'] / 1e9:.1f}"),
            both(of, lambda found: f"{found['least']['seconds']:.2f}"),
            both(of, lambda found: f"{found['least']['utilisation']:.0%}"),
            both(of, lambda found: estimated(found, "seconds", "{:.2f}")),
            both(of, lambda found: estimated(found, "utilisation", "{:.0%}")),
        )
        lines.append(f"| {' | '.join(cells[: len(headings)])} |")
    return "\n".join(lines)


def write(path: Path, rows: dict[str, dict[str, Any]]) -> None:
    temporary = path.with_suffix(".tmp")
    temporary.write_text(json.dumps(rows, indent=1))
    os.replace(temporary, path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=Path, required=True, help="where rows are kept, as JSON")
    parser.add_argument("--sizes", nargs="*", default=list(SIZES), choices=SIZES)
    parser.add_argument("--chips", nargs="*", default=list(TOPOLOGIES), choices=TOPOLOGIES)
    parser.add_argument("--slices", nargs="*", type=int, default=[1, 2])
    parser.add_argument("--lengths", nargs="*", type=int, default=list(LENGTHS))
    parser.add_argument("--until", choices=("memory", "code"), default="memory")
    parser.add_argument("--jobs", type=int, default=2, help="compilers at once; each takes up to 6 GiB of memory")
    options = parser.parse_args()
    rows = json.loads(options.rows.read_text()) if options.rows.exists() else {}
    lock = Lock()

    def measure(row: Row) -> None:
        done = rows.get(row.key)
        if done is not None and (options.until == "memory" or done["until"] == "code"):
            return
        with tempfile.TemporaryDirectory() as folder:
            found = {when.__name__: when(row, options.until, Path(folder)) for when in (before, now)}
        with lock:
            rows[row.key] = {**vars(row), "topology": row.topology, "until": options.until, **found}
            write(options.rows, rows)
            print(f"{row.key}: {json.dumps(found)}", file=sys.stderr, flush=True)

    with ThreadPoolExecutor(options.jobs) as pool:
        list(pool.map(measure, wanted(options)))
    print(table({row.key: rows[row.key] for row in wanted(options)}))


if __name__ == "__main__":
    main()
