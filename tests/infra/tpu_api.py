"""The API of Cloud TPU on loopback, for the real gcloud, with hosts that are folders: ssh and scp run here."""

import json
import os
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, urlparse

ZONE = "us-west4-a"
BUNDLED_PYTHON = "platform/bundledpython/bin/python3"

# gcloud waits 5 seconds between attempts: here time passes at once.
PYTHON = """#!/bin/bash
shift $(( $# > 0 && ${{#1}} == 2 ? 1 : 0 ))
exec {python} -S -c 'import runpy, sys, time
sleep = time.sleep
time.sleep = lambda seconds: sleep(min(seconds, 0.05))
sys.argv = sys.argv[1:]
sys.path.insert(0, sys.argv[0].rpartition("/")[0])
runpy.run_path(sys.argv[0], run_name="__main__")' "$@"
"""
# Without their options: the host and the command, or the two files.
WORDS = """#!/bin/bash
words=()
while (($# && ${{#words[@]}} < {count})); do
  case $1 in -[ioPpLS]) shift 2 ;; -*) shift ;; *) words+=("$1") && shift ;; esac
done
[[ ${{1:-}} != -- ]] || shift
target=${{words[-1]#*@}} host=${{words[-1]#*@}}
host=${{host%%:*}}
echo "{name} $host" >>{folder}/reached
[[ ! -e {folder}/slow/$host ]] || exec sleep 60
[[ ! -e {folder}/down/$host ]] || {{ echo "ssh: connect to host $host port 22: Connection refused" >&2; exit 255; }}
mkdir -p {folder}/hosts/$host && cd {folder}/hosts/$host
"""
SSH = WORDS + 'HOME=$PWD PATH={folder}/hostbin:$PATH HOST_NAME=$host exec bash -c "$*"\n'
SCP = WORDS + 'cp -p "${{words[0]}}" "${{target#*:}}"\n'


@dataclass
class Node:
    """A slice, as the API tells of it."""

    hosts: int = 2
    state: str = "READY"
    health: str = "HEALTHY"


@dataclass
class Request:
    """A queued resource."""

    state: str
    nodes: list[str]


@dataclass
class World:
    """What there is, which a test may change at any time, and what was asked for."""

    hosts: int = 2  # of a new slice
    new_state: str = "ACTIVE"  # of a new request
    failing: set[str] = field(default_factory=set)  # methods that answer 500, or GET
    requests: dict[str, dict[str, Request]] = field(default_factory=dict)  # by zone and name
    nodes: dict[str, dict[str, Node]] = field(default_factory=dict)
    changes: list[str] = field(default_factory=list)

    def add(self, name: str, *nodes: str, zone: str = ZONE, state: str = "ACTIVE") -> None:
        """Add a queued resource with its nodes."""
        self.requests.setdefault(zone, {})[name] = Request(state, list(nodes))
        if state == "ACTIVE":
            self.add_nodes(*nodes, zone=zone)

    def add_nodes(self, *nodes: str, zone: str = ZONE) -> None:
        self.nodes.setdefault(zone, {}).update({node: Node(self.hosts) for node in nodes})

    def exists(self, name: str, zone: str = ZONE) -> bool:
        return name in self.requests.get(zone, {})


class Handler(BaseHTTPRequestHandler):
    """Answers for a `World`, which its subclass names."""

    world: World

    def log_message(self, *words: object) -> None:
        pass

    def answer(self) -> None:
        length = int(self.headers.get("Content-Length") or 0)
        body = json.loads(self.rfile.read(length) or b"{}") if length else {}
        address = urlparse(self.path)
        found = self.found(self.command, address.path, parse_qs(address.query), body)
        code, content = found if isinstance(found, tuple) else (200, found)
        if code != 200:
            content = {"error": {"code": code, "message": content, "status": content}}
        text = json.dumps(content).encode()
        self.send_response(code)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    do_GET = do_POST = do_DELETE = do_PATCH = answer

    def found(self, method: str, path: str, query: dict, body: dict) -> dict | tuple[int, str]:
        world = self.world
        if path.startswith("/compute/"):
            return {"name": "p", "kind": "compute#project", "commonInstanceMetadata": {"items": []}}
        if method in world.failing:
            return 500, "INTERNAL"
        match = re.fullmatch(r"/v2(?:alpha1)?/projects/p/locations/([^/]+)/(\w+)(?:/([^/]+?))?(:get\w+)?", path)
        assert match, path
        zone, kind, name, verb = match.groups()
        requests, nodes = world.requests.setdefault(zone, {}), world.nodes.setdefault(zone, {})
        base = f"projects/p/locations/{zone}"
        if kind == "operations":
            kind, _, name = name.partition(":")
        done = {
            "name": f"{base}/operations/{kind}:{name}",
            "done": True,
            "response": {"@type": TYPES[kind], "name": f"{base}/{kind}/{name}"},
        }
        if "/operations/" in path:
            return done
        if method != "GET" and method != "PATCH" and not verb:
            world.changes.append(f"{method} {name or query['queuedResourceId'][0]} {zone}")
        if kind == "queuedResources":
            if method == "POST":
                return self.made(query["queuedResourceId"][0], zone, body, done)
            if name is None:
                return {"queuedResources": [self.of_request(base, *item) for item in requests.items()]}
            if name not in requests:
                return 404, "NOT_FOUND"
            if method == "DELETE":
                for node in requests.pop(name).nodes:
                    nodes.pop(node, None)
                return done
            return self.of_request(base, name, requests[name])
        if name is None:
            return {"nodes": [self.of_node(base, *item) for item in nodes.items()]}
        if name not in nodes:
            return 404, "NOT_FOUND"
        if verb:
            return {"guestAttributes": [{"queryValue": {"items": []}} for _ in range(nodes[name].hosts)]}
        if method == "DELETE":
            del nodes[name]
        return self.of_node(base, name, nodes[name]) if method == "GET" else done

    def made(self, name: str, zone: str, body: dict, done: dict) -> dict | tuple[int, str]:
        if self.world.exists(name, zone):
            return 409, "ALREADY_EXISTS"
        (spec,) = body["tpu"]["nodeSpec"]
        several = spec.get("multisliceParams", {})
        nodes = [f"{several['nodeIdPrefix']}-{i}" for i in range(several["nodeCount"])] if several else [spec["nodeId"]]
        self.world.add(name, *nodes, zone=zone, state=self.world.new_state)
        return done

    def of_request(self, base: str, name: str, request: Request) -> dict:
        specs = [{"parent": base, "nodeId": node, "node": {"runtimeVersion": "x"}} for node in request.nodes]
        return {
            "name": f"{base}/queuedResources/{name}",
            "state": {"state": request.state},
            "tpu": {"nodeSpec": specs},
        }

    def of_node(self, base: str, name: str, node: Node) -> dict:
        return {
            "name": f"{base}/nodes/{name}",
            "id": str(sum(name.encode())),
            "state": node.state,
            "health": node.health,
            "apiVersion": "V2",
            "metadata": {},
            "networkConfig": {"enableExternalIps": True},
            "networkEndpoints": [
                {"ipAddress": f"10.0.0.{i}", "accessConfig": {"externalIp": f"{name}-w-{i}"}} for i in range(node.hosts)
            ],
        }


TYPES = {
    "nodes": "type.googleapis.com/google.cloud.tpu.v2.Node",
    "queuedResources": "type.googleapis.com/google.cloud.tpu.v2.QueuedResource",
}


def why_not() -> str | None:
    """Why gcloud cannot be tried here, in words."""
    return None if shutil.which("gcloud") else "there is no gcloud"


@contextmanager
def served(world: World) -> Iterator[str]:
    """The address of an API with a world of its own."""
    handler = type("OfWorld", (Handler,), {"world": world})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/"
        server.shutdown()


class Cloud:
    """The API with its world, the environment in which gcloud finds it, and hosts below `folder`."""

    def __init__(self, folder: Path, address: str, world: World):
        self.folder, self.world = folder, world
        for each in ("bin", "hostbin", "home", "down", "slow", "hosts"):
            (folder / each).mkdir()
        self.script("bin/ssh", SSH.format(name="ssh", count=1, folder=folder))
        self.script("bin/scp", SCP.format(name="scp", count=2, folder=folder))
        self.script("hostbin/uname", "#!/bin/bash\necho $HOST_NAME\n")
        root = Path(os.path.realpath(shutil.which("gcloud") or "")).parents[1]
        bundled = root / BUNDLED_PYTHON
        self.script("bin/python", PYTHON.format(python=bundled if bundled.exists() else sys.executable))
        (folder / "token").write_text("token")
        self.environment = {
            **{key: value for key, value in os.environ.items() if key != "SSH_AUTH_SOCK"},
            "PATH": f"{folder / 'bin'}:{os.environ['PATH']}",
            "HOME": str(folder / "home"),
            "TMPDIR": str(folder / "home"),
            "CLOUDSDK_CONFIG": str(folder / "config"),
            "CLOUDSDK_API_ENDPOINT_OVERRIDES_TPU": address,
            "CLOUDSDK_API_ENDPOINT_OVERRIDES_COMPUTE": f"{address}compute/v1/",
            "CLOUDSDK_AUTH_ACCESS_TOKEN_FILE": str(folder / "token"),
            "CLOUDSDK_CORE_PROJECT": "p",
            "CLOUDSDK_CORE_DISABLE_USAGE_REPORTING": "1",
            "CLOUDSDK_PYTHON": str(folder / "bin" / "python"),
        }

    def script(self, name: str, text: str) -> None:
        file = self.folder / name
        file.write_text(text)
        file.chmod(0o755)

    def host(self, name: str) -> Path:
        """The home of a host, which has been there before."""
        home = self.folder / "hosts" / name
        home.mkdir(parents=True, exist_ok=True)
        return home

    def run(self, *words: str, **environment: str) -> subprocess.CompletedProcess:
        return subprocess.run(words, capture_output=True, text=True, timeout=300, env=self.environment | environment)
