"""A model of Cloud TPU in the place of gcloud: a `Runner` that takes its commands apart, without a process."""

import json
import re
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType

import pytest

from tests.infra.stand_ins import ROOT, load_module
from tests.infra.tpu_api import World, node_answer, request_answer

launch: ModuleType = load_module(ROOT / "infra" / "launch.py")
tpu_vm: ModuleType = load_module(ROOT / "infra" / "tpu_vm.py")


@dataclass
class Training:
    """What the hosts of a slice hold: a state of each, and whether the disk has the only copy of a run."""

    states: list[str]
    holds_run: bool = False


@dataclass
class Model(launch.Runner):
    """Plays gcloud and the hosts. `fault` is asked before and after each command, and may change the world or raise."""

    world: World
    is_volatile: bool = False  # whether runs lie on the hosts' own disks
    polls: int = 3  # that a training takes
    checkpoint: int = 0
    fault: Callable[[str], str] = lambda verb: ""  # "", or refused, unreached, slow
    on_poll: list[Callable[[], object]] = field(default_factory=list)  # what happens, one after the other
    trainings: dict[str, Training] = field(default_factory=dict)
    said: list[str] = field(default_factory=list)
    slept: list[float] = field(default_factory=list)
    did: list[str] = field(default_factory=list)
    runs_lost: int = 0  # the only copy of a run, deleted
    is_complete: bool = False

    def __post_init__(self) -> None:
        super().__init__("tpu_vm.sh", False)
        self._left = self.polls

    def say(self, text: str) -> None:
        self.said.append(text)

    def sleep(self, seconds: float) -> None:
        self.fault("sleep")
        self.slept.append(seconds)
        if not seconds:
            return
        if self.on_poll:
            self.on_poll.pop(0)()
        running = [each for each in self.trainings.values() if "running" in each.states]
        if running:
            self._left -= 1
            self.checkpoint += 10
            if self._left <= 0:
                self.end("0")

    def end(self, code: str) -> None:
        """The training ends on all hosts; it was whole if all slices had it."""
        whole = all(state == "running" for state in self.all_states())
        code = code if whole else "75"
        for training in self.trainings.values():
            training.states = [code if state == "running" else state for state in training.states]
        self._left = self.polls

    def all_states(self) -> list[str]:
        names = {name for nodes in self.world.nodes.values() for name in nodes}
        return [state for name in names for state in self.training(name).states]

    def training(self, name: str) -> Training:
        hosts = next(nodes[name].hosts for nodes in self.world.nodes.values() if name in nodes)
        return self.trainings.setdefault(name, Training(["bare"] * hosts))

    def foreground(self, words: Sequence[str]) -> int:
        self.fault("sleep")  # a person looks, or presses Ctrl-C
        return 0

    def all(self, commands: Sequence[Sequence[str]], limit: int) -> list:
        return [self.one(list(words)) for words in commands]

    def one(self, words: list[str]):
        if words[0] in ("ssh-keygen", "ssh-add"):
            return launch.Result(0)
        assert words[:3] == ["gcloud", "compute", "tpus"]
        kind, verb = words[3:5]
        fault = self.fault(verb)
        if fault == "refused":
            return launch.Result(1)
        zone = next(word.removeprefix("--zone=") for word in words if word.startswith("--zone="))
        result = getattr(self, f"play_{verb}")(kind, zone, words[5:])
        fault = self.fault(f"{verb} done")
        return launch.Result(124) if fault == "slow" else result

    def play_list(self, kind: str, zone: str, words: list[str]):
        base = f"projects/p/locations/{zone}"
        if kind == "tpu-vm":
            found = [node_answer(base, *item) for item in self.world.nodes.get(zone, {}).items()]
        else:
            found = [request_answer(base, *item) for item in self.world.requests.get(zone, {}).items()]
        return launch.Result(0, json.dumps(found))

    def play_create(self, kind: str, zone: str, words: list[str]):
        name, options = words[0], dict(word.split("=", 1) for word in words[1:] if "=" in word)
        self.did.append(f"create {zone}")
        if self.world.exists(name, zone):
            return launch.Result(1)
        count = int(options.get("--node-count", 0))
        nodes = [f"{options['--node-prefix']}-{place}" for place in range(count)] or [options["--node-id"]]
        self.world.add(name, *nodes, zone=zone, state=self.world.new_state)
        return launch.Result(0)

    def play_delete(self, kind: str, zone: str, words: list[str]):
        self.did.append("delete")
        nodes = [words[0]] if kind == "tpu-vm" else []
        if request := self.world.requests.get(zone, {}).pop(words[0], None) if not nodes else None:
            nodes = request.nodes
        for name in nodes:
            node = self.world.nodes.get(zone, {}).pop(name, None)
            training = self.trainings.pop(name, None)
            self.runs_lost += bool(node and training and node.state not in tpu_vm.LOST and training.holds_run)
        return launch.Result(0)

    def reached(self, zone: str, name: str) -> bool:
        node = self.world.nodes.get(zone, {}).get(name)
        if node is None or node.state in ("PREEMPTED", "TERMINATED", "STOPPED"):
            self.trainings.pop(name, None)
            return False
        return True

    def play_scp(self, kind: str, zone: str, words: list[str]):
        return launch.Result(0 if self.reached(zone, words[1].partition(":")[0]) else 1)

    def play_ssh(self, kind: str, zone: str, words: list[str]):
        name, command = words[0], words[words.index("--command") + 1]
        if not self.reached(zone, name):
            return launch.Result(1)
        training = self.training(name)
        verb = re.search(r"host\.sh (\w+)", command)
        assert verb, command
        if verb[1] in ("install", "start"):
            self.did.append(f"{verb[1]} {name}")
        if verb[1] == "install":
            training.states = ["idle"] * len(training.states)
        elif verb[1] == "start" and "running" not in training.states:
            training.states = ["running"] * len(training.states)
            training.holds_run, self._left = self.is_volatile, self.polls
        elif verb[1] == "start":
            return launch.Result(1)
        self.is_complete = self.is_complete or set(self.all_states()) == {"0"}
        lines, code = [], 0
        for place, state in enumerate(training.states):
            if self.fault(f"host {name}") == "unreached":
                code = 255
            elif verb[1] == "state":
                asks = "state /" in command and self.is_volatile and state != "bare"
                told = "volatile" if asks else f"ended {state}" if state.isdecimal() else state
                lines.append(f"gregale-host {name}-w-{place} {told}, checkpoint {self.checkpoint or 'none'}\n")
            else:
                lines.append(f"\ngregale-answer {name}-w-{place}\n")
        return launch.Result(code, "".join(lines))


def modelled(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Has the launcher find gcloud, a key in the agent, and an archive of nothing."""
    monkeypatch.setattr(tpu_vm, "ask", lambda *words: subprocess.CompletedProcess(words, 0, "2048 SHA256:x"))
    monkeypatch.setattr(tpu_vm.shutil, "which", lambda name: name)
    monkeypatch.setattr(launch, "archive", lambda *_: nullcontext(folder / launch.ARCHIVE))
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
