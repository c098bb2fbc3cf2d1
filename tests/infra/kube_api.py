"""A stand-in of Kubernetes' API on loopback with JobSets, for the real kubectl."""

import json
from typing import Any

from werkzeug import Request, Response

GROUP = "jobset.x-k8s.io"
VERSION = f"{GROUP}/v1alpha2"
ROOT = f"/apis/{VERSION}"
JOBSETS = f"{ROOT}/namespaces/default/jobsets"
VERSIONS = [{"groupVersion": VERSION, "version": "v1alpha2"}]
# That the server itself refuses unknown fields, so kubectl asks it to.
STRICT = {
    "parameters": [{"name": "fieldValidation", "in": "query"}],
    "x-kubernetes-group-version-kind": {"group": GROUP, "version": "v1alpha2", "kind": "JobSet"},
}
DISCOVERY = {
    "/api": {"kind": "APIVersions", "versions": ["v1"]},
    "/apis": {
        "kind": "APIGroupList",
        "groups": [{"name": GROUP, "versions": VERSIONS, "preferredVersion": VERSIONS[0]}],
    },
    "/api/v1": {
        "kind": "APIResourceList",
        "groupVersion": "v1",
        "resources": [{"name": "pods", "kind": "Pod", "namespaced": True, "verbs": ["list"]}],
    },
    ROOT: {
        "kind": "APIResourceList",
        "groupVersion": VERSION,
        "resources": [
            {
                "name": "jobsets",
                "singularName": "jobset",
                "kind": "JobSet",
                "namespaced": True,
                "verbs": ["get", "create", "patch", "delete"],
            }
        ],
    },
    "/openapi/v3": {"paths": {ROOT[1:]: {"serverRelativeURL": f"/openapi/v3{ROOT}"}}},
    f"/openapi/v3{ROOT}": {
        "openapi": "3.0.0",
        "info": {"title": "JobSet", "version": "v1alpha2"},
        "paths": {f"{ROOT}/namespaces/{{namespace}}/jobsets/{{name}}": {"patch": STRICT}},
    },
    "/api/v1/namespaces/default/pods": {"kind": "PodList", "apiVersion": "v1", "items": []},
}
NOT_FOUND = {"kind": "Status", "apiVersion": "v1", "status": "Failure", "reason": "NotFound", "code": 404}


def kubeconfig(address: str) -> dict[str, Any]:
    return {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{"name": "ours", "cluster": {"server": address}}],
        "contexts": [{"name": "ours", "context": {"cluster": "ours", "user": ""}}],
        "current-context": "ours",
    }


class Api:
    """The server; `jobsets` are those that it has, by name."""

    def __init__(self):
        self.jobsets: dict[str, dict[str, Any]] = {}
        self.sent: list[tuple[str, str]] = []  # what has changed something: the method and the path

    @Request.application
    def __call__(self, request: Request) -> Response:
        code, found = self.answer(request.method, request.path, request.get_data())
        return Response(json.dumps(found), code, mimetype="application/json")

    def answer(self, method: str, path: str, body: bytes) -> tuple[int, dict[str, Any]]:
        if method != "GET":
            self.sent.append((method, path))
        if method == "GET" and path in DISCOVERY:
            return 200, DISCOVERY[path]
        if method == "POST" and path == JOBSETS:
            made = json.loads(body)
            self.jobsets[made["metadata"]["name"]] = made
            made["metadata"]["uid"] = "4711"
            return 201, made
        name = path.removeprefix(f"{JOBSETS}/")
        if name not in self.jobsets:
            return 404, NOT_FOUND
        if method == "PATCH":
            self.jobsets[name]["spec"] |= json.loads(body)["spec"]
        return 200, self.jobsets.pop(name) if method == "DELETE" else self.jobsets[name]
