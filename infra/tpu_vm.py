#!/usr/bin/env python3
"""Trains on Cloud TPU: creates slices, installs this working tree on their hosts, trains there, and creates again what
is reclaimed, until the run is complete. `--help` tells how. Needs gcloud, logged in, git, and ssh.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple

import launch
from launch import MISTAKE, MOST_SILENCE, POLL_SECONDS, QUESTION, REQUEST, SETUP, Action, Host, Mistake, Node, Runner

COMMANDS = {
    "up": "create, install, train and log, one after the other",
    "watch": "do all of this and stay: again for whatever is preempted or fails, until the run is done",
    "create": "ask for the slices and wait until they are there",
    **launch.COMMANDS,
    "ssh": "log in to a host, or run the command that follows -- there",
    "delete": "give the slices back, with everything on their disks",
}
RUNTIMES = {
    "v[234]-": "tpu-ubuntu2204-base",
    "v5litepod-": "v2-alpha-tpuv5-lite",
    "v5p-": "v2-alpha-tpuv5",
    "v6e-": "v2-alpha-tpuv6e",
}
EXTRAS = {"train": "tpu,formats,gcs", "island": "tpu,formats,gcs,islands"}
GOALS = {"create": "ready", "up": "running", "watch": "complete"}
KINDS = ("queued-resources", "tpu-vm")
LOST = ("PREEMPTED", "TERMINATED")
LASTING = ("READY", "GONE", "STOPPED", "HIDDEN", "UNKNOWN")  # the other states of a node pass
SICK = ("TIMEOUT", "UNHEALTHY_TENSORFLOW", "UNHEALTHY_MAINTENANCE")
MOST_SILENCE_OF_BLANK = 20  # of slices that were made by this watch, and have never answered
DELETES = 6


class Seen(NamedTuple):
    """What the API told, and the hosts that answered."""

    request: str | None  # state of the queued resource; PLAIN: VMs without one; "": neither; None: no answer
    zone: str = ""
    nodes: tuple[Node, ...] = ()
    hosts: Sequence[Host] = ()

    @property
    def is_ready(self) -> bool:
        return self.request in ("ACTIVE", "PLAIN") and {node.state for node in self.nodes} == {"READY"}


@dataclass
class Slices:
    """Decides what the slices of a run need; asks nothing and changes nothing itself."""

    slices: int
    zones: Sequence[str]
    goal: str  # what it ends with: ready, running or complete
    patience: int  # seconds that a request may wait in one of several zones
    training: launch.Training
    is_lasting: bool  # whether the run is known to outlive the slices; otherwise all hosts have to tell
    _place: int = 0  # of the zone
    _silence: int = 0
    _waited: int = 0
    _is_blank: bool = False  # made here, and never heard of
    _is_undeleted: bool = False  # a deletion has failed

    @property
    def zone(self) -> str:
        """Where to create."""
        return self.zones[self._place % len(self.zones)]

    def decide(self, seen: Seen) -> Action:
        """Return what to do next."""
        name = self.training.name
        if seen.request is None:
            return launch.wait(f"gcloud does not tell how {name} is; nothing is changed")
        if seen.request == "":
            # The zones are tried one after the other in one attempt.
            self.training.is_fresh = self._place % len(self.zones) > 0
            return self.training.attempt("create", f"creating {name} in {self.zone}")
        if seen.request in ("FAILED", "SUSPENDED"):
            return self._give_back(seen, f"{name} is {seen.request}", next_zone=seen.request == "FAILED")
        if seen.request not in ("ACTIVE", "PLAIN"):
            self._waited += POLL_SECONDS
            is_queued = seen.request in ("ACCEPTED", "WAITING_FOR_RESOURCES")
            text = f"{name} is {seen.request} in {seen.zone}"
            if is_queued and len(self.zones) > 1 and self._waited > self.patience:
                return self._give_back(seen, f"{text}: trying the next zone", next_zone=True)
            return launch.wait(text)
        states = [f"{node.name} is {node.state}" for node in seen.nodes]
        gone = sum(node.state == "GONE" for node in seen.nodes)
        if len(seen.nodes) != self.slices or (gone and seen.request == "PLAIN"):
            return Action("end", f"error: {', '.join(states)}, but --slices is {self.slices}", code=MISTAKE)
        if any(node.state in LOST for node in seen.nodes):
            return self._give_back(seen, ", ".join(states))
        if any(node.state not in LASTING for node in seen.nodes):
            return launch.wait(", ".join(states))
        if self.goal == "ready" and seen.is_ready:
            return Action("end", f"{name} is there")
        if len(seen.hosts) != sum(node.hosts for node in seen.nodes) or not seen.is_ready:
            return self._silent(seen)
        self._silence, self._is_blank = 0, False
        self.is_lasting = self.is_lasting or not any(host.state in ("volatile", "bare") for host in seen.hosts)
        if self.goal == "running" and any(host.state == "running" for host in seen.hosts):
            return Action("end", f"{name} trains")
        return self.training.decide(seen.hosts)

    def note(self, action: Action, succeeded: bool) -> None:
        """Take in how an action went."""
        self.training.note(action, succeeded)
        if action.verb == "create":
            self._is_blank, self._waited, self._silence = True, 0, 0
            self._place += not succeeded
        elif action.verb == "give_back":
            self._is_undeleted = not succeeded

    def _give_back(self, seen: Seen, why: str, next_zone: bool = False) -> Action:
        self._silence = 0
        is_empty = self._is_blank or all(node.state in (*LOST, "GONE") for node in seen.nodes)
        if not ((self.goal == "complete" and self.is_lasting) or (is_empty and (self.goal == "complete" or next_zone))):
            return Action("end", f"error: {why}; if nothing on it is needed, `delete` it and create it again", code=1)
        self._place = self._place + 1 if next_zone else 0
        text = f"{why}; giving it back to create it again"
        # A deletion that follows one that failed is an attempt of its own.
        return self.training.attempt("give_back", text) if self._is_undeleted else Action("give_back", text)

    def _silent(self, seen: Seen) -> Action:
        """Some hosts have not answered. Slices that are healthy, but not reached from here, may well be training."""
        name = self.training.name
        self.training.see(seen.hosts)
        if any(host.state == "running" for host in seen.hosts):  # a training runs on all hosts or on none
            self._silence = 0
            return launch.wait(f"{name} trains, but not all of its hosts answer")
        self._silence += 1
        is_sick = bool(seen.hosts) or any(node.state != "READY" or node.health in SICK for node in seen.nodes)
        if self._silence >= (MOST_SILENCE if is_sick else MOST_SILENCE_OF_BLANK) and (is_sick or self._is_blank):
            return self._give_back(seen, f"hosts of {name} have not answered {self._silence} times in a row")
        if self._silence < MOST_SILENCE or is_sick or self._is_blank:
            return launch.wait(f"waiting for the hosts of {name} to answer")
        text = "does the way to port 22 work? Nothing is changed, and it costs"
        return launch.wait(f"no host of {name} answers, but the API calls it healthy: {text}")


class TpuVms(launch.Fleet):
    """The slices of a run, reached by gcloud, each apart: for several at once it hides that it has not reached one."""

    def __init__(self, options: argparse.Namespace, overrides: list[str], runner: Runner):
        self.options, self.overrides, self.runner = options, overrides, runner
        self.may_cost = set(options.zones)  # where something may be, until the API tells
        self.seen = Seen(None)
        name, slices = options.name, options.slices
        self.names = [name] if slices == 1 else [f"{name}-{place}" for place in range(slices)]
        attempts = options.attempts if options.command == "watch" else 1
        goal, patience = GOALS.get(options.command, ""), 60 * options.zone_minutes
        training = launch.Training(name, attempts)
        self.decider = Slices(slices, options.zones, goal, patience, training, options.local_runs is None)
        self.note = self.decider.note

    def next(self) -> Action:
        """Ask the API, and the hosts if the slices are there, and decide."""
        seen = self.look()
        if seen.is_ready and self.decider.goal != "ready":
            seen = seen._replace(hosts=self.ask(self.options.local_runs))
        return self.decider.decide(seen)

    def gcloud(self, kind: str, verb: str, zone: str, *words: str) -> list[str]:
        project = [f"--project={self.options.project}"] if self.options.project else []
        return ["gcloud", "compute", "tpus", kind, verb, *words, f"--zone={zone}", *project]

    def look(self) -> Seen:
        """Set `seen` to what there is, in the first zone that has something."""
        zones = [self.seen.zone] if self.seen.request else self.options.zones
        commands = [self.gcloud(kind, "list", zone, "--format=json") for zone in zones for kind in KINDS]
        results = self.runner.all(commands, QUESTION)
        if self.runner.dry_run:
            self.seen = Seen("ACTIVE", zones[0], tuple(Node(name, "READY") for name in self.names))
        elif any(result.code for result in results):
            self.seen = self.seen._replace(request=None)
        else:
            told = [json.loads(result.text or "[]") for result in results]
            found = [self._found(zone, *told[2 * place : 2 * place + 2]) for place, zone in enumerate(zones)]
            self.may_cost = self.may_cost - set(zones) | {seen.zone for seen in found if seen.request}
            self.seen = next((seen for seen in found if seen.request), Seen(""))
        self.nodes = self.seen.nodes
        return self.seen

    def _found(self, zone: str, requests: list[dict], nodes: list[dict]) -> Seen:
        there = {node.name: node for node in map(node_of, nodes)}
        state, names = "PLAIN", self.names
        for request in requests:
            of_request = [spec.get("nodeId", "") for spec in request.get("tpu", {}).get("nodeSpec", [])]
            if request["name"].rpartition("/")[2] == self.options.name:
                state, names = request.get("state", {}).get("state", "UNKNOWN"), of_request
                break
            there = {name: node for name, node in there.items() if name not in of_request}
        if state == "PLAIN" and not there.keys() & set(names):
            return Seen("", zone)
        return Seen(state, zone, tuple(there.get(name, Node(name, "GONE")) for name in names))

    def steps(self) -> dict[str, Callable[[], bool]]:
        return {**super().steps(), "create": self.create, "give_back": self.delete, "delete": self.delete}

    def create(self) -> bool:
        """Ask for the slices in the zone whose turn it is."""
        options, zone = self.options, self.decider.zone
        several = [f"--node-count={options.slices}", f"--node-prefix={options.name}"]
        words = [options.name, *(several if options.slices > 1 else [f"--node-id={options.name}"])]
        words += [f"--accelerator-type={options.accelerator}", f"--runtime-version={options.runtime}"]
        self.may_cost.add(zone)
        words += [*options.capacity, *options.create_flag]
        return self.runner.all([self.gcloud("queued-resources", "create", zone, *words)], REQUEST)[0].code == 0

    def delete(self) -> bool:
        """Give the slices back, and try again until the API tells that nothing is left."""
        for attempt in range(DELETES):
            self.runner.sleep(launch.back_off(attempt))
            seen = self.look()
            if seen.request == "":
                return True
            words, kind = [[self.options.name, "--force"]], "queued-resources"
            if seen.request == "PLAIN":
                words, kind = [[node.name] for node in seen.nodes if node.state != "GONE"], "tpu-vm"
            if seen.request is not None:
                self.runner.all([self.gcloud(kind, "delete", seen.zone, *each, "--quiet") for each in words], SETUP)
            if self.runner.dry_run:
                return True
        return self.look().request == ""

    def ssh(self, node: Node, command: str | None, worker: str = "all") -> list[str]:
        words = [node.name, f"--worker={worker}", *self.options.ssh_flag]
        return self._remote("ssh", *words, *(["--command", command] if command else []))

    def scp(self, node: Node, path: str) -> list[str]:
        flags = scp_flags(self.options.ssh_flag)
        return self._remote("scp", path, f"{node.name}:{launch.ARCHIVE}", "--worker=all", *flags)

    def _remote(self, verb: str, *words: str) -> list[str]:
        found = self.gcloud("tpu-vm", verb, self.seen.zone, *words)
        # Only this release of gcloud's command reaches hosts through a tunnel.
        return [found[0], "alpha", *found[1:]] if "--tunnel-through-iap" in words else found

    def install_command(self) -> str:
        return launch.install_command(EXTRAS[self.options.program], self.options.setup, self.options.image)

    def start_command(self) -> str:
        # `auto`: the hosts of all slices find one another by the TPU's metadata.
        words = [self.options.program, self.options.config, "--distributed.coordinator", "auto", *self.overrides]
        return launch.host_command("start", *words)

    def log_in(self) -> int:
        """Log in to a host, or run a command on those that --node and --worker choose."""
        words, node, worker, nodes = self.overrides, self.options.node, self.options.worker, self.nodes
        if "all" in (node, worker) and not words:
            raise Mistake("a command is missing: with all hosts give one, such as -- uptime")
        self.nodes = [each for place, each in enumerate(nodes) if node in ("all", str(place))]
        if not self.nodes:
            raise Mistake(f"--node is {node}: there are 0 to {len(nodes) - 1}")
        if "all" in (node, worker):
            return int(not self.on_hosts(launch.quoted(words), SETUP, worker))
        return self.runner.foreground(self.ssh(self.nodes[0], launch.quoted(words) or None, worker))

    def make_key(self) -> None:
        """See that gcloud's key is there, before several of its processes make one, and that ssh can use it unasked."""
        given = [flag.partition("=")[2] for flag in self.options.ssh_flag if flag.startswith("--ssh-key-file=")]
        key = Path(given[-1] if given else Path.home() / ".ssh" / "google_compute_engine").expanduser()
        if not key.exists():
            if not self.runner.dry_run:
                key.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            self.runner.foreground(["ssh-keygen", "-q", "-t", "rsa", "-N", "", "-f", str(key)])
        if self.runner.dry_run:
            return
        held = ask("ssh-add", "-l")
        fingerprint = ask("ssh-keygen", "-l", "-f", str(key)).stdout.split()[1:2]
        if held.returncode == 0 and fingerprint and fingerprint[0] not in held.stdout:
            if self.runner.foreground(["ssh-add", str(key)]):
                raise Mistake(f"ssh-add did not add {key} to the agent, and gcloud copies to no host without it")
        elif held.returncode and ask("ssh-keygen", "-y", "-P", "", "-f", str(key)).returncode:
            raise Mistake(f"{key} has a passphrase, and no agent has it: `eval $(ssh-agent) && ssh-add {key}` first")

    def still_costs(self) -> str:
        """The line that tells what is still there, and how to end it."""
        options, zones = self.options, sorted(self.may_cost)
        words = ["infra/tpu_vm.sh", "delete", "--name", options.name, *(f"--zone={zone}" for zone in zones)]
        words += [f"--project={options.project}"] if options.project else []
        words += [f"--slices={options.slices}"] if options.slices > 1 else []
        state = f"is or may yet be in {' and '.join(zones)}, and costs"
        return f"{options.name} {state}; this ends it: {launch.quoted(words)}"


def node_of(told: dict) -> Node:
    """Return a node as the API describes it. A host has an address for each of its networks."""
    hosts = len(told.get("networkEndpoints", [])) // max(1, len(told.get("networkConfigs", [])))
    return Node(told["name"].rpartition("/")[2], told.get("state", "UNKNOWN"), told.get("health", ""), max(1, hosts))


def scp_flags(flags: Sequence[str]) -> list[str]:
    """Return the flags of gcloud's ssh as its scp wants them: what is ssh's own is `--scp-flag` there, a word each."""
    found = []
    for flag in flags:
        own = shlex.split(flag.partition("=")[2]) if flag.startswith("--ssh-flag=") else None
        found += [flag] if own is None else [f"--scp-flag={'-P' if word == '-p' else word}" for word in own]
    return found


def ask(*words: str) -> subprocess.CompletedProcess:
    return subprocess.run(words, stdin=subprocess.DEVNULL, capture_output=True, text=True)


def parser() -> launch.Parser:
    found = launch.parser("tpu_vm.sh", "--name NAME --zone ZONE", COMMANDS)
    add = found.add_argument
    add("--name", required=True, help="of the queued resource, or of VMs without one (of several: NAME-0, NAME-1, ...)")
    add("--zone", required=True, action="append", dest="zones", help="such as us-west4-a; several are tried in order")
    add("--zone-minutes", type=launch.positive, default=30, help="that a request waits in each of several zones (30)")
    add("--project", help="default: gcloud's own")
    add("--slices", type=launch.positive, default=1, help="number of slices (1); mesh.replica is a multiple of it")
    add("--accelerator", help="type of each slice, for example v5litepod-64 (up, watch, create)")
    add("--runtime", help="software of the hosts; default: that of the type")
    capacity = partial(found.add_mutually_exclusive_group().add_argument, dest="capacity", default=[])
    capacity("--spot", action="append_const", const="--spot", help="take capacity that may be reclaimed")
    capacity("--reserved", action="append_const", const="--reserved", help="take the project's reserved capacity")
    owner = "--reservation-host-project={}".format
    capacity("--reservation-project", action="append", type=owner, help="take capacity that this project reserved")
    add("--create-flag", action="append", default=[], help="a word for gcloud's create, such as --internal-ips")
    add("--program", choices=EXTRAS, default="train", help="island: the slices are one island of a fleet")
    add("--image", help="train in this image (infra/Dockerfile, for TPU) instead of installing packages")
    add("--then-delete", action="store_true", help="watch: give the slices back when the run is complete")
    add("--keep-nothing", action="store_true", help="watch: the run may be on the machines' own disks and go with them")
    add("--node", default="0", help="ssh: the slice; or all, for a command")
    add("--worker", default="0", help="ssh: the host of the slice; or all, for a command")
    return found


def read(arguments: list[str]) -> tuple[argparse.Namespace, list[str]]:
    """Return the options, checked, and after `--` the keys for `gregale` or the command of `ssh`."""
    options, overrides = launch.read(parser(), arguments)
    if not re.fullmatch("[a-z]([a-z0-9-]*[a-z0-9])?", options.name):
        raise Mistake(f"--name is '{options.name}': give small letters, digits and hyphens")
    for flag in (*options.create_flag, *options.ssh_flag):
        if not flag.startswith("-"):
            raise Mistake(f"--create-flag and --ssh-flag need one of gcloud's flags, such as --a=b, not '{flag}'")
    if not options.dry_run and not shutil.which("gcloud"):
        raise Mistake("gcloud is not installed; --dry-run works without it")
    if options.command in GOALS:
        check_accelerator(options)
    options.local_runs = local_runs(options, overrides) if options.command == "watch" else None
    return options, overrides


def check_accelerator(options: argparse.Namespace) -> None:
    """Refuse what cannot be created; set `runtime`."""
    kind = options.accelerator
    if not kind:
        raise Mistake("--accelerator is missing: the type of a slice, for example v5litepod-64")
    if re.match(r"(tpu|v)-?([7-9]|\d\d)", kind):
        raise Mistake(f"--accelerator is {kind}: from TPU7x on there are no TPU VMs; use GKE (infra/k8s/train.sh)")
    known = [runtime for start, runtime in RUNTIMES.items() if re.match(start, kind)]
    options.runtime = options.runtime or next(iter(known), None)
    if not options.runtime:
        raise Mistake(f"--runtime is missing: the software for --accelerator {kind} is not known here")


def local_runs(options: argparse.Namespace, overrides: Sequence[str]) -> str | None:
    """Return the folder of runs, of which the hosts can tell whether it outlives them; refuse what cannot."""
    runs = launch.runs_of(options.config, overrides)
    if options.keep_nothing or "://" in runs:
        return None
    if not (options.setup and runs.startswith(("/", "~"))):
        raise Mistake(
            f"--runs is {runs}, on the machine's own disk, which a watch deletes with the machine. Give -- --runs "
            "gs://BUCKET/runs, or a path below what --setup mounts, or --keep-nothing to lose the run on purpose"
        )
    return runs


def run(vms: TpuVms) -> int:
    """Run a command; return the exit code."""
    command = vms.options.command
    if command == "delete":
        return vms.run(command)
    vms.make_key()
    if command in GOALS:
        return bring_up(vms)
    seen = vms.look()
    if command == "status" or not seen.is_ready:
        request = {None: "not told of", "": "not there"}.get(seen.request, seen.request)
        nodes = [f"{node.name} is {node.state} {node.health}" for node in seen.nodes]
        vms.runner.say(", ".join([f"{vms.options.name} is {request}", *nodes]))
    if not seen.is_ready:
        return 1
    return vms.log_in() if command == "ssh" else vms.run(command)


def bring_up(vms: TpuVms) -> int:
    """Create, install and train, as far as the command wants; only one of a name on this machine."""
    options, code = vms.options, 0
    with open(Path(tempfile.gettempdir()) / f"gregale-watch-{options.name}.{options.zones[0]}.lock", "a") as held:
        try:
            fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise Mistake(f"another watch of {options.name} runs on this machine") from None
        if options.dry_run:
            vms.look()
            for step in ["create"] if options.command == "create" else ["create", "install", "train"]:
                vms.run(step)
        else:
            code = launch.watch(vms.runner, vms)
        if code == 0 and options.command == "watch" and options.then_delete:
            code = vms.run("delete")
    return vms.show_log() if code == 0 and options.command == "up" else code


def main(arguments: list[str], runner: Runner | None = None) -> int:
    """Run a command line; return the exit code, after a line that tells what still costs."""
    runner = runner or launch.runner_for("tpu_vm.sh", arguments)

    def command() -> int:
        vms = TpuVms(*read(arguments), runner)
        try:
            return launch.guarded(runner, lambda: run(vms))
        finally:  # also of a fault of this program
            if vms.may_cost and not runner.dry_run and vms.options.command in (*GOALS, "stop", "delete"):
                runner.say(vms.still_costs())

    return launch.guarded(runner, command)


if __name__ == "__main__":
    launch.on_signals(launch.interrupt)
    sys.exit(main(sys.argv[1:]))
