"""`infra/tpu_vm.sh`: the commands that it prints, its mistakes, and what its commands do on a host."""

import os
import re
import shlex
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from gregale.runs.config import TrainConfig
from gregale.runs.parsing import load
from tests.infra.stand_ins import ROOT

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
        return [without_limit(shlex.split(line)) for line in result.stdout.splitlines()]

    return commands


def without_limit(words: list[str]) -> list[str]:
    """A command without the `timeout --kill-after=10 N` before it."""
    return words[3:] if words[0] == "timeout" else words


def copy_host_scripts(folder: Path) -> None:
    """Copy what a host runs of `infra/` into a working tree."""
    (folder / "infra").mkdir()
    for name in ("host.sh", "carry.sh"):
        shutil.copy(ROOT / "infra" / name, folder / "infra")


def remote(command: list[str]) -> str:
    """The command for the hosts, inside a `gcloud ... ssh`."""
    return command[command.index("--command") + 1]


@pytest.mark.parametrize(
    ("accelerator", "runtime"),
    [("v4-8", "tpu-ubuntu2204-base"), ("v5litepod-64", "v2-alpha-tpuv5-lite"), ("v6e-16", "v2-alpha-tpuv6e")],
)
def test_one_slice_is_one_node_with_the_software_of_its_type(printed, accelerator, runtime):
    create, asked = printed("create", *PLACE, "--accelerator", accelerator)
    assert create[:6] == ["gcloud", "compute", "tpus", "queued-resources", "create", "llama"]
    kind, software = f"--accelerator-type={accelerator}", f"--runtime-version={runtime}"
    assert set(create[6:]) == {"--node-id=llama", kind, software, "--zone=us-west4-a"}
    assert asked[4:] == ["list", "--format=value(name.basename(),state.state)", "--zone=us-west4-a"]


def test_flags_are_passed_on_to_gcloud(printed):
    network = ("--internal-ips", "--network=ours", "--scopes=https://www.googleapis.com/auth/cloud-platform")
    tunnel = ("--tunnel-through-iap", "--ssh-flag=-o ServerAliveInterval=30")
    words = [word for flag in network for word in ("--create-flag", flag)]
    words += [word for flag in tunnel for word in ("--ssh-flag", flag)]
    commands = [each for each in printed("up", *CREATE[1:], "--config", CONFIG, *words) if each[0] == "gcloud"]
    for command in [*commands, *printed("ssh", *PLACE, *words, "--", "uptime")]:
        assert (command[4] == "create") == set(network).issubset(command)
        assert (command[4] in ("ssh", "scp")) == set(tunnel).issubset(command)


def test_several_slices_are_nodes_of_one_request_that_delete_gives_back(printed):
    create = printed(*CREATE, "--slices", "3", "--spot", "--project", "p", "--runtime", "other")[0]
    assert {"--node-count=3", "--node-prefix=llama", "--spot", "--project=p", "--runtime-version=other"} <= set(create)
    assert "--node-id=llama" not in create
    (command,) = printed("delete", *PLACE)
    assert command[4:] == ["delete", "llama", "--force", "--quiet", "--zone=us-west4-a"]


def test_up_and_watch_do_all_of_it_by_the_commands_of_its_parts(printed):
    """Each of which is what is run, word by word, as `test_watch` finds."""
    commands = printed("up", *CREATE[1:], "--slices", "2", "--config", CONFIG)
    parts = [(*CREATE, "--slices", "2"), ("install", *PLACE), ("train", *PLACE, "--config", CONFIG)]
    parts += [(command, *PLACE) for command in ("status", "log", "delete")]
    known = [each for words in parts for each in printed(*words)]
    watched = printed("watch", *CREATE[1:], "--slices", "2", "--config", CONFIG)
    assert len(watched) > 6
    assert [each for each in [*commands, *watched] if each not in known] == []
    names = [words[4] if words[0] == "gcloud" else words[0] for words in commands]
    assert names == ["create", "list", "bash", "scp", "rm", "ssh", "ssh", "ssh"]
    install, train, log = commands[-3:]
    assert {"--node=all", "--worker=all"} <= set(install)
    assert {"--node=all", "--worker=all"} <= set(train)
    assert {"--node=0", "--worker=0"} <= set(log)
    assert "make setup" in remote(install)
    assert remote(install).endswith(" && touch train.installed")


def test_the_training_command_is_one_that_gregale_reads(printed):
    overrides = ["--runs", "~/shared/runs", "--data.sources.web.files", "['a b.jsonl', \"it's\"]"]
    (command,) = printed("train", *PLACE, "--config", CONFIG, "--", *overrides)
    text = remote(command)
    words = shlex.split(text)
    assert words[:5] == ["bash", "gregale/infra/host.sh", "start", "train", CONFIG]
    config = load(TrainConfig, ROOT / CONFIG, words[5:])
    assert config.runs == "~/shared/runs"
    assert config.data.sources["web"].files == ("a b.jsonl", "it's")  # type: ignore[attr-defined]
    assert " ~/shared/runs " in text, "the host's shell expands ~"


def test_the_archive_is_its_user_s_alone_and_goes_also_if_it_cannot_be_copied(stand_ins):
    """It has what git does not ignore, which may be a file of keys."""
    stand_ins.play("gcloud", 'for word in "$@"; do [[ ! -f $word ]] || stat -c %a "$word" >>modes; done; exit 3')
    archive = stand_ins.home / "gregale-llama.tar.gz"
    archive.write_text("of an earlier one")
    archive.chmod(0o644)
    result = stand_ins.run(ROOT / "infra" / "tpu_vm.sh", "install", *PLACE)
    assert (result.returncode, stand_ins.read("modes")) == (3, "600\n"), result.stderr
    assert not archive.exists()


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


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("fly",), "there is no command 'fly'; commands: up, watch, create"),
        (("create", "--zone", "z", "--name", "Bad"), "--name is 'Bad'"),
        (("create", "--name", "a", "--zone"), "--zone needs a value"),
        (("create", *PLACE), "--accelerator is missing"),
        (("create", *PLACE, "--accelerator", "v9-8"), "--runtime is missing: the software for --accelerator v9-8"),
        ((*CREATE, "--create-flag", "internal-ips"), "--create-flag needs one of gcloud's flags as its value"),
        ((*CREATE, "--spot", "--reserved"), "--spot, --reserved and --reservation-project exclude one another"),
        (("install", *PLACE, "--environment", "none.env"), "--environment is none.env: there is no such file"),
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
    cases = source[source.index("while (($#))") : source.rindex("esac")]
    options = set(re.findall(r"--[a-z][a-z-]+", cases)) - {"--help", "--reservation-host-project"}
    assert len(options) == 20
    commands = ("up", "watch", "create", "install", "train", "status", "log", "ssh", "stop", "delete")
    for word in (*commands, *options):
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
    copy_host_scripts(tmp_path / "home" / "gregale")
    gregale.write_text(
        "#!/bin/bash\nsave() { echo The checkpoint of step 20 is saved.; echo stopped >$HOME/said; exit 143; }\n"
        "trap 'kill $!; save' TERM\nsleep 100 &\n"
        'echo "$(ps -o sid= $$) $WANDB_API_KEY $*" >"$HOME/said"; wait\n'
    )
    os.mkfifo(tmp_path / "home" / "said")
    for script in (gcloud, gregale):
        script.chmod(0o755)
    environment = {"HOME": str(tmp_path / "home"), "PATH": f"{gcloud.parent}:{os.environ['PATH']}"}

    def command(*arguments: str) -> subprocess.CompletedProcess:
        command, *rest = arguments
        return tpu_vm(command, *PLACE, "--config", CONFIG, *rest, **environment)

    return command


def said(tmp_path: Path) -> str:
    """What the training says next; waits for it."""
    pipe = tmp_path / "home" / "said"
    return subprocess.run(["cat", str(pipe)], capture_output=True, text=True, timeout=60, check=True).stdout


def test_training_outlives_the_connection_and_stops_when_asked(host, tmp_path):
    home = tmp_path / "home" / "gregale"
    (home / "train.env").write_text("WANDB_API_KEY=secret\n")
    (home / "train.installed").touch()
    assert host("train", "--", "--islands.bind", "@address").returncode == 0
    session, key, *words = said(tmp_path).split()
    ours = subprocess.run(["ps", "-o", "sid=", str(os.getpid())], capture_output=True, text=True).stdout.strip()
    assert session != ours, "it has a session of its own, which no closing terminal hangs up"
    assert key == "secret"
    assert words[:4] == ["train", CONFIG, "--distributed.coordinator", "auto"]
    assert re.fullmatch(r"[\da-f.:]+", words[5]), "the host's own address"
    again = host("train")
    assert again.returncode == 1
    assert "a training runs already; stop it first\n" in again.stderr
    assert " running, checkpoint none\n" in state(home)
    assert host("stop").returncode == 0
    assert said(tmp_path) == "stopped\n"
    assert until_it_ends(home).endswith(" stopped, checkpoint 20\n")
    assert (home / "train.log").read_text() == "The checkpoint of step 20 is saved.\n"
    assert (home / "train.code").read_text() == "143\n"


def state(home: Path) -> str:
    command = ["bash", str(home / "infra" / "host.sh"), "state"]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout


def until_it_ends(home: Path) -> str:
    for _ in range(100):
        if " running," not in (found := state(home)):
            return found
    raise AssertionError("it still runs")


@pytest.mark.parametrize(
    ("files", "found"),
    [
        ({}, "idle, checkpoint none"),
        ({"train.pid": "1"}, "lost, checkpoint none"),
        ({"train.pid": "1", "train.code": "75\n"}, "ended 75, checkpoint none"),
        ({"train.code": "0\n", "train.stopped": ""}, "ended 0, checkpoint none"),
        (
            {"train.log": "The checkpoint of step 9 is saved.\nThe checkpoint of step 20 is saved.\n"},
            "idle, checkpoint 20",
        ),
    ],
)
def test_a_host_tells_how_its_training_is(tmp_path, files, found):
    copy_host_scripts(tmp_path)
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    assert " bare, " in state(tmp_path), "until its installation is complete"
    (tmp_path / "train.installed").touch()
    assert state(tmp_path).rstrip().endswith(f" {found}")


def test_scripts_read_the_line_that_training_writes():
    source = (ROOT / "src" / "gregale" / "checkpoint" / "saving.py").read_text()
    assert 'f"The checkpoint of step {step} is saved."' in source
