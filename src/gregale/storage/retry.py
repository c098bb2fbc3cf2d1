"""Retries of failed store requests with exponential backoff, and the classification of failures.

Retry k waits min(first delay * 2^k, 10) seconds, less a random part of up to one half, so that hosts do not retry at
the same moment.
"""

import random
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import Enum
from typing import Any, TypeVar

from gregale.errors import UserError

T = TypeVar("T")

_MAX_DELAY_SECONDS = 10.0
_SHOWN_CHARACTERS = 200
# S3 error codes whose HTTP status alone is not clear.
_DENIED = {"ExpiredToken", "InvalidToken", "TokenRefreshRequired", "InvalidAccessKeyId", "SignatureDoesNotMatch"}
# Class names, so that the libraries need not be imported for their exceptions.
_WITHOUT_CREDENTIALS = {"NoCredentialsError", "PartialCredentialsError", "ProfileNotFound", "DefaultCredentialsError"}
_CREDENTIALS_FAIL = {"CredentialRetrievalError", "TokenRetrievalError", "RefreshError", "UnauthorizedSSOTokenError"}


class StoreError(UserError):
    """A store rejected a request, or failed for longer than the retry policy allows.

    - `fact`: one sentence about the failure, for the log of a run that continues; the message adds the remedy
    """

    def __init__(self, fact: str, remedy: str = ""):
        super().__init__(f"{fact} {remedy}".rstrip())
        self.fact = fact


_STATUS_FIELDS = {"HttpError": "code", "ClientResponseError": "status"}  # fields of gcsfs and aiohttp exceptions


@dataclass(frozen=True)
class RetryPolicy:
    """The limits of retries."""

    seconds: float = 120.0  # time from the first failure of a request to its last retry
    silence_seconds: float = 30.0  # maximum time without data on a connection before it has failed
    first_delay_seconds: float = 0.2

    def delays(self) -> Iterator[float]:
        """Yield the seconds to wait before each retry."""
        max_delay = self.first_delay_seconds
        while True:
            yield random.uniform(max_delay / 2, max_delay)
            max_delay = min(2 * max_delay, _MAX_DELAY_SECONDS)


class RangeBeyondEnd(Exception):
    """The requested range begins after the end of the object."""


class FailureKind(Enum):
    """The meaning of a failure."""

    MISSING = "there is no such object"
    BEYOND = "the object is shorter"
    NO_BUCKET = "there is no such bucket"
    EXISTS = "there is such an object already"
    DENIED = "the credentials do not suffice"
    REFUSED = "the request is invalid, and a retry would fail too"
    TRANSIENT = "a retry may succeed"


_RAISED: dict[FailureKind, type[Exception]] = {
    FailureKind.MISSING: FileNotFoundError,
    FailureKind.EXISTS: FileExistsError,
    FailureKind.BEYOND: RangeBeyondEnd,
}


def failure_kind(error: BaseException) -> FailureKind:
    """Classify a failure of s3fs, gcsfs or their libraries; unknown failures are transient."""
    code, number = _code_and_status(error)
    names = {type(each).__name__ for each in _chain(error)}
    if code == "NoSuchBucket":
        return FailureKind.NO_BUCKET
    if code in _DENIED or names & _WITHOUT_CREDENTIALS or number in (401, 403) or isinstance(error, PermissionError):
        return FailureKind.DENIED
    if names & _CREDENTIALS_FAIL:
        return FailureKind.TRANSIENT if getattr(error, "retryable", False) else FailureKind.DENIED
    if isinstance(error, FileExistsError) or number == 412:
        return FailureKind.EXISTS
    if isinstance(error, FileNotFoundError) or number == 404:
        return FailureKind.MISSING
    if number == 416:
        return FailureKind.BEYOND
    if str(error).startswith("Forbidden"):  # gcsfs gives 403 no class and no number
        return FailureKind.DENIED
    wrong = isinstance(error, ValueError | TypeError) or (400 <= number < 500 and number not in (408, 409, 429))
    return FailureKind.REFUSED if wrong else FailureKind.TRANSIENT


def error_text(error: BaseException) -> str:
    """Return a store's error as one short line."""
    text = " ".join(str(error).split()) or type(error).__name__
    code, _ = _code_and_status(error)
    line = text if not code or code.isdigit() or code in text else f"{code}: {text}"
    return line[:_SHOWN_CHARACTERS].rstrip(".")


def call_with_retries(url: str, policy: RetryPolicy, request: Callable[[], T]) -> T:
    """Return the result of a request, retrying transient failures.

    Raises `FileNotFoundError`, `FileExistsError` or `RangeBeyondEnd`; `StoreError` for all other permanent failures.
    """
    delays, until = policy.delays(), None
    while True:
        try:
            return request()
        except Exception as error:
            kind = failure_kind(error)
            if kind in _RAISED:
                raise _RAISED[kind](url) from error
            if kind is not FailureKind.TRANSIENT:
                raise _permanent_error(url, kind, error) from error
            delay, now = next(delays), time.monotonic()
            until = until or now + policy.seconds
            if now + delay > until:
                raise StoreError(
                    f"{url}: the store did not answer as it should for {policy.seconds:g} s ({error_text(error)}).",
                    "Nothing that was written before is lost: give the same command again when it is back.",
                ) from error
        time.sleep(delay)


def _permanent_error(url: str, kind: FailureKind, error: BaseException) -> StoreError:
    scheme = url.partition("://")[0]
    bucket = "/".join(url.split("/")[:3])
    if kind is FailureKind.NO_BUCKET:
        return StoreError(f"{url}: there is no bucket {bucket}.", "Make it, or correct the name.")
    if kind is FailureKind.REFUSED:
        return StoreError(f"{url}: the store refused the request ({error_text(error)}).")
    sources = {
        "s3": "the AWS_ variables, ~/.aws, or the role of the machine",
        "gs": "GOOGLE_APPLICATION_CREDENTIALS, `gcloud auth application-default login`, or the machine's account",
    }
    return StoreError(
        f"{url}: the store refused access ({error_text(error)}).",
        f"The credentials come from {sources[scheme]}: renew them, or let them read and write {bucket}, and give the "
        f"same command again.",
    )


def _chain(error: BaseException) -> Iterator[BaseException]:
    cause: BaseException | None = error
    while cause is not None:
        yield cause
        cause = cause.__cause__


def _code_and_status(error: BaseException) -> tuple[str, int]:
    """Return the store's error code and the HTTP status of an error or its causes; "" and 0 where unknown."""
    for each in _chain(error):
        response: Any = getattr(each, "response", None)
        if isinstance(response, dict):  # botocore
            number = response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
            return str(response.get("Error", {}).get("Code", "")), number
        if name := _STATUS_FIELDS.get(type(each).__name__):
            found = str(getattr(each, name, ""))
            return "", int(found) if found.isdigit() else 0
    return "", 0
