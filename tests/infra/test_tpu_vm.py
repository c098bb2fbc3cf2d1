"""`infra/tpu_vm.sh`: the commands that it prints, its mistakes, and what its commands do on a host."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from gregale.services.config import TrainConfig
from gregale.services.parsing import load

ROOT = Path(__file__).parents[2]
CONFIG = "config/llama_8b_two_slices.yaml"
PLACE = ("--name", "llama", "--zone", "us-west4-a")
CREATE = ("create", *PLACE, "--accelerator", "v5litepod-64")


def tpu_vm(*arguments: str, **environment: str) -> subprocess.CompletedProcess:
    command = [shutil.which("bash") or "", str(ROOT / "infra" / "tpu_vm.sh"), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, env={**os.environ, **environment})


@pytest.fixture
def printed(tmp_path) -> Callable[..., list[list[str]]]:
    """Gives the commands of a dry run, in words. None of them can have run: there is no other program to be found."""
    (tmp_path / "dirname").symlink_to(shutil.which("dirname") or "")

    def commands(name: str, *arguments: str) -> list[list[str]]:
        result = tpu_vm(name, "--dry-run", *arguments, PATH=str(tmp_path))
        assert (result.returncode, result.stderr) == (0, "")
        return [shlex.split(line) for line in result.stdout.splitlines()]

    return commands


def remote(command: list[str]) -> str:
    """The command for the hosts, inside a `gcloud ... ssh`."""
    return command[command.index("--command") + 1]


def test_one_slice_is_one_node(printed):
    (create, describe) = printed(*CREATE)
    assert create[:6] == ["gcloud", "compute", "tpus", "queued-resources", "create", "llama"]
    assert set(create[6:]) == {
        "--node-id=llama",
        "--accelerator-type=v5litepod-64",
        "--runtime-version=v2-alpha-tpuv5-lite",
        "--zone=us-west4-a",
    }
    assert describe[4:6] == ["describe", "llama"]


def test_several_slices_are_nodes_of_one_request(printed):
    create = printed(*CREATE, "--slices", "3", "--spot", "--project", "p")[0]
    assert {"--node-count=3", "--node-prefix=llama", "--spot", "--project=p"} <= set(create)
    assert "--node-id=llama" not in create


def test_up_creates_installs_trains_and_follows(printed):
    commands = printed("up", *CREATE[1:], "--slices", "2", "--config", CONFIG)
    assert [words[4] if words[0] == "gcloud" else words[0] for words in commands] == [
        "create",
        "describe",
        "bash",
        "scp",
        "rm",
        "ssh",
        "ssh",
        "ssh",
    ]
    install, train, log = commands[-3:]
    assert {"--node=all", "--worker=all"} <= set(install)
    assert {"--node=all", "--worker=all"} <= set(train)
    assert {"--node=0", "--worker=0"} <= set(log)
    assert "make setup" in remote(install)


def test_the_training_command_is_one_that_gregale_reads(printed):
    overrides = ["--runs", "~/shared/runs", "--data.sources.web.files", "['a b.jsonl', \"it's\"]"]
    (command,) = printed("train", *PLACE, "--config", CONFIG, "--", *overrides)
    text = remote(command)
    words = shlex.split(text[text.index(".venv/bin/gregale") : text.index(">>train.log")])
    assert words[1:3] == ["train", CONFIG]
    config = load(TrainConfig, ROOT / CONFIG, words[3:])
    assert config.runs == "~/shared/runs"
    assert config.data.sources["web"].files == ("a b.jsonl", "it's")  # type: ignore[attr-defined]
    assert " ~/shared/runs " in text, "the host's shell expands ~"


def test_delete_gives_everything_back(printed):
    (command,) = printed("delete", *PLACE)
    assert command[4:] == ["delete", "llama", "--force", "--quiet", "--zone=us-west4-a"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("fly",), "there is no command 'fly'; commands: up, create"),
        (("create", "--zone", "z", "--name", "Bad"), "--name is 'Bad'"),
        (("create", "--name", "a"), "--zone is missing"),
        (("create", "--name", "a", "--zone"), "--zone needs a value"),
        (("create", "--name", "--zone", "z"), "--name needs a value"),
        (("create", *PLACE), "--accelerator is missing"),
        ((*CREATE, "--slices", "0"), "--slices is '0'"),
        (("train", *PLACE), "--config is missing"),
        (("train", *PLACE, "--config", "config/none.yaml"), "--config is config/none.yaml"),
        (("up", *PLACE, "--steps", "3"), "'--steps' is no option"),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(arguments, message):
    result = tpu_vm(*arguments, "--dry-run")
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr.startswith(f"tpu_vm.sh: error: {message}")
    assert result.stderr.count("\n") == 1


def test_help_names_every_command_and_option():
    text = tpu_vm("--help").stdout
    source = (ROOT / "infra" / "tpu_vm.sh").read_text()
    cases = source[source.index("case $1 in") : source.rindex("esac")]
    options = set(re.findall(r"--[a-z][a-z-]+", cases)) - {"--help"}
    assert len(options) == 9
    for word in ("up", "create", "install", "train", "log", "stop", "delete", *options):
        assert f"  {word} " in text


@pytest.fixture
def host(tmp_path) -> Callable[..., subprocess.CompletedProcess]:
    """Runs the script with a gcloud that runs the hosts' commands here, in a home of their own."""
    gcloud = tmp_path / "bin" / "gcloud"
    gcloud.parent.mkdir()
    # Wait for the command alone, as ssh does: what it leaves behind has to look after itself.
    gcloud.write_text('#!/bin/bash\nwhile [[ $1 != --command ]]; do shift; done\ncd "$HOME" && exec bash -c "$2"\n')
    gregale = tmp_path / "home" / "gregale" / ".venv" / "bin" / "gregale"
    gregale.parent.mkdir(parents=True)
    gregale.write_text(
        "#!/bin/bash\ntrap 'kill $!; echo stopped >\"$HOME/said\"; exit 143' TERM\n"
        'sleep 100 &\necho "$(ps -o sid= $$) $$ $*" >"$HOME/said"; echo training; wait\n'
    )
    os.mkfifo(tmp_path / "home" / "said")
    for script in (gcloud, gregale):
        script.chmod(0o755)
    environment = {"HOME": str(tmp_path / "home"), "PATH": f"{gcloud.parent}:{os.environ['PATH']}"}

    def command(*arguments: str) -> subprocess.CompletedProcess:
        return tpu_vm(*arguments, *PLACE, "--config", CONFIG, **environment)

    return command


def said(tmp_path: Path) -> str:
    """What the training says next; waits for it."""
    pipe = tmp_path / "home" / "said"
    return subprocess.run(["cat", str(pipe)], capture_output=True, text=True, timeout=60, check=True).stdout


def test_training_outlives_the_connection_and_stops_when_asked(host, tmp_path):
    assert host("train").returncode == 0
    session, process, *words = said(tmp_path).split()
    assert session == process, "it has a session of its own, which no closing terminal hangs up"
    assert words == ["train", CONFIG, "--distributed.coordinator", "auto"]
    again = host("train")
    assert (again.returncode, again.stderr) == (1, "a training runs already; stop it first\n")
    assert host("stop").returncode == 0
    assert said(tmp_path) == "stopped\n"
    assert (tmp_path / "home" / "gregale" / "train.log").read_text() == "training\n"
