"""Kubernetes: the manifest of a run, the commands of `infra/k8s/train.sh`, and `infra/Dockerfile`."""

import re
import shlex
import shutil

import pytest
import yaml

from tests.infra.kube_api import Api, kubeconfig
from tests.infra.stand_ins import ROOT, StandIns, load_module, serving

load_module(ROOT / "infra" / "launch.py")

kube = load_module(ROOT / "infra" / "kube.py")
TPU = ("config/llama_8b_two_slices.yaml", "--image", "gregale:1", "--accelerator", "v5e", "--claim", "shared")
GPU = ("config/llama_124m_gpu.yaml", "--image", "gregale:1", "--accelerator", "nvidia-h100-80gb", "--claim", "shared")

OWN = ("--gpu-label", "nvidia.com/gpu.product", "--accelerator", "H100-SXM")


@pytest.fixture
def manifest(capsys):
    def made(*words: str) -> dict:
        assert kube.main(["up", "--dry-run", *words]) == 0
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


# Each TPU that GKE offers: its label, topologies, and the pods of a slice and their chips.
SLICES = [
    ("v4", "tpu-v4-podslice", "2x2x4", (), 4, 4),
    ("v5e", "tpu-v5-lite-podslice", "4x4", (), 4, 4),
    ("v5e", "tpu-v5-lite-podslice", "2x4", (), 2, 4),
    ("v5e", "tpu-v5-lite-podslice", "2x4", ("--host-chips", "8"), 1, 8),
    ("v5p", "tpu-v5p-slice", "4x4x8", (), 32, 4),
    ("v6e", "tpu-v6e-slice", "1x1", (), 1, 1),
    ("tpu-v6e-slice", "tpu-v6e-slice", "2x4", (), 2, 4),
    ("tpu7x", "tpu7x", "2x2x1", (), 1, 4),
    ("tpu7x", "tpu7x", "4x8x8", (), 64, 4),
]


@pytest.mark.parametrize(("accelerator", "label", "topology", "words", "pods", "chips"), SLICES)
def test_a_slice_is_a_job_with_a_pod_for_each_host(manifest, accelerator, label, topology, words, pods, chips):
    found = manifest(*TPU, "--accelerator", accelerator, "--topology", topology, "--slices", "2", *words)
    job = job_of(found)
    inner = job["template"]["spec"]
    assert (job["replicas"], inner["parallelism"], inner["completions"]) == (2, pods, pods)
    container = container_of(found)
    assert container["resources"]["limits"]["google.com/tpu"] == chips
    assert inner["template"]["spec"]["nodeSelector"] == {
        "cloud.google.com/gke-tpu-accelerator": label,
        "cloud.google.com/gke-tpu-topology": topology,
    }
    assert "alpha.jobset.sigs.k8s.io/exclusive-topology" in found["metadata"]["annotations"]
    # Rights that are added for a user other than root are not in force.
    assert pod_of(found)["securityContext"]["runAsUser"] == 0
    assert container["securityContext"]["capabilities"] == {"drop": ["ALL"], "add": ["SYS_RESOURCE"]}


# GKE's labels, and the most GPUs of a box.
BOXES = {
    "nvidia-tesla-t4": 4,
    "nvidia-l4": 8,
    "nvidia-tesla-a100": 16,
    "nvidia-a100-80gb": 8,
    "nvidia-h100-80gb": 8,
    "nvidia-h100-mega-80gb": 8,
    "nvidia-h200-141gb": 8,
    "nvidia-rtx-pro-6000": 8,
    "nvidia-b200": 8,
    "nvidia-gb200": 4,
    "nvidia-gb300": 4,
}


def test_each_gpu_of_gke_is_known(manifest, capsys):
    assert set(kube.GPUS) == set(BOXES)
    for label, most in BOXES.items():
        size = ("--cpu", "8", "--memory", "30Gi") if label == "nvidia-tesla-t4" else ()
        found = manifest(*GPU, "--accelerator", label, *size)
        selector = pod_of(found)["nodeSelector"]
        assert selector["cloud.google.com/gke-accelerator"] == label
        assert container_of(found)["resources"]["limits"]["nvidia.com/gpu"] == min(most, 8)
        assert container_of(found)["securityContext"]["capabilities"] == {"drop": ["ALL"], "add": []}
        is_arm = label.startswith("nvidia-gb")
        assert (selector.get("kubernetes.io/arch") == "arm64") == is_arm
        assert [each["value"] for each in pod_of(found).get("tolerations", [])] == ["arm64"] * is_arm
        assert kube.main(["up", "--dry-run", *GPU, "--accelerator", label, *size, "--gpus", str(most + 1)]) == 2
        assert f"has at most {most}" in capsys.readouterr().err


# Messages of a failed job, in the words of Kubernetes' controller.
EXIT = "Container gregale for pod team/llama-hosts-0-1 failed with exit code {} matching FailJob rule at index 1"
DISRUPTED = "Pod team/llama-hosts-0-1 has condition DisruptionTarget matching FailJob rule at index 0"


def action_after(found: dict, reason: str, message: str) -> str:
    """What JobSet does, by its rules: the first that matches counts."""
    for rule in found["spec"]["failurePolicy"]["rules"]:
        patterns = rule["onJobFailureMessagePatterns"]
        if reason in rule["onJobFailureReasons"] and any(re.search(each, message) for each in patterns):
            return rule["action"]
    return "RestartJobSet"


def test_a_failure_starts_all_again_a_mistake_ends_it_and_a_preemption_is_not_counted(manifest):
    found = manifest(*TPU, "--topology", "4x4", "--slices", "2", "--restarts", "7", "--grace-seconds", "900")
    assert found["spec"]["failurePolicy"]["maxRestarts"] == 7
    assert action_after(found, "BackoffLimitExceeded", "Job has reached the specified backoff limit") == "RestartJobSet"
    assert action_after(found, "PodFailurePolicy", EXIT.format(2)) == "FailJobSet"
    for message in (EXIT.format(143), DISRUPTED):
        assert action_after(found, "PodFailurePolicy", message) == "RestartJobSetAndIgnoreMaxRestarts"
    inner = job_of(found)["template"]["spec"]
    assert inner["backoffLimit"] == 0
    condition, codes = inner["podFailurePolicy"]["rules"]
    assert condition["onPodConditions"] == [{"type": "DisruptionTarget", "status": "True"}]
    assert codes["onExitCodes"]["values"] == [2, 143]
    pod = inner["template"]["spec"]
    assert (pod["restartPolicy"], pod["terminationGracePeriodSeconds"]) == ("Never", 900)
    assert container_of(found)["command"][0] == "gregale", "no shell keeps SIGTERM from it"


def test_boxes_find_the_first_pod(manifest):
    words = ("--nodes", "2", "--spot", "--environment-secret", "keys", "--", "--name", "other", "--steps=9")
    found = manifest(*GPU, *words)
    container = container_of(found)
    command = container["command"]
    assert found["metadata"]["name"] == "other"
    assert command[command.index("--distributed.coordinator") + 1] == "other-hosts-0-0.other:8476"
    assert command[command.index("--distributed.process") + 1] == "$(JOB_COMPLETION_INDEX)"
    assert command[-3:] == ["--name", "other", "--steps=9"]
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
        ((*GPU, *OWN, "--cpu", "9", "--memory", "10Gi"), 9, 10, 2),
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
    found = manifest(*GPU[:-2], "--gpus", "1", "--keep-nothing")
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
    keys = ("--runs=gs://bucket/runs", "--data.cache", "gs://bucket/cache")
    assert container_of(manifest(*TPU[:-2], "--topology", "4x4", "--", *keys))["command"][-3:] == list(keys)


MISTAKES = [
    ((*TPU, "--topology", "4x4", "--slices", "3"), "mesh.replica is 2, no multiple of 3 slices"),
    ((*TPU, "--topology", "4x4", "--", "--mesh.replica", "auto"), "mesh.replica is auto, no multiple of 1 slices"),
    ((*TPU, "--topology", "four"), "--topology is four: give the chips of a slice. v5e has 1x1, 2x2, 2x4, 4x4"),
    ((*TPU, "--topology", "3x3"), "--topology is 3x3: give the chips"),
    ((*TPU, "--accelerator", "tpu7x", "--topology", "4x4"), "--topology is 4x4: give the chips of a slice. tpu7x has"),
    ((*TPU, "--accelerator", "v5p", "--topology", "8x4x4"), "--topology is 8x4x4: give the chips"),
    (
        (*TPU, "--topology", "4x4", "--host-chips", "8"),
        "--host-chips is 8, but hosts of v5e with --topology 4x4 have 4",
    ),
    ((*TPU, "--topology", "4x4", "--nodes", "2"), "--nodes is not for v5e"),
    ((*GPU, "--topology", "4x4"), "--topology is not for nvidia-h100-80gb"),
    (
        (*GPU, "--accelerator", "v5litepod-16", "--topology", "4x4"),
        "--accelerator is v5litepod-16, but GKE has v4, v5e",
    ),
    ((*GPU, "--accelerator", "nvidia-tesla-v100"), "--accelerator is nvidia-tesla-v100, but GKE has"),
    ((*TPU[:-2], "--topology", "4x4"), "--claim is missing: 4 pods have to see"),
    ((*TPU[:-2], "--topology", "4x4", "--keep-nothing"), "--claim is missing: 4 pods have to see"),
    ((*GPU[:-2],), "--claim is missing: runs would be on the pod's own disk, so that each restart begins empty"),
    ((*GPU, "--", "--name", "Llama_1"), "name is 'Llama_1'"),
    (("config/none.yaml", *GPU[1:]), "config/none.yaml: there is no such file"),
    (("README.md", *GPU[1:]), "README.md: "),
    ((*GPU, "--nodes", "0"), "argument --nodes: '0' is no number from 1 on"),
    ((*GPU, *OWN), "--cpu and --memory are missing: the size of a machine with H100-SXM"),
]


@pytest.fixture
def cluster(stand_ins, monkeypatch) -> StandIns:
    stand_ins.play("kubectl", "[[ $* != *--filename=-* ]] || cat >applied")
    stand_ins.play("docker")
    for name, value in stand_ins.environment.items():
        monkeypatch.setenv(name, value)
    return stand_ins


def test_up_applies_what_its_dry_run_shows(cluster, capfd):
    words = ("up", *GPU, "--nodes", "2", "--namespace", "team", "--", "--data.sources.text.files", "[\"it's\", 'b c']")
    assert kube.main([words[0], "--dry-run", *words[1:]]) == 0
    assert not cluster.calls("kubectl")
    command, _, shown = capfd.readouterr().out.partition("\n")
    assert kube.main([*words]) == 0
    assert [shlex.split(command)[1:]] == cluster.calls("kubectl")
    assert cluster.read("applied") == shown
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
def test_a_dry_run_prints_what_is_run(cluster, capfd, words):
    assert kube.main([*words, "--dry-run"]) == 0
    assert not cluster.calls("kubectl", "docker")
    shown = [shlex.split(line) for line in capfd.readouterr().out.splitlines()]
    assert kube.main([*words]) == 0
    assert shown == cluster.calls("kubectl", "docker") != []


@pytest.mark.parametrize(
    ("words", "message"),
    [
        *((("up", *words), message) for words, message in MISTAKES),
        (("fly",), "argument COMMAND: invalid choice: 'fly'"),
        (("image", "gregale:1"), "the following arguments are required: --for"),
        (("stop", "Llama_1"), "argument name: 'Llama_1' is no name of a JobSet"),
        (("stop", "llama", "other"), "unrecognized arguments: other"),
        (("stop", "llama"), "kubectl is not installed; --dry-run works without it"),
    ],
)
def test_a_mistake_is_one_line(tmp_path, monkeypatch, capfd, words, message):
    monkeypatch.setenv("PATH", str(tmp_path))
    dry = ["--dry-run"] if "kubectl" not in message else []
    assert kube.main([words[0], *dry, *words[1:]]) == 2
    said = capfd.readouterr()
    assert said.err.startswith(f"train.sh: error: {message}")
    assert (said.out, said.err.count("\n")) == ("", 1)


@pytest.mark.skipif(shutil.which("kubectl") is None, reason="there is no kubectl")
def test_the_real_kubectl_takes_the_manifest_and_the_commands(stand_ins, monkeypatch, capfd):
    api = Api()
    with serving(api) as address:
        stand_ins.write("config", yaml.safe_dump(kubeconfig(address)))
        monkeypatch.setenv("KUBECONFIG", str(stand_ins.folder / "config"))

        def run(*words: str) -> None:
            assert kube.main([*words]) == 0

        run("up", *GPU, "--nodes", "2")
        found = api.jobsets["llama-124m"]
        check({**found, "metadata": {"name": found["metadata"]["name"]}})
        run("stop", "llama-124m")
        assert found["spec"]["suspend"] is True
        run("resume", "llama-124m")
        assert found["spec"]["suspend"] is False
        capfd.readouterr()
        run("status", "llama-124m")
        assert "llama-124m" in capfd.readouterr().out
        run("delete", "llama-124m")
        assert not api.jobsets
        assert [method for method, _ in api.sent] == ["POST", "PATCH", "PATCH", "DELETE"]


# A cluster with Kueue: the JobSet has a queue, and Kueue a workload for it.
QUEUED = """
case "$1 $2" in
  "get jobset") echo 4711 team ;;
  "get workloads.kueue.x-k8s.io") [[ -f none ]] || echo "workload.kueue.x-k8s.io/jobset-llama-1" ;;
esac
"""


@pytest.mark.parametrize(("command", "active"), [("stop", "false"), ("resume", "true")])
def test_a_jobset_with_a_queue_is_stopped_by_its_workload(cluster, capfd, command, active):
    """Kueue starts a suspended JobSet again that it has admitted."""
    cluster.play("kubectl", QUEUED)
    assert kube.main([command, "llama"]) == 0
    _, asked, patch = cluster.calls("kubectl")
    assert "--selector=kueue.x-k8s.io/job-uid=4711" in asked
    change = f'--patch={{"spec":{{"active":{active}}}}}'
    assert patch[1:] == ["patch", "workload.kueue.x-k8s.io/jobset-llama-1", "--type=merge", change]
    cluster.write("none", "")
    assert kube.main([command, "llama"]) == 2
    assert capfd.readouterr().err.count("\n") == 1


def test_a_cluster_that_hangs_or_refuses_is_told(cluster, monkeypatch, capfd):
    cluster.play("kubectl", "exec tail -f /dev/null")
    monkeypatch.setattr(kube, "QUESTION", 0.1)
    for command in ("stop", "delete"):  # one whose answer is read, and one that has the terminal
        assert kube.main([command, "llama"]) == 124
        assert "train.sh: no answer in time: kubectl " in capfd.readouterr().err
    cluster.play("docker", "exit 5")
    assert kube.main(["image", "gregale:1", "--for", "cpu", "--push"]) == 5
    assert len(cluster.calls("docker")) == 1, "what was not built is not pushed"


DOCKERFILE = (ROOT / "infra" / "Dockerfile").read_text()


def test_the_image_has_a_pinned_base_no_root_and_only_what_is_named():
    assert re.search(r"^ARG BASE=python:\d+\.\d+\.\d+-\S+$", DOCKERFILE, re.MULTILINE)
    assert DOCKERFILE.rindex("\nUSER 1000\n") > DOCKERFILE.rindex("\nRUN ")
    assert re.search(r"^ENV LD_LIBRARY_PATH=/usr/local/nvidia/lib64\b", DOCKERFILE, re.MULTILINE), "GKE's drivers"
    copied = [word for line in re.findall(r"^COPY (.*)$", DOCKERFILE, re.MULTILINE) for word in line.split()[:-1]]
    ignored = (ROOT / "infra" / "Dockerfile.dockerignore").read_text().splitlines()
    assert next(line for line in ignored if not line.startswith("#")) == "*"
    assert {line[1:] for line in ignored if line.startswith("!")} == set(copied)
    assert all((ROOT / each).exists() for each in copied)
    extras = {word for line in re.findall(r"extras=([\w,]+)", DOCKERFILE) for word in line.split(",")}
    assert extras == {"formats", "islands", "cuda", "tpu", "gcs", "s3"}
