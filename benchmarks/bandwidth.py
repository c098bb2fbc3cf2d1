"""Tokens a second over links that `tc` limits, beside what `gregale simulate` predicts (as root, some ten minutes).

    python benchmarks/bandwidth.py FOLDER [--cycles 3] [--picture docs/figures/bandwidth.svg]

Two sites, each a network namespace with one device: PSDP in every step (two processes, one mesh, gloo), and islands:
DiLoCo, streaming with tau = 1, and streaming with 4 bits. A method is started once, and its link is changed while it
runs, in turn: no limit, 50, 200 and 1000 Mbit/s, then again; so all links meet the same other work on the machine. The
exchange of the model (17 MB in float32, 2.8 s at 50 Mbit/s) is far above what such a link carries in one of its steps.

The prediction is the timeline's: its step is the method's own measured one with no limit, so that it says what the link
costs and nothing of what the processor does. Results so far are in FOLDER/rates.json; `--only METHOD` adds one.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import yaml

from gregale.islands.engine.namespaces import Network, rate_limited
from gregale.islands.protocol.settings import LAN
from gregale.programs.islands.processes import end, make_token, start, start_lighthouse
from gregale.timeline.fleet import Fleet
from gregale.timeline.methods import METHODS, Cadence
from gregale.timeline.model import Workload
from gregale.timeline.plot import LINE_COLOURS, new_figure, save_figure
from gregale.timeline.table import run_method

SITES, PERIOD, LAYERS, FRAGMENT_LAYERS = 2, 30, 4, 2
ROWS, POSITIONS = 4, 64
MBIT_PER_SECOND: tuple[int | None, ...] = (None, 50, 200, 1000)
PORT = 29_640
START_SECONDS = 300.0
WINDOW_SECONDS = 240.0
CONFIG = {
    "steps": 1_000_000,
    "model": {"type": "llama", "layers": LAYERS, "hidden": 256, "heads": 4, "kv_heads": 4, "mlp": 1024},
    "compute": {"dtype": "float32", "remat": "none"},
    "data": {"sources": {"python": {"type": "text", "files": ["{stdlib}/*.py"]}}, "held_out": 0.02},
    "batch": {"sequence_length": POSITIONS},
    "optimizer": {"type": "adamw", "learning_rate": 1e-4, "schedule": {"type": "constant"}},
    "evaluation": {"batches": 1},
    "checkpoint": {"every": 1_000_000},
    "distributed": {"timeout_seconds": 600},
}
STREAMING = {"type": "streaming_diloco", "period": PERIOD, "fragments": LAYERS // FRAGMENT_LAYERS + 1, "delay": 1}


@dataclass(frozen=True)
class Setting:
    """A method: its label, its name in the timeline's model, what it has of the configuration, steps of a window."""

    label: str
    predicted: str
    config: Mapping
    window: int
    parameters_codec: str | None = None


SETTINGS = {
    "psdp": Setting("PSDP, every step", "psdp", {}, 4),
    "diloco": Setting(
        f"DiLoCo, H {PERIOD}", "diloco", {"sync": {"type": "diloco", "period": PERIOD}}, PERIOD, "float32"
    ),
    "streaming": Setting(f"streaming, H {PERIOD}, tau 1", "islands", {"sync": STREAMING}, PERIOD),
    "4 bits": Setting(
        "the same, 4 bits",
        "islands_4bit",
        {"sync": STREAMING, "reduce": {"codec": "int4", "second_leg": "int4"}},
        PERIOD,
    ),
}


class Steps:
    """When a run has logged its steps, by its metrics.jsonl."""

    def __init__(self, run: Path, processes: Sequence[subprocess.Popen]):
        self._path, self._processes = run / "metrics.jsonl", processes

    def now(self) -> int:
        """Steps logged so far."""
        for process in self._processes:
            assert process.poll() is None, f"a process has ended with {process.returncode}; look at its log"
        return len(self._path.read_bytes().splitlines()) if self._path.exists() else 0

    def wait_for(self, step: int, seconds: float) -> float:
        """The time at which a step is logged."""
        until = time.monotonic() + seconds
        while self.now() < step:
            assert time.monotonic() < until, f"step {step} did not come within {seconds:.0f} s"
            time.sleep(0.02)
        return time.monotonic()

    def seconds_a_step(self, steps: int) -> float:
        """Of so many steps from the next but one on."""
        first = self.now() + 2
        began = self.wait_for(first, WINDOW_SECONDS)
        return (self.wait_for(first + steps, WINDOW_SECONDS) - began) / steps


@contextmanager
def one_mesh(folder: Path, network: Network) -> Iterator[Steps]:
    """PSDP over two processes in one mesh."""
    config = CONFIG | {"name": "psdp", "runs": str(folder / "runs"), "cpu_devices": SITES, "mesh": {"replica": SITES}}
    config["batch"] = {**CONFIG["batch"], "size": SITES * ROWS}
    path = write(folder / "psdp.yaml", config)
    way = ["--distributed.coordinator", f"{network.sites[0].address}:{PORT}", "--distributed.processes", str(SITES)]
    processes = []
    try:
        for number, site in enumerate(network.sites):
            command = ["train", str(path), *way, "--distributed.process", str(number), "--fresh"]
            processes.append(start(command, folder / f"psdp-{number}.log", site.command))
        yield Steps(folder / "runs" / "psdp", processes)
    finally:
        kill(processes)


@contextmanager
def islands(folder: Path, network: Network, name: str, changes: Mapping) -> Iterator[Steps]:
    """Two islands and a lighthouse on the bridge."""
    token = folder / "token"
    make_token(token)
    config = CONFIG | {"name": name, "runs": str(folder / "runs"), "cpu_devices": 1} | changes
    config["batch"] = {**CONFIG["batch"], "size": ROWS}
    config["islands"] = {"start": SITES, "reduce_seconds": 120, "heartbeat_seconds": 20, "token_file": str(token)}
    path, processes = write(folder / f"{name}.yaml", config), []
    lighthouse = start_lighthouse(f"{network.coordinator}:0", LAN, folder / f"{name}-lighthouse.log")
    try:
        for number, site in enumerate(network.sites):
            own = f"{name}-{number}"
            command = ["island", str(path), "--name", own, "--islands.name", own, "--islands.bind", site.address]
            command += ["--islands.lighthouse", lighthouse.address, "--fresh"]
            processes.append(start(command, folder / f"{own}.log", site.command))
        yield Steps(folder / "runs" / f"{name}-0", processes)
    finally:
        kill(processes)
        end([lighthouse.process])


def write(path: Path, config: Mapping) -> Path:
    path.write_text(yaml.safe_dump(dict(config)), encoding="utf-8")
    return path


def kill(processes: Sequence[subprocess.Popen]) -> None:
    for process in processes:
        process.kill()
        process.wait()


def measure(folder: Path, name: str, cycles: int) -> dict[str, list[float]]:
    """Seconds of a step by link, one for each cycle."""
    setting, found = SETTINGS[name], {str(rate): [] for rate in MBIT_PER_SECOND}
    slug = name.replace(" ", "-")
    with rate_limited(SITES, None) as network:
        running = one_mesh(folder, network) if name == "psdp" else islands(folder, network, slug, setting.config)
        with running as steps:
            steps.wait_for(setting.window // 2, START_SECONDS)
            for _ in range(cycles):
                for rate in MBIT_PER_SECOND:
                    for site in range(SITES):
                        network.limit(site, None if rate is None else f"{rate}mbit")
                    found[str(rate)].append(steps.seconds_a_step(setting.window))
                    print(f"{name} at {rate} Mbit/s: {found[str(rate)][-1]:.3f} s a step", flush=True)
    return found


def parameters() -> int:
    """Parameters of the model, embedding and output layer included."""
    model = CONFIG["model"]
    hidden, mlp = model["hidden"], model["mlp"]
    return LAYERS * (4 * hidden**2 + 3 * hidden * mlp + 2 * hidden) + hidden + 2 * 320 * hidden


def predicted(name: str, step_seconds: float, mbit_per_second: int) -> float:
    """Seconds of a step by the timeline's model."""
    setting = SETTINGS[name]
    nominal = step_seconds * 3 * LAYERS / (3 * LAYERS - 1)  # the model's first layer has one node fewer
    cadence = Cadence(20 * PERIOD, PERIOD, FRAGMENT_LAYERS, 1)
    workload, at = Workload(parameters(), LAYERS, nominal), np.array([mbit_per_second / 1e3])
    run = run_method(setting.predicted, workload, Fleet.uniform(SITES), cadence, at, setting.parameters_codec)
    return float(run.total_seconds[0]) / cadence.steps


def rows(rates: Mapping[str, Mapping[str, Sequence[float]]]) -> list[dict]:
    """For each method and link: tokens a second of both sites, measured and predicted, and shares of its unlimited."""
    found, tokens = [], SITES * ROWS * POSITIONS
    for name, by_link in rates.items():
        free = statistics.median(by_link["None"])
        for link, seconds in by_link.items():
            measured = statistics.median(seconds)
            expected = free if link == "None" else predicted(name, free, int(link))
            found.append(
                {
                    "method": name,
                    "mbit_per_second": None if link == "None" else int(link),
                    "measured": tokens / measured,
                    "least": tokens / max(seconds),
                    "most": tokens / min(seconds),
                    "predicted": tokens / expected,
                    "share": free / measured,
                    "predicted_share": free / expected,
                }
            )
    return found


def table(found: Sequence[Mapping]) -> str:
    """The rows as Markdown: a method a line."""
    lines = ["| method | no limit | 50 Mbit/s | 200 Mbit/s | 1000 Mbit/s |", "|---|---|---|---|---|"]
    for name, setting in SETTINGS.items():
        cells = []
        for each in (each for each in found if each["method"] == name):
            cell = f"{each['measured']:,.0f}"
            if each["mbit_per_second"] is not None:
                cell += f" ({each['share']:.0%}; {each['predicted_share']:.0%})"
            cells.append(cell)
        if cells:
            lines.append(f"| {setting.label} | {' | '.join(cells)} |")
    return "\n".join(lines)


def draw(path: Path, found: Sequence[Mapping]) -> None:
    """Shares of the unlimited rate against the link: points are measured, lines are the model's."""
    figure = new_figure(path, (7.5, 4.5))
    axes, grid = figure.subplots(), np.geomspace(30, 2000, 60)
    for (name, setting), colour in zip(SETTINGS.items(), LINE_COLOURS, strict=False):
        mine = [each for each in found if each["method"] == name]
        if not mine:
            continue
        free = next(SITES * ROWS * POSITIONS / each["measured"] for each in mine if each["mbit_per_second"] is None)
        shares = [free / predicted(name, free, link) for link in grid]
        axes.plot(grid, shares, color=colour, linewidth=1.5, label=setting.label)
        points = [(each["mbit_per_second"], each["share"]) for each in mine if each["mbit_per_second"]]
        axes.plot(*zip(*points, strict=True), "o", color=colour, markersize=6)
    axes.set_xscale("log")
    axes.set_xticks([50, 200, 1000], ["50", "200", "1000"])
    axes.minorticks_off()
    axes.set_ylim(0, 1.15)
    axes.set_xlabel("Mbit/s between two sites")
    axes.set_ylabel("tokens/s, share of the rate without a limit")
    axes.set_title("Measured (points) and predicted (lines)")
    axes.grid(alpha=0.3)
    figure.legend(loc="outside lower center", ncols=4, fontsize="small", frameon=False)
    save_figure(figure, path)


def main() -> None:
    assert all(SETTINGS[name].predicted in METHODS for name in SETTINGS)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--cycles", type=int, default=3)
    parser.add_argument("--only", choices=tuple(SETTINGS), action="append")
    parser.add_argument("--picture", type=Path)
    options = parser.parse_args()
    folder = options.folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "rates.json"
    rates = json.loads(path.read_text()) if path.exists() else {}
    for name in options.only or [name for name in SETTINGS if name not in rates]:
        rates[name] = measure(folder, name, options.cycles)
        path.write_text(json.dumps(rates))
    found = rows(rates)
    print(table(found))
    for each in found:
        off = each["predicted"] / each["measured"] - 1
        print(f"{each['method']:10} {each['mbit_per_second']!s:>5} Mbit/s: {each['measured']:8,.0f} tokens/s", end=" ")
        print(f"({each['least']:,.0f} to {each['most']:,.0f}), predicted {each['predicted']:,.0f} ({off:+.0%})")
    print(f"load average {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")
    if options.picture:
        draw(options.picture, found)


if __name__ == "__main__":
    main()
