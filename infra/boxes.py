#!/usr/bin/env python3
"""Trains on GPU boxes without a scheduler: installs this working tree on each by ssh, starts one process a box, and
starts all again whenever one was lost and is back, until the run is complete. `--help` tells how. Needs git and ssh.
"""

from __future__ import annotations

import argparse
import re
import sys

import launch
from launch import MOST_SILENCE, Action, Mistake, Node, Runner

WATCH = "install, train and stay: start all again whenever one was lost and is back, until the run is done"
SSH = ["-oBatchMode=yes", "-oConnectTimeout=20", "-oServerAliveInterval=15"]
OLDEST_DRIVER = 580  # of NVIDIA's, for CUDA 13; with an older one JAX would use the processors
DRIVER = f"""nvidia-smi --query-gpu=driver_version --format=csv,noheader |
awk -F. '$1 >= {OLDEST_DRIVER} {{ found = 1 }} END {{ exit !found }}' ||
{{ echo "NVIDIA's driver is missing, or older than {OLDEST_DRIVER}, which CUDA 13 needs" >&2; exit 1; }}"""


class Boxes(launch.Fleet):
    """The boxes of a run, reached by ssh, in the order of their processes."""

    def __init__(self, options: argparse.Namespace, overrides: list[str], runner: Runner):
        self.options, self.overrides, self.runner = options, overrides, runner
        self.nodes = [Node(box) for box in options.hosts.split(",")]
        self.heard: set[str] = set()
        self.silence = 0
        self.training = launch.Training("the run", options.attempts)
        self.note = self.training.note

    def next(self) -> Action:
        """Ask the boxes, and decide once all have answered: one that was lost may come back."""
        hosts = self.ask()
        heard = {host.name for host in hosts}
        silent = [box.name for box in self.nodes if box.name not in heard]
        self.heard |= heard
        self.silence = self.silence + 1 if silent else 0
        if self.silence >= MOST_SILENCE and not self.heard >= set(silent):
            return Action("end", f"error: {', '.join(silent)} never answered; what ssh said is above", code=1)
        if silent:
            return launch.wait(f"waiting for {', '.join(silent)} to answer; nothing is changed")
        return self.training.decide(hosts)

    def ssh(self, node: Node, command: str, worker: str = "all") -> list[str]:
        own = command.replace("@number", str(self.nodes.index(node)))
        return ["ssh", *SSH, *self.options.ssh_flag, node.name, own]

    def scp(self, node: Node, path: str) -> list[str]:
        return ["scp", "-q", *SSH, *self.options.ssh_flag, path, f"{node.name}:{launch.ARCHIVE}"]

    def install_command(self) -> str:
        command = launch.install_command(self.options.extras, self.options.setup, None)
        return f"({DRIVER}) && {command}" if "cuda" in self.options.extras.split(",") else command

    def start_command(self) -> str:
        options, count = self.options, len(self.nodes)
        first = f"{options.address or self.nodes[0].name.rpartition('@')[2]}:{options.port}"
        joining = ["--distributed.coordinator", first, "--distributed.processes", str(count)]
        own = [*joining, "--distributed.process", "@number"] if count > 1 else []
        start = launch.host_command("start", "train", options.config, *own, *self.overrides)
        return f"NCCL_SOCKET_IFNAME={options.interface} {start}" if options.interface else start


def parser() -> launch.Parser:
    found = launch.parser("boxes.sh", "--hosts BOX[,BOX...]", {"watch": WATCH, **launch.COMMANDS})
    add = found.add_argument
    add("--hosts", required=True, help="the boxes as ssh knows them, such as me@10.0.0.1,me@10.0.0.2; the first leads")
    add("--address", help="of the first box for the others; default: its name in --hosts")
    add("--port", type=launch.positive, default=8476, help="where processes find the first (8476)")
    add("--interface", help="of the network between the boxes (NCCL_SOCKET_IFNAME); default: NCCL chooses")
    add("--extras", default="cuda,formats,gcs,s3", help="of the installation (cuda,formats,gcs,s3)")
    return found


def read(arguments: list[str]) -> tuple[argparse.Namespace, list[str]]:
    """Return the options, checked, and after `--` the keys for `gregale`."""
    options, overrides = launch.read(parser(), arguments)
    if not re.fullmatch(r"[\w.@-]+(,[\w.@-]+)*", options.hosts, re.ASCII) or options.hosts.startswith("-"):
        raise Mistake(f"--hosts is '{options.hosts}': give the boxes with commas in between, without spaces")
    if options.command in ("watch", "train") and "," in options.hosts:
        runs = launch.runs_of(options.config, overrides)
        if "://" not in runs and not runs.startswith(("/", "~")):  # in the tree, which each box has for itself
            raise Mistake(
                "several boxes have to see the same run directory and token stores: give -- --runs and --data.cache, "
                "each a bucket's folder or a path on a file system that they share"
            )
    return options, overrides


def run(arguments: list[str], runner: Runner) -> int:
    """Run a command line; return the exit code."""
    options, overrides = read(arguments)
    boxes = Boxes(options, overrides, runner)
    if options.command != "watch":
        return boxes.run(options.command)
    if options.dry_run:
        boxes.ask()
        return boxes.run("install") or boxes.run("train")
    return launch.watch(runner, boxes)


def main(arguments: list[str], runner: Runner | None = None) -> int:
    """Run a command line; return the exit code, also of a mistake or a signal."""
    runner = runner or launch.runner_for("boxes.sh", arguments)
    return launch.guarded(runner, lambda: run(arguments, runner))


if __name__ == "__main__":
    launch.on_signals(launch.interrupt)
    sys.exit(main(sys.argv[1:]))
