"""What compiled steps send, and that they cross `replica` once a step."""

from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from gregale.axes.layout import MappingConfig, MeshConfig
from gregale.axes.parameters import trainable
from gregale.cost import audit
from gregale.cost.memory import bytes_on_device
from gregale.cost.work import work_of
from gregale.methods.config import DilocoConfig
from gregale.model.config import BalanceConfig, ExpertsConfig, LoraConfig
from gregale.model.llama import GptOssConfig
from gregale.objectives import DpoConfig
from gregale.optim import AdamWConfig, GroupConfig, MuonConfig
from gregale.programs.plan.step import known_trips
from gregale.programs.runtime.build import set_up
from gregale.runs.config import TrainConfig
from gregale.runs.parsing import load
from tests.cost.steps import audited, compiled_text, products_of, small_setup, traced_step
from tests.cost.warnings import rematerializations
from tests.sent import assert_sends_as_recorded

pytestmark = pytest.mark.usefixtures("compiled_anew")  # for what the compiler warns of

EXPERTS = ExpertsConfig(8, 2, width=16, balance=BalanceConfig(loss=0.1, z_loss=0.01, bias=True))
EXCHANGED = MappingConfig(compute={"experts": "data"})
QUICKSTART = Path(__file__).parents[2] / "config" / "quickstart.yaml"
OVER_HEADS = {"norms": "after", "qk_norm": True, "qk_norm_over": "heads"}
BIASES = {"qk_norm": True, "attention_bias": True}
SPREAD = {
    "bfloat16, biases, norms of heads, tied head": (
        *((2, 2, 2), 2, {"dtype": "bfloat16", "remat": "context"}),
        {**BIASES, "tied_head": True},
    ),
    "gathered once a step, norms after, and over heads": (
        *((1, 2, 4), 4, {"remat": "none", "gather": "per_step"}),
        {**OVER_HEADS, "kv_heads": 4},
    ),
    "norms after, and over heads, recomputed, 8 bits": (
        *((2, 2, 2), 2, {"remat": "full", "matmul": "int8"}),
        OVER_HEADS,
    ),
    "no tensor parallelism, layers unrolled": ((2, 4, 1), 2, {"remat": "full", "unroll": 3}),
    "experts, a weighed MLP beside them, and layers without": (
        *((2, 2, 2), 2, {"dtype": "bfloat16", "remat": "full"}),
        {"experts": replace(EXPERTS, shared=24, shared_gate=True), "layers": 6, "dense_layers": 3},
    ),
    "experts, norms after, 8 bits": (
        *((2, 2, 2), 1, {"remat": "context", "matmul": "int8"}),
        {"experts": replace(EXPERTS, shared=24), "norms": "after"},
    ),
    "gpt-oss": ((2, 2, 2), 2, {"dtype": "bfloat16", "remat": "full"}),
    "experts, exchanged, norms after, tied": (
        *((2, 2, 2), 1, {"remat": "full"}),
        {"experts": replace(EXPERTS, shared=24, shared_gate=True), "norms": "after"},
        {"mapping": EXCHANGED},
    ),
    "experts, exchanged, and layers without": (
        *((2, 4, 1), 4, {"dtype": "bfloat16", "remat": "none"}),
        {"experts": EXPERTS, "layers": 4, "dense_layers": 2},
        {"mapping": EXCHANGED},
    ),
    "experts, exchanged, sequences shared": (
        *((2, 2, 1), 2, {"remat": "full"}),
        {"experts": EXPERTS},
        {"mapping": EXCHANGED, "mesh": MeshConfig(context=2, data=2)},
    ),
    "no FSDP, groups, a limit of the direction's norm, a z-loss": (
        *((4, 1, 2), 1, {"remat": "projections"}, {"z_loss": 0.01}),
        {"optimizer": AdamWConfig(clip_update_norm=1.0, groups=(GroupConfig("layer.1.*", learning_rate=0.5),))},
    ),
    "adapters beside weights in 4 bits, and experts": (
        *((2, 2, 2), 2, {"dtype": "bfloat16", "remat": "full"}),
        {"hidden": 128, "head_size": 32, "heads": 4, "experts": replace(EXPERTS, balance=BalanceConfig(loss=0.1))},
        {"adapter": LoraConfig(rank=8, targets=("query", "out"), base="nf4"), "start_from": "a model"},
    ),
    "DPO beside a copy": (
        *((2, 2, 2), 1, {"remat": "context"}, {}),
        {"objective": DpoConfig(), "start_from": "a model"},
    ),
    "DPO, adapters, exchanged experts with an MLP beside them, sequences shared": (
        *((1, 2, 2, 2), 1, {"remat": "full"}),
        {"experts": replace(EXPERTS, shared=24, balance=BalanceConfig(loss=0.1)), "layers": 2},
        {
            "objective": DpoConfig(),
            "adapter": LoraConfig(rank=8, targets=("query", "out")),
            "start_from": "a model",
            "mapping": EXCHANGED,
            "mesh": MeshConfig(context=2, data=2, model=2),
        },
    ),
    "Muon, but for a matrix of AdamW, biases, norms of heads, replicas that DiLoCo joins": (
        *((2, 2, 2), 1, {}, {"layers": 5, **BIASES}),
        {"optimizer": MuonConfig(iterations=1, adamw="*.gate.*"), "sync": DilocoConfig()},
    ),
}


@pytest.mark.parametrize("name", ["the quickstart itself", *SPREAD])
def test_a_compiled_step_sends_as_recorded(name):
    setup = small_setup(*SPREAD[name]) if name in SPREAD else set_up(load(TrainConfig, QUICKSTART), 257)
    if name == "gpt-oss":
        model = GptOssConfig(layers=4, hidden=32, heads=8, kv_heads=4, vocabulary=320, experts=EXPERTS)
        setup = set_up(replace(setup.config, model=model), 257, setup.layout.mesh)
    step = traced_step(setup)
    with rematerializations() as warnings:
        text = compiled_text(step)
    found = audit(text, setup.layout.mesh, known_trips(setup))
    assert not warnings
    assert not [each for each in found.over("replica") if each.loop]
    rings = [each for each in found.collectives if each.kind == "collective-permute"]
    assert setup.layout.context > 1 or setup.config.adapter is not None or not rings
    if name not in SPREAD:
        assert [each for each in found.over("data") if each.loop], "the check finds what is there"
    assert_sends_as_recorded(found)
    assert products_of(text, setup) == pytest.approx(work_of(step.jaxpr).flops, rel=0.06), "as the walk over the jaxpr"


def test_a_rematerialization_would_be_found(mesh):
    """A tensor that goes from one sharding to another in a way that the partitioner knows only by gathering it all."""

    def step(x):
        y = jax.lax.with_sharding_constraint(jnp.sin(x), NamedSharding(mesh, P("data")))
        return jax.lax.with_sharding_constraint(jnp.cos(y), NamedSharding(mesh, P(None, ("model", "replica"))))

    x = jax.ShapeDtypeStruct((16, 16), jnp.float32, sharding=NamedSharding(mesh, P("replica", "data")))
    with rematerializations() as caught:
        jax.jit(step).lower(x).compile()
    assert len(caught) == 1
    assert "sharding_constraint" in caught[0]


@pytest.mark.parametrize("microbatches", [1, 4])
def test_replica_carries_every_gradient_once_whatever_the_microbatches(microbatches):
    """2 * 4 bytes a parameter of the device's shard, and the loss and its weight; two replicas send half of each."""
    setup = small_setup((2, 2, 2), microbatches)
    far = [each for each in audited(setup).collectives if each.axes == ("replica",)]
    shards = bytes_on_device(setup.layout.abstract(trainable(setup.model), setup.layout.params))
    assert sum(each.bytes for each in far) == 2 * shards + 2 * 4
    assert setup.method.bytes_sent(1) == shards
