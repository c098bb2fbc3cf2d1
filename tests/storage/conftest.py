"""Places in the stand-ins, and a proxy that fails when told to."""

import os

import pytest

from gregale.storage import RetryPolicy, storage_path
from tests.stores import proxied

# On a busy machine any answer may take half a second; what is asked again then is answered once.
QUICK = RetryPolicy(seconds=60.0, silence_seconds=0.5, first_delay_seconds=0.02)


@pytest.fixture
def failing_s3(s3, monkeypatch):
    """A folder of the S3 stand-in behind a proxy, and the proxy."""
    with proxied(os.environ["AWS_ENDPOINT_URL"]) as (endpoint, proxy):
        monkeypatch.setenv("AWS_ENDPOINT_URL", endpoint)
        yield storage_path(str(s3), QUICK), proxy


@pytest.fixture
def failing_gs(gs, monkeypatch):
    """A folder of the GCS stand-in behind a proxy, and the proxy."""
    with proxied(os.environ["STORAGE_EMULATOR_HOST"]) as (endpoint, proxy):
        monkeypatch.setenv("STORAGE_EMULATOR_HOST", endpoint)
        yield storage_path(str(gs), QUICK), proxy
