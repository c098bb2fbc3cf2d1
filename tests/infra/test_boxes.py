"""`infra/boxes.py`: two boxes in network namespaces with a real sshd each; and what it refuses."""

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from threading import Thread

import pytest

from tests.infra.stand_ins import ROOT, load_module, write_program
from tests.namespaces import NoNetworkError, Site, rate_limited
from tests.programs.tiny import FAST_TO_COMPILE, checkpoint_steps, losses, write_inputs
from tests.waiting import WAIT_SECONDS, until

launch = load_module(ROOT / "infra" / "launch.py")
load_module(ROOT / "infra" / "tpu_vm.py")
boxes = load_module(ROOT / "infra" / "boxes.py")

SSHD = shutil.which("sshd", path=f"{os.environ['PATH']}:/usr/sbin")
# A session of the box has a home and a temporary folder of its own; Python may be below the old home.
SESSION = """
mkdir -p "$box/home" "$box/tmp"
if [[ $python == "$HOME"/* ]]; then
  mkdir -p "$box/home/${python#"$HOME"/}" && mount --bind "$python" "$box/home/${python#"$HOME"/}"
fi
mount --rbind "$box/home" "$HOME"
exec unshare --pid --fork --mount-proc --kill-child "$sshd" -D -e -f "$box/sshd_config"
"""
SSHD_CONFIG = """
ListenAddress {address}
HostKey {folder}/key
AuthorizedKeysFile {folder}/key.pub
StrictModes no
UsePAM no
PidFile none
Subsystem sftp internal-sftp
SetEnv PATH={folder}/bin:/usr/bin:/bin
"""
# In the place of `make setup`. A .venv that was copied as a link would be that of this machine.
MAKE = """#!/bin/bash
rm -rf .venv
mkdir -p .venv/bin
printf '#!/bin/bash\\n' >.venv/bin/python
cp {folder}/bin/gregale .venv/bin
chmod +x .venv/bin/*
"""
GREGALE = f'#!/bin/bash\nPYTHONPATH=$PWD/src exec {sys.executable} -m gregale "$@"\n'  # the tree that was copied
# Trains until a file tells how it ends.
TRAINING = """#!/bin/bash
echo "$KEY $NCCL_SOCKET_IFNAME $*" >>{folder}/started
trap 'exit 143' TERM
echo "The checkpoint of step 7 is saved."
while sleep 0.1; do [[ ! -f {folder}/code ]] || exit $(<{folder}/code); done
"""


class Quick(launch.Runner):
    """Polls often, and notes what it has said."""

    def __init__(self):
        super().__init__("boxes.sh", False)
        self.said: list[str] = []
        self.is_over = False

    def say(self, text: str) -> None:
        self.said.append(text)

    def sleep(self, seconds: float) -> None:
        super().sleep(min(seconds, 0.2))
        if self.is_over:
            raise launch.Interrupted(130)


class Box:
    """A box whose network is a namespace: a real sshd, and a home of its own."""

    def __init__(self, site: Site, folder: Path, number: int):
        self.site, self.folder, self.own = site, folder, folder / f"box{number}"
        self.own.mkdir()
        (self.own / "sshd_config").write_text(SSHD_CONFIG.format(address=site.address, folder=folder))

    def start(self) -> None:
        variables = {"box": str(self.own), "python": sys.base_prefix, "sshd": str(SSHD)}
        with (self.own / "log").open("ab") as log:
            command = [*self.site.command, "bash", "-ec", SESSION]
            subprocess.Popen(command, env={**os.environ, **variables}, stdout=log, stderr=log)

    def kill(self) -> None:
        """Ends all that runs on it at once, as when its power fails."""
        name = self.site.command[-1]
        for pid in subprocess.run(["ip", "netns", "pids", name], capture_output=True, text=True).stdout.split():
            with suppress(ProcessLookupError):  # it has just ended
                os.kill(int(pid), signal.SIGKILL)


@contextmanager
def two_boxes(folder: Path, program: str) -> Iterator[list[Box]]:
    """Boxes that trust the key `key` in a folder, and find `make` and Python in its `bin`; with this `gregale`."""
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", folder / "key"], check=True)
    Path("/run/sshd").mkdir(exist_ok=True)
    write_program(folder / "bin" / "make", MAKE.format(folder=folder))
    (folder / "bin" / "gregale").write_text(program)
    (folder / "bin" / "python3.11").symlink_to(sys.executable)
    with ExitStack() as stack:
        try:
            network = stack.enter_context(rate_limited(2, None))
        except NoNetworkError as error:
            pytest.skip(str(error))
        found = [Box(site, folder, number) for number, site in enumerate(network.sites)]
        for box in found:
            stack.callback(box.kill)
            box.start()
        yield found


@pytest.fixture
def shared(tmp_path) -> Path:
    """A folder that both boxes see, with texts and `tiny.yaml`."""
    if SSHD is None:
        pytest.skip("there is no sshd: `apt-get install openssh-server` installs it")
    return write_inputs(tmp_path / "shared")


def words_for(found: list[Box], folder: Path) -> list[str]:
    hosts = ",".join(f"root@{box.site.address}" for box in found)
    ssh = ["-oUserKnownHostsFile=/dev/null", "-oStrictHostKeyChecking=no", f"-oIdentityFile={folder / 'key'}"]
    words = ["--hosts", hosts, *(f"--ssh-flag={flag}" for flag in ssh), "--extras", "formats"]
    return [*words, "--config", str(folder / "tiny.yaml"), "--environment", str(folder / "keys.env")]


@contextmanager
def watched(arguments: list[str], runner: Quick) -> Iterator[list[int]]:
    """A watch that runs beside the block; its exit code is in the list after it."""
    codes: list[int] = []
    watch = Thread(target=lambda: codes.append(boxes.main(["watch", *arguments], runner)))
    watch.start()
    try:
        yield codes
        watch.join(WAIT_SECONDS)
    finally:
        runner.is_over = True
        watch.join()


def lose(box: Box, runner: Quick) -> None:
    """Ends a box, and waits until the watch has noticed."""
    before = len(runner.said)
    box.kill()
    until(lambda: any(f"waiting for root@{box.site.address} to" in text for text in runner.said[before:]))


def test_what_was_lost_is_started_again_once_it_is_back(shared, tmp_path, monkeypatch):
    shutil.copytree(ROOT / "infra", tmp_path / "tree" / "infra")  # no more than that takes no time to copy
    subprocess.run(["git", "init", "--quiet", tmp_path / "tree"], check=True)
    monkeypatch.setattr(launch, "ROOT", tmp_path / "tree")
    (shared / "keys.env").write_text("KEY=secret\n")
    with two_boxes(shared, TRAINING.format(folder=shared)) as found:
        words, runner = [*words_for(found, shared), "--interface", "eth0"], Quick()
        with watched([*words, "--", "--runs", str(shared / "runs")], runner) as codes:
            started = shared / "started"
            until(lambda: started.exists() and len(started.read_text().splitlines()) == 2)
            lose(found[1], runner)
            (shared / "code").write_text("75")  # as a process ends that has lost another
            until(lambda: (found[0].own / "home/gregale/train.code").exists())
            (shared / "code").unlink()
            found[1].start()
            until(lambda: len(started.read_text().splitlines()) == 4)
            (shared / "code").write_text("0")
        assert codes == [0]
        assert any("starting the training on the run, which ended (75 lost)" in text for text in runner.said)
        assert runner.said[-1].endswith("the run is complete, with the checkpoint of step 7")
        joining = (
            f"--distributed.coordinator {found[0].site.address}:8476 --distributed.processes 2 --distributed.process"
        )
        keys = [f"secret eth0 train {shared}/tiny.yaml {joining} {number}" for number in (0, 0, 1, 1)]
        assert sorted(started.read_text().splitlines()) == [f"{key} --runs {shared}/runs" for key in keys]


@pytest.mark.soak  # the test above has what the launcher does then
def test_two_boxes_train_and_go_on_when_one_is_back(shared):
    (shared / "keys.env").write_text(f"JAX_PLATFORMS=cpu\nXLA_FLAGS='{FAST_TO_COMPILE}'\n")
    run, runner = shared / "runs" / "tiny", Quick()
    keys = ["--runs", str(shared / "runs"), "--data.cache", str(shared / "cache"), "--distributed.timeout_seconds", "3"]
    keys += ["--data.sources.words.files", f"['{shared}/text/*.txt']", "--checkpoint.every", "10"]
    keys += ["--cpu_devices", "2", "--mesh.replica=2", "--mesh.data=1", "--mesh.model=1"]
    with two_boxes(shared, GREGALE) as found:
        words = words_for(found, shared)
        with watched([*words, "--", *keys, "--steps", "1000000"], runner) as codes:
            until(lambda: checkpoint_steps(run))
            lose(found[1], runner)
            before = checkpoint_steps(run)[-1]
            found[1].start()
            until(lambda: checkpoint_steps(run)[-1] > before)
            assert boxes.main(["stop", *words], runner) == 0
        assert codes == [143]
        last = checkpoint_steps(run)[-1] + 1
        runner = Quick()
        assert boxes.main(["train", *words, "--", *keys, "--steps", str(last)], runner) == 0
        assert boxes.main(["watch", *words, "--", *keys, "--steps", str(last)], runner) == 0
        assert [step for step, _ in losses(run)] == list(range(1, last + 1))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("fly", "--hosts", "a"), "argument COMMAND: invalid choice: 'fly'"),
        (("status", "--hosts", "a, b"), "--hosts is 'a, b': give the boxes with commas in between"),
        (("watch", "--hosts", "a,b"), "--config is missing"),
        (("watch", "--hosts", "a,b", "--config", "config/quickstart.yaml"), "several boxes have to see the same run"),
    ],
)
def test_a_mistake_is_one_line(words, message):
    runner = Quick()
    assert boxes.main(list(words), runner) == 2
    (said,) = runner.said
    assert said.startswith(f"error: {message}")
