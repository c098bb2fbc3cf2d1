"""Writes the JobSet of a run: `python infra/k8s/jobset.py CONFIG --image IMAGE --accelerator v5e --topology 4x4`.

The name is the run's. On TPUs each slice is a job of as many pods as it has hosts; on GPUs each pod is a box, with one
process. A pod that ends with exit code 2, a mistake, ends the JobSet; any other failure starts all pods again, from the
newest checkpoint. Nothing is asked and nothing is sent: `train.sh` beside this gives the manifest to kubectl.
"""

from __future__ import annotations

import argparse
import re
import sys
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parents[2]
PORT = 8476  # of process 0, where nothing else names it
HOSTS = "hosts"  # the JobSet's one kind of job
MISTAKE = 2  # the exit code that starting again does not mend
SPOT = "cloud.google.com/gke-spot"
QUEUE = "kueue.x-k8s.io/queue-name"
INDEX = "metadata.annotations['batch.kubernetes.io/job-completion-index']"
NAME = re.compile(r"[a-z0-9]([a-z0-9-]*[a-z0-9])?")
MOST_NAME_LETTERS = 40  # of a host name's 63, with which the pods' own numbers and letters have to do


@dataclass(frozen=True)
class Size:
    """Processors and memory of a machine, or of a pod."""

    cpus: int
    gibibytes: int

    def part(self, share: float) -> Size:
        return Size(max(1, int(self.cpus * share)), max(1, int(self.gibibytes * share)))


@dataclass(frozen=True)
class Tpu:
    """A kind of TPU as GKE names it, and its machines by their chips; a slice of several hosts has those of four."""

    label: str
    machines: dict[int, Size]
    chips_of_host: int = 4


TPUS = {
    "v4": Tpu("tpu-v4-podslice", {4: Size(240, 407)}),
    "v5e": Tpu("tpu-v5-lite-podslice", {1: Size(24, 48), 4: Size(112, 192), 8: Size(224, 384)}),
    "v5p": Tpu("tpu-v5p-slice", {4: Size(208, 448)}),
    "v6e": Tpu("tpu-v6e-slice", {1: Size(44, 176), 4: Size(180, 720), 8: Size(180, 1440)}),
}
# GKE's labels of GPUs, and what its machines have for each GPU.
GPUS = {
    "nvidia-tesla-a100": Size(12, 85),
    "nvidia-a100-80gb": Size(12, 170),
    "nvidia-h100-80gb": Size(26, 234),
    "nvidia-h100-mega-80gb": Size(26, 234),
    "nvidia-h200-141gb": Size(28, 369),
    "nvidia-b200": Size(28, 496),
}
POD_SHARE = 0.8  # of a machine; Kubernetes and its own pods take the rest
SHARED_MEMORY_SHARE = 0.25  # of a pod's memory, at most: /dev/shm counts as memory of the pod


class Mistake(Exception):
    """What the user has to mend, in one line."""


def main(arguments: list[str]) -> int:
    """Prints the manifest; returns the exit code."""
    own, overrides = split(arguments)
    options = parser().parse_args(own)
    try:
        text = yaml.safe_dump(manifest(options, overrides), sort_keys=False, width=1000)
    except Mistake as mistake:
        print(f"jobset.py: error: {mistake}", file=sys.stderr)
        return 2
    print(text, end="")
    return 0


def split(arguments: list[str]) -> tuple[list[str], list[str]]:
    """What is ours, and after `--` the keys for `gregale`."""
    if "--" not in arguments:
        return arguments, []
    place = arguments.index("--")
    return arguments[:place], arguments[place + 1 :]


def parser() -> argparse.ArgumentParser:
    found = argparse.ArgumentParser(prog="jobset.py", description="Writes the JobSet of a run.", allow_abbrev=False)
    add = found.add_argument
    add("config", help="the YAML file, below the repository: the image has it at the same place")
    add("--image", required=True, help="made from infra/Dockerfile, with a tag or a digest")
    add("--accelerator", required=True, help=f"{', '.join(TPUS)}, or the label of a GPU, such as nvidia-h100-80gb")
    add("--topology", help="TPU: chips of a slice, for example 4x4")
    add("--slices", type=positive, default=1, help="TPU: slices; mesh.replica has to be a multiple of it")
    add("--nodes", type=positive, default=1, help="GPU: boxes")
    add("--gpus", type=positive, default=8, help="GPU: of a box")
    add("--gpu-label", default="cloud.google.com/gke-accelerator", help="GPU: the nodes' label with their kind of GPU")
    add("--cpu", type=positive, help="processors that a pod requests; default: four fifths of a known machine's")
    add("--memory", type=gibibytes, help="memory that a pod requests, and its limit, such as 64Gi; default: that share")
    add("--queue", help="Kueue: the LocalQueue that admits the JobSet")
    add("--claim", help="a PersistentVolumeClaim that all pods can write; it is mounted at --mount")
    add("--mount", default="/data", help="where the claim is mounted; runs and cache are below")
    add("--store", help="gs://BUCKET/FOLDER or s3://...: runs and cache are there, and no claim is needed")
    add("--environment-secret", help="a Secret whose keys become the training's variables, such as those of trackers")
    add("--service-account", help="of the pods")
    add("--restarts", type=positive, default=20, help="failures after which it is given up")
    add("--grace-seconds", type=positive, default=600, help="for the last checkpoint, from SIGTERM to SIGKILL")
    add("--spot", action="store_true", help="GKE: take capacity that may be reclaimed")
    return found


def positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} is below 1")
    return value


def gibibytes(text: str) -> int:
    if not re.fullmatch(r"[1-9]\d*Gi", text):
        raise argparse.ArgumentTypeError(f"{text} is no number of gibibytes: give for example 64Gi")
    return int(text.removesuffix("Gi"))


def manifest(options: argparse.Namespace, overrides: list[str]) -> dict[str, Any]:
    """The JobSet as nested dictionaries."""
    path = ROOT / options.config
    if not path.is_file():
        raise Mistake(f"{options.config}: there is no such file in {ROOT}")
    config = yaml.safe_load(path.read_text(encoding="utf-8"))
    name = name_of(config, overrides)
    on_tpu = options.accelerator in TPUS
    slices, pods = (options.slices, hosts_of_slice(options)) if on_tpu else (1, options.nodes)
    check_replicas(config, overrides, slices)
    if options.claim is None and options.store is None and slices * pods > 1:
        raise Mistake(
            f"--claim is missing: {slices * pods} pods have to see the same run directory and token stores, so they "
            "need a PersistentVolumeClaim with the access mode ReadWriteMany; or give --store with a bucket's folder"
        )
    job = {
        "backoffLimit": 0,  # one pod less is a failure of the run: the JobSet starts all of them again
        "completionMode": "Indexed",
        "completions": pods,
        "parallelism": pods,
        "podFailurePolicy": {
            "rules": [
                {
                    "action": "FailJob",
                    "onExitCodes": {"containerName": "gregale", "operator": "In", "values": [MISTAKE]},
                }
            ]
        },
        "template": {"spec": pod(options, name, overrides, on_tpu)},
    }
    metadata: dict[str, Any] = {"name": name}
    if on_tpu:
        metadata["annotations"] = {"alpha.jobset.sigs.k8s.io/exclusive-topology": "cloud.google.com/gke-nodepool"}
    if options.queue:
        metadata["labels"] = {QUEUE: options.queue}
    return {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": metadata,
        "spec": {
            "failurePolicy": {
                "maxRestarts": options.restarts,
                "restartStrategy": "BlockingRecreate",  # those that still save are waited for
                "rules": [{"name": "mistake", "action": "FailJobSet", "onJobFailureReasons": ["PodFailurePolicy"]}],
            },
            "replicatedJobs": [{"name": HOSTS, "replicas": slices, "template": {"spec": job}}],
        },
    }


def pod(options: argparse.Namespace, name: str, overrides: list[str], on_tpu: bool) -> dict[str, Any]:
    """The specification of a pod."""
    base = (options.store or options.mount).rstrip("/")
    kept = ["--runs", f"{base}/runs", "--data.cache", f"{base}/cache"] if options.store or options.claim else []
    size = size_of_pod(options, on_tpu)
    container: dict[str, Any] = {
        "name": "gregale",
        "image": options.image,
        # Without a shell: the training itself gets SIGTERM, and saves.
        "command": ["gregale", "train", options.config, *joining(options, name, on_tpu), *kept, *overrides],
        "resources": resources(options, on_tpu, size),
        "securityContext": {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}},
    }
    spec: dict[str, Any] = {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": options.grace_seconds,
        "securityContext": {"runAsNonRoot": True, "runAsUser": 1000, "runAsGroup": 1000, "fsGroup": 1000},
        "nodeSelector": selector(options, on_tpu),
        "containers": [container],
    }
    if not on_tpu:
        container["env"] = [{"name": "PROCESS", "valueFrom": {"fieldRef": {"fieldPath": INDEX}}}]
    if options.environment_secret:
        container["envFrom"] = [{"secretRef": {"name": options.environment_secret}}]
    shared = f"{size.part(SHARED_MEMORY_SHARE).gibibytes}Gi"
    volumes: list[dict[str, Any]] = [{"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": shared}}]
    mounts = [{"name": "shm", "mountPath": "/dev/shm"}]  # NCCL's, which the default of 64 MiB is too little for
    if options.claim:
        volumes.append({"name": "data", "persistentVolumeClaim": {"claimName": options.claim}})
        mounts.append({"name": "data", "mountPath": options.mount})
    container["volumeMounts"] = mounts
    spec["volumes"] = volumes
    if options.service_account:
        spec["serviceAccountName"] = options.service_account
    if options.spot:
        spec["tolerations"] = [{"key": SPOT, "operator": "Equal", "value": "true", "effect": "NoSchedule"}]
    return spec


def size_of_pod(options: argparse.Namespace, on_tpu: bool) -> Size:
    """Returns what a pod requests: the options, or a share of the machine where its size is known."""
    if on_tpu:
        machine = TPUS[options.accelerator].machines.get(chips_of_host(options))
    else:
        each = GPUS.get(options.accelerator)
        machine = each and each.part(options.gpus)
    if machine is None and None in (options.cpu, options.memory):
        raise Mistake(
            f"--cpu and --memory are missing: the size of a machine with {options.accelerator} is not known here. Give "
            "what a pod may take of it, for example --cpu 96 --memory 800Gi"
        )
    default = machine.part(POD_SHARE) if machine else Size(1, 1)
    return Size(options.cpu or default.cpus, options.memory or default.gibibytes)


def resources(options: argparse.Namespace, on_tpu: bool, size: Size) -> dict[str, Any]:
    """Processors are requested only: those that are idle may be used. Memory and chips are limited too."""
    chip, count = ("google.com/tpu", chips_of_host(options)) if on_tpu else ("nvidia.com/gpu", options.gpus)
    memory = f"{size.gibibytes}Gi"
    return {"requests": {"cpu": size.cpus, "memory": memory, chip: count}, "limits": {"memory": memory, chip: count}}


def joining(options: argparse.Namespace, name: str, on_tpu: bool) -> list[str]:
    """How processes find one another: on TPUs by what GKE tells each pod, on GPUs by the first pod's host name."""
    if on_tpu:
        return ["--distributed.coordinator", "auto"]
    if options.nodes == 1:
        return []
    first = f"{name}-{HOSTS}-0-0.{name}:{PORT}"
    count = ["--distributed.processes", str(options.nodes), "--distributed.process", "$(PROCESS)"]
    return ["--distributed.coordinator", first, *count]


def selector(options: argparse.Namespace, on_tpu: bool) -> dict[str, str]:
    found = {SPOT: "true"} if options.spot else {}
    if not on_tpu:
        return {options.gpu_label: options.accelerator, **found}
    tpu = TPUS[options.accelerator]
    return {
        "cloud.google.com/gke-tpu-accelerator": tpu.label,
        "cloud.google.com/gke-tpu-topology": options.topology,
        **found,
    }


def chips(options: argparse.Namespace) -> int:
    if options.topology is None or not re.fullmatch(r"[1-9]\d*(x[1-9]\d*)+", options.topology):
        raise Mistake(f"--topology is {options.topology}: give the chips of a slice, for example 4x4 for v5e")
    return prod(map(int, options.topology.split("x")))


def chips_of_host(options: argparse.Namespace) -> int:
    return chips(options) // hosts_of_slice(options)


def hosts_of_slice(options: argparse.Namespace) -> int:
    """1 if a single host has them all."""
    tpu = TPUS[options.accelerator]
    found, most = chips(options), tpu.chips_of_host
    if found <= max(tpu.machines):
        return 1
    if found % most:
        raise Mistake(f"--topology {options.topology} has {found} chips; hosts of {options.accelerator} have {most}")
    return found // most


def name_of(config: dict[str, Any], overrides: list[str]) -> str:
    found = overridden(overrides, "name") or str(config.get("name", ""))
    if not NAME.fullmatch(found) or len(found) > MOST_NAME_LETTERS:
        raise Mistake(
            f"name is {found!r}: Kubernetes wants small letters, digits and hyphens, {MOST_NAME_LETTERS} at most. "
            "Another name comes after `--`: -- --name my-run"
        )
    return found


def check_replicas(config: dict[str, Any], overrides: list[str], slices: int) -> None:
    given = overridden(overrides, "mesh.replica") or (config.get("mesh") or {}).get("replica", 1)
    if int(given) % slices:
        raise Mistake(f"mesh.replica is {given}, no multiple of {slices} slices: a replica lies in one slice")


def overridden(overrides: list[str], key: str) -> str | None:
    """The value of a key that is given as `--key value` or `--key=value`; the last one counts."""
    found = None
    for place, word in enumerate(overrides):
        if word == f"--{key}" and place + 1 < len(overrides):
            found = overrides[place + 1]
        elif word.startswith(f"--{key}="):
            found = word.partition("=")[2]
    return found


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
