#!/usr/bin/env python3
"""Trains on Kubernetes: builds the image, writes the JobSet of a run and gives it to kubectl. `--help` tells how. Needs
kubectl, logged in, JobSet in the cluster, docker for `image`, and PyYAML for `up`.
"""

from __future__ import annotations

import argparse
import re
import shutil
import sys
from collections.abc import Callable
from functools import partial
from math import prod
from typing import Any, NamedTuple

try:
    import yaml
except ImportError:
    yaml: Any = None  # commands other than `up` do without

import launch
from launch import MISTAKE, QUESTION, ROOT, STOPPED, Mistake, Runner, positive

PORT = 8476  # of process 0, where nothing else names it
HOSTS = "hosts"  # the JobSet's one kind of job
PREEMPTION = "DisruptionTarget"  # the condition of a pod that was preempted or evicted
GKE = "cloud.google.com"  # where its labels begin
OF_JOBSET = "--selector=jobset.sigs.k8s.io/jobset-name="
FIRST_POD = "jobset.sigs.k8s.io/job-index=0,batch.kubernetes.io/job-completion-index=0"
# A run's name has at most 40 of the 63 letters of a host name, with which the pods' own numbers and letters have to do.
NAME = re.compile(r"[a-z0-9]([a-z0-9-]{0,38}[a-z0-9])?")


class Size(NamedTuple):
    """Processors and memory of a machine, or of a pod."""

    cpus: int
    gibibytes: int

    def part(self, share: float) -> Size:
        return Size(max(1, int(self.cpus * share)), max(1, int(self.gibibytes * share)))


class Tpu(NamedTuple):
    """A kind of TPU as GKE names it, and its machines by their chips."""

    label: str
    topologies: str
    machines: dict[int, Size]


class Gpu(NamedTuple):
    """What GKE's machines have for each GPU of a kind; None where it is chosen with the machine."""

    share: Size | None
    most: int = 8  # GPUs of a machine
    is_arm: bool = False


FLAT = "1x1, 2x2, 2x4, 4x4, 4x8, 8x8, 8x16, 16x16"
SOLID = "2x2x1, 2x2x2, 2x2x4, 2x4x4, or AxBxC of multiples of 4 with A <= B <= C"
TPUS = {
    "v4": Tpu("tpu-v4-podslice", SOLID, {4: Size(240, 407)}),
    "v5e": Tpu("tpu-v5-lite-podslice", FLAT, {1: Size(24, 48), 4: Size(112, 192), 8: Size(224, 384)}),
    "v5p": Tpu("tpu-v5p-slice", SOLID, {4: Size(208, 448)}),
    "v6e": Tpu("tpu-v6e-slice", FLAT, {1: Size(44, 176), 4: Size(180, 720), 8: Size(180, 1440)}),
    "tpu7x": Tpu("tpu7x", SOLID, {4: Size(224, 960)}),
}
HOST_CHIPS = 4  # of a machine, if not chosen otherwise: slices of several hosts have only these
# GKE's labels of GPUs that CUDA 13 knows, from compute capability 7.5 on.
GPUS = {
    "nvidia-tesla-t4": Gpu(None, most=4),
    "nvidia-l4": Gpu(Size(12, 48)),
    "nvidia-tesla-a100": Gpu(Size(12, 85), most=16),
    "nvidia-a100-80gb": Gpu(Size(12, 170)),
    "nvidia-h100-80gb": Gpu(Size(26, 234)),
    "nvidia-h100-mega-80gb": Gpu(Size(26, 234)),
    "nvidia-h200-141gb": Gpu(Size(28, 369)),
    "nvidia-rtx-pro-6000": Gpu(Size(48, 180)),
    "nvidia-b200": Gpu(Size(28, 496)),
    "nvidia-gb200": Gpu(Size(35, 221), most=4, is_arm=True),
    "nvidia-gb300": Gpu(Size(36, 240), most=4, is_arm=True),
}
TPU, GPU = "google.com/tpu", "nvidia.com/gpu"
ARM = {"kubernetes.io/arch": "arm64"}
POD_SHARE = 0.8  # of a machine; Kubernetes and its own pods take the rest
SHARED_MEMORY_SHARE = 0.25  # of a pod's memory, at most: /dev/shm counts as memory of the pod


class Machines(NamedTuple):
    """The machines of a run: of each slice `pods`, and what a pod takes of its machine."""

    slices: int
    pods: int
    chip: str  # the resource
    chips: int
    size: Size | None  # of the machine, where it is known
    labels: dict[str, str]


def manifest_text(options: argparse.Namespace, overrides: list[str]) -> str:
    """Return the JobSet as YAML."""
    if yaml is None:
        raise Mistake("PyYAML is missing: `make setup` installs it in .venv")
    path = ROOT / options.config
    if not path.is_file():
        raise Mistake(f"{options.config}: there is no such file in {ROOT}")
    try:
        keys = Keys(yaml.safe_load(path.read_text(encoding="utf-8")), overrides)
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise Mistake(f"{options.config}: {' '.join(str(error).split())}") from None
    return yaml.safe_dump(manifest(options, keys), sort_keys=False, width=1000)


def manifest(options: argparse.Namespace, given: Keys) -> dict[str, Any]:
    """The JobSet as nested dictionaries."""
    name = name_of(given)
    machines = machines_of(options)
    check_replicas(given, machines.slices)
    check_storage(options, given, machines)
    # One pod less is a failure of the run: the JobSet starts all of them again, and waits for those that still save.
    found = yaml.safe_load(f"""
apiVersion: jobset.x-k8s.io/v1alpha2
kind: JobSet
metadata: {{name: "{name}"}}
spec:
  failurePolicy:
    maxRestarts: {options.restarts}
    restartStrategy: BlockingRecreate
    rules:
    - name: mistake
      action: FailJobSet
      onJobFailureReasons: [PodFailurePolicy]
      onJobFailureMessagePatterns: ["exit code {MISTAKE} "]
    - name: preempted
      action: RestartJobSetAndIgnoreMaxRestarts
      onJobFailureReasons: [PodFailurePolicy]
      onJobFailureMessagePatterns: [{PREEMPTION}, "exit code {STOPPED} "]
  replicatedJobs:
  - name: {HOSTS}
    replicas: {machines.slices}
    template:
      spec:
        backoffLimit: 0
        completionMode: Indexed
        completions: {machines.pods}
        parallelism: {machines.pods}
        podFailurePolicy:
          rules:
          - action: FailJob
            onPodConditions: [{{type: {PREEMPTION}, status: "True"}}]
          - action: FailJob
            onExitCodes: {{containerName: gregale, operator: In, values: [{MISTAKE}, {STOPPED}]}}
        template: {{}}
""")
    (job,) = found["spec"]["replicatedJobs"]
    job["template"]["spec"]["template"]["spec"] = pod(options, name, given.overrides, machines)
    if machines.chip == TPU:
        found["metadata"]["annotations"] = {"alpha.jobset.sigs.k8s.io/exclusive-topology": f"{GKE}/gke-nodepool"}
    if options.queue:
        found["metadata"]["labels"] = {"kueue.x-k8s.io/queue-name": options.queue}
    return found


def pod(options: argparse.Namespace, name: str, overrides: list[str], machines: Machines) -> dict[str, Any]:
    """The specification of a pod."""
    base = (options.store or options.mount).rstrip("/")
    kept = ["--runs", f"{base}/runs", "--data.cache", f"{base}/cache"] if options.store or options.claim else []
    # Without a shell: the training itself gets SIGTERM, and saves.
    command = ["gregale", "train", options.config, *joining(name, machines), *kept, *overrides]
    size = size_of_pod(options, machines)
    # libtpu opens devices of root and raises the limit of locked memory; Kubernetes gives rights to root alone.
    user, right = (0, "SYS_RESOURCE") if machines.chip == TPU else (1000, "")
    secrets = [{"secretRef": {"name": options.environment_secret}}] if options.environment_secret else []
    # Processors are requested only: those that are idle may be used. For NCCL, 64 MiB of /dev/shm are too little.
    limits = {"memory": f"{size.gibibytes}Gi", machines.chip: machines.chips}
    shared = f"{size.part(SHARED_MEMORY_SHARE).gibibytes}Gi"
    spot = {f"{GKE}/gke-spot": "true"} if options.spot else {}
    tainted = spot | {label: value for label, value in machines.labels.items() if label in ARM}
    found = yaml.safe_load(f"""
restartPolicy: Never
terminationGracePeriodSeconds: {options.grace_seconds}
securityContext: {{runAsNonRoot: {user > 0}, runAsUser: {user}, runAsGroup: 1000, fsGroup: 1000}}
containers:
- name: gregale
  securityContext: {{allowPrivilegeEscalation: false, capabilities: {{drop: [ALL], add: [{right}]}}}}
  volumeMounts: [{{name: shm, mountPath: /dev/shm}}]
volumes: [{{name: shm, emptyDir: {{medium: Memory, sizeLimit: {shared}}}}}]
""")
    (container,) = found["containers"]
    resources = {"requests": {"cpu": size.cpus, **limits}, "limits": limits}
    container.update(image=options.image, command=command, resources=resources, envFrom=secrets)
    found["serviceAccountName"] = options.service_account
    found["nodeSelector"] = machines.labels | spot
    found["tolerations"] = [{"key": label, "value": value, "effect": "NoSchedule"} for label, value in tainted.items()]
    if options.claim:
        found["volumes"].append({"name": "data", "persistentVolumeClaim": {"claimName": options.claim}})
        container["volumeMounts"].append({"name": "data", "mountPath": options.mount})
    return found


def size_of_pod(options: argparse.Namespace, machines: Machines) -> Size:
    """Returns what a pod requests: the options, or a share of the machine where its size is known."""
    if machines.size is None and None in (options.cpu, options.memory):
        raise Mistake(
            f"--cpu and --memory are missing: the size of a machine with {options.accelerator} is not known here. Give "
            "what a pod may take of it, for example --cpu 96 --memory 800Gi"
        )
    default = machines.size.part(POD_SHARE) if machines.size else Size(1, 1)
    return Size(options.cpu or default.cpus, options.memory or default.gibibytes)


def joining(name: str, machines: Machines) -> list[str]:
    """How processes find one another: on TPUs by what GKE tells each pod, on GPUs by the first pod's host name."""
    if machines.chip == TPU:
        return ["--distributed.coordinator", "auto"]
    if machines.pods == 1:
        return []
    first = f"{name}-{HOSTS}-0-0.{name}:{PORT}"
    # The variable is Kubernetes' own, of the pods of an indexed job.
    count = ["--distributed.processes", str(machines.pods), "--distributed.process", "$(JOB_COMPLETION_INDEX)"]
    return ["--distributed.coordinator", first, *count]


def machines_of(options: argparse.Namespace) -> Machines:
    """The machines that the options name; they exist on GKE, or have a label of the user's own."""
    tpu = next((each for kind, each in TPUS.items() if options.accelerator in (kind, each.label)), None)
    if tpu is None and options.gpu_label is None and options.accelerator not in GPUS:
        raise Mistake(
            f"--accelerator is {options.accelerator}, but GKE has {', '.join(TPUS)} (with --topology) and "
            f"{', '.join(GPUS)}. For other GPUs give --gpu-label too, the label of your nodes that has this value"
        )
    for each in ("nodes", "gpus", "gpu_label") if tpu else ("topology", "slices", "host_chips"):
        if vars(options)[each] is not None:
            raise Mistake(f"--{each.replace('_', '-')} is not for {options.accelerator}: leave it out")
    return tpu_machines(options, tpu) if tpu else gpu_machines(options)


def tpu_machines(options: argparse.Namespace, tpu: Tpu) -> Machines:
    chips = chips_of(options, tpu)
    of_host = options.host_chips or min(HOST_CHIPS, chips)
    known = [each for each in tpu.machines if each == chips or (each == HOST_CHIPS and chips % each == 0)]
    if of_host not in known:
        hosts = f"hosts of {options.accelerator} with --topology {options.topology}"
        raise Mistake(f"--host-chips is {of_host}, but {hosts} have {' or '.join(map(str, known))}")
    labels = {f"{GKE}/gke-tpu-accelerator": tpu.label, f"{GKE}/gke-tpu-topology": options.topology}
    return Machines(options.slices or 1, chips // of_host, TPU, of_host, tpu.machines[of_host], labels)


def chips_of(options: argparse.Namespace, tpu: Tpu) -> int:
    given = options.topology or ""
    sides = [int(side) for side in given.split("x") if re.fullmatch(r"[1-9]\d*", side)]
    is_cuboid = len(sides) == 3 and sides == sorted(sides) and not any(side % 4 for side in sides)
    if given not in tpu.topologies.split(", ") and not (tpu.topologies is SOLID and is_cuboid):
        known = f"{options.accelerator} has {tpu.topologies}"
        raise Mistake(f"--topology is {options.topology}: give the chips of a slice. {known}")
    return prod(sides)


def gpu_machines(options: argparse.Namespace) -> Machines:
    gpu = GPUS[options.accelerator] if options.gpu_label is None else Gpu(None)
    gpus = options.gpus or min(8, gpu.most)
    if options.gpu_label is None and gpus > gpu.most:
        raise Mistake(f"--gpus is {gpus}, but a box with {options.accelerator} has at most {gpu.most}")
    labels = {options.gpu_label or f"{GKE}/gke-accelerator": options.accelerator, **(ARM if gpu.is_arm else {})}
    return Machines(1, options.nodes or 1, GPU, gpus, gpu.share and gpu.share.part(gpus), labels)


class Keys(NamedTuple):
    """The configuration and the keys after `--`, of which the last one counts."""

    config: Any
    overrides: list[str]

    def get(self, key: str, default: str = "") -> str:
        found: Any = self.config
        for part in key.split("."):
            found = found.get(part) if isinstance(found, dict) else None
        return launch.overridden(key, self.overrides, default if found is None else str(found))


def name_of(given: Keys) -> str:
    found = given.get("name")
    if not NAME.fullmatch(found):
        raise Mistake(
            f"name is {found!r}: Kubernetes wants small letters, digits and hyphens, 40 at most. "
            "Another name comes after `--`: -- --name my-run"
        )
    return found


def check_replicas(given: Keys, slices: int) -> None:
    found = given.get("mesh.replica", "1")
    if not re.fullmatch(r"-?\d+", found) or int(found) % slices:
        raise Mistake(f"mesh.replica is {found}, no multiple of {slices} slices: a replica lies in one slice")


def check_storage(options: argparse.Namespace, given: Keys, machines: Machines) -> None:
    """Refuses runs that die with their pods: a restart makes all pods anew."""
    in_bucket = all("://" in given.get(key) for key in ("runs", "data.cache"))
    pods = machines.slices * machines.pods
    if options.claim or options.store or in_bucket or (options.keep_nothing and pods == 1):
        return
    why, rest = "runs would be on the pod's own disk, so that each restart begins empty", ", or --keep-nothing"
    if pods > 1:
        why, rest = f"{pods} pods have to see the same run directory and token stores", " with the mode ReadWriteMany"
    raise Mistake(f"--claim is missing: {why}. Give --store with a bucket's folder, or a PersistentVolumeClaim{rest}")


class Cluster:
    """The commands, and the cluster that kubectl reaches."""

    def __init__(self, options: argparse.Namespace, overrides: list[str], runner: Runner):
        self.options, self.overrides, self.runner, self.name = options, overrides, runner, options.name
        places = {"--namespace": options.namespace, "--context": options.context}
        self.kubectl = ["kubectl", *(f"{option}={value}" for option, value in places.items() if value)]

    def run(self, *words: str, text: str | None = None) -> int:
        return self.runner.foreground([*self.kubectl, *words], QUESTION, text)

    def ask(self, *words: str) -> launch.Result:
        return self.runner.all([[*self.kubectl, *words]], QUESTION)[0]

    def image(self) -> int:
        base = [f"--build-arg=BASE={self.options.base}"] if self.options.base else []
        target, file = f"--build-arg=TARGET={self.options.target}", ROOT / "infra" / "Dockerfile"
        build = ["docker", "build", f"--file={file}", target, *base, f"--tag={self.name}", str(ROOT)]
        code = self.runner.foreground(build)
        return self.runner.foreground(["docker", "push", self.name]) if self.options.push and not code else code

    def up(self) -> int:
        """Apply the manifest; a dry run shows it, and the command as a comment."""
        text = manifest_text(self.options, self.overrides)
        if self.options.dry_run:
            print("# ", end="", flush=True)
        code = self.run("apply", "--filename=-", text=text)
        if self.options.dry_run:
            print(text, end="")
        return code

    def status(self) -> int:
        code = self.run("get", "jobset", self.name, "--output=wide")
        return code or self.run("get", "pods", f"{OF_JOBSET}{self.name}", "--output=wide")

    def log(self) -> int:
        first = f"{OF_JOBSET}{self.name},{FIRST_POD}"
        return self.runner.foreground([*self.kubectl, "logs", "--follow", "--tail=-1", first, "--max-log-requests=1"])

    def suspend(self, is_wanted: bool) -> int:
        """Kueue starts a JobSet that somebody else suspended again: one with a queue is stopped by its workload."""
        told = "{.metadata.uid} {.metadata.labels.kueue\\.x-k8s\\.io/queue-name}"
        code, answer = self.ask("get", "jobset", self.name, f"--output=jsonpath={told}")
        uid, _, queue = answer.strip().partition(" ")
        what, field, value = f"jobset/{self.name}", "suspend", is_wanted
        if queue and not code:
            selector = f"--selector=kueue.x-k8s.io/job-uid={uid}"
            code, answer = self.ask("get", "workloads.kueue.x-k8s.io", selector, "--output=name")
            what, field, value = answer.strip(), "active", not is_wanted
            if not (what or code):
                raise Mistake(f"{self.name} has the queue {queue}, but Kueue has no workload for it")
        patch = f'--patch={{"spec":{{"{field}":{str(value).lower()}}}}}'
        return code or self.run("patch", what, "--type=merge", patch)

    def delete(self) -> int:
        return self.run("delete", "jobset", self.name, "--wait=false")


OF_RUN: dict[str, tuple[Callable[[Cluster], int], str]] = {
    "status": (Cluster.status, "show the JobSet and its pods"),
    "log": (Cluster.log, "follow the log of the first pod; Ctrl-C ends the following, not the training"),
    "stop": (partial(Cluster.suspend, is_wanted=True), "take the pods away with time to save; the JobSet stays"),
    "resume": (partial(Cluster.suspend, is_wanted=False), "go on after `stop`"),
    "delete": (Cluster.delete, "delete the JobSet and its pods; what is on the claim stays"),
}


def parser() -> launch.Parser:
    shared = launch.Parser(add_help=False)
    shared.add_argument("--namespace", help="default: kubectl's own")
    shared.add_argument("--context", help="default: kubectl's own")
    shared.add_argument("--dry-run", action="store_true", help="print every command and the manifest, run none")
    found = launch.Parser("infra/k8s/train.sh", epilog="COMMAND --help lists the options of a command")
    commands = found.add_subparsers(dest="command", metavar="COMMAND", required=True)
    of_image = commands.add_parser("image", parents=[shared], help="build an image from infra/Dockerfile")
    add = of_image.add_argument
    add("name", metavar="IMAGE", help="its name, with a tag")
    add("--for", dest="target", choices=["cpu", "cuda", "tpu"], required=True, help="what it trains on")
    add("--base", help="the image to build on; default: that of the file")
    add("--push", action="store_true", help="push it too")
    of_image.set_defaults(run=Cluster.image)
    of_up = commands.add_parser("up", parents=[shared], help="write the JobSet of a run and apply it")
    of_up.set_defaults(run=Cluster.up, name=None)
    add = of_up.add_argument
    add("config", help="the YAML file, below the repository: the image has it at the same place")
    add("--image", required=True, help="made from infra/Dockerfile, with a tag or a digest")
    add("--accelerator", required=True, help=f"{', '.join(TPUS)}, or GKE's label of a GPU, such as nvidia-h100-80gb")
    add("--topology", help="TPU: chips of a slice, for example 4x4")
    add("--slices", type=positive, help="TPU: slices, default 1; mesh.replica has to be a multiple of it")
    add("--host-chips", type=positive, help="TPU: chips of a host, default 4; 8 for a v5e or v6e host with all of 2x4")
    add("--nodes", type=positive, help="GPU: boxes, default 1")
    add("--gpus", type=positive, help="GPU: of a box, default 8, or all that such a box has")
    add("--gpu-label", help="GPU: your nodes' label, where they are not GKE's; --accelerator is then its value")
    add("--cpu", type=positive, help="processors that a pod requests; default: four fifths of a known machine's")
    add("--memory", type=gibibytes, help="memory that a pod requests, and its limit, such as 64Gi; default: that share")
    add("--queue", help="Kueue: the LocalQueue that admits the JobSet")
    add("--claim", help="a PersistentVolumeClaim that all pods can write; it is mounted at --mount")
    add("--mount", default="/data", help="where the claim is mounted; runs and cache are below")
    add("--store", help="gs://BUCKET/FOLDER or s3://...: runs and cache are there, and no claim is needed")
    add("--keep-nothing", action="store_true", help="one pod: without a claim and a store; each restart begins empty")
    add("--environment-secret", help="a Secret of variables for the training (`kubectl create secret generic ...`)")
    add("--service-account", default="default", help="of the pods; default: the namespace's own")
    add("--restarts", type=positive, default=20, help="failures after which it is given up")
    add("--grace-seconds", type=positive, default=600, help="for the last checkpoint, from SIGTERM to SIGKILL")
    add("--spot", action="store_true", help="GKE: capacity that may be reclaimed, with 15 s for the last checkpoint")
    for name, (call, text) in OF_RUN.items():
        of_run = commands.add_parser(name, parents=[shared], help=text)
        of_run.set_defaults(run=call)
        of_run.add_argument("name", type=run_name, help="of the run")
    return found


def run_name(text: str) -> str:
    if not NAME.fullmatch(text):
        raise argparse.ArgumentTypeError(f"'{text}' is no name of a JobSet")
    return text


def gibibytes(text: str) -> int:
    if not re.fullmatch(r"[1-9]\d*Gi", text):
        raise argparse.ArgumentTypeError(f"{text} is no number of gibibytes: give for example 64Gi")
    return int(text.removesuffix("Gi"))


def main(arguments: list[str]) -> int:
    """Run a command line; return the exit code."""
    own, overrides = launch.split(arguments)
    runner = launch.runner_for("train.sh", arguments)

    def command() -> int:
        options = parser().parse_args(own)
        program = "docker" if options.command == "image" else "kubectl"
        if not runner.dry_run and not shutil.which(program):
            raise Mistake(f"{program} is not installed; --dry-run works without it")
        return options.run(Cluster(options, overrides, runner))

    return launch.guarded(runner, command)


if __name__ == "__main__":
    launch.on_signals(launch.interrupt)
    sys.exit(main(sys.argv[1:]))
