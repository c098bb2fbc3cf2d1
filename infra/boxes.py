#!/usr/bin/env python3
"""Trains on GPU boxes without a scheduler: installs this working tree on each by ssh, starts one process a box, and
starts all again whenever one was lost and is back, until the run is complete. `--help` tells how. Needs git and ssh.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Sequence

import launch
from launch import LOG, MOST_SILENCE, QUESTION, REQUEST, SETUP, Action, Host, Mistake, Runner

WATCH = "install, train and stay: start all again whenever one was lost and is back, until the run is done"
SSH = ["-oBatchMode=yes", "-oConnectTimeout=20", "-oServerAliveInterval=15"]
OLDEST_DRIVER = 580  # of NVIDIA's, for CUDA 13; with an older one JAX would use the processors
DRIVER = f"""nvidia-smi --query-gpu=driver_version --format=csv,noheader |
awk -F. '$1 >= {OLDEST_DRIVER} {{ found = 1 }} END {{ exit !found }}' ||
{{ echo "NVIDIA's driver is missing, or older than {OLDEST_DRIVER}, which CUDA 13 needs" >&2; exit 1; }}"""


class Boxes:
    """The boxes of a run, reached by ssh, in the order of their processes."""

    def __init__(self, options: argparse.Namespace, overrides: list[str], runner: Runner):
        self.options, self.overrides, self.runner = options, overrides, runner
        self.boxes: list[str] = options.hosts.split(",")
        self.heard: set[str] = set()
        self.silence = 0
        self.training = launch.Training("the run", options.attempts)
        self.note = self.training.note

    def next(self) -> Action:
        """Ask the boxes, and decide once all have answered: one that was lost may come back."""
        hosts = self.ask()
        silent = [box for box, host in zip(self.boxes, hosts, strict=True) if host is None]
        self.heard |= set(self.boxes) - set(silent)
        self.silence = self.silence + 1 if silent else 0
        if self.silence >= MOST_SILENCE and not self.heard >= set(silent):
            return Action("end", f"error: {', '.join(silent)} never answered; what ssh said is above", code=1)
        if silent:
            return launch.wait(f"waiting for {', '.join(silent)} to answer; nothing is changed")
        return self.training.decide([host for host in hosts if host])

    def act(self, action: Action) -> bool:
        return self.install() if action.verb == "install" else self.train()

    def ssh(self, box: str, command: str) -> list[str]:
        return ["ssh", *SSH, *self.options.ssh_flag, box, command]

    def ask(self) -> list[Host | None]:
        """Return what each box tells, in order; None for one that does not answer."""
        results = self.runner.all([self.ssh(box, launch.state_command()) for box in self.boxes], QUESTION)
        told = [launch.hosts_in(result.text) for result in results]
        return [hosts[0]._replace(name=box) if hosts else None for box, hosts in zip(self.boxes, told, strict=True)]

    def on_boxes(self, commands: Sequence[str], limit: int) -> bool:
        """Run a command on each box; print what they say. True if all have done it."""
        words = [self.ssh(box, launch.answered(each)) for box, each in zip(self.boxes, commands, strict=True)]
        return self.runner.on_hosts(words, [1] * len(words), limit)

    def install(self) -> bool:
        options, command = self.options, launch.install_command(self.options.extras, self.options.setup, None)
        if "cuda" in options.extras.split(","):
            command = f"({DRIVER}) && {command}"
        with launch.archive(options.environment, self.runner.dry_run) as path:
            words = [["scp", "-q", *SSH, *options.ssh_flag, str(path), f"{box}:{launch.ARCHIVE}"] for box in self.boxes]
            results = self.runner.all(words, REQUEST)
        return all(each.code == 0 for each in results) and self.on_boxes([command] * len(self.boxes), SETUP)

    def stop(self) -> bool:
        return self.on_boxes([launch.host_command("stop", str(self.options.grace))] * len(self.boxes), QUESTION)

    def train(self) -> bool:
        options, interface = self.options, self.options.interface
        first = f"{options.address or self.boxes[0].rpartition('@')[2]}:{options.port}"
        joining = ["--distributed.coordinator", first, "--distributed.processes", str(len(self.boxes))]
        commands = []
        for number in range(len(self.boxes)):
            own = [*joining, "--distributed.process", str(number)] if len(self.boxes) > 1 else []
            start = launch.host_command("start", "train", options.config, *own, *self.overrides)
            commands.append(f"NCCL_SOCKET_IFNAME={interface} {start}" if interface else start)
        return self.on_boxes(commands, QUESTION)


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
        if not launch.is_url(runs) and not runs.startswith(("/", "~")):  # in the tree, which each box has for itself
            raise Mistake(
                "several boxes have to see the same run directory and token stores: give -- --runs and --data.cache, "
                "each a bucket's folder or a path on a file system that they share"
            )
    return options, overrides


def run(options: argparse.Namespace, runner: Runner, boxes: Boxes) -> int:
    """Run a command; return the exit code."""
    command = options.command
    if command == "watch" and not options.dry_run:
        return launch.watch(runner, boxes)
    if command == "log":
        return runner.foreground(boxes.ssh(boxes.boxes[0], f"tail -n +1 -F {LOG}"))
    if command == "status":
        for box, host in zip(boxes.boxes, hosts := boxes.ask(), strict=True):
            print(host or f"{box} does not answer", flush=True)
        return runner.foreground(boxes.ssh(boxes.boxes[0], f"tail -n 3 {LOG}")) or int(None in hosts)
    watch = [boxes.ask, boxes.install, boxes.train]
    steps = {"install": [boxes.install], "train": [boxes.train], "stop": [boxes.stop], "watch": watch}
    return int(not all(step() for step in steps[command]))


def main(arguments: list[str], runner: Runner | None = None) -> int:
    """Run a command line; return the exit code."""
    runner = runner or launch.runner_for("boxes.sh", arguments)

    def command() -> int:
        options, overrides = read(arguments)
        return run(options, runner, Boxes(options, overrides, runner))

    return launch.guarded(runner, command)


if __name__ == "__main__":
    launch.on_signals(launch.interrupt)
    sys.exit(main(sys.argv[1:]))
