"""The compiled step of the quickstart itself, as `gregale train config/quickstart.yaml` compiles it."""

from pathlib import Path

import jax
import pytest

from gregale.audit import audit
from gregale.axes.layout import is_named
from gregale.data.tokenizers import vocabulary_size
from gregale.programs.plan.shapes import abstract_batch
from gregale.programs.run.setup import set_up
from gregale.services.config import TrainConfig
from gregale.services.parsing import load
from tests.audit.warnings import captured_compiler_warnings

pytestmark = pytest.mark.usefixtures("compiled_anew")  # plans tell what the compiler warns of

QUICKSTART = Path(__file__).parents[2] / "config" / "quickstart.yaml"
LARGEST_SCALAR_BYTES = 64


@pytest.fixture(scope="module")
def compiled():
    config = load(TrainConfig, QUICKSTART)
    setup = set_up(config, vocabulary_size(config.data.tokenizer))
    program = setup.stepper().program.lower(setup.abstract_state(), abstract_batch(setup))
    with captured_compiler_warnings() as warnings:
        step = program.compile()
    return setup, audit(step, setup.layout.mesh), warnings


def test_nothing_crosses_replica_inside_the_microbatch_loop(compiled):
    _, found, _ = compiled
    assert not [each for each in found.over("replica") if each.loop]
    assert [each for each in found.over("data") if each.loop], "the check finds what is there"


def test_what_crosses_replica_is_the_closed_form(compiled):
    """One reduce-scatter and one all-gather of each parameter's shard: 1 / (data x model) of it, in float32."""
    setup, found, _ = compiled
    layout, expected = setup.layout, []
    for leaf in jax.tree.leaves(setup.model, is_leaf=is_named):
        size = 4 * leaf.size
        for axis in layout.mesh_axes(leaf.axes, layout.params):
            size //= layout.mesh.shape[axis]
        expected.append(size)
    over = [each for each in found.over("replica") if each.bytes > LARGEST_SCALAR_BYTES]
    for kind in ("reduce-scatter", "all-gather"):
        assert sorted(each.bytes for each in over if each.kind == kind) == sorted(expected)
    assert len(over) == 2 * len(expected)


def test_the_partitioner_had_no_trouble(compiled):
    _, found, warnings = compiled
    assert not [each for each in found.collectives if each.kind == "collective-permute"]
    assert not warnings.rematerializations
