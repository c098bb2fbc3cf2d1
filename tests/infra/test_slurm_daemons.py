"""`infra/slurm.sh` under Slurm's own daemons: what processes get, and real trainings whose batch node dies."""

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from gregale.atomic_files import is_process_dead
from tests.infra.cluster import Cluster, cluster, why_not
from tests.infra.stand_ins import ROOT, write_program
from tests.programs.tiny import FAST_TO_COMPILE, checkpoint_steps, losses, write_inputs
from tests.waiting import until

ONE_DEVICE = [f"--mesh.{axis}=1" for axis in ("replica", "data", "model")]
KEYS = ["--distributed.coordinator", "null", "--cpu_devices", "1", *ONE_DEVICE, "--checkpoint.every", "10"]
SUBMIT = ["submit", "--name", "tiny", "--config", "tiny.yaml", "--gpus", "1", "--time", "01:00:00"]


@pytest.fixture(scope="module")
def slurm() -> Iterator[Cluster]:
    if reason := why_not():
        pytest.skip(reason)
    with tempfile.TemporaryDirectory(prefix="slurm", ignore_cleanup_errors=True) as folder, cluster(Path(folder)) as it:
        yield it


@pytest.fixture
def tree(tmp_path) -> Iterator[Path]:
    """A working tree with the scripts, whose pauses are short, and `gregale`."""
    folder = write_inputs(tmp_path / "tree")
    shutil.copytree(ROOT / "infra", folder / "infra")
    script = folder / "infra" / "slurm.sh"
    script.write_text(script.read_text().replace("POLL_SECONDS=30", "POLL_SECONDS=2"))
    write_program(folder / ".venv" / "bin" / "gregale", f'#!/bin/bash\nexec {sys.executable} -m gregale "$@"\n')
    yield folder
    shutil.rmtree(folder / "slurm")  # with it goes what lets a training go on, if the test has failed
    (folder / "slurm" / "tiny" / "turns").mkdir(parents=True)


def command(slurm: Cluster, tree: Path, *words: str) -> None:
    environment = slurm.environment | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": FAST_TO_COMPILE}
    subprocess.run(["bash", tree / "infra" / "slurm.sh", *words], env=environment, check=True, timeout=300)


def logs(tree: Path) -> list[str]:
    """What each job has said, the first one first."""
    files = sorted((tree / "slurm" / "tiny").glob("*.log"), key=lambda file: int(file.stem))
    return [file.read_text() for file in files]


def test_each_process_has_its_cores_and_the_setup(slurm, tree):
    """Two processes of two cores on a box of eight. Since 22.05 srun does not take the cores from sbatch."""
    program = tree / ".venv" / "bin" / "gregale"
    step = 'scontrol show step "$SLURM_JOB_ID.$SLURM_STEP_ID" | grep -o "CPUs=[0-9]*"'
    program.write_text(f"#!/bin/bash\necho $SLURM_PROCID/$SLURM_NTASKS $SLURM_CPUS_PER_TASK $LOADED $({step}) >>seen\n")
    words = ["--gres", "gpu:2", "--cpus", "2", "--mem", "100M", "--sbatch-flag", "--comment=test", "--exclusive"]
    command(slurm, tree, *SUBMIT[:5], *words, "--setup", "export LOADED=yes", "--time", "01:00:00")
    until(lambda: (tree / "slurm" / "tiny" / "complete").exists())
    until(lambda: not slurm.run("squeue", "--noheader"))
    assert sorted((tree / "seen").read_text().splitlines()) == ["0/2 2 yes CPUs=4", "1/2 2 yes CPUs=4"]


@pytest.mark.soak  # `test_slurm` has what the script does then
@pytest.mark.parametrize("is_script_killed", [False, True])
def test_a_run_whose_batch_node_fails_goes_on_alone(slurm, tree, is_script_killed):
    """srun ends with 0, and neither srun nor Slurm can end the process of the training."""
    run = tree / "runs" / "tiny"
    command(slurm, tree, *SUBMIT, "--", *KEYS, "--steps", "1000000")
    until(lambda: checkpoint_steps(run))
    orphan = json.loads((run / "lock").read_text())["pid"]
    node = slurm.run("squeue", "--noheader", "--states=RUNNING", "--format=%N")
    if is_script_killed:
        jobs = subprocess.run(["pgrep", "-f", f"{tree}/infra/slurm.sh job"], capture_output=True, text=True).stdout
        for pid in jobs.split():
            os.kill(int(pid), signal.SIGKILL)
    slurm.end_node(node)
    until(lambda: is_process_dead(orphan))
    until(lambda: len(logs(tree)) == 2 and "Going on after step" in logs(tree)[1])
    first = logs(tree)[0]
    assert is_script_killed or "srun ended with 0, but 0 of 1 processes have noted that the run is complete" in first
    assert not (tree / "slurm" / "tiny" / "complete").exists()
    until(lambda: f"The checkpoint of step {checkpoint_steps(run)[-1]} is saved." in logs(tree)[1])

    command(slurm, tree, "stop", "--name", "tiny")
    until(lambda: "stopped on request" in logs(tree)[1])
    until(lambda: not slurm.run("squeue", "--noheader"))
    slurm.start_node(node)
    command(slurm, tree, *SUBMIT, "--", *KEYS, "--steps", str(checkpoint_steps(run)[-1]))
    until(lambda: (tree / "slurm" / "tiny" / "complete").exists())
    until(lambda: not slurm.run("squeue", "--noheader"))
    assert "the run is complete" in logs(tree)[2]
    steps = [step for step, _ in losses(run)]
    assert steps == list(range(1, len(steps) + 1)), "never did two processes write the run"
