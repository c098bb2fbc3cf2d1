"""Meshes and stored programs that several tests of the audit read."""

from pathlib import Path

import jax
import numpy as np
import pytest
from jax.sharding import Mesh

from tests.mesh.support import Device

AXES = ("replica", "data", "model")


@pytest.fixture(scope="session")
def mesh():
    return Mesh(np.array(jax.devices()[:8]).reshape(2, 2, 2), AXES)


@pytest.fixture(scope="session")
def pod():
    """A mesh of devices with the ids of TPU slices: `pod(sizes, slices)`, slices along the first axis."""

    def make(sizes, slices=1, names=AXES):
        count = int(np.prod(sizes))
        each = count // slices
        ids = [100000 * (place // each + 1) + place % each for place in range(count)]
        devices = [Device(number, 0, place // each, "tpu") for place, number in enumerate(ids)]
        return Mesh(np.array(devices, dtype=object).reshape(sizes), names)

    return make


@pytest.fixture(scope="session")
def boxes():
    """A mesh of boxes of GPUs: `boxes(sizes, names)`, one along the first axis each."""

    def make(sizes, names):
        each = int(np.prod(sizes[1:]))
        devices = [Device(place, place // each, 0) for place in range(int(np.prod(sizes)))]
        return Mesh(np.array(devices, dtype=object).reshape(sizes), names)

    return make


def stored_program(name: str) -> str:
    """The text of a program of `fixtures`: of a compiler, or written by hand."""
    return (Path(__file__).parent / "fixtures" / f"{name}.txt").read_text()


@pytest.fixture(scope="session")
def stored():
    return stored_program


@pytest.fixture(scope="session")
def summary():
    """What is compared of the collectives of an audit, in any order."""

    def summarize(collectives):
        return sorted((c.kind, c.dtype, c.bytes, c.axes, c.times, len(c.loop)) for c in collectives)

    return summarize
