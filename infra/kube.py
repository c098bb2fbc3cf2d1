#!/usr/bin/env python3
"""Trains on Kubernetes: builds the image, writes the JobSet of a run (`jobset.py`) and gives it to kubectl. `--help`
tells how. Needs kubectl, logged in, JobSet in the cluster, docker for `image`, and PyYAML for `up`.
"""

from __future__ import annotations

import argparse
import shutil
import sys

import jobset
import launch
from launch import Mistake, Runner

QUESTION = 60  # limit of a command of kubectl, in seconds
COMMANDS = {
    "status": "show the JobSet and its pods",
    "log": "follow the log of the first pod; Ctrl-C ends the following, not the training",
    "stop": "take the pods away with time to save a checkpoint; the JobSet stays",
    "resume": "go on after `stop`",
    "delete": "delete the JobSet and its pods; what is on the claim stays",
}
OF_JOBSET = "--selector=jobset.sigs.k8s.io/jobset-name="
FIRST_POD = "jobset.sigs.k8s.io/job-index=0,batch.kubernetes.io/job-completion-index=0"


def parser() -> launch.Parser:
    shared = launch.Parser(add_help=False)
    shared.add_argument("--namespace", help="default: kubectl's own")
    shared.add_argument("--context", help="default: kubectl's own")
    shared.add_argument("--dry-run", action="store_true", help="print every command and the manifest, run none")
    found = launch.Parser("infra/k8s/train.sh", epilog="COMMAND --help lists the options of a command")
    commands = found.add_subparsers(dest="command", metavar="COMMAND", required=True)
    add = commands.add_parser("image", parents=[shared], help="build an image from infra/Dockerfile").add_argument
    add("name", metavar="IMAGE", help="its name, with a tag")
    add("--for", dest="target", choices=["cpu", "cuda", "tpu"], required=True, help="what it trains on")
    add("--base", help="the image to build on; default: that of the file")
    add("--push", action="store_true", help="push it too")
    commands.add_parser(
        "up", parents=[jobset.parser(), shared], help="write the JobSet of a run and apply it"
    ).set_defaults(name=None)
    for name, text in COMMANDS.items():
        commands.add_parser(name, parents=[shared], help=text).add_argument("name", type=run_name, help="of the run")
    return found


def run_name(text: str) -> str:
    if not jobset.NAME.fullmatch(text):
        raise argparse.ArgumentTypeError(f"'{text}' is no name of a JobSet")
    return text


def image(options: argparse.Namespace, runner: Runner) -> int:
    base = [f"--build-arg=BASE={options.base}"] if options.base else []
    target, file = f"--build-arg=TARGET={options.target}", launch.ROOT / "infra" / "Dockerfile"
    build = ["docker", "build", f"--file={file}", target, *base, f"--tag={options.name}", str(launch.ROOT)]
    push = [["docker", "push", options.name]] if options.push else []
    return next(filter(None, (runner.foreground(words) for words in [build, *push])), 0)


class Cluster:
    """The run of a command and its cluster, reached by kubectl."""

    def __init__(self, options: argparse.Namespace, runner: Runner):
        self.runner, self.name = runner, options.name
        places = {"--namespace": options.namespace, "--context": options.context}
        self.kubectl = ["kubectl", *(f"{option}={value}" for option, value in places.items() if value)]

    def run(self, *words: str, limit: int | None = QUESTION, text: str | None = None) -> int:
        return self.runner.foreground([*self.kubectl, *words], limit, text)

    def ask(self, *words: str) -> launch.Result:
        return self.runner.all([[*self.kubectl, *words]], QUESTION)[0]

    def status(self) -> int:
        code = self.run("get", "jobset", self.name, "--output=wide")
        return code or self.run("get", "pods", f"{OF_JOBSET}{self.name}", "--output=wide")

    def log(self) -> int:
        first = f"{OF_JOBSET}{self.name},{FIRST_POD}"
        return self.run("logs", "--follow", "--tail=-1", first, "--max-log-requests=1", limit=None)

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


def up(options: argparse.Namespace, overrides: list[str], cluster: Cluster) -> int:
    """Apply the manifest; a dry run shows it, and the command as a comment."""
    text = jobset.manifest_text(options, overrides)
    if options.dry_run:
        print("# ", end="", flush=True)
    code = cluster.run("apply", "--filename=-", text=text)
    if options.dry_run:
        print(text, end="")
    return code


def main(arguments: list[str]) -> int:
    """Run a command line; return the exit code."""
    own, overrides = launch.split(arguments)
    runner = launch.runner_for("train.sh", arguments)

    def command() -> int:
        options = parser().parse_args(own)
        program = "docker" if options.command == "image" else "kubectl"
        if not runner.dry_run and not shutil.which(program):
            raise Mistake(f"{program} is not installed; --dry-run works without it")
        cluster = Cluster(options, runner)
        commands = {
            "image": lambda: image(options, runner),
            "up": lambda: up(options, overrides, cluster),
            "status": cluster.status,
            "log": cluster.log,
            "stop": lambda: cluster.suspend(True),
            "resume": lambda: cluster.suspend(False),
            "delete": cluster.delete,
        }
        return commands[options.command]()

    return launch.guarded(runner, command)


if __name__ == "__main__":
    launch.on_signals(launch.interrupt)
    sys.exit(main(sys.argv[1:]))
