"""`infra/slurm.sh` against a Slurm that fails, hangs and loses answers."""

import os
import re
import shlex
import shutil
import signal
import subprocess
from pathlib import Path

import pytest

from tests.infra.stand_ins import HANG, ROOT, StandIns, write_program
from tests.waiting import until

CONFIG = "config/llama_124m_gpu.yaml"
SUBMIT = ("submit", "--name", "llama", "--config", CONFIG, "--nodes", "2", "--gpus", "1", "--time", "04:00:00")
TASKS = 2
SLEEP = shutil.which("sleep")

# `queue` has the pending jobs, `next` the number of the next one. `sbatch_part` may say LOSE (the job is taken and the
# answer never comes), FAIL or nothing, a line for each call.
SQUEUE = "if [[ -s squeue_fails ]]; then sed -i 1d squeue_fails; exit 1; fi; cat queue 2>/dev/null; true"
SBATCH = f"""
part=$(head -n 1 sbatch_part 2>/dev/null); sed -i 1d sbatch_part 2>/dev/null
[[ $part != FAIL ]] || exit 1
[[ $part != SLOW ]] || {SLEEP} 1
next=$(($(cat next 2>/dev/null || echo 100) + 1)); echo $next | tee next >>queue
[[ $part != LOSE ]] || {{ {HANG}; }}
echo "$next;cluster"
"""
SCANCEL = 'case " $* " in *" --signal=TERM "*) kill -TERM $(<tasks) ;; *) sed -i "/^$1$/d" queue ;; esac'
# Starts the tasks and ends with the highest of their codes; or with that in `srun_code`, as when slurmd dies.
SRUN = f"""
play=$PWD && cd - >/dev/null
head -n 1 $play/begin >$play/try
[[ $(wc -l <$play/begin) == 1 ]] || sed -i 1d $play/begin
export PLAY=$play SLURM_PROCID
while [[ $1 == --* ]]; do shift; done
for ((SLURM_PROCID = 0; SLURM_PROCID < {TASKS}; SLURM_PROCID++)); do
  "$@" & tasks+=($!)
done
echo "${{tasks[*]}}" >$play/tasks
for task in "${{tasks[@]}}"; do wait $task || {{ last=$?; ((last < code)) || code=$last; }}; done
exit $(cat $play/srun_code 2>/dev/null || echo ${{code:-0}})
"""
# The training: says what it does, and ends with a code of its own; or waits for SIGTERM, or is lost with its host.
TRAINING = f"""#!/bin/bash
((SLURM_PROCID)) && exec >/dev/null
trap 'kill $!; echo "The checkpoint of step 30 is saved."; exit 143' TERM
read -r code step <"$PLAY/try"
[[ -z $step ]] || echo "The checkpoint of step $step is saved."
echo $$ >>"$PLAY/training"
case $code in
  wait) {SLEEP} 60 >/dev/null & wait ;;
  lost) kill -KILL $PPID $$ ;;
  *) exit $code ;;
esac
"""


class Slurm(StandIns):
    """Slurm's commands, and a working tree of its own, with a space in its path: jobs leave notes there."""

    def __init__(self, folder: Path):
        super().__init__(folder)
        for name, part in zip(("squeue", "sbatch", "scancel", "srun"), (SQUEUE, SBATCH, SCANCEL, SRUN), strict=True):
            self.play(name, part)
        self.play("scontrol")
        self.tree = folder / "working tree"
        self.script, self.notes = self.tree / "infra" / "slurm.sh", self.tree / "slurm" / "llama"
        shutil.copytree(ROOT / "infra", self.script.parent)
        (self.tree / "config").mkdir()
        shutil.copy(ROOT / CONFIG, self.tree / "config")
        write_program(self.tree / ".venv" / "bin" / "gregale", TRAINING)

    def submit(self, *words: str) -> None:
        self.run(self.script, *SUBMIT, *words, code=0)

    def begin(self, number: int, begin: str = "wait", **more: str) -> subprocess.Popen:
        """Begins a job as Slurm does: it is no longer pending, and its script writes to its log."""
        self.write("begin", f"{begin}\n")
        self.write("queue", "".join(line for line in self.read("queue").splitlines(True) if line != f"{number}\n"))
        for name in ("training", "tasks"):
            (self.folder / name).unlink(missing_ok=True)
        with (self.notes / f"{number}.log").open("a") as log:
            environment = {**self.environment, "SLURM_JOB_ID": str(number), **more}
            words = ["bash", str(self.notes / "job.sh")]
            return subprocess.Popen(words, stdout=log, stderr=subprocess.STDOUT, env=environment)

    def end(self, number: int, begin: str, **more: str) -> int:
        """The exit code of a job that begins so."""
        return self.begin(number, begin, **more).wait(300)

    def wait_for_training(self) -> None:
        """Until all processes train, and srun can tell them to end."""
        until(lambda: self.read("training").count("\n") >= TASKS and self.read("tasks"))

    def log(self, number: int) -> str:
        return (self.notes / f"{number}.log").read_text()

    @property
    def pending(self) -> list[str]:
        return self.read("queue").split()


@pytest.fixture
def slurm(tmp_path) -> Slurm:
    return Slurm(tmp_path)


def test_the_script_asks_for_a_process_a_gpu_and_a_signal(slurm):
    keys = "--runs", "~/a b", "--data.sources.text.files", '["it\'s"]'
    more = ("--mem", "500G", "--cpus", "9", "--sbatch-flag", "--nodelist=n[1-4]")
    slurm.run(slurm.script, *SUBMIT, "--partition", "gpu", *more, "--", *keys, code=0)
    text = (slurm.notes / "job.sh").read_text()
    asked = re.findall(r"^#SBATCH (\S+)$", text, re.MULTILINE)
    assert {"--nodes=2", "--ntasks-per-node=1", "--gpus-per-node=1", "--time=04:00:00", "--no-requeue"} <= set(asked)
    assert {"--mem=500G", "--cpus-per-task=9", "--nodelist=n[1-4]"} <= set(asked)
    assert {"--signal=B:USR1@300", "--partition=gpu", "--job-name=llama", "--output=slurm/llama/%j.log"} <= set(asked)
    words = shlex.split(text.splitlines()[-1])
    assert words[words.index("--") + 1 :] == [
        *(".venv/bin/gregale", "train", CONFIG, "--distributed.coordinator", "auto"),
        *keys,
    ]
    assert slurm.pending == ["101"]
    assert "newest checkpoint: 0\n" in slurm.run(slurm.script, "status", "--name", "llama").stdout
    again = slurm.run(slurm.script, *SUBMIT)
    assert (again.returncode, slurm.pending) == (2, ["101"])
    assert "a job of llama is queued or runs: 101" in again.stderr


def test_a_dry_run_prints_a_program_that_does_the_same(slurm):
    keys = slurm.home / "keys.env"
    keys.write_text("WANDB_API_KEY=secret\n")
    words = (*SUBMIT, "--environment", str(keys), "--", "--name", "it's")
    printed = slurm.run(slurm.script, SUBMIT[0], "--dry-run", *words[1:], code=0)
    assert not slurm.notes.exists()
    assert not slurm.calls("squeue", "sbatch")
    subprocess.run(["bash", "-e", "-c", printed.stdout], env=slurm.environment, check=True, timeout=60)
    by_hand = slurm.calls("squeue", "sbatch"), (slurm.notes / "job.sh").read_text()
    (slurm.folder / "calls").unlink()
    slurm.write("queue", "")
    slurm.run(slurm.script, *words, code=0)
    assert (slurm.calls("squeue", "sbatch"), (slurm.notes / "job.sh").read_text()) == by_hand
    assert "secret" not in slurm.read("calls") + by_hand[1]


def test_jobs_follow_one_another_until_the_run_is_complete(slurm):
    slurm.submit()
    first = slurm.begin(101)
    slurm.wait_for_training()
    assert slurm.pending == ["102"], "its successor is there before it trains"
    assert "--dependency=afterany:101" in slurm.calls("sbatch")[-1]
    first.send_signal(signal.SIGUSR1)
    until(lambda: slurm.calls("scancel"))
    first.send_signal(signal.SIGUSR1)  # as after a `stop` shortly before the limit
    assert first.wait(300) == 143
    assert len(slurm.calls("scancel")) == 1, "it is told to save once"
    assert "The checkpoint of step 30 is saved." in slurm.log(101)
    assert slurm.pending == ["102"], "no second one"
    assert slurm.end(102, "0 60") == 0
    assert slurm.pending == []
    assert "the run is complete" in slurm.log(102)
    assert not slurm.calls("scontrol")


def test_a_job_that_is_killed_has_a_successor_and_a_mistake_ends_it(slurm):
    slurm.submit()
    first = slurm.begin(101)
    slurm.wait_for_training()
    first.kill()
    first.wait()
    subprocess.run(["kill", *slurm.read("tasks").split()], check=True)
    assert slurm.pending == ["102"]
    # It may not begin yet, while a process of an earlier job may still hold the run.
    assert slurm.end(102, "75\n75\n2") == 2
    assert slurm.read("slept").split() == ["30", "30"]
    assert slurm.pending == []


def test_a_job_runs_its_setup_and_trains_in_a_container(slurm):
    tree = slurm.tree
    setup = ("--setup", "module load cuda/13", "--setup", "$NOTHING; export LOADED='a b'", "--gres", "gpu:h100:1")
    slurm.submit(*setup, "--container", "REPOSITORY/gregale:1")
    text = (slurm.notes / "job.sh").read_text()
    assert "#SBATCH --gres=gpu:h100:1\n" in text
    assert "--gpus-per-node" not in text
    slurm.play("module", "[[ $1 != load ]] || touch loaded")
    slurm.play("gregale", 'echo "$LOADED, $SRUN_CPUS_PER_TASK" >>trained')  # that of the image
    assert slurm.end(101, "0", SLURM_CPUS_PER_TASK="9") == 0
    assert slurm.read("trained") == "a b, 9\n" * TASKS
    (srun,) = slurm.calls("srun")
    assert srun[2:5] == [
        "--container-image=REPOSITORY/gregale:1",
        *(f"--container-{name}={tree}" for name in ("mounts", "workdir")),
    ]
    assert slurm.calls("gregale")[0][1:] == ["train", CONFIG, "--distributed.coordinator", "auto"]

    slurm.submit("--container", "gregale.sif", "--setup", "module load cuda/13", "--setup", "(exit 2)")
    apptainer = ["apptainer", "exec", "--nv", "--bind", str(tree), "--pwd", str(tree), "gregale.sif", "gregale"]
    words = shlex.split((slurm.notes / "job.sh").read_text().splitlines()[-1])
    assert words[words.index("--") + 1 :][: len(apptainer)] == apptainer
    assert slurm.end(103, "0") == 1, "no mistake of the training's, so the run goes on"
    assert "the setup failed with exit code 2: (exit 2)" in slurm.log(103)
    assert slurm.pending == ["104"]


@pytest.mark.parametrize("begin", ["wait", "lost"])
def test_a_job_is_complete_when_all_of_its_processes_say_so(slurm, begin):
    """srun ends with 0 also when slurmd of its node dies."""
    slurm.submit()
    slurm.write("srun_code", "0")
    first = slurm.begin(101, begin)
    if begin == "wait":
        slurm.wait_for_training()
        subprocess.run(["kill", *slurm.read("tasks").split()], check=True)
    assert first.wait(300) == 75
    assert "srun ended with 0, but 0 of 2 processes have noted that the run is complete" in slurm.log(101)
    assert not (slurm.notes / "complete").exists()
    assert slurm.pending == ["102"]
    slurm.write("srun_code", "1")
    assert slurm.end(102, "0") == 0, "the processes know it, whatever srun says"
    assert (slurm.notes / "complete").exists()
    assert slurm.pending == []
    assert not list((slurm.notes / "turns").iterdir())


def test_a_process_whose_job_is_over_ends(slurm, tmp_path):
    (tmp_path / "turns").mkdir()
    slurm.write("try", "wait")
    training = slurm.tree / ".venv" / "bin" / "gregale"
    words = ["bash", slurm.script, "task", tmp_path / "turns" / "101", training]
    environment = {**os.environ, "SLURM_JOB_ID": "101", "SLURM_PROCID": "0", "PLAY": str(slurm.folder)}
    result = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=100)
    assert result.returncode == 143
    assert "the job 101 is over; its process 0 saves and ends" in result.stderr


@pytest.mark.parametrize(
    ("file", "parts", "submitted"),
    [("sbatch_part", "LOSE", 2), ("sbatch_part", "FAIL", 3), ("squeue_fails", "\n\n", 2)],
)
def test_whatever_fails_or_is_lost_there_is_one_successor(slurm, file, parts, submitted):
    if file == "squeue_fails":
        slurm.write(file, "\n")
        slurm.run(slurm.script, *SUBMIT, code=2)
    slurm.submit()
    slurm.write(file, f"{parts}\n")
    assert slurm.end(101, "1") == 1
    assert slurm.pending == ["102"]
    assert len(slurm.calls("sbatch")) == submitted
    assert slurm.read("slept").split() == ["30", "30"] * (file == "squeue_fails")


def test_a_signal_while_a_successor_is_submitted_makes_no_second_one(slurm):
    slurm.submit()
    slurm.write("sbatch_part", "SLOW\n")
    first = slurm.begin(101)
    until(lambda: len(slurm.calls("sbatch")) == 2)
    first.send_signal(signal.SIGUSR1)
    assert first.wait(300) == 143
    assert (len(slurm.calls("sbatch")), slurm.pending) == (2, ["102"])


def test_jobs_without_a_new_checkpoint_wait_and_end(slurm):
    slurm.submit("--attempts", "2")
    assert slurm.end(101, "1 10") == 1
    assert slurm.end(102, "1") == 1  # the first that began with step 10
    assert slurm.end(103, "134") == 134
    assert slurm.end(104, "0") == 1
    assert "2 jobs in a row have made no new checkpoint (the newest is that of step 10)" in slurm.log(104)
    assert slurm.pending == []
    assert [words[-1] for words in slurm.calls("scontrol")] == [f"StartTime=now+{each}" for each in (30, 30, 60)]
    assert slurm.calls("scontrol")[0] == ["scontrol", "update", "JobId=102", "StartTime=now+30"]


def test_a_stop_saves_and_ends_it(slurm):
    slurm.submit()
    first = slurm.begin(101)
    slurm.wait_for_training()
    slurm.run(slurm.script, "stop", "--name", "llama", code=0)
    cancelled = slurm.calls("scancel")
    assert [words[-1] for words in cancelled] == ["--state=PENDING", "--signal=USR1"]
    assert "--batch" in cancelled[1]
    first.send_signal(signal.SIGUSR1)
    assert first.wait(300) == 143
    assert slurm.pending == []
    assert "stopped on request" in slurm.log(101)
    status = slurm.run(slurm.script, "status", "--name", "llama")
    assert "newest checkpoint: 30\n" in status.stdout
    slurm.submit()  # and goes on
    assert not (slurm.notes / "stopped").exists()


@pytest.mark.parametrize(
    ("command", "programs"), [("status", ("squeue",)), ("log", ("tail",)), ("stop", ("squeue", "scancel"))]
)
def test_a_dry_run_prints_what_is_run(slurm, command, programs):
    slurm.play("tail")
    slurm.write("queue", "")
    slurm.notes.mkdir(parents=True)
    (slurm.notes / "101.log").write_text("")
    assert slurm.check_dry_run(slurm.script, command, "--name", "llama", programs=programs)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("fly",), "there is no command 'fly'; commands: submit"),
        (("submit", "--name", "a b"), "--name is 'a b'"),
        (("submit", "--name", "a", "--config", CONFIG), "--time is ''"),
        (("submit", "--name", "a", "--gpus", "0"), "--gpus is '0'"),
        (("submit", "--name", "a", "--gpus", "2", "--gres", "gpu:a100:4"), "--gpus is 2, but --gres is gpu:a100:4"),
        (("submit", "--name", "a", "--gres", "gpus"), "--gres is 'gpus'"),
        (("submit", "--name", "a", "--sbatch-flag", "--comment=a b"), "'--comment=a b' has characters"),
        (("submit", "--name", "a", "--sbatch-flag", "x"), "--sbatch-flag needs one of sbatch's flags"),
        (("submit", "--name", "a", "--partition", "x y"), "'--partition=x y' has characters"),
        (("submit", "--name", "a", "--steps", "3"), "'--steps' is no option"),
    ],
)
def test_a_mistake_in_the_command_is_one_line(slurm, words, message):
    result = slurm.run(slurm.script, *words, "--dry-run")
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr.startswith(f"slurm.sh: error: {message}")
