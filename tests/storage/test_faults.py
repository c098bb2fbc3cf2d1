"""Stores that are out of order, slow, cut off or that refuse: a proxy before the stand-ins makes them so."""

import os
import signal
import time
from dataclasses import replace

import pytest

from gregale.storage import RetryPolicy, StoreError, storage_path
from tests.stores import CREDENTIALS, Fault


@pytest.fixture(params=["s3", "gs"])
def failing(request):
    return request.getfixturevalue(f"failing_{request.param}")


@pytest.mark.parametrize("how", [503, 429, "cut", "lost", "slow"])
def test_what_passes_is_not_noticed(failing, how):
    folder, proxy = failing
    fault = Fault(how, 2 if how == 503 else 1, seconds=0.7)
    (folder / "x").write_bytes(b"0123456789" * 1000)
    requests = (
        lambda: (folder / "y").write_bytes(b"content"),
        lambda: (folder / "x").read_bytes() == b"0123456789" * 1000,
        lambda: (folder / "x").read_range(10, 20) == b"0123456789",
        lambda: sorted(folder.files_below()) == ["x", "y"],
        lambda: (folder / "y").status().size == 7,
    )
    for request in requests[: 2 if how == "slow" else None]:
        proxy.faults[:] = [met := replace(fault)]
        assert request() in (True, None)
        assert met.times == 0
    assert (folder / "y").read_bytes() == b"content"


def test_the_answer_of_a_creation_may_be_lost(failing):
    folder, proxy = failing
    proxy.faults[:] = [lost := Fault("lost", 1, "PUT")]
    assert (folder / "lock").create(b"mine")
    assert lost.times == 0
    assert not (folder / "lock").create(b"another's")
    assert (folder / "lock").read_bytes() == b"mine"


def test_what_does_not_pass_is_one_line_after_the_time_allowed(failing):
    folder, proxy = failing
    folder = replace(folder, retry_policy=RetryPolicy(seconds=0.4, first_delay_seconds=0.02))
    proxy.faults[:] = [Fault(503, 10_000)]
    began = time.monotonic()
    with pytest.raises(StoreError, match=r"x: the store did not answer as it should for 0.4 s \(.*\)\. Nothing"):
        (folder / "x").write_bytes(b"content")
    assert time.monotonic() - began < 30
    assert 2 <= len(proxy.seen) < 40, "asked again, later and later"
    proxy.faults.clear()
    assert not folder.exists()


def test_a_refusal_is_one_line_at_once(failing_s3, failing_gs):
    for how, words in (("expired", "token has expired"), ("denied", "Access Denied"), (401, ""), (403, "")):
        folder, proxy = failing_gs if isinstance(how, int) else failing_s3
        proxy.faults[:] = [Fault(how, 10_000)]
        proxy.seen.clear()
        with pytest.raises(StoreError) as caught:
            (folder / "x").write_bytes(b"content")
        assert len(proxy.seen) == 1
        said = str(caught.value)
        assert said.startswith(f"{folder}/x: the store refused access (")
        assert words in said
        bucket = str(folder).rpartition("/")[0]
        assert f"renew them, or let them read and write {bucket}, and give the same command again" in said
        assert "\n" not in said
        assert CREDENTIALS["AWS_SECRET_ACCESS_KEY"] not in said


@pytest.mark.parametrize(("how", "words"), [(301, ".* incorrectly configured region"), (501, "501: out of order")])
def test_another_region_and_what_a_store_cannot_do_are_one_line_at_once(failing_s3, how, words):
    folder, proxy = failing_s3
    proxy.faults[:] = [Fault(how, 10_000)]
    with pytest.raises(StoreError, match=rf"x: the store refused the request \({words}\)\."):
        (folder / "x").read_bytes()
    assert len(proxy.seen) == 1


def test_a_conflict_that_passes_is_no_object_that_exists(failing_s3):
    folder, proxy = failing_s3
    proxy.faults[:] = [Fault(409)]  # S3's answer while another request writes the same name
    assert (folder / "x").create(b"content")
    assert len(proxy.seen) == 2


def test_an_interrupt_ends_the_wait_for_an_answer(failing_s3):
    folder, proxy = failing_s3
    folder = replace(folder, retry_policy=RetryPolicy())
    proxy.faults[:] = [Fault("slow", seconds=20.0)]
    proxy.on_request = lambda: os.kill(os.getpid(), signal.SIGINT)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # `nohup` and a background job ignore it
    try:
        with pytest.raises(KeyboardInterrupt):
            (folder / "x").read_bytes()
    finally:
        signal.signal(signal.SIGINT, before)
    assert (len(proxy.seen), proxy.answered) == (1, 0)


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        ("Wanted range starting at 10, but object was only 10 bytes long", EOFError),
        ("409 Conflict: <Error><Code>BlobAlreadyExists</Code><Message>Is.</Message></Error>", FileExistsError),
        (
            "404 Not Found: <Error><Code>ContainerNotFound</Code><Message>None.</Message></Error>",
            "no bucket az://bucket",
        ),
        ("403 Forbidden: <Error><Code>AuthorizationFailure</Code><Message>No.</Message></Error>", "refused access"),
        ("503 Busy: <Error><Code>ServerBusy</Code><Message>Wait.</Message></Error>", "for 0 s (ServerBusy: Wait)"),
    ],
)
def test_answers_of_azure_have_the_same_meaning(answer, expected):
    """The texts are those that obstore makes of the answers of Microsoft's emulator."""

    def request():
        raise RuntimeError(f"Generic MicrosoftAzure error: PUT in 1ms - Server returned non-2xx status code: {answer}")

    with pytest.raises(StoreError if isinstance(expected, str) else expected) as caught:
        RetryPolicy(seconds=0.0).call("az://bucket/x", request)
    assert not isinstance(expected, str) or expected in str(caught.value)


def test_no_credentials_and_a_missing_bucket_are_one_line(s3, gs, monkeypatch, tmp_path):
    for scheme in ("s3", "gs"):
        with pytest.raises(StoreError, match=f"there is no bucket {scheme}://nowhere. Make it, or correct the name."):
            storage_path(f"{scheme}://nowhere/x").write_bytes(b"content")
    for name in CREDENTIALS:
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "none"))
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:1")  # a file system of its own, without credentials
    with pytest.raises(StoreError, match=r"the store refused access \(Unable to locate credentials\)"):
        (s3 / "x").write_bytes(b"content")


@pytest.mark.parametrize("scheme", ["gs", "az"])
def test_a_machine_without_an_identity_is_one_line_at_once(scheme, monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))  # without credentials of a user
    for name in ("STORAGE_EMULATOR_HOST", "GOOGLE_APPLICATION_CREDENTIALS"):
        monkeypatch.delenv(name, raising=False)
    for name in ("GCE_METADATA_HOST", "GCE_METADATA_IP"):
        monkeypatch.setenv(name, "127.0.0.1:1")
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_NAME", "account")
    monkeypatch.setenv("AZURE_MSI_ENDPOINT", "http://127.0.0.1:1/metadata/identity/oauth2/token")
    path = storage_path(f"{scheme}://{tmp_path.name.replace('_', '-')}/x", RetryPolicy(seconds=30))
    with pytest.raises(StoreError, match=r"refused access \(there are no credentials, and this machine has no"):
        path.read_bytes()
