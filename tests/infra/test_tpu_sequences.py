"""`infra/tpu_vm.py` in sequences of faults at random: what it says is so, and nothing is left behind in silence."""

import random
import re

import pytest

from tests.infra.tpu_api import ZONE, World
from tests.infra.tpu_model import Model, Training, launch, modelled, tpu_vm

ZONES = (ZONE, "us-central1-a")
CONFIG = "config/llama_8b_two_slices.yaml"
MOST_STEPS = 1000
RUNS = {"bucket": ["gs://b/runs"], "mounted": ["/mnt/a/runs"], "own disk": ["/mnt/a/runs"]}


class Faults:
    """Preempts, loses, refuses, delays and interrupts, at random."""

    def __init__(self, seed: int, world: World):
        self.random, self.world, self.steps = random.Random(seed), world, 0
        self.model = Model(world)
        self.rate = self.random.choice([0.01, 0.05, 0.2])
        self.interrupts = self.random.random() < 0.5
        self.down: dict[str, int] = {}  # slices, for so many questions more

    def __call__(self, verb: str) -> str:
        self.steps += 1
        if self.steps == 3 * MOST_STEPS:  # it may wait for ever, and a person loses patience
            raise launch.Interrupted(130)
        kind, _, name = verb.partition(" ")
        if kind == "host" and self.down.get(name, 0) > 0:
            self.down[name] -= 1
            return "unreached"
        if self.steps > MOST_STEPS or self.random.random() > self.rate:  # in the end, faults end
            return ""
        if self.interrupts and self.random.random() < 0.1:
            raise launch.Interrupted(self.random.choice([129, 130, 143]))
        kinds = {"sleep": self.of_world, "host": self.of_host}
        return kinds.get(kind, self.of_command)()

    def of_command(self) -> str:
        return self.random.choice(["refused", "slow", ""])

    def of_host(self) -> str:
        self.down[self.random.choice(sorted(self.model.trainings))] = self.random.choice([3, 12, 200])
        return "unreached"

    def of_world(self) -> str:
        zones = [zone for zone, nodes in self.world.nodes.items() if nodes]
        what = self.random.choice(
            ["PREEMPTED", "TERMINATED", "STOPPED", "REPAIRING", "READY", "GONE", "ended", "half", "request"]
        )
        if what == "request":
            self.world.new_state = self.random.choice(["ACTIVE", "ACTIVE", "WAITING_FOR_RESOURCES", "FAILED"])
            for requests in self.world.requests.values():
                for request in requests.values():
                    self.set_request(request)
        elif what == "half":  # a slice ends well, another does not
            for training in self.model.trainings.values():
                training.states = [self.random.choice(["0", "75", "lost"])] * len(training.states)
        elif what == "ended":
            self.model.end(self.random.choice(["75", "134", "0", "1", "2"]))
        elif zones:
            nodes = self.world.nodes[self.random.choice(zones)]
            name = self.random.choice(sorted(nodes))
            if what == "GONE":
                del nodes[name]
                self.model.trainings.pop(name, None)
            elif nodes[name].state not in tpu_vm.LOST:  # which do not come back
                nodes[name].state = what
                nodes[name].health = self.random.choice(["HEALTHY", "TIMEOUT", "HEALTH_UNSPECIFIED"])
        return ""

    def set_request(self, request) -> None:
        request.state = self.random.choice(["ACTIVE", "SUSPENDED", "FAILED", "SUSPENDING", request.state])
        if request.state in ("SUSPENDED", "FAILED"):
            for nodes in self.world.nodes.values():
                for name in request.nodes:
                    nodes.pop(name, None)
                    self.model.trainings.pop(name, None)
        elif request.state == "ACTIVE" and not any(
            set(request.nodes) & set(nodes) for nodes in self.world.nodes.values()
        ):
            zone = next(zone for zone, found in self.world.requests.items() if request in found.values())
            self.world.add_nodes(*request.nodes, zone=zone)


@pytest.mark.parametrize("seeds", [range(100), range(100, 200)], ids=str)
def test_nothing_is_claimed_lost_or_left_behind_in_silence(seeds, tmp_path, monkeypatch):
    modelled(tmp_path, monkeypatch)
    for seed in seeds:
        check_sequence(seed)


def check_sequence(seed: int) -> str:
    world = World()
    faults = Faults(seed, world)
    pick = faults.random
    storage = pick.choice(list(RUNS))
    model = Model(world, storage == "own disk", polls=pick.choice([1, 5]), fault=faults)
    faults.model = model
    slices = pick.randint(1, 4)
    zones = pick.sample(ZONES, pick.choice([1, 2]))
    words = ["--name", "llama", "--slices", str(slices), *(word for zone in zones for word in ("--zone", zone))]
    command = pick.choice(["watch", "watch", "watch", "up"])
    words += ["--accelerator", "v5litepod-16", "--config", CONFIG, "--attempts", str(pick.choice([1, 3, 10]))]
    words += ["--setup", "mount", *pick.choice([[], ["--then-delete"]])]
    names = ["llama"] if slices == 1 else [f"llama-{place}" for place in range(slices)]
    before = pick.choice(["nothing", "nothing", "request", "plain"])
    if before == "request":
        world.add("llama", *names, zone=zones[-1])
    elif before == "plain":
        world.add_nodes(*names, zone=zones[-1])
    if before != "nothing" and (state := pick.choice(["bare", "running", "apart"])) != "bare":
        for name in names:
            own = pick.choice(["0", "75"]) if state == "apart" else state
            model.trainings[name] = Training([own] * world.hosts, model.is_volatile)
        faults.down[pick.choice(names)] = pick.choice([0, 6])
    code = tpu_vm.main([command, *words, "--", "--runs", *RUNS[storage]], model)
    story = f"seed {seed}: {command} {words} {storage} {before}: exit {code}\n" + "\n".join(model.said)
    if any("is complete" in text for text in model.said):
        assert model.is_complete, story
    assert not model.runs_lost, story
    left = {zone for zone in ZONES if world.exists("llama", zone) or set(names) & set(world.nodes.get(zone, {}))}
    told = {
        zone for text in model.said if "and costs; this ends it" in text for zone in re.findall("--zone=([^ ]+)", text)
    }
    assert left <= told, story
    if code == 0 and command == "watch" and "--then-delete" in words:
        assert not left, story
    return model.said[-1] if model.said else ""
