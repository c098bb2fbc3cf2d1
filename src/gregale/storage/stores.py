"""Clients of object stores, from the package obstore, and the classification of their failures.

Endpoints, regions and credentials are those of the environment and of each store's own tools. The client's own retries
are off, because it does not retry a conditional write, or a listing whose answer breaks off.
"""

import importlib.util
import os
import random
import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from functools import cache
from typing import Any, TypeVar

from gregale.errors import UserError, install_hint

T = TypeVar("T")

EXTRAS = {"s3": "s3", "gs": "gcs", "az": "azure"}  # scheme: extra
_CREDENTIALS = {
    "s3": "the AWS_ variables, ~/.aws, or the role of the machine",
    "gs": "GOOGLE_APPLICATION_CREDENTIALS, `gcloud auth application-default login`, or the machine's account",
    "az": "the AZURE_STORAGE_ variables, or the identity of the machine",
}
_ENDPOINTS = ("AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3", "STORAGE_EMULATOR_HOST", "AZURE_STORAGE_ENDPOINT")
_IDENTITY_PATHS = ("/computeMetadata/", "/metadata/identity/")  # of a cloud machine's own server of tokens
_CONNECT_SECONDS = 10.0
_MAX_DELAY_SECONDS = 10.0
_SHOWN_CHARACTERS = 200
_ANSWER = re.compile(r"<Code>(.*?)</Code>.*?<Message>(.*?)</Message>", re.DOTALL)
# Classes of exceptions, and S3's error codes whose HTTP status is that of any invalid request.
_DENIED = {
    *("PermissionDeniedError", "UnauthenticatedError", "ExpiredToken", "InvalidToken", "TokenRefreshRequired"),
    *("InvalidAccessKeyId", "SignatureDoesNotMatch"),
}


class StoreError(UserError):
    """A store rejected a request, or failed for longer than the retry policy allows.

    - `fact`: one sentence about the failure, for the log of a run that continues; the message adds the remedy
    """

    def __init__(self, fact: str, remedy: str = ""):
        super().__init__(f"{fact} {remedy}".rstrip())
        self.fact = fact


@dataclass(frozen=True)
class RetryPolicy:
    """The limits of retries.

    Retry k waits min(first delay * 2^k, 10) seconds, less a random part of up to one half, so that hosts do not retry
    at the same moment.
    """

    seconds: float = 120.0  # time from the first failure of a request to its last retry
    silence_seconds: float = 30.0  # maximum time without data on a connection before it has failed
    first_delay_seconds: float = 0.2

    def call(self, url: str, request: Callable[[], T]) -> T:
        """Return the result of a request, retrying failures that may pass.

        Raises `FileNotFoundError`, `FileExistsError`, `EOFError` for a range after the end, or `StoreError`.
        """
        max_delay, until = self.first_delay_seconds, None
        while True:
            try:
                return request()
            except Exception as error:
                if (permanent := _permanent_error(url, error)) is not None:
                    raise permanent from error
                delay, now = random.uniform(max_delay / 2, max_delay), time.monotonic()
                until = until or now + self.seconds
                if now + delay > until:
                    raise StoreError(
                        f"{url}: the store did not answer as it should for {self.seconds:g} s ({_text(error)}).",
                        "Nothing that was written before is lost: give the same command again when it is back.",
                    ) from error
            time.sleep(delay)
            max_delay = min(2 * max_delay, _MAX_DELAY_SECONDS)


def client(url: str, **timeouts: float) -> Any:
    """Return the client of a URL's bucket, one for each endpoint and each choice of timeouts.

    - `timeouts`: `read_timeout`, seconds without data, or `timeout`, seconds of a whole request

    Raises `StoreError` if obstore is not installed, or if there are no credentials.
    """
    scheme, _, bucket = url.split("/")[:3]
    if importlib.util.find_spec("obstore") is None:
        raise StoreError(
            f"{url} needs the package obstore, which is not installed. {install_hint(EXTRAS[scheme[:-1]])}"
        )
    try:
        return _client(scheme[:-1], bucket, tuple(timeouts.items()), *map(os.environ.get, _ENDPOINTS))
    except Exception as error:
        raise _access_error(url, error) from error


@cache
def _client(scheme: str, bucket: str, timeouts: tuple[tuple[str, float], ...], *_: object) -> Any:
    from obstore.store import AzureStore, GCSStore, S3Store

    seconds = {"connect_timeout": _CONNECT_SECONDS, "timeout": 86400.0, **dict(timeouts)}
    common: dict[str, Any] = {
        "client_options": {"allow_http": True, **{name: f"{1000 * each:.0f}ms" for name, each in seconds.items()}},
        "retry_config": {"max_retries": 0},
    }
    if scheme == "az":
        return AzureStore(bucket, **common)
    if scheme == "gs":
        if endpoint := os.environ.get("STORAGE_EMULATOR_HOST"):
            common |= {"base_url": endpoint, "bearer_token": "emulator"}
        return GCSStore(bucket, **common)
    from boto3 import Session  # obstore itself does not read ~/.aws
    from obstore.auth.boto3 import Boto3CredentialProvider

    session = Session()
    if session.get_credentials() is None:
        raise PermissionError("Unable to locate credentials")
    credentials = Boto3CredentialProvider(session, ttl=timedelta(minutes=5))
    return S3Store(bucket, credential_provider=credentials, disable_bulk_delete=True, **common)


def _permanent_error(url: str, error: Exception) -> Exception | None:
    """Return the exception for a failure that a retry would repeat; None for other failures, and for unknown ones."""
    text, name = str(error), type(error).__name__
    code = answer[1] if (answer := _ANSWER.search(text)) else ""
    status = int((re.search(r"status code: (\d+)", text) or "00")[1])
    bucket = "/".join(url.split("/")[:3])
    if code in ("NoSuchBucket", "ContainerNotFound"):
        return StoreError(f"{url}: there is no bucket {bucket}.", "Make it, or correct the name.")
    if {code, name} & _DENIED or status in (401, 403) or (status == 400 and "token request" in text):
        return _access_error(url, error)
    if "error sending request" in text and any(path in text for path in _IDENTITY_PATHS):
        return _access_error(url, PermissionError("there are no credentials, and this machine has no identity"))
    if isinstance(error, FileNotFoundError):
        return FileNotFoundError(url)
    if status == 412 or code == "BlobAlreadyExists":
        return FileExistsError(url)
    if status == 416 or "range starting at" in text:
        return EOFError(url)
    wrong = isinstance(error, ValueError | TypeError) or "invalid path" in text or "configured region" in text
    if wrong or (400 <= status <= 501 and status not in (408, 409, 429, 500)):
        return StoreError(f"{url}: the store refused the request ({_text(error)}).")
    return None


def _access_error(url: str, error: Exception) -> StoreError:
    scheme, _, bucket = url.split("/")[:3]
    return StoreError(
        f"{url}: the store refused access ({_text(error)}).",
        f"The credentials come from {_CREDENTIALS[scheme[:-1]]}: renew them, or let them read and write "
        f"{scheme}//{bucket}, and give the same command again.",
    )


def _text(error: Exception) -> str:
    """Return an error as one short line: the code and message of the store's answer, if there is one."""
    text = str(error).partition("\n\nDebug source")[0]
    answer = _ANSWER.search(text)
    line = ": ".join(answer.groups()) if answer else text.partition(" - ")[2] or text
    return " ".join(line.split())[:_SHOWN_CHARACTERS].rstrip(".")
