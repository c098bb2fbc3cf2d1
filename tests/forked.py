"""Processes that begin with everything imported: forks of one that did nothing else.

`Popen` is `subprocess.Popen`. Where its command begins with this Python, the new process is not one of an interpreter
that starts, but a fork: to import JAX and Gregale takes 1.5 s of the processor. It is a child of this process as any
other, with its own environment, folder and streams. What a module reads of the environment when it is imported cannot
be other than here (`FIXED`): such a process is started in the usual way.
"""

import ctypes
import gc
import io
import os
import pickle
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import time
import types
import warnings
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from threading import Lock
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
FIXED = ("JAX_", "PYTHON", "MALLOC_", "GLIBC_", "LD_", "LC_", "LANG", "TPU_")
PER_PROCESS = ("PYTHONUNBUFFERED", "PYTHONPATH")
MESSAGE_BYTES = 1 << 20
_LIBC, _PR_SET_CHILD_SUBREAPER = ctypes.CDLL(None), 36
_one_at_a_time = Lock()
_servers: dict[int, tuple[socket.socket, dict[str, str]]] = {}
Job = Callable[[], Any]

IMPORTED = (
    *("gregale.cli", "gregale.programs.train.command", "gregale.islands.run"),
    *("gregale.huggingface.hub", "gregale.islands.lighthouse", "gregale.islands.driver"),
    *("gregale.cli.invocation", "grain", "tokenizers"),
)


class Popen(subprocess.Popen):
    """A process, forked if it can be."""

    def _execute_child(self, args, executable, preexec_fn, close_fds, pass_fds, cwd, env, *rest) -> None:
        _, _, _, stdin, stdin_here, out_here, out, err_here, err, _, _, _, _, _, new_session, *_ = rest
        words = [os.fspath(word) for word in args]
        environment = dict(os.environ if env is None else env)
        if words[0] != sys.executable or preexec_fn or pass_fds or not may_be_forked(environment):
            super()._execute_child(args, executable, preexec_fn, close_fds, pass_fds, cwd, env, *rest)
            return
        streams = [given if given != -1 else own for given, own in zip((stdin, out, err), (0, 1, 2), strict=True)]
        request = (words[1:], os.fspath(cwd or os.getcwd()), environment, bool(new_session))
        try:
            self.pid = fork(pickle.dumps(request), streams)
            self._child_created = True
        finally:
            self._close_pipe_fds(stdin, stdin_here, out_here, out, err_here, err)


def run(command: Sequence[str], seconds: float = 300, **options: Any) -> subprocess.CompletedProcess[str]:
    """As `subprocess.run`, with what the process has said as text."""
    pipe = subprocess.PIPE
    with Popen(command, stdin=subprocess.DEVNULL, stdout=pipe, stderr=pipe, text=True, **options) as process:
        try:
            out, err = process.communicate(timeout=seconds)
        except BaseException:
            process.kill()
            raise
    return subprocess.CompletedProcess(command, process.returncode, out, err)


def may_be_forked(environment: Mapping[str, str]) -> bool:
    """Whether all that was read during imports is as in the process that is forked."""
    return _fixed(environment) == _fixed(_server()[1])


def _fixed(environment: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in environment.items() if name.startswith(FIXED) and name not in PER_PROCESS}


def fork(request: bytes, streams: list[int]) -> int:
    """Asks for a process; returns its id. It becomes a child of this one, which adopts what its server lets go."""
    with _one_at_a_time:
        connection, _ = _server()
        _LIBC.prctl(_PR_SET_CHILD_SUBREAPER, 1)
        try:
            socket.send_fds(connection, [request], streams)
            process = int(connection.recv(64))
            connection.recv(64)  # it is no longer the child of the one between
            return process
        finally:
            _LIBC.prctl(_PR_SET_CHILD_SUBREAPER, 0)


def _server() -> tuple[socket.socket, dict[str, str]]:
    """The connection to this process's server, and the environment that it began with."""
    if os.getpid() not in _servers:
        here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        here.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, MESSAGE_BYTES)
        paths = os.pathsep.join([str(ROOT), str(ROOT / "src")])
        environment = dict(os.environ) | {"PYTHONPATH": paths}
        program = f"from tests.forked import serve; job = serve({there.fileno()}); job()"
        # Nobody waits for it: it ends with the connection.
        server = subprocess.Popen(
            [sys.executable, "-c", program],
            cwd=ROOT,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            pass_fds=[there.fileno()],
        )
        server.returncode = 0
        there.close()
        _servers[os.getpid()] = here, environment
    return _servers[os.getpid()]


def serve(descriptor: int) -> Job:
    """Forks as long as it is asked to; returns what there is to do: in a new process its program."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    gc.disable()
    for name in IMPORTED:
        import_module(name)
    gc.freeze()
    gc.enable()
    connection = socket.socket(fileno=descriptor)
    while True:
        request, streams, _, _ = socket.recv_fds(connection, MESSAGE_BYTES, 3)
        if not request:
            return sys.exit
        job = _forked(connection, request, streams)
        if job is not None:
            return job


def _forked(connection: socket.socket, request: bytes, streams: list[int]) -> Job | None:
    """Forks twice: the process between ends at once, so that the new one is adopted. None: this is the server."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        between = os.fork()
        if between:
            os.waitpid(between, 0)
            connection.send(b"adopted")
            for stream in streams:
                os.close(stream)
            return None
        between = os.getpid()
        new = os.fork()
    if new:
        connection.send(str(new).encode())
        os._exit(0)
    while os.getppid() == between:
        time.sleep(0.0005)
    connection.close()
    return _program(*pickle.loads(request), streams)


def _program(words: list[str], folder: str, environment: dict[str, str], new_session: bool, streams: list[int]) -> Job:
    """Makes this process what its request says; returns what runs its program."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if new_session:
        os.setsid()
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
    for stream in set(streams) - {0, 1, 2}:
        os.close(stream)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    tempfile.tempdir = None
    sys.path[1:1] = [path for path in environment.get("PYTHONPATH", "").split(os.pathsep) if path not in sys.path]
    at_once = "PYTHONUNBUFFERED" in environment
    # New ones: those of the process that was forked know whether its own files can be sought in.
    sys.stdin = sys.__stdin__ = os.fdopen(0, closefd=False)
    sys.stdout = sys.__stdout__ = io.TextIOWrapper(
        os.fdopen(1, "wb", 0 if at_once else -1, closefd=False), write_through=at_once
    )
    sys.stderr = sys.__stderr__ = io.TextIOWrapper(
        os.fdopen(2, "wb", closefd=False), errors="backslashreplace", line_buffering=True
    )
    return lambda: run_words(words)


def run_words(words: list[str]) -> None:
    """As `python WORDS` does."""
    kind, *rest = words
    if kind == "-m":
        sys.argv = rest
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    elif kind == "-c":
        sys.argv = ["-c", *rest[1:]]
        main = sys.modules["__main__"] = types.ModuleType("__main__")
        exec(compile(rest[0], "<string>", "exec"), main.__dict__)
    else:
        sys.argv = [kind, *rest]
        sys.path[0] = str(Path(kind).resolve().parent)
        runpy.run_path(kind, run_name="__main__")
