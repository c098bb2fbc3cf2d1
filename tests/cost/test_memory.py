import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from gregale.axes.parameters import trainable
from gregale.cost.memory import bytes_on_device, compiler_memory
from gregale.model.config import TARGETS, LoraConfig
from gregale.objectives import DpoConfig
from gregale.programs.plan.estimates import ParameterUse, parameter_use, tree_bytes
from gregale.runs.config import BatchConfig
from tests.cost.steps import small_setup

WIDE = {"layers": 4, "hidden": 256, "heads": 4, "kv_heads": 2, "head_size": 64, "mlp": 1024, "vocabulary": 4096}


def test_bytes_on_a_device_follow_the_sharding():
    mesh = Mesh(np.array(jax.devices()[:8]).reshape(4, 2), ("a", "b"))
    split = jax.ShapeDtypeStruct((8, 6), "float32", sharding=NamedSharding(mesh, P("a", "b")))
    copied = jax.ShapeDtypeStruct((5,), "int32", sharding=NamedSharding(mesh, P()))
    assert bytes_on_device({"x": split, "y": [copied, None]}) == 2 * 3 * 4 + 5 * 4


def test_state_and_batch_are_the_compiled_programs_arguments():
    setup = small_setup((2, 2, 2))
    trees = tree_bytes(setup)
    state = jax.jit(lambda state: state, donate_argnums=0).lower(setup.abstract_state()).compile()
    assert compiler_memory(state).arguments == trees.state
    assert compiler_memory(state).peak == pytest.approx(trees.state, rel=0.01)
    assert trees.batch == 5 * 32 * 16 * 4 // 4, "five arrays, split over four devices"


@pytest.mark.parametrize("base", ["dtype", "nf4"])
def test_frozen_weights_take_their_bits(base):
    others = {"adapter": LoraConfig(rank=16, targets=TARGETS, base=base), "start_from": "a model"}
    setup = small_setup((1, 2, 1), 1, model=WIDE, others={**others, "batch": BatchConfig(8, 256)})
    matrices, rest = 4 * (2 * 256 * 256 + 2 * 256 * 128 + 3 * 256 * 1024), 2 * 4096 * 256 + 9 * 256
    held = 4.25 / 8 * matrices if base == "nf4" else 4 * matrices
    assert tree_bytes(setup).frozen == (held + 4 * rest) / 2
    assert tree_bytes(setup).gradients == 4 * 16 * 4 * (2 * (256 + 256) + 2 * (256 + 128) + 3 * (256 + 1024)) / 2


def test_a_copy_takes_the_bytes_of_the_parameters():
    found = tree_bytes(small_setup((1, 2, 1), 1, others={"objective": DpoConfig(), "start_from": "a model"}))
    assert found.frozen == found.parameters
    assert found.counters < 64, "counts of steps alone"


@pytest.mark.parametrize(("gather", "passes"), [("per_layer", 4), ("per_step", 1)])
def test_weights_are_gathered_forward_and_backward_of_each_microbatch_or_once(gather, passes):
    """On data 2 half of each weight comes from the other device, and half of each microbatch's gradient goes there."""
    setup = small_setup((1, 2, 1), 2, compute={"gather": gather, "dtype": "bfloat16"})
    half = sum(leaf.size for leaf in jax.tree.leaves(trainable(setup.model))) // 2
    found = parameter_use(setup)
    assert found == ParameterUse(2 * (passes + 2) * half, 2 * 3 * 2 * half, 4 * half * (gather == "per_step"))
