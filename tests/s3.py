"""A stand-in for S3: moto's, but of several requests at once that create an object on condition one does, as in S3.

moto looks whether there is such an object and then writes it, and another thread's request may come between.
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


if __name__ == "__main__":
    make_server(
        "127.0.0.1",
        0,
        one_creates(DomainDispatcherApplication(create_backend_app)),
        threaded=True,
        request_handler=MotoRequestHandler,
        fd=int(sys.argv[1]),  # of a socket that listens
    ).serve_forever()
