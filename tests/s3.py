"""A stand-in for S3 and for GCS's XML interface: moto's, with two repairs.

- Of several simultaneous requests that create an object on condition, one does, as in S3. moto looks whether there is
  such an object and then writes it, and another thread's request may come between.
- GCS's headers become those of S3. The XML interfaces of the two are otherwise equal in what a client of obstore uses.
"""

import sys
import threading
from collections.abc import Callable, Iterable
from typing import Any

from moto.moto_server.werkzeug_app import DomainDispatcherApplication, MotoRequestHandler, create_backend_app
from werkzeug.serving import make_server


def one_creates(application: Callable[..., Iterable[bytes]]) -> Callable[..., Iterable[bytes]]:
    """A WSGI application that carries out requests with `If-None-Match` one after the other."""
    creating = threading.Lock()

    def answer(environment: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        if "HTTP_IF_NONE_MATCH" not in environment:
            return application(environment, start_response)
        with creating:
            return list(application(environment, start_response))

    return answer


def google(application: Callable[..., Iterable[bytes]]) -> Callable[..., Iterable[bytes]]:
    """A WSGI application that takes GCS's headers of conditions and copies for those of S3."""

    def answer(environment: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        if environment.get("HTTP_X_GOOG_IF_GENERATION_MATCH") == "0":
            environment["HTTP_IF_NONE_MATCH"] = "*"
        if (source := environment.get("HTTP_X_GOOG_COPY_SOURCE")) is not None:
            environment["HTTP_X_AMZ_COPY_SOURCE"] = source
        return application(environment, start_response)

    return answer


if __name__ == "__main__":
    make_server(
        "127.0.0.1",
        0,
        google(one_creates(DomainDispatcherApplication(create_backend_app))),
        threaded=True,
        request_handler=MotoRequestHandler,
        fd=int(sys.argv[1]),  # of a socket that listens
    ).serve_forever()
