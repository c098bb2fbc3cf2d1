"""`infra/tpu_vm.py` with gcloud's own code, against a stand-in of its API and hosts that are folders.

A comment before a test tells what its commands did as long as the launcher asked all slices at once, by gcloud's
`queued-resources ssh`, which exits 0 when it has reached only some hosts or none.
"""

import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator

import pytest

from tests.infra.stand_ins import ROOT
from tests.infra.tpu_api import ZONE, Cloud, cloud
from tests.infra.tpu_model import launch, tpu_vm
from tests.waiting import until

SOAK = pytest.mark.soak  # what the model has too: `test_watch`, `test_tpu_vm`
pytestmark = pytest.mark.skipif(shutil.which("gcloud") is None, reason="there is no gcloud")

CONFIG = "config/run.yaml"
PLACE = ("--name", "llama", "--zone", ZONE)
WATCH = ("watch", *PLACE, "--accelerator", "v5litepod-16", "--spot", "--config", CONFIG, "--then-delete")
BUCKET = ("--", "--runs", "gs://bucket/runs")
ENDED = {"code": "0\n", "pid": "1\n", "log": "The checkpoint of step 20 is saved.\n"}
# What a host has of Python: a `make` that makes a .venv, in which a training saves and ends.
MAKE = """#!/bin/bash
mkdir -p .venv/bin
printf '#!/bin/bash\\n' >.venv/bin/python
printf '#!/bin/bash\\necho The checkpoint of step 20 is saved.\\n' >.venv/bin/gregale
chmod +x .venv/bin/*
"""


@pytest.fixture(scope="module")
def served(tmp_path_factory) -> Iterator[Cloud]:
    folder = tmp_path_factory.mktemp("tpu")
    with cloud(folder) as found:
        found.script("hostbin/make", MAKE)
        found.script("hostbin/python3.11", "#!/bin/bash\n")
        tree = folder / "tree"
        (tree / "config").mkdir(parents=True)
        (tree / CONFIG).write_text("name: llama\n")
        shutil.copytree(ROOT / "infra", tree / "infra", ignore=shutil.ignore_patterns("__pycache__", "k8s"))
        subprocess.run(["git", "init", "--quiet", str(tree)], check=True)
        yield found


@pytest.fixture
def tpus(served, monkeypatch) -> Cloud:
    served.reset()
    for name, value in served.environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("SSH_AUTH_SOCK", raising=False)
    monkeypatch.setattr(launch, "ROOT", served.folder / "tree")
    monkeypatch.setattr(tempfile, "tempdir", None)
    return served


class Quick(launch.Runner):
    """A runner for which time passes at once; what happens meanwhile are `events`, one for each pause."""

    def __init__(self, *events: Callable[[], object]):
        super().__init__("tpu_vm.sh", False)
        self.events, self.said = list(events), []

    def sleep(self, seconds: float) -> None:
        if seconds and self.events:
            self.events.pop(0)()

    def say(self, text: str) -> None:
        self.said.append(text)

    @property
    def text(self) -> str:
        return "\n".join(self.said)


def ctrl_c() -> None:
    raise launch.Interrupted(130)


# Exit 0, and nothing was done.
@pytest.mark.parametrize(
    "command", ["install", *(pytest.param(name, marks=SOAK) for name in ("train", "stop", "status"))]
)
def test_a_command_for_a_slice_that_was_preempted_fails(tpus, command):
    tpus.world.add("llama", "llama")
    tpus.world.nodes[ZONE]["llama"].state = "PREEMPTED"
    runner = Quick()
    assert tpu_vm.main([command, *PLACE, "--config", CONFIG], runner) == 1
    assert "llama is ACTIVE, llama is PREEMPTED" in runner.text
    assert tpus.reached() == []


# "the training ended (); starting it" three times, then given up and still billed.
def test_a_watch_gives_back_a_slice_that_was_preempted(tpus):
    tpus.world.add("llama", "llama")
    tpus.world.nodes[ZONE]["llama"].state = "PREEMPTED"
    tpus.world.new_state = "WAITING_FOR_RESOURCES"
    assert tpu_vm.main([*WATCH, *BUCKET], Quick(ctrl_c)) == 130
    assert tpus.world.changes == [f"DELETE llama {ZONE}", f"POST llama {ZONE}"]


# Installed on half of the hosts, started there, and never given back.
@SOAK
def test_a_watch_replaces_both_slices_and_trains_to_the_end(tpus):
    tpus.world.add("llama", "llama-0", "llama-1")
    tpus.world.nodes[ZONE]["llama-1"].state = "PREEMPTED"
    runner = Quick()
    assert tpu_vm.main([*WATCH, "--slices", "2", *BUCKET], runner) == 0, runner.text
    assert tpus.world.changes == [f"{method} llama {ZONE}" for method in ("DELETE", "POST", "DELETE")]
    assert "llama is complete, with the checkpoint of step 20" in runner.text
    hosts = {f"llama-{slice}-w-{worker}" for slice in range(2) for worker in range(2)}
    assert {word.removeprefix("scp ") for word in tpus.reached() if word.startswith("scp ")} == hosts
    assert "costs" not in runner.text


# "complete", and deleted, with half of the hosts unheard.
def test_a_run_is_complete_when_all_hosts_have_said_so(tpus):
    tpus.world.add("llama", "llama-0", "llama-1")
    for name in ("llama-0-w-0", "llama-0-w-1", "llama-1-w-0"):
        tpus.host(name, **ENDED)
    silent = tpus.folder / "down" / "llama-1-w-1"
    silent.touch()
    runner = Quick(lambda: (silent.unlink(), tpus.host("llama-1-w-1", **ENDED)), ctrl_c)
    assert tpu_vm.main([*WATCH, "--slices", "2", *BUCKET], runner) == 0, runner.text
    assert runner.events == [ctrl_c], "one pause"
    assert tpus.world.changes == [f"DELETE llama {ZONE}"]


# Copied to no worker of slice 0, exit 0: two of gcloud's threads made a key at once.
def test_the_key_is_made_before_several_slices_are_reached(tpus):
    shutil.rmtree(tpus.folder / "home" / ".ssh")
    tpus.world.hosts = 1
    tpus.world.add("llama", "llama-0", "llama-1")
    assert tpu_vm.main(["install", *PLACE, "--slices", "2"], Quick()) == 0
    assert sorted(word for word in tpus.reached() if word.startswith("scp")) == ["scp llama-0-w-0", "scp llama-1-w-0"]


# Copied to no worker, exit 0.
@pytest.mark.parametrize("adds", [pytest.param(True, marks=SOAK), False])
def test_the_agent_is_given_the_key_or_nothing_begins(tpus, adds):
    held = tpus.folder / "held"
    held.write_text("256 SHA256:other other (RSA)\n")
    key = tpus.folder / "home" / ".ssh" / "google_compute_engine"
    add = f"ssh-keygen -l -f $1 >>{held}" if adds else "exit 1"
    tpus.script("bin/ssh-add", f"#!/bin/bash\n[[ $1 != -l ]] || exec cat {held}\n{add}\n")
    tpus.world.add("llama", "llama")
    runner = Quick()
    code = tpu_vm.main(["install", *PLACE], runner)
    (tpus.folder / "bin" / "ssh-add").unlink()
    assert code == (0 if adds else 2), runner.text
    assert adds or (tpus.reached() == [] and f"ssh-add did not add {key} to the agent" in runner.text)


# The archive, which may hold a token, stayed in the temporary folder.
@SOAK
def test_an_interrupted_upload_leaves_no_archive(tpus):
    tpus.world.add("llama", "llama")
    for worker in range(2):
        (tpus.folder / "slow" / f"llama-w-{worker}").touch()
    command = [sys.executable, str(tpus.folder / "tree" / "infra" / "tpu_vm.py"), "install", *PLACE]
    process = subprocess.Popen(command, env=os.environ, stderr=subprocess.DEVNULL)
    until(tpus.reached)
    (archive,) = (tpus.folder / "home").glob("gregale-*/gregale.tar.gz")
    assert (archive.stat().st_mode & 0o777, archive.parent.stat().st_mode & 0o777) == (0o600, 0o700)
    process.send_signal(signal.SIGINT)
    assert process.wait(60) == 130
    assert list((tpus.folder / "home").glob("gregale-*")) == []


# "unrecognized arguments: --ssh-flag=... (did you mean '--scp-flag'?)".
@SOAK
def test_flags_of_ssh_reach_both_programs(tpus):
    tpus.world.add("llama", "llama")
    flags = ("--ssh-flag", "--ssh-flag=-o ServerAliveInterval=30", "--ssh-flag", "--internal-ip")
    runner = Quick()
    assert tpu_vm.main(["install", *PLACE, *flags], runner) == 0, runner.text
    assert "scp 10.0.0.1" in tpus.reached()


# Deleted, with the only copy of the run.
def test_a_run_on_the_machine_s_own_disk_is_never_deleted(tpus):
    tpus.world.hosts = 1
    tpus.world.add("llama", "llama")
    tpus.host("llama-w-0", **ENDED)
    runner = Quick()
    assert tpu_vm.main([*WATCH, "--setup", "true", "--", "--runs", "~/mounted/runs"], runner) == 2
    assert "error: --runs is on the machine's own disk" in runner.text
    assert tpus.world.changes == []
    assert tpu_vm.main([*WATCH, "--keep-nothing", "--", "--runs", "~/mounted/runs"], Quick()) == 0
    assert tpus.world.changes == [f"DELETE llama {ZONE}"]
