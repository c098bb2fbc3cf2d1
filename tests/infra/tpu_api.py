"""The API of Cloud TPU on loopback, for the real gcloud, with hosts that are folders: ssh and scp run here."""

import json
import os
import re
import shlex
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import werkzeug

from tests.infra.stand_ins import ROOT, serving, write_program
from tests.waiting import until

ZONE = "us-west4-a"
SERVER = Path(__file__).parent / "gcloud_server.py"

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


def request_answer(base: str, name: str, request: Request) -> dict:
    specs = [{"parent": base, "nodeId": node, "node": {"runtimeVersion": "x"}} for node in request.nodes]
    return {"name": f"{base}/queuedResources/{name}", "state": {"state": request.state}, "tpu": {"nodeSpec": specs}}


def node_answer(base: str, name: str, node: Node) -> dict:
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


class Api:
    """Answers for the world of a `Cloud`."""

    def __init__(self, cloud: "Cloud"):
        self.cloud = cloud

    @werkzeug.Request.application
    def __call__(self, request: werkzeug.Request) -> werkzeug.Response:
        found = self.found(request.method, request.path, request.args.to_dict(flat=False), request.get_data())
        code, content = found if isinstance(found, tuple) else (200, found)
        if code != 200:
            content = {"error": {"code": code, "message": content, "status": content}}
        return werkzeug.Response(json.dumps(content), code, mimetype="application/json")

    def found(self, method: str, path: str, query: dict, body: bytes) -> dict | tuple[int, str]:
        world = self.cloud.world
        if path.startswith("/compute/"):
            return {"name": "p", "kind": "compute#project", "commonInstanceMetadata": {"items": []}}
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
                return {"queuedResources": [request_answer(base, *item) for item in requests.items()]}
            if name not in requests:
                return 404, "NOT_FOUND"
            if method == "DELETE":
                for node in requests.pop(name).nodes:
                    self.cloud.lose(zone, node)
                return done
            return request_answer(base, name, requests[name])
        if name is None:
            return {"nodes": [node_answer(base, *item) for item in nodes.items()]}
        if name not in nodes:
            return 404, "NOT_FOUND"
        if verb:
            return {"guestAttributes": [{"queryValue": {"items": []}} for _ in range(nodes[name].hosts)]}
        if method == "DELETE":
            self.cloud.lose(zone, name)
        return node_answer(base, name, nodes[name]) if method == "GET" else done

    def made(self, name: str, zone: str, body: bytes, done: dict) -> dict | tuple[int, str]:
        if self.cloud.world.exists(name, zone):
            return 409, "ALREADY_EXISTS"
        (spec,) = json.loads(body)["tpu"]["nodeSpec"]
        several = spec.get("multisliceParams", {})
        nodes = [f"{several['nodeIdPrefix']}-{i}" for i in range(several["nodeCount"])] if several else [spec["nodeId"]]
        self.cloud.world.add(name, *nodes, zone=zone, state=self.cloud.world.new_state)
        return done


TYPES = {
    "nodes": "type.googleapis.com/google.cloud.tpu.v2.Node",
    "queuedResources": "type.googleapis.com/google.cloud.tpu.v2.QueuedResource",
}


class Cloud:
    """The API with its world, gcloud's own code, and hosts that are folders; for the tests of a module."""

    def __init__(self, folder: Path):
        self.folder, self.world = folder, World()
        (folder / "home").mkdir()
        self.script("bin/ssh", SSH.format(name="ssh", count=1, folder=folder))
        self.script("bin/scp", SCP.format(name="scp", count=2, folder=folder))
        self.script("hostbin/uname", "#!/bin/bash\necho $HOST_NAME\n")
        (folder / "token").write_text("token")
        self.environment = {
            **{name: value for name, value in os.environ.items() if name != "SSH_AUTH_SOCK"},
            "PATH": f"{folder / 'bin'}:{os.environ['PATH']}",
            "HOME": str(folder / "home"),
            "TMPDIR": str(folder / "home"),
            "CLOUDSDK_CONFIG": str(folder / "config"),
            "CLOUDSDK_AUTH_ACCESS_TOKEN_FILE": str(folder / "token"),
            "CLOUDSDK_CORE_PROJECT": "p",
            "CLOUDSDK_CORE_DISABLE_USAGE_REPORTING": "1",
        }

    def reset(self) -> None:
        """A world without anything, hosts that were never there, and a user with a key."""
        self.world = World()
        for name in ("hosts", "down", "slow", "home"):
            shutil.rmtree(self.folder / name, ignore_errors=True)
            (self.folder / name).mkdir()
        (self.folder / "reached").write_text("")
        key = self.folder / "google_compute_engine"
        if not key.exists():
            subprocess.run(["ssh-keygen", "-q", "-t", "rsa", "-N", "", "-f", str(key)], check=True)
        (self.folder / "home" / ".ssh").mkdir()
        for each in (key, key.with_suffix(".pub")):
            shutil.copy(each, self.folder / "home" / ".ssh")

    def script(self, name: str, text: str) -> None:
        write_program(self.folder / name, text)

    def lose(self, zone: str, node: str) -> None:
        """A node goes, with the disks of its hosts."""
        self.world.nodes.get(zone, {}).pop(node, None)
        for host in (self.folder / "hosts").glob(f"{node}-w-*"):
            shutil.rmtree(host)

    def reached(self) -> list[str]:
        """`ssh HOST` and `scp HOST`, in order."""
        return (self.folder / "reached").read_text().splitlines()

    def host(self, name: str, **files: str) -> Path:
        """The working tree on a host, which is installed there, with these files."""
        tree = self.folder / "hosts" / name / "gregale"
        (tree / "infra").mkdir(parents=True)
        for script in ("host.sh", "carry.sh"):
            shutil.copy(ROOT / "infra" / script, tree / "infra")
        for file, text in {"installed": "", **files}.items():
            (tree / f"train.{file}").write_text(text)
        return tree


@contextmanager
def cloud(folder: Path) -> Iterator[Cloud]:
    """The API and gcloud's server, while they are used."""
    found = Cloud(folder)
    python = os.environ.get("CLOUDSDK_PYTHON") or shutil.which("python3") or "python3"
    lib = Path(os.path.realpath(shutil.which("gcloud") or "")).parents[1] / "lib"
    with serving(Api(found)) as address:
        found.environment["CLOUDSDK_API_ENDPOINT_OVERRIDES_TPU"] = f"{address}/"
        found.environment["CLOUDSDK_API_ENDPOINT_OVERRIDES_COMPUTE"] = f"{address}/compute/v1/"
        words = [python, "-S", str(SERVER), str(folder / "socket")]
        found.script("bin/gcloud", f'#!/bin/bash\nexec {shlex.join(words)} "$@"\n')
        with (folder / "log").open("w") as log:
            server = subprocess.Popen([*words, str(lib)], env=found.environment, stdout=log, stderr=log)
        try:
            until((folder / "socket").exists)
            yield found
        finally:
            server.kill()
            server.wait()
