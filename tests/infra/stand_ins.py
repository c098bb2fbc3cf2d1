"""Commands on the PATH that stand in for those of a cloud or a scheduler: they record their words and play a part."""

import logging
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from threading import Thread
from types import ModuleType

from werkzeug.serving import make_server

ROOT = Path(__file__).parents[2]
# A part that hangs for ever; `timeout`, which started it, takes SIGALRM for the end of its time, once it waits for it.
HANG = f"until [[ $(</proc/$PPID/stat) == *') S '* ]]; do :; done; kill -ALRM $PPID; exec {shutil.which('sleep')} 60"

# Notes its words, each ended by a NUL and all by a newline of their own; then plays its part, where the play is.
RECORDER = """#!/bin/bash
printf '%s\\0' {name} "$@" $'\\n' >>{folder}/calls # at once, as several processes may be called
cd {folder}
{part}
"""


def load_module(path: Path) -> ModuleType:
    """Import a script of `infra/` as a module of its name."""
    spec = spec_from_file_location(path.stem, path)
    sys.modules[path.stem] = module = module_from_spec(spec)  # for its dataclasses
    spec.loader.exec_module(module)
    return module


def write_program(path: Path, text: str) -> None:
    """Write a script that can be run, in a folder that may have to be made."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)


@contextmanager
def serving(application: Callable) -> Iterator[str]:
    """The address on loopback at which a WSGI application answers."""
    logging.getLogger("werkzeug").setLevel(logging.ERROR)  # not each request
    server = make_server("127.0.0.1", 0, application, threaded=True)
    Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
    yield f"http://127.0.0.1:{server.port}"
    server.shutdown()


class StandIns:
    """A folder of stand-ins, and what they were called with."""

    def __init__(self, folder: Path):
        self.folder, self.bin, self.home = (folder / name for name in ("play", "bin", "home"))
        for each in (self.folder, self.bin, self.home):
            each.mkdir()
        self.play("sleep", "echo $1 >>slept")  # time passes at once
        self.play("timeout", f'exec {shutil.which("timeout")} "$@"')

    def play(self, name: str, part: str = "") -> None:
        """Puts a command on the PATH; its part is bash, which finds files of the play in its working directory."""
        write_program(self.bin / name, RECORDER.format(name=name, folder=self.folder, part=part))

    def write(self, name: str, text: str) -> None:
        (self.folder / name).write_text(text)

    def read(self, name: str) -> str:
        file = self.folder / name
        return file.read_text() if file.is_file() else ""

    def calls(self, *names: str) -> list[list[str]]:
        """The words of all calls of some commands, in order."""
        found: list[list[str]] = [[]]
        for word in self.read("calls").split("\0")[:-1]:
            if word == "\n":
                found.append([])
            else:
                found[-1].append(word)
        return [words for words in found if words and words[0] in names]

    @property
    def environment(self) -> dict[str, str]:
        path = f"{self.bin}:{os.environ['PATH']}"
        return {**os.environ, "PATH": path, "HOME": str(self.home), "TMPDIR": str(self.home)}

    def check_dry_run(self, script: Path, *words: str, programs: tuple[str, ...]) -> list[list[str]]:
        """A dry run calls nothing and prints, word by word, what the command then calls; returns what was printed."""
        printed = self.run(script, *words[:1], "--dry-run", *words[1:], code=0)
        assert not self.calls(*programs, "timeout", "git", "tar")
        shown = [shlex.split(line) for line in printed.stdout.splitlines()]
        self.run(script, *words, code=0)
        called = [each[3:] if each[0] == "timeout" else each for each in shown]
        assert [each for each in called if each[0] in programs] == self.calls(*programs)
        assert [each for each in shown if each[0] == "timeout"] == self.calls("timeout")
        return shown

    def run(self, script: Path, *words: str, code: int | None = None, **environment: str):
        """What a script has said, which has to end with a code, if one is given."""
        result = subprocess.run(
            ["bash", str(script), *words],
            capture_output=True,
            text=True,
            timeout=300,  # of a machine with other work
            env={**self.environment, **environment},
        )
        assert code in (None, result.returncode), result.stderr
        return result
