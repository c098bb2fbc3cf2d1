"""`infra/k8s`: the manifest of a run, the commands of `train.sh`, and `infra/Dockerfile`."""

import re
import shlex
import sys

import pytest
import yaml

from tests.infra.stand_ins import HANG, ROOT, StandIns, load_module

SCRIPT = ROOT / "infra" / "k8s" / "train.sh"
TPU = ("config/llama_8b_two_slices.yaml", "--image", "gregale:1", "--accelerator", "v5e", "--claim", "shared")
GPU = ("config/llama_124m_gpu.yaml", "--image", "gregale:1", "--accelerator", "nvidia-h100-80gb", "--claim", "shared")


@pytest.fixture(scope="module")
def jobset():
    return load_module(ROOT / "infra" / "k8s" / "jobset.py")


@pytest.fixture
def manifest(jobset, capsys):
    def made(*words: str) -> dict:
        assert jobset.main(list(words)) == 0
        found = yaml.safe_load(capsys.readouterr().out)
        check(found)
        return found

    return made


def check(found: dict) -> None:
    """Read it with the API's own models, which leave out fields that they do not know."""
    from kubeflow_trainer_api.models.jobset_v1alpha2_job_set import JobsetV1alpha2JobSet  # here, for it takes long

    read = JobsetV1alpha2JobSet.from_dict(found)
    assert read is not None
    assert read.to_dict() == found


def job_of(found: dict) -> dict:
    (job,) = found["spec"]["replicatedJobs"]
    return job


def pod_of(found: dict) -> dict:
    return job_of(found)["template"]["spec"]["template"]["spec"]


def container_of(found: dict) -> dict:
    return pod_of(found)["containers"][0]


@pytest.mark.parametrize(
    ("accelerator", "topology", "pods", "chips"), [("v5e", "4x4", 4, 4), ("v5e", "2x4", 1, 8), ("v4", "2x2x4", 4, 4)]
)
def test_a_slice_is_a_job_with_a_pod_for_each_host(manifest, accelerator, topology, pods, chips):
    found = manifest(*TPU, "--accelerator", accelerator, "--topology", topology, "--slices", "2")
    job = job_of(found)
    inner = job["template"]["spec"]
    assert (job["replicas"], inner["parallelism"], inner["completions"]) == (2, pods, pods)
    assert container_of(found)["resources"]["limits"]["google.com/tpu"] == chips
    assert inner["template"]["spec"]["nodeSelector"]["cloud.google.com/gke-tpu-topology"] == topology
    assert "alpha.jobset.sigs.k8s.io/exclusive-topology" in found["metadata"]["annotations"]


def test_a_failure_starts_all_again_and_a_mistake_ends_it(manifest):
    found = manifest(*TPU, "--topology", "4x4", "--slices", "2", "--restarts", "7", "--grace-seconds", "900")
    policy = found["spec"]["failurePolicy"]
    assert policy["maxRestarts"] == 7
    assert policy["rules"][0]["action"] == "FailJobSet"
    inner = job_of(found)["template"]["spec"]
    assert inner["backoffLimit"] == 0
    assert inner["podFailurePolicy"]["rules"][0]["onExitCodes"]["values"] == [2]
    pod = inner["template"]["spec"]
    assert (pod["restartPolicy"], pod["terminationGracePeriodSeconds"]) == ("Never", 900)
    assert container_of(found)["command"][0] == "gregale", "no shell keeps SIGTERM from it"


def test_boxes_find_the_first_pod(manifest):
    found = manifest(
        *GPU, "--nodes", "2", "--spot", "--environment-secret", "keys", "--", "--name", "other", "--steps=9"
    )
    container = container_of(found)
    command = container["command"]
    assert found["metadata"]["name"] == "other"
    assert command[command.index("--distributed.coordinator") + 1] == "other-hosts-0-0.other:8476"
    assert command[command.index("--distributed.process") + 1] == "$(PROCESS)"
    assert command[-3:] == ["--name", "other", "--steps=9"]
    assert container["env"][0]["name"] == "PROCESS"
    assert container["envFrom"] == [{"secretRef": {"name": "keys"}}]
    assert container["resources"]["limits"]["nvidia.com/gpu"] == 8
    pod = pod_of(found)
    assert pod["securityContext"]["runAsNonRoot"]
    assert pod["tolerations"][0]["key"] in pod["nodeSelector"]


@pytest.mark.parametrize(
    ("words", "cpu", "memory", "shared"),
    [
        ((*TPU, "--topology", "8x8", "--slices", "2"), 89, 153, 38),  # 112 vCPUs, 192 GB
        ((*TPU, "--accelerator", "v6e", "--topology", "1x1"), 35, 140, 35),  # 44 vCPUs, 176 GB
        ((*GPU,), 166, 1497, 374),  # 208 vCPUs, 1872 GB
        ((*GPU, "--gpus", "1", "--memory", "64Gi"), 20, 64, 16),
        ((*GPU, "--accelerator", "H100-SXM", "--cpu", "9", "--memory", "10Gi"), 9, 10, 2),
    ],
)
def test_pods_request_what_their_machine_has(manifest, words, cpu, memory, shared):
    found = manifest(*words)
    resources = container_of(found)["resources"]
    assert (resources["requests"]["cpu"], resources["requests"]["memory"]) == (cpu, f"{memory}Gi")
    assert resources["limits"].items() <= resources["requests"].items()
    assert resources["limits"]["memory"] == f"{memory}Gi"
    assert pod_of(found)["volumes"][0]["emptyDir"] == {"medium": "Memory", "sizeLimit": f"{shared}Gi"}


def test_one_pod_needs_no_claim_and_no_others_and_may_have_kueue_s_label(manifest):
    assert manifest(*GPU, "--queue", "team")["metadata"]["labels"] == {"kueue.x-k8s.io/queue-name": "team"}
    found = manifest(*GPU[:-2], "--gpus", "1")
    assert "labels" not in found["metadata"]
    assert container_of(found)["command"] == ["gregale", "train", GPU[0]]
    pod_of(found)["nodeSelectors"] = {}
    with pytest.raises(AssertionError):
        check(found)  # it finds a field that the API does not know


def test_a_bucket_takes_the_place_of_a_claim(manifest):
    found = manifest(*TPU[:-2], "--topology", "4x4", "--store", "gs://bucket/gregale/")
    command = container_of(found)["command"]
    assert command[command.index("--runs") + 1] == "gs://bucket/gregale/runs"
    assert command[command.index("--data.cache") + 1] == "gs://bucket/gregale/cache"
    assert [each["name"] for each in container_of(found)["volumeMounts"]] == ["shm"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ((*TPU, "--topology", "4x4", "--slices", "3"), "mesh.replica is 2, no multiple of 3 slices"),
        ((*TPU, "--topology", "four"), "--topology is four"),
        ((*TPU, "--topology", "3x3"), "--topology 3x3 has 9 chips; hosts of v5e have 4"),
        ((*TPU[:-2], "--topology", "4x4"), "--claim is missing: 4 pods have to see"),
        ((*GPU, "--", "--name", "Llama_1"), "name is 'Llama_1'"),
        (("config/none.yaml", *GPU[1:]), "config/none.yaml: there is no such file"),
        ((*GPU, "--accelerator", "H100-SXM"), "--cpu and --memory are missing: the size of a machine with H100-SXM"),
    ],
)
def test_a_mistake_is_one_line(jobset, capsys, words, message):
    assert jobset.main(list(words)) == 2
    assert capsys.readouterr().err.startswith(f"jobset.py: error: {message}")


@pytest.fixture
def cluster(stand_ins) -> StandIns:
    stand_ins.play("kubectl", 'for word; do [[ $word != --filename=* ]] || cp "${word#*=}" applied; done')
    stand_ins.play("docker")
    return stand_ins


def test_up_applies_what_its_dry_run_shows(cluster):
    words = ("up", *GPU, "--nodes", "2", "--namespace", "team", "--", "--data.sources.text.files", "[\"it's\", 'b c']")
    python = {"PYTHON": sys.executable}
    printed = cluster.run(SCRIPT, words[0], "--dry-run", *words[1:], **python, code=0)
    assert not cluster.calls("kubectl", "timeout")
    command, *shown = printed.stdout.splitlines()
    cluster.run(SCRIPT, *words, **python, code=0)
    assert shlex.split(command)[3:-1] == cluster.calls("kubectl")[0][:-1]
    assert cluster.read("applied") == "".join(f"{line.removeprefix('# ')}\n" for line in shown)
    assert container_of(yaml.safe_load(cluster.read("applied")))["command"][-1] == "[\"it's\", 'b c']"


@pytest.mark.parametrize(
    "words",
    [
        ("image", "gregale:1", "--for", "tpu", "--push"),
        ("status", "llama", "--context", "ours"),
        ("log", "llama"),
        ("stop", "llama"),
        ("resume", "llama"),
        ("delete", "llama"),
    ],
    ids=lambda words: words[0],
)
def test_a_dry_run_prints_what_is_run(cluster, words):
    cluster.check_dry_run(SCRIPT, *words, programs=("kubectl", "docker"))


# A cluster with Kueue: the JobSet has a queue, and Kueue a workload for it.
QUEUED = """
case "$1 $2" in
  "get jobset") echo 4711 team ;;
  "get workloads.kueue.x-k8s.io") [[ -f none ]] || echo "workload.kueue.x-k8s.io/jobset-llama-1" ;;
esac
"""


@pytest.mark.parametrize(("command", "active"), [("stop", "false"), ("resume", "true")])
def test_a_jobset_with_a_queue_is_stopped_by_its_workload(cluster, command, active):
    """Kueue starts a suspended JobSet again that it has admitted."""
    cluster.play("kubectl", QUEUED)
    cluster.run(SCRIPT, command, "llama", code=0)
    _, asked, patch = cluster.calls("kubectl")
    assert "--selector=kueue.x-k8s.io/job-uid=4711" in asked
    change = f'--patch={{"spec":{{"active":{active}}}}}'
    assert patch[1:] == ["patch", "workload.kueue.x-k8s.io/jobset-llama-1", "--type=merge", change]
    cluster.write("none", "")
    refused = cluster.run(SCRIPT, command, "llama")
    assert (refused.returncode, refused.stderr.count("\n")) == (2, 1)


def test_a_cluster_that_hangs_or_refuses_is_told(cluster):
    cluster.play("kubectl", HANG)
    result = cluster.run(SCRIPT, "stop", "llama", code=124)
    assert "no answer within 60 seconds: kubectl get jobset llama" in result.stderr
    cluster.play("docker", "exit 5")
    cluster.run(SCRIPT, "image", "gregale:1", "--for", "cpu", "--push", code=5)
    assert len(cluster.calls("docker")) == 1, "what was not built is not pushed"


DOCKERFILE = (ROOT / "infra" / "Dockerfile").read_text()


def test_the_image_has_a_pinned_base_no_root_and_only_what_is_named():
    assert re.search(r"^ARG BASE=python:\d+\.\d+\.\d+-\S+$", DOCKERFILE, re.MULTILINE)
    assert DOCKERFILE.rindex("\nUSER 1000\n") > DOCKERFILE.rindex("\nRUN ")
    copied = [word for line in re.findall(r"^COPY (.*)$", DOCKERFILE, re.MULTILINE) for word in line.split()[:-1]]
    ignored = (ROOT / "infra" / "Dockerfile.dockerignore").read_text().splitlines()
    assert next(line for line in ignored if not line.startswith("#")) == "*"
    assert {line[1:] for line in ignored if line.startswith("!")} == set(copied)
    assert all((ROOT / each).exists() for each in copied)
    extras = {word for line in re.findall(r"extras=([\w,]+)", DOCKERFILE) for word in line.split(",")}
    assert extras == {"formats", "islands", "cuda", "tpu", "gcs", "s3"}
