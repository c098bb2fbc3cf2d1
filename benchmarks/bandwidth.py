"""Tokens a second over links that `tc` limits, beside what `gregale simulate` predicts (as root, some ten minutes).

    python benchmarks/bandwidth.py FOLDER [--cycles 3] [--picture docs/figures/bandwidth.svg]

Two sites, each a network namespace with one device: PSDP in every step (two processes, one mesh, gloo), and islands:
DiLoCo, streaming with tau = 1, and streaming with 4 bits. A method is started once, and its link is changed while it
runs, in turn: no limit, 50 Mbit/s, no limit, 200, no limit, 1000, and again. What a link costs is the share of its rate
in that of the windows without a limit before and after it, the median over the cycles: other work on the machine meets
both alike. The exchange of the model (17 MB in float32, 2.8 s at 50 Mbit/s) is far above what such a link carries in
one of its steps.

An island's step takes at least PACE seconds (`doomed.py`), as if its device were not the processor that all of this
shares: else the codecs and TCP would slow the steps down. PSDP's is as it is.

The prediction is the timeline's: its step is the method's own measured one with no limit, so that it says what the link
costs and nothing of what the processor does; its link is what TCP brings through such a one, each way while both are
used. Results so far are in FOLDER/windows.json; `--only METHOD` measures one anew.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import yaml
from fleet import DOOMED

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
MBIT_PER_SECOND = (50, 200, 1000)
PORT = 29_640
START_SECONDS = 300.0
SECONDS = {"reduce_seconds": 120, "heartbeat_seconds": 30}  # nobody is to be left out, however busy the machine
WINDOW_SECONDS = 240.0
PACE = 0.25
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
    config = CONFIG | {"name": name, "runs": str(folder / "runs"), "cpu_devices": 1} | dict(changes)
    config["batch"] = {**CONFIG["batch"], "size": ROWS}
    config["islands"] = {"start": SITES, "minimum": SITES, "token_file": str(token), **SECONDS}
    path, processes = write(folder / f"{name}.yaml", config), []
    timing = replace(LAN, heartbeat_seconds=SECONDS["heartbeat_seconds"])
    lighthouse = start_lighthouse(f"{network.coordinator}:0", token, timing, folder / f"{name}-lighthouse.log")
    try:
        for number, site in enumerate(network.sites):
            own = f"{name}-{number}"
            command = ["island", str(path), "--name", own, "--islands.name", own, "--islands.bind", site.address]
            command += ["--islands.lighthouse", lighthouse.address, "--fresh"]
            processes.append(paced([*site.command, *DOOMED, *command], folder / f"{own}.log"))
        yield Steps(folder / "runs" / f"{name}-0", processes)
        rounds = (folder / "runs" / f"{name}-0" / "rounds.jsonl").read_text().splitlines()
        assert all(len(json.loads(line)["members"]) == SITES for line in rounds), "a round was made by one alone"
        print(f"{name}: {len(rounds)} rounds, all of both sites")
    finally:
        kill(processes)
        end([lighthouse.process])


def paced(command: Sequence[str], log: Path) -> subprocess.Popen:
    """Starts an island whose steps take at least `PACE` seconds."""
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "DOOM": str(log.with_suffix(".doom")), "PACE": str(PACE)}
    with log.open("ab") as file:
        return subprocess.Popen(command, stdout=file, stderr=file, stdin=subprocess.DEVNULL, env=environment)


def write(path: Path, config: Mapping) -> Path:
    path.write_text(yaml.safe_dump(dict(config)), encoding="utf-8")
    return path


def kill(processes: Sequence[subprocess.Popen]) -> None:
    for process in processes:
        process.kill()
        process.wait()


EXCHANGE = """
import socket, sys, threading, time
role, address, count = sys.argv[1], sys.argv[2], int(sys.argv[3])
if role == "listen":
    listener = socket.create_server((address, 5555))
    print("listens", flush=True)
    connection, _ = listener.accept()
else:
    connection = socket.create_connection((address, 5555), 5.0)
began = time.monotonic()
sender = threading.Thread(target=connection.sendall, args=(bytes(count),))
sender.start()
left = count
while left:
    left -= len(connection.recv(min(left, 1 << 20)))
sender.join()
print(count * 8 / (time.monotonic() - began) / 1e6)
"""


def carried(rate: int) -> float:
    """Mbit/s of content that TCP brings through a link of this rate, each way while both ways are used."""
    with rate_limited(SITES, f"{rate}mbit") as network:
        one, other = network.sites
        arguments = [one.address, str(rate * 10**6 // 4)]  # two seconds
        listen = [*one.command, sys.executable, "-c", EXCHANGE, "listen", *arguments]
        with subprocess.Popen(listen, stdout=subprocess.PIPE, text=True) as listener:
            assert listener.stdout is not None
            listener.stdout.readline()
            call = [*other.command, sys.executable, "-c", EXCHANGE, "call", *arguments]
            speed = float(subprocess.run(call, check=True, capture_output=True, text=True).stdout)
            listener.communicate()
            return speed


Window = tuple[int | None, float]  # Mbit/s or no limit, seconds of a step


def measure(folder: Path, name: str, cycles: int) -> list[Window]:
    """Windows in the order in which they were measured; the first and the last are without a limit."""
    setting, slug = SETTINGS[name], name.replace(" ", "-")
    found: list[Window] = []
    with rate_limited(SITES, None) as network:
        running = one_mesh(folder, network) if name == "psdp" else islands(folder, network, slug, setting.config)
        with running as steps:
            steps.wait_for(setting.window + 5, START_SECONDS)  # every fragment's round was there once
            for rate in (
                None,
                *(each for _ in range(cycles) for limited in MBIT_PER_SECOND for each in (limited, None)),
            ):
                for site in range(SITES):
                    network.limit(site, None if rate is None else f"{rate}mbit")
                found.append((rate, steps.seconds_a_step(setting.window)))
                print(
                    f"{name} at {rate} Mbit/s: {found[-1][1]:.3f} s a step, load {os.getloadavg()[0]:.0f}", flush=True
                )
    return found


def parameters() -> int:
    """Parameters of the model, embedding and output layer included."""
    model = CONFIG["model"]
    hidden, mlp = model["hidden"], model["mlp"]
    return LAYERS * (4 * hidden**2 + 3 * hidden * mlp + 2 * hidden) + hidden + 2 * 320 * hidden


def predicted(name: str, step_seconds: float, mbit_per_second: float) -> float:
    """Seconds of a step by the timeline's model."""
    setting = SETTINGS[name]
    nominal = step_seconds * 3 * LAYERS / (3 * LAYERS - 1)  # the model's first layer has one node fewer
    cadence = Cadence(20 * PERIOD, PERIOD, FRAGMENT_LAYERS, 1)
    workload, at = Workload(parameters(), LAYERS, nominal), np.array([mbit_per_second / 1e3])
    run = run_method(setting.predicted, workload, Fleet.uniform(SITES), cadence, at, setting.parameters_codec)
    return float(run.total_seconds[0]) / cadence.steps


def rows(windows: Mapping[str, Sequence[Window]], links: Mapping[str, float]) -> list[dict]:
    """For each method and link: seconds of a step without a limit, and shares of its rate, as seen and predicted.

    `links`: Mbit/s that a link carries, by its rate
    """
    found = []
    for name, measured in windows.items():
        free = statistics.median(seconds for rate, seconds in measured if rate is None)
        for link in MBIT_PER_SECOND:
            shares = [
                (measured[place - 1][1] + measured[place + 1][1]) / 2 / seconds
                for place, (rate, seconds) in enumerate(measured)
                if rate == link
            ]
            found.append(
                {
                    "method": name,
                    "mbit_per_second": link,
                    "free_seconds": free,
                    "share": statistics.median(shares),
                    "shares": sorted(shares),
                    "predicted_share": free / predicted(name, free, links[str(link)]),
                }
            )
    return found


def table(found: Sequence[Mapping]) -> str:
    """The rows as Markdown: a method a line."""
    links = " | ".join(f"{rate} Mbit/s" for rate in MBIT_PER_SECOND)
    lines = [f"| method | tokens/s, no limit | {links} |", "|---|---|" + "---|" * len(MBIT_PER_SECOND)]
    for name, setting in SETTINGS.items():
        mine = [each for each in found if each["method"] == name]
        if mine:
            speed = SITES * ROWS * POSITIONS / mine[0]["free_seconds"]
            cells = [f"{each['share']:.0%} ({each['predicted_share']:.0%})" for each in mine]
            lines.append(f"| {setting.label} | {speed:,.0f} | {' | '.join(cells)} |")
    return "\n".join(lines)


def draw(path: Path, found: Sequence[Mapping]) -> None:
    """Shares of the unlimited rate against the link: points are measured, lines are the model's."""
    figure = new_figure(path, (7.5, 4.5))
    axes, grid = figure.subplots(), np.geomspace(30, 2000, 60)
    for (name, setting), colour in zip(SETTINGS.items(), LINE_COLOURS, strict=False):
        mine = [each for each in found if each["method"] == name]
        if not mine:
            continue
        free = mine[0]["free_seconds"]
        shares = [free / predicted(name, free, link) for link in grid]  # as if TCP carried all of it
        axes.plot(grid, shares, color=colour, linewidth=1.5, label=setting.label)
        points = [(each["mbit_per_second"], each["share"]) for each in mine]
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
    path = folder / "windows.json"
    windows = json.loads(path.read_text()) if path.exists() else {}
    links = windows.pop("links", None) or {str(rate): carried(rate) for rate in MBIT_PER_SECOND}
    for name in options.only or [name for name in SETTINGS if name not in windows]:
        windows[name] = measure(folder, name, options.cycles)
        path.write_text(json.dumps({**windows, "links": links}))
    found = rows(windows, links)
    print(table(found))
    print("links carry, each way at once:", ", ".join(f"{rate}: {speed:.0f} Mbit/s" for rate, speed in links.items()))
    for each in found:
        shares = " ".join(f"{share:.0%}" for share in each["shares"])
        print(f"{each['method']:10} {each['mbit_per_second']:>5}: {shares}; predicted {each['predicted_share']:.0%}")
    if options.picture:
        draw(options.picture, found)


if __name__ == "__main__":
    main()
