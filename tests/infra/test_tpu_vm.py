"""`infra/tpu_vm.py`: the commands that it prints, and its mistakes."""

import shlex
import subprocess
import tempfile
from collections.abc import Callable

import pytest

from gregale.runs.config import TrainConfig
from gregale.runs.parsing import load
from tests.infra.stand_ins import ROOT
from tests.infra.tpu_api import World
from tests.infra.tpu_model import Model, launch, modelled, tpu_vm

CONFIG = "config/llama_8b_two_slices.yaml"
PLACE = ("--name", "llama", "--zone", "us-west4-a")
CREATE = ("create", *PLACE, "--accelerator", "v5litepod-64")
WATCH = ("watch", *CREATE[1:], "--config", CONFIG)


@pytest.fixture
def printed(capfd, tmp_path, monkeypatch) -> Callable[..., list[list[str]]]:
    """Gives the commands of a dry run, in words. None of them can have run: there is no program to be found."""
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))

    def commands(name: str, *arguments: str) -> list[list[str]]:
        assert tpu_vm.main([name, "--dry-run", *arguments]) == 0
        lines = [shlex.split(line) for line in capfd.readouterr().out.splitlines()]
        return [words for words in lines if words[0] != "ssh-keygen"]

    return commands


def remote(command: list[str]) -> str:
    """The command for the hosts, inside a `gcloud ... ssh`."""
    return command[command.index("--command") + 1]


@pytest.mark.parametrize(
    ("accelerator", "runtime"),
    [("v4-8", "tpu-ubuntu2204-base"), ("v5litepod-64", "v2-alpha-tpuv5-lite"), ("v6e-16", "v2-alpha-tpuv6e")],
)
def test_one_slice_is_one_node_with_the_software_of_its_type(printed, accelerator, runtime):
    *asked, create = printed(*CREATE[:-1], accelerator)
    assert create[:6] == ["gcloud", "compute", "tpus", "queued-resources", "create", "llama"]
    kind, software = f"--accelerator-type={accelerator}", f"--runtime-version={runtime}"
    assert set(create[6:]) == {"--node-id=llama", kind, software, "--zone=us-west4-a"}
    assert [words[3:] for words in asked] == [
        [kind, "list", "--format=json", "--zone=us-west4-a"] for kind in ("queued-resources", "tpu-vm")
    ]


def test_flags_are_passed_on_to_gcloud(printed):
    network = ("--internal-ips", "--network=ours", "--scopes=https://www.googleapis.com/auth/cloud-platform")
    own = ("-o", "ServerAliveInterval=30", "-p", "2222")
    tunnel = ("--tunnel-through-iap", f"--ssh-flag={' '.join(own)}")
    words = [word for flag in network for word in ("--create-flag", flag)]
    words += [word for flag in tunnel for word in ("--ssh-flag", flag)]
    commands = printed("up", *CREATE[1:], "--config", CONFIG, *words)
    commands += printed("ssh", *PLACE, *words, "--", "uptime")
    verbs = set()
    for command in commands:
        verb = command[command.index("tpus") + 2]
        verbs.add(verb)
        assert (verb == "create") == set(network).issubset(command)
        assert (verb == "ssh") == set(tunnel).issubset(command)
        assert (command[1] == "alpha") == (verb in ("ssh", "scp")), "the release that has tunnels"
        if verb == "scp":
            assert [word for word in command if word.startswith("--s")] == [
                f"--scp-flag={word}" for word in ("-o", "ServerAliveInterval=30", "-P", "2222")
            ]
    assert verbs == {"list", "create", "scp", "ssh"}


def test_several_slices_are_nodes_of_one_request_that_delete_gives_back(printed):
    create = printed(*CREATE, "--slices", "3", "--spot", "--project", "p", "--runtime", "other")[-1]
    assert {"--node-count=3", "--node-prefix=llama", "--spot", "--project=p", "--runtime-version=other"} <= set(create)
    assert "--node-id=llama" not in create
    command = printed("delete", *PLACE)[-1]
    assert command[4:] == ["delete", "llama", "--force", "--quiet", "--zone=us-west4-a"]


def test_up_asks_each_slice_apart(printed):
    commands = printed("up", *CREATE[1:], "--slices", "2", "--config", CONFIG)
    assert [words[4] for words in commands] == ["list", "list", "create", *["scp"] * 2, *["ssh"] * 5][:10]
    for pair in (commands[3:5], commands[5:7], commands[7:9]):
        assert [" ".join(words).count(f"llama-{place}") for place, words in enumerate(pair)] == [1, 1]
        assert all("--worker=all" in words for words in pair)
    assert {"llama-0", "--worker=0"} <= set(commands[9])
    install = remote(commands[5])
    assert install.index("host.sh install") < install.index("touch gregale/train.installed")


@pytest.mark.parametrize(
    ("options", "order"),
    [
        (["--setup", "mount"], ["host.sh install tpu,formats,gcs", "(mount)", "touch gregale/train.installed"]),
        (["--setup", "login", "--image", "r/g:1"], ["(login)", "host.sh pull r/g:1", "touch gregale/train.installed"]),
    ],
)
def test_a_host_is_installed_when_its_setup_is_done(printed, options, order):
    """Also: an image's registry is made known before it is fetched."""
    text = remote(printed("install", *PLACE, *options)[-1])
    assert sorted(order, key=text.index) == order


# The words that are run are those that a dry run prints: one Runner prints or runs them.
@pytest.mark.parametrize(
    "words",
    [
        ("install", "--environment", "keys.env", "--setup", "sudo mount -t nfs server:/share '/mnt/a b'"),
        ("train", "--config", CONFIG, "--", "--data.sources.web.files", "['a b.jsonl', \"it's\"]"),
        ("status",),
        ("ssh", "--worker", "all", "--", "grep", "-c", "it's there", "gregale/train.log"),
        ("ssh", "--ssh-flag", "--tunnel-through-iap"),
        ("log",),
        ("stop",),
        ("delete",),
    ],
    ids=lambda words: words[0],
)
def test_a_dry_run_prints_what_is_run(printed, monkeypatch, tmp_path, words):
    keys = tmp_path / "keys.env"
    keys.write_text("WANDB_API_KEY=secret\n")
    command, *rest = (str(keys) if word == "keys.env" else word for word in words)
    lines = printed(command, *PLACE, *rest)
    assert "secret" not in str(lines)
    modelled(tmp_path, monkeypatch)
    recorded = Recorder(World())
    recorded.world.add("llama", "llama")
    tpu_vm.main([command, *PLACE, *rest], recorded)
    assert [each for each in recorded.words if each[0] == "gcloud"][: len(lines)] == lines


def test_a_dry_run_of_the_command_for_a_host_is_none_of_the_launcher():
    assert not launch.runner_for("tpu_vm.sh", ["ssh", *PLACE, "--", "make", "--dry-run"]).dry_run
    assert launch.runner_for("tpu_vm.sh", ["ssh", *PLACE, "--dry-run", "--", "make"]).dry_run


class Recorder(Model):
    """Notes what it runs; every host has done everything."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.words: list[list[str]] = []

    def one(self, words):
        self.words.append(words)
        said = "".join(f"gregale-answer {place}\n" for place in range(2))
        return super().one(words) if words[4:5] in (["list"], ["delete"]) else launch.Result(0, said)

    def foreground(self, words):
        return self.one(list(words)).code


def test_the_training_command_is_one_that_gregale_reads(printed):
    overrides = ["--runs", "~/shared/runs", "--data.sources.web.files", "['a b.jsonl', \"it's\"]"]
    text = remote(printed("train", *PLACE, "--config", CONFIG, "--", *overrides)[-1])
    words = shlex.split(text[1 : text.index(") && printf")])
    assert words[:5] == ["bash", "gregale/infra/host.sh", "start", "train", CONFIG]
    config = load(TrainConfig, ROOT / CONFIG, words[5:])
    assert config.runs == "~/shared/runs"
    assert config.data.sources["web"].files == ("a b.jsonl", "it's")  # type: ignore[attr-defined]
    assert " ~/shared/runs " in text, "the host's shell expands ~"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("fly",), "argument COMMAND: invalid choice: 'fly' (choose from 'up', 'watch'"),
        (("create", "--zone", "z", "--name", "Bad"), "--name is 'Bad'"),
        (("create", "--name", "a", "--zone"), "argument --zone: expected one argument"),
        (("create", *PLACE), "--accelerator is missing"),
        ((*CREATE[:-1], "v1-8"), "--runtime is missing: the software for --accelerator v1-8"),
        ((*CREATE, "--create-flag", "internal-ips"), "--create-flag and --ssh-flag need one of gcloud's flags"),
        ((*CREATE, "--spot", "--reserved"), "argument --reserved: not allowed with argument --spot"),
        (("install", *PLACE, "--environment", "none.env"), "--environment is none.env: there is no such file"),
        (("train", *PLACE), "--config is missing"),
        (("train", *PLACE, "--config", "config/none.yaml"), "--config is config/none.yaml"),
        (("up", *PLACE, "--steps", "3"), "unrecognized arguments: --steps 3"),
        ((*CREATE, "--slices", "0"), "argument --slices: '0' is no number from 1 on"),
        ((*CREATE[:-1], "tpu7x-64"), "--accelerator is tpu7x-64: from TPU7x on there are no TPU VMs"),
        (WATCH, "--runs is runs, on the machine's own disk, which a watch deletes"),
        ((*WATCH, "--", "--runs", "/mnt/x"), "--runs is /mnt/x, on the machine's own"),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(arguments, message, capfd):
    assert tpu_vm.main([*arguments, "--dry-run"] if "--" not in arguments else ["--dry-run", *arguments]) == 2
    said = capfd.readouterr()
    assert said.out == ""
    assert said.err.startswith(f"tpu_vm.sh: error: {message}")
    assert said.err.count("\n") == 1


def test_help_names_every_command_and_the_wrapper_runs_it():
    command = ["bash", str(ROOT / "infra" / "tpu_vm.sh"), "--help"]
    text = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout
    for command in ("up", "watch", "create", "install", "train", "status", "log", "ssh", "stop", "delete"):
        assert f"\n  {command} " in text
    assert "usage: infra/tpu_vm.sh COMMAND" in text
