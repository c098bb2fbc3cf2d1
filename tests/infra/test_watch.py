"""`infra/tpu_vm.py watch`: what it decides while the cloud fails, preempts and hangs, in a model without processes."""

import os
import random
import re
import shutil
import signal
import subprocess
from collections.abc import Callable, Iterator

import pytest

from gregale.atomic_files import is_process_dead
from tests.infra.stand_ins import ROOT
from tests.infra.tpu_api import ZONE, World
from tests.infra.tpu_model import Model, Training, launch, modelled, tpu_vm
from tests.waiting import until

OTHER = "us-central1-a"
CONFIG = "config/llama_8b_two_slices.yaml"
WATCH = ("watch", "--name", "llama", "--zone", ZONE, "--accelerator", "v5litepod-16", "--spot", "--config", CONFIG)
BUCKET = ("--", "--runs", "gs://bucket/runs")


@pytest.fixture
def model(tmp_path, monkeypatch) -> Iterator[Model]:
    modelled(tmp_path, monkeypatch)
    return Model(World())


def act(model: Model, *events: Callable[[], object] | None) -> None:
    """What happens at one pause after the other."""
    model.on_poll = [each or (lambda: None) for each in events]


def there(model: Model, *states: str, name: str = "llama") -> None:
    """A slice, with the state of each host."""
    model.world.hosts = len(states)
    model.world.add("llama", name)
    model.training(name).states = list(states)


def costs(model: Model) -> bool:
    return f"and costs; this ends it: infra/tpu_vm.sh delete --name llama --zone={ZONE}" in model.said[-1]


def set_state(model: Model, state: str, health: str = "HEALTHY") -> None:
    for node in model.world.nodes[ZONE].values():
        node.state, node.health = state, health


def ctrl_c() -> None:
    raise launch.Interrupted(130)


ONCE = ["install llama", "start llama"]


def test_what_is_preempted_is_made_again_until_the_run_is_complete(model):
    act(model, None, lambda: set_state(model, "PREEMPTED"), None, lambda: model.end("75"))
    assert tpu_vm.main([*WATCH, "--then-delete", "--attempts", "1", *BUCKET], model) == 0
    assert f"llama is complete, with the checkpoint of step {model.checkpoint}" in model.said[-1]
    assert "attempt" not in str(model.said), "an end after progress is no failed one"
    made = [f"create {ZONE}", *ONCE]
    assert model.did == [*made, "delete", *made, "start llama", "delete"]


def test_vms_without_a_queued_resource_are_used(model):
    model.world.add_nodes("llama-0", "llama-1")
    assert tpu_vm.main([*WATCH, "--slices", "2", "--then-delete", *BUCKET], model) == 0
    made = [f"{verb} llama-{place}" for verb in ("install", "start") for place in range(2)]
    assert model.did == [*made, "delete", "delete"]
    assert not any(model.world.nodes.values())


@pytest.mark.parametrize("command", ["up", "watch"])
def test_ctrl_c_while_a_request_waits_tells_that_it_is_there(model, command):
    model.world.new_state = "WAITING_FOR_RESOURCES"
    act(model, None, ctrl_c)
    assert tpu_vm.main([command, *WATCH[1:], *BUCKET], model) == 130
    assert model.world.exists("llama")
    assert costs(model)


@pytest.mark.parametrize("is_mended", [True, False])
def test_a_deletion_that_fails_is_tried_again(model, is_mended):
    there(model, "0")
    asked = []

    def deletes(verb: str) -> str:
        asked.extend([verb] * (verb == "delete"))
        return "refused" if verb == "delete" and len(asked) < (3 if is_mended else 1000) else ""

    model.fault = deletes
    assert tpu_vm.main([*WATCH, "--then-delete", *BUCKET], model) == (0 if is_mended else 1)
    assert model.world.exists("llama") != is_mended
    assert costs(model) != is_mended


def test_what_is_there_is_left_alone_while_gcloud_fails(model):
    there(model, "running", "running")
    left = [1, 1, 1]
    model.fault = lambda verb: "refused" if verb == "list" and left and left.pop() else ""
    assert tpu_vm.main([*WATCH, *BUCKET], model) == 0
    assert model.did == []
    assert costs(model)


@pytest.mark.parametrize(
    ("state", "health", "is_given_back"),
    [("READY", "TIMEOUT", True), ("STOPPED", "", True), ("READY", "HEALTHY", False), ("REPAIRING", "", False)],
)
def test_hosts_that_do_not_answer_are_given_back_unless_the_api_calls_them_healthy(model, state, health, is_given_back):
    """A way that is cut here, such as port 22, is no reason to delete what trains."""
    there(model, "running", "running")
    set_state(model, state, health)
    model.fault = lambda verb: "unreached" if verb.startswith("host") else ""
    act(model, *[None] * 40, ctrl_c)
    assert tpu_vm.main([*WATCH, *BUCKET], model) == 130
    assert model.did[:2] == (["delete", f"create {ZONE}"] if is_given_back else [])
    is_healthy = health == "HEALTHY"
    assert ("the API calls it healthy: does the way to port 22 work?" in str(model.said)) == is_healthy
    assert costs(model)


def test_a_host_that_is_silent_beside_others_is_given_back_once_nothing_runs(model):
    there(model, "75", "75")
    asked = []

    def second_is_silent(verb: str) -> str:
        asked.extend([verb] * (verb.startswith("host")))
        return "unreached" if verb.startswith("host") and len(asked) % 2 == 0 and not model.did else ""

    model.fault = second_is_silent
    assert tpu_vm.main([*WATCH, *BUCKET], model) == 0
    assert model.slept.count(launch.POLL_SECONDS) >= launch.MOST_SILENCE - 1
    assert model.did[:2] == ["delete", f"create {ZONE}"]


def test_without_a_new_checkpoint_it_waits_longer_and_gives_up(model):
    there(model, "lost")
    model.checkpoint = 40
    model.sleep = lambda seconds: (model.slept.append(seconds), model.end("134"))
    assert tpu_vm.main([*WATCH, "--attempts", "4", *BUCKET], model) == 1
    assert "gave up after 4 attempts in a row without a new checkpoint" in str(model.said)
    assert model.did == ["start llama"] * 4
    assert [launch.back_off(attempt) for attempt in range(1, 9)] == [0, 30, 60, 120, 240, 480, 960, 960]


def test_what_the_cloud_refuses_again_and_again_is_given_up(model):
    model.fault = lambda verb: "refused" if verb == "create" else ""
    assert tpu_vm.main([*WATCH, "--attempts", "3", *BUCKET], model) == 1
    assert model.slept == [0, 30, 60]
    assert "costs" not in str(model.said), "the API tells that there is nothing"
    there(model, "idle")
    model.world.requests[ZONE]["llama"].state = "SUSPENDED"
    model.fault = lambda verb: "refused" if verb == "delete" else ""
    assert tpu_vm.main([*WATCH, "--attempts", "3", *BUCKET], model) == 1
    assert costs(model)


@pytest.mark.parametrize(
    ("states", "code", "text"),
    [
        (("2", "75"), 2, "a mistake that starting it again does not mend"),
        (("stopped", "stopped"), 143, "stopped on request after checkpoint 8"),
        (("0", "0"), 0, "llama is complete, with the checkpoint of step 8"),
    ],
)
def test_an_end_changes_nothing_and_tells_what_costs(model, states, code, text):
    there(model, *states)
    model.checkpoint = 8
    assert tpu_vm.main([*WATCH, *BUCKET], model) == code
    assert text in model.said[-2]
    assert costs(model)
    assert model.did == []


def test_zones_are_tried_in_order(model):
    """The first refuses, the second lets it wait, and after half an hour the first is tried again."""
    zones = ("--zone", OTHER)
    model.world.new_state = "WAITING_FOR_RESOURCES"
    model.fault = lambda verb: "refused" if verb == "create" and not model.did and not model.slept[1:] else ""

    def grant() -> None:
        model.world.new_state = "ACTIVE"

    act(model, *[None] * 30, grant)
    assert tpu_vm.main([*WATCH, *zones, "--then-delete", *BUCKET], model) == 0
    assert model.did == [f"create {OTHER}", "delete", f"create {ZONE}", *ONCE, "delete"]


@pytest.mark.parametrize("zone", [ZONE, OTHER])
def test_what_exists_is_found_in_any_of_the_zones(model, zone):
    model.world.add("llama", "llama", zone=zone)
    model.training("llama").states = ["0", "0"]
    assert tpu_vm.main([*WATCH, "--zone", OTHER, "--then-delete", *BUCKET], model) == 0
    assert model.did == ["delete"]


def test_other_numbers_of_slices_are_a_mistake(model):
    model.world.add("llama", "llama-0", "llama-1")
    assert tpu_vm.main([*WATCH, *BUCKET], model) == 2
    assert "llama-0 is READY, llama-1 is READY, but --slices is 1" in str(model.said)
    model.world.requests.clear()
    del model.world.nodes[ZONE]["llama-1"]
    assert tpu_vm.main([*WATCH, "--slices", "2", *BUCKET], model) == 2
    assert model.did == []


def test_up_gives_back_nothing_that_it_has_not_made(model):
    there(model, "running")
    set_state(model, "PREEMPTED")
    assert tpu_vm.main(["up", *WATCH[1:]], model) == 1
    assert model.did == []
    assert costs(model)


def test_it_ends_at_once_when_told_to_while_a_command_hangs(stand_ins):
    stand_ins.play("gcloud", f"echo $$ >hanging; exec {shutil.which('sleep')} 60")
    command = ["bash", str(ROOT / "infra" / "tpu_vm.sh"), *WATCH, *BUCKET]
    process = subprocess.Popen(command, env=stand_ins.environment, stderr=subprocess.PIPE, text=True)
    until(lambda: stand_ins.read("hanging"))
    second = stand_ins.run(ROOT / "infra" / "tpu_vm.sh", *WATCH, *BUCKET, code=2)
    assert "another watch of llama runs on this machine" in second.stderr
    process.send_signal(signal.SIGTERM)
    _, said = process.communicate(timeout=20)
    assert process.returncode == 143
    assert "llama is or may yet be in us-west4-a, and costs" in said
    with pytest.raises(ProcessLookupError):
        os.kill(int(stand_ins.read("hanging").split()[0]), 0)


def test_a_command_that_takes_too_long_is_ended_with_what_it_started(tmp_path, capfd):
    runner = launch.Runner("x", False)
    words = ["bash", "-c", f"sleep 60 & echo $! >{tmp_path}/child; wait"]
    assert runner.all([words, ["echo", "said"]], 1) == [(124, ""), (0, "said\n")]
    assert "x: no answer in time: bash -c" in capfd.readouterr().err
    until(lambda: is_process_dead(int((tmp_path / "child").read_text())))


ZONES = (ZONE, OTHER)
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


@pytest.mark.parametrize("seed", range(200))
def test_nothing_is_claimed_lost_or_left_behind_in_silence(seed, tmp_path, monkeypatch):
    modelled(tmp_path, monkeypatch)
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
