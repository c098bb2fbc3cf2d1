"""Slurm's own daemons: a controller and two nodes on this machine, as a user of Slurm sees them."""

import os
import secrets
import shutil
import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.ports import free_port
from tests.waiting import WAIT_SECONDS, until

PROGRAMS = ("munged", "slurmctld", "slurmd", "squeue", "scontrol", "srun")
PATH = f"{os.environ['PATH']}:/usr/sbin:/sbin"
NODES = ("n0", "n1")

CONFIG = """\
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
AuthInfo=socket={folder}/munge.socket
SlurmUser=root
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/%n.pid
SlurmdSpoolDir={folder}/%n
StateSaveLocation={folder}/state
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
SelectType=select/cons_tres
SchedulerType=sched/builtin
SchedulerParameters=sched_interval=1,sched_min_interval=0
KillWait=1
ReturnToService=2
GresTypes=gpu
SlurmdParameters=config_overrides
PartitionName=main Nodes=ALL Default=YES
"""
NODE = "NodeName={name} NodeHostname={host} NodeAddr=127.0.0.1 Port={port} CPUs=8 RealMemory=1000 Gres=gpu:2\n"


def why_not() -> str | None:
    """Why no cluster can be started here, in words."""
    missing = [name for name in PROGRAMS if shutil.which(name, path=PATH) is None]
    if missing:
        return f"{', '.join(missing)} are missing: `apt-get install slurmctld slurmd slurm-client munge` installs them"
    return None if os.geteuid() == 0 else "Slurm's daemons have to be started by root"


class Cluster:
    """A controller and its nodes; `environment` leads Slurm's commands to them."""

    def __init__(self, folder: Path):
        self.environment = {**os.environ, "PATH": PATH, "SLURM_CONF": str(folder / "slurm.conf")}
        self._folder, self._daemons = folder, {}

    def start(self) -> None:
        """Starts the daemons and waits until both nodes take jobs."""
        folder, host = self._folder, socket.gethostname()
        for name in ("state", *NODES):
            (folder / name).mkdir()
        (folder / "munge.key").write_bytes(secrets.token_bytes(64))
        (folder / "munge.key").chmod(0o600)
        nodes = "".join(NODE.format(name=name, host=host, port=free_port()) for name in NODES)
        config = CONFIG.format(folder=folder, host=host, port=free_port()) + nodes
        (folder / "slurm.conf").write_text(config)
        (folder / "gres.conf").write_text("".join(f"Name=gpu File=/dev/{each}\n" for each in ("null", "zero")))
        files = {name: folder / f"munge.{name}" for name in ("socket", "pid", "log", "seed")}
        options = [f"--{name}{'' if name == 'socket' else '-file'}={file}" for name, file in files.items()]
        self._start("munged", "--foreground", "--force", f"--key-file={folder / 'munge.key'}", *options)
        until((folder / "munge.socket").exists)
        self._start("slurmctld", "-D")
        for name in NODES:
            self.start_node(name)

    def start_node(self, name: str) -> None:
        """Starts slurmd of a node and waits until it takes jobs."""
        self._start("slurmd", "-D", "-N", name, key=name)
        until(lambda: self.run("sinfo", "--noheader", "--Node", "--nodes", name, "--format=%T") == "idle")

    def end_node(self, name: str) -> None:
        """Kills slurmd of a node, and has the controller notice it at once instead of after SlurmdTimeout."""
        self._daemons[name].kill()
        self._daemons[name].wait()
        self.run("scontrol", "update", f"NodeName={name}", "State=DOWN", "Reason=test")

    def run(self, *words: str) -> str:
        """What a command of Slurm prints; nothing if it fails."""
        result = subprocess.run(words, env=self.environment, capture_output=True, text=True, timeout=WAIT_SECONDS)
        return result.stdout.strip() if result.returncode == 0 else ""

    def stop(self) -> None:
        """Ends all jobs, also on nodes without slurmd, and all daemons."""
        for name in NODES:
            if name in self._daemons and self._daemons[name].poll() is not None:
                self.start_node(name)
        self.run("scancel", "--user=root")
        until(lambda: not self.run("squeue", "--noheader"))
        for daemon in self._daemons.values():
            daemon.kill()
            daemon.wait()

    def _start(self, program: str, *words: str, key: str = "") -> None:
        with (self._folder / f"{key or program}.log").open("ab") as log:
            self._daemons[key or program] = subprocess.Popen(
                [program, *words], env=self.environment, stdout=log, stderr=log, cwd=self._folder
            )


@contextmanager
def cluster(folder: Path) -> Iterator[Cluster]:
    """A cluster that runs inside; its files are in a folder with a short name, for the name of a socket is short."""
    running = Cluster(folder)
    try:
        running.start()
        yield running
    finally:
        running.stop()
