"""An island from a configuration, what is refused, and what methods say of a run before it begins."""

from dataclasses import replace

import jax
import numpy as np
import optax
import pytest

from gregale.axes.mapping import standard_layout
from gregale.axes.mesh import MeshConfig, make_mesh
from gregale.codecs.config import ReduceConfig
from gregale.communication.shards import host_device
from gregale.errors import UserError
from gregale.methods.config import OUTER, DilocoConfig, MethodContext, PsdpConfig, StreamingDilocoConfig, SyncConfig
from gregale.optim import SgdConfig
from tests.mesh.support import layout_of
from tests.methods.islands import psdp_on

FOUR_BITS = ReduceConfig(codec="int4")


def parts(layout=None, reduce=FOUR_BITS) -> MethodContext:
    return MethodContext(layout or layout_of(replica=2), psdp_on, reduce, steps=100, seed=0)


@pytest.mark.parametrize(
    ("config", "mixing"),
    [(DilocoConfig(period=5), 0.0), (StreamingDilocoConfig(period=6, fragments=3, delay=1, alpha=0.25), 0.25)],
    ids=["diloco", "streaming"],
)
def test_an_island_has_what_the_mesh_method_has(config, mixing):
    """But its layout: its own whole mesh, whose replicas average in every step."""
    island, mesh = config.island(parts()), config.build(parts()).chosen
    assert island.schedule == mesh.schedule
    assert island.mixing == mesh.mixing == mixing
    assert island.reduce == mesh.reduce == FOUR_BITS
    assert island.inner.layout == parts().layout
    gradient = {"weight": np.ones(3, np.float32)}
    updates = [each.outer.update(gradient, each.outer.init(gradient), gradient)[0] for each in (island, mesh)]
    np.testing.assert_array_equal(*(each["weight"] for each in updates))


@pytest.mark.parametrize(
    ("config", "given", "says"),
    [
        (PsdpConfig(), parts(), "sync.type is 'psdp'.*diloco or streaming_diloco"),
        (DilocoConfig(warmup_steps=3), parts(), "sync.warmup_steps is 3.*Set it to 0"),
        (DilocoConfig(dropout=0.5), parts(), "sync.dropout is 0.5.*Set it to 0"),
        (DilocoConfig(), parts(reduce=replace(FOUR_BITS, measure=True)), "reduce.measure is true.*Set it to false"),
        (
            DilocoConfig(),
            parts(standard_layout(make_mesh(MeshConfig(island=2), jax.devices()[:2]))),
            "mesh.island is 2.*set mesh.island to 1",
        ),
    ],
    ids=["psdp", "warm-up", "dropout", "measure", "islands in a mesh"],
)
def test_what_only_one_mesh_can_do_is_refused(config, given, says):
    with pytest.raises(UserError, match=says):
        config.island(given)


def test_an_island_of_many_hosts_does_not_clip_by_the_norm_of_a_part(monkeypatch):
    config = DilocoConfig(outer=SgdConfig(clip_norm=1.0))
    assert isinstance(config.island(parts()).outer, optax.GradientTransformationExtraArgs)
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    with pytest.raises(UserError, match=r"sync.outer.clip_norm is 1.*2 hosts.*null"):
        config.island(parts())


def test_without_the_processor_there_is_one_clear_line(monkeypatch):
    def none(backend):
        raise RuntimeError(f"Unknown backend {backend}")

    monkeypatch.setattr(jax, "local_devices", none)
    monkeypatch.setenv("JAX_PLATFORMS", "cuda")
    with pytest.raises(UserError, match="JAX_PLATFORMS=cuda,cpu"):
        host_device()


PLAIN_AVERAGE = replace(OUTER, learning_rate=1.0, momentum=0.0, nesterov=False)


def test_a_run_of_few_rounds_with_the_default_outer_optimizer_is_told_of_the_plain_average():
    (said,) = DilocoConfig(period=30, warmup_steps=90).notes(layout_of(data=8), 690, is_island=True)
    assert said.startswith("This run has 20 rounds, ")
    assert "sync.outer.learning_rate 1, sync.outer.momentum 0 and sync.outer.nesterov false" in said


def test_a_single_replica_is_allowed_and_said():
    (said,) = DilocoConfig(period=4).notes(layout_of(data=8), 12)
    assert said == (
        "sync.type is diloco, but mesh.replica is 1: there is no other replica to be joined with, so the outer "
        "optimizer moves this one by itself, every 4 steps."
    )


@pytest.mark.parametrize(
    "sync",
    [DilocoConfig(period=6), DilocoConfig(period=30, outer=PLAIN_AVERAGE), PsdpConfig()],
    ids=["many rounds", "chosen", "psdp"],
)
def test_others_are_not(sync: SyncConfig):
    assert sync.notes(layout_of(replica=2, data=4), 600) == []
