"""Runs gcloud's own code without its start of a second: `python gcloud_server.py SOCKET LIB`, by gcloud's Python.

A command comes as JSON with its words, folder and environment, and the files of its output. It runs in a fork, in which
time passes at once, and ends when its client does. The client is `python gcloud_server.py SOCKET WORDS...`.
"""

import contextlib
import json
import os
import select
import signal
import socket
import sys
import time

WARM_UP = (  # loads what the tests use; the API answers that there is no such node
    ("list",),
    ("ssh", "none", "--command=true"),
    ("scp", __file__, "none:x"),
)


def serve(address: str, lib: str) -> None:
    sys.path[:0] = [lib, os.path.join(lib, "third_party")]
    from googlecloudsdk import gcloud_main  # type: ignore[import-not-found]

    sleep = time.sleep
    time.sleep = lambda seconds: sleep(min(float(seconds), 0.02))  # gcloud waits 5 seconds before it tries again
    cli = gcloud_main.CreateCLI([])
    for words in WARM_UP:
        with contextlib.suppress(SystemExit):
            cli.Execute(["compute", "tpus", "tpu-vm", *words, "--zone=us-west4-a"])
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(address + ".new")
        listening.listen(64)
        os.rename(address + ".new", address)
        while True:
            client, _ = listening.accept()
            if os.fork() == 0:
                run(client, cli)
            client.close()
            with contextlib.suppress(ChildProcessError):
                while os.waitpid(-1, os.WNOHANG)[0]:
                    pass


def run(client: socket.socket, cli) -> None:
    """Runs a command in a process group of its own, which is ended if the client goes away."""
    text, files, _, _ = socket.recv_fds(client, 1 << 20, 2)
    asked = json.loads(text)
    child = os.fork()
    if child == 0:
        os.setsid()
        for number, file in enumerate(files, 1):
            os.dup2(file, number)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.chdir(asked["folder"])
        os.environ.clear()
        os.environ.update(asked["environment"])
        code = 0
        try:
            cli.Execute(asked["words"])
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else int(end.code is not None)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    while True:
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            client.sendall(bytes([os.waitstatus_to_exitcode(status) & 255]))
            os._exit(0)
        if select.select([client], [], [], 0.01)[0]:
            os.killpg(child, signal.SIGKILL)
            os._exit(0)


def ask(address: str, words: list[str], *files: int) -> int:
    """Have a command run, with these files for its output and errors; return its exit code."""
    asked = {"words": words, "folder": os.getcwd(), "environment": dict(os.environ)}
    with socket.socket(socket.AF_UNIX) as server:
        server.connect(address)
        socket.send_fds(server, [json.dumps(asked).encode()], files)
        return (server.recv(1) or b"\xff")[0]


if __name__ == "__main__":
    if os.path.exists(sys.argv[1]):
        sys.exit(ask(sys.argv[1], sys.argv[2:], 1, 2))
    serve(*sys.argv[1:])
