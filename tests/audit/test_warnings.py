"""Warnings that the compiler writes to standard error from C++."""

import os

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from tests.audit.warnings import captured_compiler_warnings

pytestmark = pytest.mark.usefixtures("compiled_anew")  # plans tell what the compiler warns of


def compile_resharding(mesh, middle):
    """A tensor that goes from one sharding to another; some ways the partitioner knows only by gathering it all."""

    def step(x):
        y = jax.lax.with_sharding_constraint(jnp.sin(x), NamedSharding(mesh, middle))
        return jax.lax.with_sharding_constraint(jnp.cos(y), NamedSharding(mesh, P(None, ("model", "replica"))))

    x = jax.ShapeDtypeStruct((16, 16), jnp.float32, sharding=NamedSharding(mesh, P("replica", "data")))
    return jax.jit(step).lower(x).compile()


def test_an_involuntary_rematerialization_is_caught_and_handed_on(mesh, capfd):
    with captured_compiler_warnings() as caught:
        compile_resharding(mesh, P("data"))
    assert len(caught.rematerializations) == 1
    assert "sharding_constraint" in caught.rematerializations[0]
    assert "Involuntary full rematerialization" in capfd.readouterr().err


def test_a_clean_program_has_none(mesh):
    with captured_compiler_warnings() as caught:
        compile_resharding(mesh, P(None, ("model", "replica")))
    assert caught.rematerializations == []


def test_standard_error_is_restored_after_an_error(capfd):
    caught = None

    def fail():
        nonlocal caught
        with captured_compiler_warnings() as caught:
            os.write(2, b"W0101 a warning\nplain line\n")
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    os.write(2, b"afterwards\n")
    assert caught is not None
    assert caught.lines == ["W0101 a warning"]
    assert capfd.readouterr().err == "W0101 a warning\nplain line\nafterwards\n"
