"""What launchers share that reach their hosts by ssh: commands with time limits, the copy of the tree, the commands for
hosts, and the decisions about a training. `host.sh` beside this is the part on a host. Standard library only.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import signal
import subprocess
import sys
import tarfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory, TemporaryFile, gettempdir
from typing import IO, Any, NamedTuple, NoReturn, Protocol

ROOT = Path(__file__).resolve().parents[1]
FOLDER = "gregale"  # on the hosts, below the home directory
HOST_SCRIPT = f"bash {FOLDER}/infra/host.sh"
ARCHIVE = "gregale.tar.gz"
POLL_SECONDS = 30
MOST_PAUSE_SECONDS = 960
MOST_SILENCE = 5  # questions in a row without all answers
QUESTION, REQUEST, SETUP = 120, 600, 1800  # limits of commands, in seconds
MISTAKE, STOPPED = 2, 143  # exit codes
# The commands that all launchers have.
COMMANDS = {
    "install": "copy this working tree to every host and install it there",
    "train": "start the training on every host; it outlives the connection",
    "status": "tell the state of the training on each host, and of the slices",
    "log": "follow the log of the first host; Ctrl-C ends the following, not the training",
    "stop": "ask the training to save a checkpoint and stop; a watch then ends too",
}
HOST = re.compile(r"^gregale-host (\S+) (?:ended )?([a-z0-9]+), checkpoint (\w+)$", re.MULTILINE)
ANSWER = re.compile(r"\n?^gregale-answer (\S+)$\n?", re.MULTILINE)


class Mistake(Exception):
    """What the user has to mend, in one line."""


class Interrupted(BaseException):
    """A signal; its argument is the exit code."""


def interrupt(number: int, frame: object) -> None:
    on_signals(signal.SIG_IGN)  # what follows is the end, which a second Ctrl-C does not change
    raise Interrupted(128 + number)


def on_signals(handler: Callable | signal.Handlers) -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, handler)


def quoted(words: Sequence[str]) -> str:
    """Return the words as a shell reads them back; ~ is left for that shell to expand."""
    return " ".join(word if re.fullmatch(r"[\w./:=@%+,~-]+", word, re.ASCII) else shlex.quote(word) for word in words)


class Result(NamedTuple):
    """The exit code of a command, and its output."""

    code: int
    text: str = ""


class Runner:
    """Runs commands with a time limit, or prints them in a dry run."""

    def __init__(self, script: str, dry_run: bool):
        self.script, self.dry_run = script, dry_run

    def say(self, text: str) -> None:
        print(f"{self.script}: {text}", file=sys.stderr, flush=True)

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)

    def all(self, commands: Sequence[Sequence[str]], limit: int) -> list[Result]:
        """Run commands at once. One that takes more than `limit` seconds is ended, with what it has started (124)."""
        if self.dry_run:
            print("\n".join(map(quoted, commands)), flush=True)
            return [Result(0) for _ in commands]
        with ExitStack() as stack:
            running = [stack.enter_context(started(words)) for words in commands]
            end = time.monotonic() + limit
            return [self._result(each, end) for each in running]

    def _result(self, started: tuple[subprocess.Popen, IO, IO], end: float) -> Result:
        process, *files = started
        try:
            code = process.wait(max(end - time.monotonic(), 0.0))
        except subprocess.TimeoutExpired:
            code = 124
        for file in files:
            file.seek(0)
        output, errors = (file.read().decode(errors="replace") for file in files)
        if code:
            self._tell(code, process.args, output + errors)
        return Result(code, output)

    def _tell(self, code: int, words: Any, text: str = "") -> None:
        why = "no answer in time" if code == 124 else f"exit code {code}"
        tail = "".join(f"\n  {line}" for line in text.splitlines()[-8:])
        self.say(f"{why}: {quoted(words)[:200]}{tail}")

    def foreground(self, words: Sequence[str], limit: int | None = None, text: str | None = None) -> int:
        """Run a command that has the terminal, or this text as its input; return its exit code."""
        if self.dry_run:
            return self.all([words], 0)[0].code
        try:
            return subprocess.run(words, timeout=limit, input=text, text=True).returncode
        except subprocess.TimeoutExpired:
            self._tell(124, words)
            return 124


@contextmanager
def started(words: Sequence[str]) -> Iterator[tuple[subprocess.Popen, IO, IO]]:
    """A command with its output and errors, in a session of its own, which Ctrl-C does not reach; it ends with this."""
    with TemporaryFile() as output, TemporaryFile() as errors:
        process = subprocess.Popen(
            words, stdin=subprocess.DEVNULL, stdout=output, stderr=errors, start_new_session=True
        )
        try:
            yield process, output, errors
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGTERM)
                try:
                    process.wait(10)
                except subprocess.TimeoutExpired:
                    os.killpg(process.pid, signal.SIGKILL)
                    process.wait()


def guarded(runner: Runner, command: Callable[[], int]) -> int:
    """Run a command; return its exit code, also after a mistake, which is told, or a signal."""
    try:
        return command()
    except Mistake as mistake:
        runner.say(f"error: {mistake}")
        return MISTAKE
    except Interrupted as interrupted:
        return interrupted.args[0]


def back_off(attempt: int) -> int:
    """Return the seconds to wait before an attempt, from 1: 0, 30, 60, 120, ..."""
    return 0 if attempt < 2 else min(POLL_SECONDS << min(attempt - 2, 8), MOST_PAUSE_SECONDS)


@contextmanager
def archive(environment: str | None, dry_run: bool) -> Iterator[Path]:
    """The working tree as git knows it, with files that it does not ignore, in a folder that is removed in any case.

    The lines of the file `environment` become `train.env`. The archive may hold keys, so only its user can read it.
    """
    if dry_run:
        yield Path(gettempdir()) / ARCHIVE
        return
    listing = ["git", "-C", str(ROOT), "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
    names = subprocess.run(listing, stdout=subprocess.PIPE, check=True).stdout
    with TemporaryDirectory(prefix="gregale-") as folder:
        path = Path(folder) / ARCHIVE
        path.touch(0o600)
        with tarfile.open(path, "w:gz") as tar:
            for name in filter(None, os.fsdecode(names).split("\0")):
                if os.path.lexists(ROOT / name):
                    tar.add(ROOT / name, name, recursive=False)
            if environment:
                entry = tar.gettarinfo(environment, "train.env")
                entry.mode = 0o600
                with open(environment, "rb") as lines:
                    tar.addfile(entry, lines)
        yield path


def answered(command: str) -> str:
    """A command after whose success a host gives its name, so that answers can be counted."""
    return rf"({command}) && printf '\ngregale-answer %s\n' $(uname -n)"


def install_command(extras: str, setup: str | None, image: str | None) -> str:
    """Unpack the tree, then install packages or fetch an image; the host is `bare` until all of it is done."""
    installed = f"{FOLDER}/train.installed"
    steps = [f"mkdir -p {FOLDER} && rm -f {installed} && tar -xzf {ARCHIVE} -C {FOLDER} && rm -f {ARCHIVE}"]
    steps += [f"({setup})"] if setup else []
    # The setup may make an image's registry known, and may use what is installed.
    steps.insert(2 if image else 1, host_command("pull", image) if image else host_command("install", extras))
    return " && ".join([*steps, f"touch {installed}"])


def host_command(*words: str) -> str:
    return f"{HOST_SCRIPT} {quoted(words)}"


def state_command(runs: str | None = None) -> str:
    """Ask for the line that `HOST` reads. With `runs`, a host on whose own disk these are says `volatile`."""
    ask = host_command("state", *([runs] if runs else []))
    return f"if [ -f {FOLDER}/infra/host.sh ]; then {ask}; else echo gregale-host $(uname -n) bare, checkpoint none; fi"


class Parser(argparse.ArgumentParser):
    def __init__(self, *words: Any, **options: Any):
        super().__init__(*words, allow_abbrev=False, **options)

    def error(self, message: str) -> NoReturn:
        raise Mistake(message)


def parser(script: str, where: str, commands: dict[str, str]) -> Parser:
    """Return a parser with the options that launchers share."""
    listed = "commands:\n" + "\n".join(f"  {name:8} {text}" for name, text in commands.items())
    usage = f"infra/{script} COMMAND {where} [OPTIONS] [-- --dotted.key value ...]"
    form = argparse.RawDescriptionHelpFormatter
    found = Parser(script, usage, listed, "docs/clusters.md tells more", formatter_class=form)
    add = found.add_argument
    add("command", metavar="COMMAND", choices=commands, help="one of those above")
    add("--config", help="the YAML file, below the repository (up, watch, train)")
    add("--environment", help="file of lines NAME=value for the training, such as keys; on no command line")
    add("--setup", help="command for every host once it is installed, such as a mount of the shared file system")
    add("--attempts", type=positive, default=10, help="watch: give up after so many without a new checkpoint (10)")
    add("--grace", type=positive, default=600, help="stop: the training is killed after so many seconds (600)")
    add("--ssh-flag", action="append", default=[], help="a word for ssh and scp; may be repeated")
    add("--dry-run", action="store_true", help="print every command and run none")
    return found


def positive(text: str) -> int:
    if not re.fullmatch("[1-9][0-9]*", text):
        raise argparse.ArgumentTypeError(f"'{text}' is no number from 1 on")
    return int(text)


def split(arguments: list[str]) -> tuple[list[str], list[str]]:
    """Return what is for a launcher, and what follows `--`."""
    place = arguments.index("--") if "--" in arguments else len(arguments)
    return arguments[:place], arguments[place + 1 :]


def runner_for(script: str, arguments: list[str]) -> Runner:
    return Runner(script, "--dry-run" in split(arguments)[0])


def read(parser: Parser, arguments: list[str]) -> tuple[argparse.Namespace, list[str]]:
    """Return the options, checked, and what follows `--`."""
    own, overrides = split(arguments)
    for at in reversed(range(len(own) - 1)):
        if own[at] in ("--create-flag", "--ssh-flag"):  # whose value begins with -
            own[at : at + 2] = [f"{own[at]}={own[at + 1]}"]
    options = parser.parse_args(own)
    if options.environment and not Path(options.environment).is_file():
        raise Mistake(f"--environment is {options.environment}: there is no such file")
    if options.command in ("up", "watch", "train"):
        if not options.config:
            raise Mistake("--config is missing: the YAML file to train, for example config/llama_8b_two_slices.yaml")
        if not (ROOT / options.config).is_file():
            raise Mistake(f"--config is {options.config}: there is no such file in {ROOT}")
    return options, overrides


def overridden(key: str, overrides: Sequence[str], default: str) -> str:
    """Return the value that a key is given, as `--key value` or as `--key=value`; the last one counts."""
    parser = Parser(add_help=False)
    parser.add_argument(f"--{key}", dest="value", default=default)
    return parser.parse_known_args(overrides)[0].value


def runs_of(config: str, overrides: Sequence[str]) -> str:
    """Return the folder or URL of runs: that of the overrides, of the file, or the default."""
    text = (ROOT / config).read_text(encoding="utf-8")
    of_file = re.findall(r"^runs:[ \t]*['\"]?([^#\s'\"]+)", text, re.MULTILINE)
    return overridden("runs", overrides, ["runs", *of_file][-1])


class Host(NamedTuple):
    """What a host tells of its training: running, bare, idle, stopped, lost, volatile, or an exit code."""

    name: str
    state: str
    checkpoint: int

    def __str__(self) -> str:
        return f"{self.name} {self.state}, checkpoint {self.checkpoint}"


def hosts_in(text: str) -> tuple[Host, ...]:
    """Return the hosts that have answered, each once."""
    found = (Host(name, state, 0 if step == "none" else int(step)) for name, state, step in HOST.findall(text))
    return tuple({host.name: host for host in found}.values())


class Action(NamedTuple):
    """What to do next: wait, a step of the fleet, or end with a code; after a pause in seconds."""

    verb: str
    text: str
    pause: float = 0
    code: int = 0


def wait(text: str) -> Action:
    return Action("wait", text, POLL_SECONDS)


@dataclass
class Training:
    """Decides, from what all hosts tell, what a training needs; asks nothing and changes nothing itself."""

    name: str
    most_attempts: int
    checkpoint: int = 0
    is_fresh: bool = False  # what comes next belongs to the attempt that has begun
    _attempt: int = 0
    _checkpoint_before: int = 0

    def see(self, hosts: Sequence[Host]) -> None:
        self.checkpoint = max([self.checkpoint, *(host.checkpoint for host in hosts)])

    def decide(self, hosts: Sequence[Host]) -> Action:
        """Return what to do once all hosts have answered."""
        self.see(hosts)
        states = list(dict.fromkeys(host.state for host in hosts))
        if "volatile" in states:
            text = "error: --runs is on the machine's own disk, which is deleted with it: give a bucket's folder or a"
            return Action("end", f"{text} mounted file system (--setup), or --keep-nothing", code=MISTAKE)
        if "running" in states:
            return wait(f"{self.name} trains, checkpoint {self.checkpoint}")
        if "bare" in states:
            return self.attempt("install", f"installing on {self.name}, {len(hosts)} hosts")
        if "stopped" in states:
            text = f"{self.name} was stopped on request after checkpoint {self.checkpoint}"
            return Action("end", f"{text}; `train` or `watch` after `train` goes on", code=STOPPED)
        if str(MISTAKE) in states:
            text = "error: the run ended with a mistake that starting it again does not mend; `log` shows it"
            return Action("end", text, code=MISTAKE)
        if states == ["0"]:
            return Action("end", f"{self.name} is complete, with the checkpoint of step {self.checkpoint}")
        ended = "" if states == ["idle"] else f", which ended ({' '.join(states)})"
        return self.attempt("train", f"starting the training on {self.name}{ended}")

    def attempt(self, verb: str, text: str) -> Action:
        """Return an action that begins an attempt or belongs to one, and the pause before it; in the end give up."""
        pause = 0
        if not self.is_fresh:
            if self.checkpoint > self._checkpoint_before:
                self._attempt, self._checkpoint_before = 0, self.checkpoint
            self._attempt += 1
            pause = back_off(self._attempt)
            if self._attempt > self.most_attempts:
                text = f"error: gave up after {self.most_attempts} attempts in a row without a new checkpoint"
                return Action("end", f"{text}; `status` and `log` tell more", code=1)
            if pause:
                text += f"; attempt {self._attempt} of {self.most_attempts} without a new checkpoint, in {pause} s"
        self.is_fresh = False
        return Action(verb, text, pause)

    def note(self, action: Action, succeeded: bool) -> None:
        """Take in how an action went: what follows a creation or an installation belongs to the same attempt."""
        if action.verb != "wait":
            self.is_fresh = succeeded and action.verb in ("create", "install")


class Node(NamedTuple):
    """What one ssh reaches: a slice, as the API tells of it, or a box."""

    name: str
    state: str = "READY"
    health: str = ""
    hosts: int = 1


class Fleet(Protocol):
    """Machines with a training. Launchers tell how to reach and install them, and decide what comes next."""

    options: argparse.Namespace
    runner: Runner
    nodes: Sequence[Node]

    def next(self) -> Action: ...
    def note(self, action: Action, succeeded: bool) -> None: ...
    def ssh(self, node: Node, command: str, worker: str = "all") -> list[str]: ...
    def scp(self, node: Node, path: str) -> list[str]: ...
    def install_command(self) -> str: ...
    def start_command(self) -> str: ...

    def ask(self, runs: str | None = None) -> list[Host]:
        """Return what the hosts tell that answer `state_command`. The only host of a node has the node's name."""
        results = self.runner.all([self.ssh(node, state_command(runs)) for node in self.nodes], QUESTION)
        told = zip(self.nodes, (hosts_in(result.text) for result in results), strict=True)
        return [host._replace(name=node.name) if node.hosts == 1 else host for node, hosts in told for host in hosts]

    def on_hosts(self, command: str, limit: int = QUESTION, worker: str = "all") -> bool:
        """Run a command on every host; print what they say. True if as many have done it as there are."""
        results = self.runner.all([self.ssh(node, answered(command), worker) for node in self.nodes], limit)
        print("".join(ANSWER.sub("", result.text) for result in results), end="", flush=True)
        answers = [0 if result.code else len(set(ANSWER.findall(result.text))) for result in results]
        wanted = [node.hosts if worker == "all" else 1 for node in self.nodes]
        if answers == wanted or self.runner.dry_run:
            return True
        self.runner.say(f"error: {sum(answers)} of {sum(wanted)} hosts have done it")
        return False

    def install(self) -> bool:
        """Copy the tree to every host, and install it."""
        with archive(self.options.environment, self.runner.dry_run) as path:
            results = self.runner.all([self.scp(node, str(path)) for node in self.nodes], REQUEST)
        return all(result.code == 0 for result in results) and self.on_hosts(self.install_command(), SETUP)

    def train(self) -> bool:
        return self.on_hosts(self.start_command())

    def stop(self) -> bool:
        return self.on_hosts(host_command("stop", str(self.options.grace)))

    def show_log(self, tail: str = "tail -n +1 -F") -> int:
        return self.runner.foreground(self.ssh(self.nodes[0], f"{tail} {FOLDER}/train.log", "0"))

    def status(self) -> int:
        """Print how the hosts are, and the end of the log."""
        hosts = self.ask()
        print("".join(f"{host}\n" for host in hosts), end="", flush=True)
        is_whole = len(hosts) == sum(node.hosts for node in self.nodes) or self.runner.dry_run
        return self.show_log("tail -n 3") or int(not is_whole)

    def steps(self) -> dict[str, Callable[[], bool]]:
        """Return the commands that either succeed or fail."""
        return {"install": self.install, "train": self.train, "stop": self.stop}

    def run(self, command: str) -> int:
        """Run a command; return its exit code."""
        shows = {"log": self.show_log, "status": self.status}
        return shows[command]() if command in shows else int(not self.steps()[command]())


def watch(runner: Runner, fleet: Fleet) -> int:
    """Look, decide and act until the decision is to end; return the exit code."""
    said = ""
    while True:
        action = fleet.next()
        if action.text != said:
            runner.say(f"{time.strftime('%H:%M:%S')} {action.text}")
            said = action.text
        if action.verb == "end":
            return action.code
        runner.sleep(action.pause)
        succeeded = action.verb == "wait" or fleet.run(action.verb) == 0
        if not succeeded:
            runner.say(f"{action.verb}: that failed")
        fleet.note(action, succeeded)
