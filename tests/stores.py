"""Stand-ins for object stores, in processes of their own, and a proxy before them that fails when told to."""

import http.client
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import urlsplit

BUCKET = "bucket"
CREDENTIALS = {"AWS_ACCESS_KEY_ID": "testing", "AWS_SECRET_ACCESS_KEY": "a-secret-key", "AWS_REGION": "us-east-1"}
_START_SECONDS = 120
_HOP_BY_HOP = {"connection", "transfer-encoding", "content-length", "keep-alive"}


@contextmanager
def s3_server() -> Iterator[str]:
    """The endpoint of a stand-in for S3 and GCS that has a bucket."""
    with _served("s3.py") as endpoint:
        make(endpoint, BUCKET)
        yield endpoint


def make(endpoint: str, path: str) -> None:
    """Make a bucket, or an empty object in it, whose name may end with a slash as those of consoles do."""
    connection = http.client.HTTPConnection(urlsplit(endpoint).netloc, timeout=_START_SECONDS)
    authorization = "AWS4-HMAC-SHA256 Credential=testing/20200101/us-east-1/s3/aws4_request"
    connection.request("PUT", f"/{path}", headers={"Authorization": authorization})
    assert connection.getresponse().status == 200
    connection.close()


@contextmanager
def _served(program: str, *arguments: str) -> Iterator[str]:
    """The endpoint of a stand-in that answers; it is given a socket that listens, so that no other takes its port."""
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen(128)
        port, number = listening.getsockname()[1], listening.fileno()
        command = [sys.executable, str(Path(__file__).with_name(program)), str(number), *arguments]
        output = subprocess.DEVNULL
        process = subprocess.Popen(command, stdout=output, stderr=output, pass_fds=[number])
    try:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=_START_SECONDS)
        connection.request("GET", "/")
        connection.getresponse().read()
        connection.close()
        yield f"http://127.0.0.1:{port}"
    finally:
        process.kill()
        process.wait()


@dataclass
class Fault:
    """What happens to the next requests, of a method and with a text in their path.

    - `how`: a status such as 503; `expired` (a token, 400) or `denied` (403), in words of S3; `cut`, in the middle of
      the answer; `lost`: the request is carried out, and its answer is not given; `slow`: nothing for `seconds`
    - `times`: so many requests, then no more
    """

    how: int | str
    times: int = 1
    method: str = ""
    path: str = ""
    seconds: float = 0.0


_ANSWERS = {
    "expired": (400, "ExpiredToken", "The provided token has expired."),
    "denied": (403, "AccessDenied", "Access Denied"),
}


@dataclass
class Proxy:
    """Passes requests on to a server, except for those that meet a fault; `seen` has all of them: (method, path)."""

    endpoint: str
    faults: list[Fault] = field(default_factory=list)
    seen: list[tuple[str, str]] = field(default_factory=list)
    on_request: Callable[[], None] | None = None
    answered: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)

    def met(self, method: str, path: str) -> Fault | None:
        with self.lock:
            self.seen.append((method, path))
            if self.on_request:
                self.on_request()
            for fault in self.faults:
                if fault.times > 0 and method.startswith(fault.method) and fault.path in path:
                    fault.times -= 1
                    return fault
        return None


@contextmanager
def proxied(endpoint: str) -> Iterator[tuple[str, Proxy]]:
    """The endpoint of a proxy before a server, and the proxy."""
    proxy = Proxy(endpoint)

    class Handler(_Handler):
        pass

    Handler.proxy = proxy
    with _Server(("127.0.0.1", 0), Handler) as server:
        server.daemon_threads = True
        server.block_on_close = False
        thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}", proxy
        finally:
            server.shutdown()


class _Server(ThreadingHTTPServer):
    request_queue_size = 128  # a connection that finds no place is tried again a second later


class _Handler(BaseHTTPRequestHandler):
    proxy: Proxy
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: object) -> None:
        pass

    def _any(self) -> None:
        body = self._body()
        fault = self.proxy.met(self.command, self.path)
        how = fault.how if fault else None
        if how == "slow":
            time.sleep(fault.seconds)
        if isinstance(how, int):
            return self._answer(how, f"<Error><Code>{how}</Code><Message>out of order</Message></Error>".encode())
        if how in _ANSWERS:
            status, code, message = _ANSWERS[how]
            text = f"<Error><Code>{code}</Code><Message>{message}</Message></Error>"
            return self._answer(status, text.encode())
        answer, content = self._passed_on(self.command, self.path, body, dict(self.headers))
        if how == "lost":
            self.close_connection = True
            return None
        headers = [(name, value) for name, value in answer.getheaders() if name.lower() not in _HOP_BY_HOP]
        length = answer.getheader("Content-Length") if self.command == "HEAD" else None
        return self._answer(answer.status, content, headers, cut=how == "cut", length=length)

    do_GET = do_PUT = do_POST = do_HEAD = do_DELETE = do_PATCH = _any

    def _passed_on(self, method: str, path: str, body: bytes, headers: dict[str, str]):
        connection = http.client.HTTPConnection(urlsplit(self.proxy.endpoint).netloc, timeout=120)
        connection.request(method, path, body=body, headers=headers)
        answer = connection.getresponse()
        content = answer.read()
        connection.close()
        return answer, content

    def _body(self) -> bytes:
        if self.headers.get("Transfer-Encoding", "") != "chunked":
            return self.rfile.read(int(self.headers.get("Content-Length", 0)))
        del self.headers["Transfer-Encoding"]
        content = b""
        while size := int(self.rfile.readline().split(b";")[0], 16):
            content += self.rfile.read(size)
            self.rfile.readline()
        while self.rfile.readline().strip():
            pass
        self.headers["Content-Length"] = str(len(content))
        return content

    def _answer(self, status: int, content: bytes, headers=(), cut: bool = False, length: str | None = None) -> None:
        self.proxy.answered += 1
        self.send_response(status)
        for name, value in headers:
            self.send_header(name, value)
        self.send_header("Content-Length", length or str(len(content)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content[: len(content) // 2] if cut else content)
        if cut:
            self.close_connection = True
