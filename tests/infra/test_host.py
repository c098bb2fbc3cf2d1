"""`infra/host.sh`: what launchers ask of a host, with a `gregale` that plays a training."""

import os
import re
import shutil
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.infra.stand_ins import ROOT, write_program
from tests.infra.tpu_model import launch
from tests.waiting import until

GREGALE = """#!/bin/bash
save() { echo The checkpoint of step 20 is saved.; exit 143; }
trap "$HOW" TERM
echo "$(ps -o sid= $$) $WANDB_API_KEY $*" >said.new && mv said.new said
while true; do sleep 0.05; done
"""


class Host:
    """An installed working tree, in which commands of launchers run."""

    def __init__(self, folder: Path):
        self.tree, self.bin = folder / "home" / launch.FOLDER, folder / "bin"
        (self.tree / "infra").mkdir(parents=True)
        for name in ("host.sh", "carry.sh"):
            shutil.copy(ROOT / "infra" / name, self.tree / "infra")
        write_program(self.tree / ".venv" / "bin" / "gregale", GREGALE)
        write_program(self.bin / "sudo", '#!/bin/bash\nexec "$@"\n')
        (self.tree / "train.installed").touch()
        self.environment = {
            **os.environ, "HOME": str(folder / "home"), "PATH": f"{self.bin}:{os.environ['PATH']}", "HOW": "save"
        }  # fmt: skip

    def run(self, command: str, code: int = 0) -> str:
        """What a command prints, as ssh runs it: what it leaves behind has to look after itself."""
        words = ["bash", "-c", f"(cd && {command}) 2>&1"]
        result = subprocess.run(words, env=self.environment, text=True, timeout=60, stdout=subprocess.PIPE)
        assert result.returncode == code, result.stdout
        return result.stdout

    def state(self, runs: str | None = None) -> str:
        ((_, state, checkpoint),) = launch.hosts_in(self.run(launch.state_command(runs)))
        return f"{state} {checkpoint}"

    def read(self, name: str) -> str:
        file = self.tree / name
        return file.read_text() if file.exists() else ""

    def start(self) -> int:
        """Starts a training and waits for it; returns its number."""
        (self.tree / "said").unlink(missing_ok=True)
        self.run(launch.host_command("start", "train", "a.yaml", "--islands.bind", "@address"))
        until(lambda: self.read("said"))
        until(lambda: self.read("train.pid"))
        return int(self.read("train.pid"))


@pytest.fixture
def host(tmp_path) -> Iterator[Host]:
    found = Host(tmp_path)
    yield found
    session = found.read("train.session").strip()
    if session:
        subprocess.run(["pkill", "-KILL", "--session", session], check=False)


def test_training_outlives_the_connection_and_stops_when_asked(host):
    (host.tree / "train.env").write_text("WANDB_API_KEY=secret\n")
    host.start()
    session, key, *words = host.read("said").split()
    ours = subprocess.run(["ps", "-o", "sid=", str(os.getpid())], capture_output=True, text=True).stdout.strip()
    assert session != ours, "it has a session of its own, which no closing terminal hangs up"
    assert key == "secret"
    assert words[:2] == ["train", "a.yaml"]
    assert re.fullmatch(r"[\da-f.:]+", words[3]), "the host's own address"
    assert "a training runs already; stop it first" in host.run(launch.host_command("start", "train"), code=1)
    assert host.state() == "running 0"
    host.run(launch.host_command("stop", "60"))
    until(lambda: host.state() == "stopped 20")
    assert host.read("train.log") == "The checkpoint of step 20 is saved.\n"
    assert host.read("train.code") == "143\n"


def test_a_training_that_does_not_save_in_time_is_killed(host):
    host.environment["HOW"] = ":"
    number = host.start()
    assert "is killed after 1 seconds" in host.run(launch.host_command("stop", "1"))
    until(lambda: not Path(f"/proc/{number}").exists())
    until(lambda: host.state() == "stopped 0")
    assert "the training has not ended 1 seconds after SIGTERM: killed" in host.read("train.log")


def test_a_start_ends_what_an_earlier_one_left(host):
    """Its main process was killed, as by a lack of memory; the rest holds the TPU, here the lock."""
    number = host.start()
    os.kill(int(host.read("train.session")), signal.SIGKILL)
    until(lambda: host.state() == "lost 0")
    lock = Path("/tmp/libtpu_lockfile")
    lock.touch()
    again = host.start()
    assert again != number
    until(lambda: not Path(f"/proc/{number}").exists())
    assert not lock.exists()
    assert host.state() == "running 20", "the earlier one has saved"


def test_processes_of_somebody_else_are_left_alone(host, tmp_path):
    lock = f"{host.tree}/train.lock"
    words = ["bash", "-c", f"exec 3>>{lock}; read"]
    with subprocess.Popen(words, stdin=subprocess.PIPE, cwd=tmp_path) as other:
        until(lambda: lock in [os.path.realpath(each) for each in Path(f"/proc/{other.pid}/fd").iterdir()])
        assert f"process {other.pid} (bash -c" in host.run(launch.host_command("start", "train"), code=1)
        other.communicate(b"\n")


@pytest.mark.parametrize(
    ("files", "found"),
    [
        ({}, "idle 0"),
        ({"train.pid": "1"}, "lost 0"),
        ({"train.pid": "1", "train.code": "75\n"}, "75 0"),
        ({"train.code": "0\n", "train.stopped": ""}, "0 0"),
        ({"train.log": "The checkpoint of step 9 is saved.\nThe checkpoint of step 20 is saved.\n"}, "idle 20"),
    ],
)
def test_a_host_tells_how_its_training_is(host, files, found):
    for name, text in files.items():
        (host.tree / name).write_text(text)
    assert host.state() == found
    (host.tree / "train.installed").unlink()
    assert host.state().startswith("bare "), "until its installation is complete"


def test_runs_on_the_disk_of_the_machine_are_volatile(host, tmp_path):
    """Another file system, as a mount has, is one that the stand-in of `stat` tells of."""
    assert host.state("~/runs/that/is/not/there") == "volatile 0"
    assert host.state("/dev/shm/runs") == "volatile 0"
    script = '#!/bin/bash\n[[ $1 == --file-system ]] && echo nfs || echo "${@: -1}" | cksum\n'
    write_program(host.bin / "stat", script)
    assert host.state("~/runs") == "idle 0"


def test_an_image_takes_the_place_of_the_packages(host):
    docker = '#!/bin/bash\necho "$*" >>$HOME/docker\n[[ $1 == run ]] || exit 0\n'
    docker += 'while [[ $1 != r/g:1 ]]; do shift; done\nexec .venv/bin/"${@:2}"\n'
    write_program(host.bin / "docker", docker)
    (host.tree / "train.env").write_text("WANDB_API_KEY=secret\n")
    host.run(f"{launch.HOST_SCRIPT} pull r/g:1")
    host.start()
    calls = (host.tree.parent / "docker").read_text()
    assert "pull --quiet r/g:1" in calls
    assert f"--workdir {host.tree} --env-file train.env r/g:1 gregale train a.yaml" in calls
    assert "secret" not in calls
    host.run(launch.host_command("stop", "60"))
    until(lambda: host.state() == "stopped 20")


def test_a_fresh_machine_that_updates_itself_is_waited_for(stand_ins):
    """`apt-get update` fails while another process holds its lock; the installation waits by its own option."""
    stand_ins.play("sudo", 'exec "$@"')
    locked = '{ echo "Could not get lock" >&2; exit 100; }'
    stand_ins.play("apt-get", f"[[ $1 != update || $(wc -l <slept) -ge 2 ]] || {locked}")
    stand_ins.write("slept", "")
    for name in ("bash", "dirname", "wc"):
        (stand_ins.bin / name).symlink_to(shutil.which(name) or "")
    stand_ins.run(ROOT / "infra" / "host.sh", "prepare", PATH=str(stand_ins.bin), code=0)
    assert stand_ins.read("slept").split() == ["10", "10"]
    *updates, install = stand_ins.calls("apt-get")
    assert updates == [["apt-get", "update", "-qq"]] * 3
    assert install[4:6] == ["-o", "DPkg::Lock::Timeout=600"]


def test_scripts_read_the_line_that_training_writes():
    source = (ROOT / "src" / "gregale" / "checkpoint" / "store.py").read_text()
    assert 'f"The checkpoint of step {step} is saved."' in source
