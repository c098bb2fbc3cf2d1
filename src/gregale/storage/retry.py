"""How long a store that is out of order is asked again, and what its failures mean.

The k-th repetition comes min(first delay * 2^k, 10) seconds after the failure before, or up to a half of it earlier, by
chance: so many hosts do not ask at once.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import Enum
from typing import Any, TypeVar

from gregale.errors import UserError

T = TypeVar("T")

_LONGEST_DELAY_SECONDS = 10.0
_SHOWN_CHARACTERS = 200
# Codes of S3 beside those that HTTP's number says enough of.
_DENIED = {"ExpiredToken", "InvalidToken", "TokenRefreshRequired", "InvalidAccessKeyId", "SignatureDoesNotMatch"}
# Classes by their names: the libraries are not imported for their exceptions.
_WITHOUT_CREDENTIALS = {"NoCredentialsError", "PartialCredentialsError", "ProfileNotFound", "DefaultCredentialsError"}
_CREDENTIALS_FAIL = {"CredentialRetrievalError", "TokenRetrievalError", "RefreshError", "UnauthorizedSSOTokenError"}


class StoreError(UserError):
    """A store refused a request, or was out of order for longer than it was waited for.

    - `fact`: what happened, in a sentence, for a line of a run that goes on; the message adds the remedy
    """

    def __init__(self, fact: str, remedy: str = ""):
        super().__init__(f"{fact} {remedy}".rstrip())
        self.fact = fact


_NUMBERS = {"HttpError": "code", "ClientResponseError": "status"}  # where gcsfs and aiohttp put the number


@dataclass(frozen=True)
class RetryPolicy:
    """How long requests are repeated.

    - `seconds`: from the first failure of a request to the last repetition
    - `silence_seconds`: how long a connection may be silent before it counts as failed
    """

    seconds: float = 120.0
    silence_seconds: float = 30.0
    first_delay_seconds: float = 0.2

    def delays(self) -> Iterator[float]:
        """Seconds before each repetition."""
        longest = self.first_delay_seconds
        while True:
            yield random.uniform(longest / 2, longest)
            longest = min(2 * longest, _LONGEST_DELAY_SECONDS)


class Beyond(Exception):
    """An object ends before what was asked for begins."""


class FailureKind(Enum):
    """What a failure means."""

    MISSING = "there is no such object"
    BEYOND = "the object is shorter"
    NO_BUCKET = "there is no such bucket"
    EXISTS = "there is such an object already"
    DENIED = "the credentials do not suffice"
    REFUSED = "the request is wrong, and would be again"
    TRANSIENT = "it may go well the next time"


def verdict(error: BaseException) -> FailureKind:
    """What a failure of s3fs, gcsfs or what they are built on means; anything unknown may pass."""
    code, number = _answer(error)
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


def words_of(error: BaseException) -> str:
    """What a store said, in one short line."""
    text = " ".join(str(error).split()) or type(error).__name__
    code, _ = _answer(error)
    said = text if not code or code.isdigit() or code in text else f"{code}: {text}"
    return said[:_SHOWN_CHARACTERS].rstrip(".")


def call_with_retries(url: str, patience: RetryPolicy, request: Callable[[], T]) -> T:
    """What a request returns, in the end.

    Raises `FileNotFoundError`, `FileExistsError` and `Beyond` as they are, and `StoreError` for what cannot be helped.
    """
    delays, until = patience.delays(), None
    while True:
        try:
            return request()
        except Exception as error:
            found = verdict(error)
            if found is FailureKind.MISSING:
                raise FileNotFoundError(url) from error
            if found is FailureKind.EXISTS:
                raise FileExistsError(url) from error
            if found is FailureKind.BEYOND:
                raise Beyond(url) from error
            if found is not FailureKind.TRANSIENT:
                raise _refusal(url, found, error) from error
            delay, now = next(delays), time.monotonic()
            until = until or now + patience.seconds
            if now + delay > until:
                raise StoreError(
                    f"{url}: the store did not answer as it should for {patience.seconds:g} s ({words_of(error)}).",
                    "Nothing that was written before is lost: give the same command again when it is back.",
                ) from error
        time.sleep(delay)


def _refusal(url: str, found: FailureKind, error: BaseException) -> StoreError:
    scheme = url.partition("://")[0]
    bucket = "/".join(url.split("/")[:3])
    if found is FailureKind.NO_BUCKET:
        return StoreError(f"{url}: there is no bucket {bucket}.", "Make it, or correct the name.")
    if found is FailureKind.REFUSED:
        return StoreError(f"{url}: the store refused the request ({words_of(error)}).")
    sources = {
        "s3": "the AWS_ variables, ~/.aws, or the role of the machine",
        "gs": "GOOGLE_APPLICATION_CREDENTIALS, `gcloud auth application-default login`, or the machine's account",
    }
    return StoreError(
        f"{url}: the store refused access ({words_of(error)}).",
        f"The credentials come from {sources[scheme]}: renew them, or let them read and write {bucket}, and give the "
        f"same command again.",
    )


def _chain(error: BaseException) -> Iterator[BaseException]:
    cause: BaseException | None = error
    while cause is not None:
        yield cause
        cause = cause.__cause__


def _answer(error: BaseException) -> tuple[str, int]:
    """A store's own code and the number of HTTP, as far as the error or what caused it holds them: "" and 0."""
    for each in _chain(error):
        response: Any = getattr(each, "response", None)
        if isinstance(response, dict):  # botocore
            number = response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
            return str(response.get("Error", {}).get("Code", "")), number
        if name := _NUMBERS.get(type(each).__name__):
            found = str(getattr(each, name, ""))
            return "", int(found) if found.isdigit() else 0
    return "", 0
