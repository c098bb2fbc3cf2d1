"""Which rounds an island keeps on its disk or in its store."""

from __future__ import annotations

import jax.numpy as jnp
import pytest

from gregale.checkpoint.store import Checkpoints
from gregale.programs.island.loop import rounds_of
from gregale.storage import StoreError
from tests.stores import Fault, proxied


def test_no_round_of_a_checkpoint_is_forgotten_while_the_store_does_not_tell(s3, s3_endpoint, monkeypatch):
    with Checkpoints(s3 / "checkpoints", report=lambda _: None) as checkpoints:
        for step, metadata in ((10, {"islands": {"round": 4}}), (20, {})):
            checkpoints.save(step, {"x": jnp.zeros(1)}, metadata)
        checkpoints.wait()
        assert rounds_of(checkpoints) == {4}
    with proxied(s3_endpoint) as (endpoint, proxy):
        monkeypatch.setenv("AWS_ENDPOINT_URL", endpoint)
        proxy.faults[:] = [Fault("denied", 1000, "GET", "metadata.json")]
        with Checkpoints(s3 / "checkpoints") as checkpoints, pytest.raises(StoreError):
            rounds_of(checkpoints)
