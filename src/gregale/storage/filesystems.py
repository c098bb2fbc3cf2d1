"""Access to object stores through s3fs and gcsfs, with fsspec's asynchronous interface.

The libraries find endpoints and credentials themselves: `AWS_ENDPOINT_URL`, `STORAGE_EMULATOR_HOST`, and the credential
chain of each. Their own retries are off: `gregale.storage.retry` retries in one way for both.
"""

import importlib.util
import logging
import os
import warnings
from collections.abc import Callable
from functools import cache
from typing import Any

from gregale.errors import install_hint
from gregale.storage.retry import StoreError

SCHEMES = {"s3": ("s3fs", "s3"), "gs": ("gcsfs", "gcs")}  # scheme: (package, extra)
_ENDPOINTS = ("AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3", "STORAGE_EMULATOR_HOST")
_CONNECT_SECONDS = 10.0
_CONNECTIONS = 32


def filesystem(url: str, silence_seconds: float) -> Any:
    """Return the fsspec file system of a URL, one for each endpoint; raise `StoreError` if its package is missing."""
    scheme = url.partition("://")[0]
    package, extra = SCHEMES[scheme]
    if importlib.util.find_spec(package) is None:
        raise StoreError(f"{url} needs the package {package}, which is not installed. {install_hint(extra)}")
    endpoints = tuple(os.environ.get(name) for name in _ENDPOINTS)
    return _OPENERS[scheme](silence_seconds, os.getpid(), endpoints)


@cache
def _s3(silence_seconds: float, *_: object) -> Any:
    from s3fs import S3FileSystem

    opened = S3FileSystem(
        config_kwargs={
            "retries": {"mode": "standard", "total_max_attempts": 1},
            "connect_timeout": min(_CONNECT_SECONDS, silence_seconds),
            "read_timeout": silence_seconds,
            "max_pool_connections": _CONNECTIONS,
        },
        use_listings_cache=False,
        skip_instance_cache=True,
    )
    opened.retries = 1
    return opened


@cache
def _gs(silence_seconds: float, *_: object) -> Any:
    import aiohttp
    from gcsfs.core import GCSFileSystem  # the extended class would first request the kind of each bucket

    class Once(GCSFileSystem):
        _request = getattr(GCSFileSystem._request, "__wrapped__", GCSFileSystem._request)

    logging.getLogger("gcsfs").setLevel(logging.CRITICAL + 1)  # it logs tracebacks of errors that are handled here
    connect = min(_CONNECT_SECONDS, silence_seconds)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it warns about a missing project, which only creating a bucket needs
        return Once(
            requests_timeout=aiohttp.ClientTimeout(total=None, sock_connect=connect, sock_read=silence_seconds),
            use_listings_cache=False,
            skip_instance_cache=True,
        )


_OPENERS: dict[str, Callable[..., Any]] = {"s3": _s3, "gs": _gs}
