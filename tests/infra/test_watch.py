"""`infra/tpu_vm.sh watch` and its other commands against a gcloud that fails, preempts and hangs."""

import shutil
import signal
import subprocess

import pytest

from tests.infra.cluster import until
from tests.infra.stand_ins import HANG, ROOT, StandIns

SCRIPT = ROOT / "infra" / "tpu_vm.sh"
CONFIG = "config/llama_8b_two_slices.yaml"
PLACE = ("--name", "llama", "--zone", "us-west4-a")
WATCH = ("watch", *PLACE, "--accelerator", "v5litepod-16", "--spot", "--config", CONFIG)

# The cloud: `state` is that of the slices. Each question to the hosts takes the next line of `hosts`; PREEMPT, HANG and
# FAIL happen instead of an answer. `listings` says how often in a row the list fails first.
GCLOUD = f"""
case " $* " in
  *" list "*)
    if [[ -s listings ]]; then sed -i 1d listings; echo "the way is cut" >&2; exit 1; fi
    printf 'other\\tACTIVE\\n'
    [[ ! -s state ]] || printf 'llama\\t%s\\n' "$(<state)" ;;
  *" create "*) [[ -f refused ]] && exit 1; echo ACTIVE >state ;;
  *" delete "*) rm -f state ;;
  *"host.sh state"*)
    line=$(head -n 1 hosts); sed -i 1d hosts
    case $line in
      PREEMPT) echo SUSPENDED >state; exit 255 ;;
      HANG) {HANG} ;;
      FAIL | "") exit 255 ;;
      *) IFS='|' read -ra each <<<"$line"; printf 'gregale-host t1v-%s\\n' "${{each[@]}}" ;;
    esac ;;
esac
"""


@pytest.fixture
def cloud(stand_ins) -> StandIns:
    stand_ins.play("gcloud", GCLOUD)
    return stand_ins


def verbs(cloud: StandIns) -> list[str]:
    """What gcloud was asked to change, in order."""
    found = []
    for words in cloud.calls("gcloud"):
        command = words[words.index("--command") + 1] if "--command" in words else ""
        name = words[4] if words[4] != "ssh" else "install" if "make setup" in command else "train"
        if words[4] != "list" and "host.sh state" not in command:
            found.append(name)
    return found


ONCE = ["scp", "install", "train"]


def test_what_is_preempted_is_made_again_until_the_run_is_complete(cloud):
    cloud.write(
        "hosts",
        "a bare, checkpoint none|b bare, checkpoint none\n"
        "a idle, checkpoint none|b idle, checkpoint none\n"
        "a running, checkpoint 20|b running, checkpoint none\n"
        "PREEMPT\n"
        "a bare, checkpoint none|b bare, checkpoint none\n"
        "a idle, checkpoint none|b idle, checkpoint none\n"
        "a running, checkpoint 40|b ended 75, checkpoint none\n"
        "a ended 75, checkpoint 40|b ended 75, checkpoint none\n"
        "a ended 0, checkpoint 60|b ended 0, checkpoint none\n",
    )
    result = cloud.run(SCRIPT, *WATCH, "--then-delete", "--attempts", "1", code=0)
    assert "llama is complete, with the checkpoint of step 60" in result.stderr
    assert "starting the training on llama\n" in result.stderr, "after an installation no training had ended"
    assert "the training on llama ended (75); starting it\n" in result.stderr
    assert "attempt" not in result.stderr, "an end after progress is no failed one"
    assert verbs(cloud) == ["create", *ONCE, "delete", "create", *ONCE, "train", "delete"]
    create = cloud.calls("gcloud")[1]
    assert {"--spot", "--accelerator-type=v5litepod-16", "--node-id=llama"} <= set(create)


def test_what_is_there_is_left_alone_while_gcloud_fails(cloud):
    cloud.write("state", "ACTIVE")
    cloud.write("listings", "\n" * 3)
    cloud.write("hosts", "FAIL\nFAIL\na running, checkpoint 1\na ended 0, checkpoint 2\n")
    result = cloud.run(SCRIPT, *WATCH, code=0)
    assert verbs(cloud) == []
    assert "its slices are still there, and cost" in result.stderr


def test_hosts_that_hang_are_given_back(cloud):
    cloud.write("state", "ACTIVE")
    cloud.write("hosts", "HANG\n" * 5 + "a ended 0, checkpoint 2\n")
    result = cloud.run(SCRIPT, *WATCH, code=0)
    assert "no answer within 120 seconds: gcloud compute tpus queued-resources ssh" in result.stderr
    assert verbs(cloud) == ["delete", "create"]


def test_without_a_new_checkpoint_it_waits_longer_and_gives_up(cloud):
    cloud.write("state", "ACTIVE")
    cloud.write("hosts", "a lost, checkpoint 20\n" * 2 + "a ended 134, checkpoint 40\n" * 9)
    result = cloud.run(SCRIPT, *WATCH, "--attempts", "4", code=1)
    assert "gave up after 4 attempts in a row without a new checkpoint" in result.stderr
    assert verbs(cloud) == ["train"] * 6
    assert cloud.read("slept").split() == ["30", "30", "60", "120"]


def test_what_the_cloud_refuses_again_and_again_is_given_up(cloud):
    cloud.write("refused", "")
    cloud.run(SCRIPT, *WATCH, "--attempts", "3", code=1)
    cloud.play("gcloud", GCLOUD.replace("rm -f state", "exit 1"))
    cloud.write("state", "SUSPENDED")
    cloud.run(SCRIPT, *WATCH, "--attempts", "3", code=1)
    assert verbs(cloud) == ["create"] * 3 + ["delete"] * 4


@pytest.mark.parametrize(
    ("hosts", "code", "text"),
    [
        ("a ended 2, checkpoint 8|b ended 75, checkpoint none", 2, "a mistake that starting it again does not mend"),
        ("a stopped, checkpoint 8|b stopped, checkpoint none", 143, "stopped on request after checkpoint 8"),
    ],
)
def test_what_a_person_has_to_look_at_ends_it(cloud, hosts, code, text):
    cloud.write("state", "ACTIVE")
    cloud.write("hosts", f"a running, checkpoint 8|b stopped, checkpoint none\n{hosts}\n")
    result = cloud.run(SCRIPT, *WATCH)
    assert result.returncode == code
    assert text in result.stderr
    assert verbs(cloud) == []


def test_it_ends_at_once_when_told_to_while_a_command_hangs(cloud):
    cloud.play("gcloud", f"echo $$ >hanging; exec {shutil.which('sleep')} 60")
    process = subprocess.Popen(["bash", str(SCRIPT), *WATCH], env=cloud.environment)
    until(lambda: cloud.read("hanging"))
    second = cloud.run(SCRIPT, *WATCH, code=2)
    assert "another watch of llama runs on this machine" in second.stderr
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=20) == 143


@pytest.mark.parametrize(
    "words",
    [
        ("create", "--accelerator", "v5litepod-16", "--reservation-project", "ours"),
        ("install", "--environment", "keys.env", "--setup", "sudo mount -t nfs server:/share '/mnt/a b'"),
        ("train", "--config", CONFIG, "--", "--data.sources.web.files", "['a b.jsonl', \"it's\"]"),
        ("status",),
        ("ssh", "--node", "1", "--worker", "all", "--", "grep", "-c", "it's there", "gregale/train.log"),
        ("ssh", "--ssh-flag", "--tunnel-through-iap"),
        ("log",),
        ("stop",),
        ("delete",),
    ],
    ids=lambda words: words[0],
)
def test_a_dry_run_prints_what_is_run(cloud, words):
    """Word by word, as a shell takes the printed line apart; a secret is in no word."""
    cloud.write("state", "ACTIVE")
    cloud.write("hosts", "a running, checkpoint 1\n")
    keys = cloud.home / "keys.env"
    keys.write_text("WANDB_API_KEY=secret\n")
    command, *rest = (str(keys) if word == "keys.env" else word for word in words)
    cloud.check_dry_run(SCRIPT, command, *PLACE, *rest, programs=("gcloud",))
    assert "secret" not in cloud.read("calls")
