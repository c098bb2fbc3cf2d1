"""The flags that XLA gets for CPU devices, and the memory that JAX takes of a GPU."""

from __future__ import annotations

import os

import jax
import pytest

from gregale.services.config import DistributedConfig
from gregale.services.devices import PATIENCE, WITHOUT_YNN, WITHOUT_YNN_BEFORE, start_devices, with_flags


def test_flags_are_added_and_a_users_own_stand():
    assert with_flags("").split() == [PATIENCE, WITHOUT_YNN]
    own = f"--xla_dump_to=here {WITHOUT_YNN}dot"
    assert with_flags(own).split() == [*own.split(), PATIENCE]
    assert with_flags(with_flags(own)) == with_flags(own)


def test_a_version_that_may_not_know_a_flag_does_not_get_it(monkeypatch: pytest.MonkeyPatch):
    assert jax.__version_info__ < WITHOUT_YNN_BEFORE, (
        "does it know the flag, and is it still of use? Then raise the bound"
    )
    monkeypatch.setattr(jax, "__version_info__", WITHOUT_YNN_BEFORE)
    assert with_flags("") == PATIENCE


@pytest.mark.parametrize(("given", "found"), [(None, "0.92"), ("0.5", "0.5")])
def test_jax_takes_most_of_a_gpu_unless_the_environment_says_otherwise(monkeypatch, given, found):
    monkeypatch.setenv("XLA_PYTHON_CLIENT_MEM_FRACTION", given or "")
    if given is None:
        monkeypatch.delenv("XLA_PYTHON_CLIENT_MEM_FRACTION")
    start_devices(None, DistributedConfig())
    assert os.environ["XLA_PYTHON_CLIENT_MEM_FRACTION"] == found
