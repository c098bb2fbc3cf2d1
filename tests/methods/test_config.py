"""An island from a configuration, what is refused, and what methods say of a run before it begins."""

from dataclasses import dataclass, replace

import draccus
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from gregale.axes.layout import MeshConfig, make_mesh, standard_layout
from gregale.axes.parameters import trainable
from gregale.codecs.codec import ReduceConfig
from gregale.errors import UserError
from gregale.islands.method import Island, as_island, methods_of_island
from gregale.islands.shards import host_device
from gregale.methods.config import OUTER, DilocoConfig, MethodContext, PsdpConfig, StreamingDilocoConfig, SyncConfig
from gregale.methods.diloco import Diloco
from gregale.optim import AdamWConfig, GroupConfig, LinearSchedule, MuonConfig, OptimizerConfig, SgdConfig
from gregale.programs.runtime.build import set_up
from gregale.runs.config import TrainConfig
from gregale.runs.parsing import load
from gregale.settings.decoding import TYPE_NAMES, entries
from tests.mesh.support import layout_of
from tests.methods.islands import psdp_on

FOUR_BITS = ReduceConfig(codec="int4")


def island_of(config: SyncConfig, given: MethodContext) -> Island:
    return as_island(methods_of_island(config, given).chosen)


def parts(layout=None, reduce=FOUR_BITS) -> MethodContext:
    return MethodContext(layout or layout_of(replica=2), psdp_on, reduce, steps=100, seed=0)


@pytest.mark.parametrize(
    ("config", "mixing"),
    [(DilocoConfig(period=5), 0.0), (StreamingDilocoConfig(period=6, fragments=3, delay=1, alpha=0.25), 0.25)],
    ids=["diloco", "streaming"],
)
def test_an_island_has_what_the_mesh_method_has(config, mixing):
    """But its layout: its own whole mesh, whose replicas average in every step."""
    island, mesh = island_of(config, parts()), config.build(parts()).chosen
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
        (StreamingDilocoConfig(period=9, delay=3), parts(), "sync.delay is 3, .* = 9 / 4 steps.*Set .* to at most 2"),
        (DilocoConfig(dropout=0.5), parts(), "sync.dropout is 0.5.*Set it to 0"),
        (DilocoConfig(), parts(reduce=replace(FOUR_BITS, measure=True)), "reduce.measure is true.*Set it to false"),
        (
            DilocoConfig(),
            parts(standard_layout(make_mesh(MeshConfig(island=2), jax.devices()[:2]))),
            "mesh.island is 2.*set mesh.island to 1",
        ),
    ],
    ids=["psdp", "warm-up", "delay", "dropout", "measure", "islands in a mesh"],
)
def test_what_only_one_mesh_can_do_is_refused(config, given, says):
    with pytest.raises(UserError, match=says):
        island_of(config, given)


LINE = SgdConfig(learning_rate=1.0, momentum=0.0, clip_norm=None, schedule=LinearSchedule())


@pytest.mark.quick
@pytest.mark.parametrize(
    ("config", "steps", "rates"),
    [
        (DilocoConfig(period=2, warmup_steps=4, outer=LINE), 8, [1, 1 / 2]),
        (DilocoConfig(period=2, outer=LINE), 3, [1, 1 / 2]),
        (DilocoConfig(period=4, warmup_steps=6, outer=LINE), 17, [1, 3 / 4, 1 / 2, 1 / 4]),
        (DilocoConfig(period=4, warmup_steps=2, outer=LINE).between(8, 17), 99, [1, 2 / 3, 1 / 3]),
        (StreamingDilocoConfig(period=4, fragments=2, delay=1, outer=LINE), 8, [1, 2 / 3, 1 / 3]),
        (DilocoConfig(period=2, outer=replace(LINE, schedule=LinearSchedule(begin=1, end=3))), 99, [1, 1, 1 / 2]),
    ],
    ids=["warm-up", "the end", "both", "a stage", "streaming", "outer steps of its own"],
)
def test_a_line_to_zero_reaches_it_after_the_last_outer_step(config, steps, rates):
    """Those that happen: after the warm-up or the beginning of a stage, with the one at the end if there is any."""
    context = MethodContext(layout_of(replica=2), psdp_on, ReduceConfig(), steps=steps, seed=0)
    outer, one, found = config.build(context).chosen.outer, {"weight": np.ones(3, np.float32)}, []
    state = outer.init(one)
    for _ in range(len(rates) + 1):
        update, state = outer.update(one, state, one)
        found.append(-update["weight"][0])
    np.testing.assert_allclose(found, [*rates, 0], atol=1e-6)


@pytest.mark.quick
def test_outer_steps_that_begin_elsewhere_than_their_schedule_are_refused():
    DilocoConfig(warmup_steps=4, outer=LINE).check_begins(4)
    DilocoConfig(outer=LINE).between(9, None).check_begins(9)
    DilocoConfig().check_begins(9)
    for config, step in ((DilocoConfig(outer=LINE), 9), (DilocoConfig(outer=LINE).between(9, None), 0)):
        begin = config.begin
        with pytest.raises(UserError, match=rf"sync.begin is {begin}, but .* after step {step}, .* Set it to {step}"):
            config.check_begins(step)


def documented() -> list[tuple[str, ...]]:
    """The arguments of every choice of methods, optimizers, their schedules and codecs in the reference of keys."""
    found = []
    for entry in entries(TrainConfig):
        names = [name for name in entry.type.split(" | ") if name not in TYPE_NAMES.values()]
        if len(names) > 1 and entry.key.startswith(("optimizer.", "sync.", "reduce.")):
            key, _, of = entry.choice.partition(" ")
            above = {} if entry.key.startswith("optimizer.") else {"sync.type": "diloco"}
            above |= {key: of.split(", ")[0]} if key else {}
            found += [tuple(f"--{key}={value}" for key, value in (above | {entry.key: name}).items()) for name in names]
    return list(dict.fromkeys(found))


@pytest.mark.parametrize("arguments", documented(), ids=lambda arguments: " ".join(arguments))
def test_every_documented_choice_works_with_its_documented_defaults(arguments):
    """A step without a gradient leaves what the outer optimizer moves as it is."""
    model = {"type": "llama", "layers": 3, "hidden": 32, "heads": 1, "kv_heads": 1, "mlp": 8}
    given = {"name": "a", "steps": 9, "model": model, "mesh": {"replica": 2}, "batch": {"size": 2}}
    config = load(TrainConfig, given, arguments)
    assert load(TrainConfig, draccus.encode(config)) == config, "as a run's config.yaml has it"
    setup = set_up(config, 64, layout_of(replica=2).mesh)
    jax.eval_shape(lambda model: setup.psdp.optimizer.whole().init(trainable(model)), setup.model)
    if isinstance(setup.method, Diloco):
        outer, one = setup.method.outer, {"weight": jnp.ones(3)}
        still, moved = (outer.update({"weight": jnp.full(3, slope)}, outer.init(one), one)[0] for slope in (0.0, 1.0))
        np.testing.assert_array_equal(still["weight"], 0)
        assert np.all(moved["weight"] < 0)


def test_an_outer_optimizer_does_not_decay():
    for outer, told in (
        (AdamWConfig(), r"sync.outer.weight_decay is 0.1: .* Set it to 0"),
        (replace(LINE, groups=(GroupConfig("up", weight_decay=0.2),)), r"sync.outer.groups.0.weight_decay is 0.2: "),
    ):
        with pytest.raises(UserError, match=told):
            DilocoConfig(outer=outer)


@dataclass(frozen=True)
class OwnMuonConfig(MuonConfig):
    """A plugin's."""


@pytest.mark.parametrize(("name", "kind"), [("muon", MuonConfig), ("own", OwnMuonConfig)])
def test_an_outer_optimizer_that_needs_whole_matrices_is_refused_with_the_reason(monkeypatch, name, kind):
    monkeypatch.setitem(OptimizerConfig.get_known_choices(), name, kind)
    why = "it needs whole matrices, and the outer optimizer runs on shards of the parameters. adamw, lion, sgd would"
    with pytest.raises(UserError, match=f"^sync.outer.type is '{name}': {why}"):
        DilocoConfig(outer=kind(weight_decay=0.0))
    with pytest.raises(UserError, match=rf"^sync.outer.type is '{name}' \(as a keyword\): {why}"):
        load(TrainConfig, {"name": "a", "steps": 9}, keywords={"sync": {"type": "diloco", "outer": {"type": name}}})


def test_an_island_of_many_hosts_does_not_clip_by_the_norm_of_a_part(monkeypatch):
    config = DilocoConfig(outer=SgdConfig(clip_norm=1.0))
    assert isinstance(island_of(config, parts()).outer, optax.GradientTransformationExtraArgs)
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    with pytest.raises(UserError, match=r"sync.outer.clip_norm is 1.*2 hosts.*null"):
        island_of(config, parts())


def test_without_the_processor_there_is_one_clear_line(monkeypatch):
    def none(backend):
        raise RuntimeError(f"Unknown backend {backend}")

    monkeypatch.setattr(jax, "local_devices", none)
    monkeypatch.setenv("JAX_PLATFORMS", "cuda")
    with pytest.raises(UserError, match="JAX_PLATFORMS=cuda,cpu"):
        host_device()


PLAIN_AVERAGE = replace(OUTER, learning_rate=1.0, momentum=0.0, nesterov=False)


def test_a_single_replica_is_allowed_and_said():
    (said,) = DilocoConfig(period=4).notes(layout_of(data=8), 12)
    assert said == (
        "sync.type is diloco, but mesh.replica is 1: there is no other replica to be joined with, so the outer "
        "optimizer moves this one by itself, every 4 steps."
    )


@pytest.mark.parametrize(
    "sync",
    [DilocoConfig(period=6), DilocoConfig(period=30, outer=PLAIN_AVERAGE), PsdpConfig()],
    ids=["default", "chosen", "psdp"],
)
def test_others_are_not(sync: SyncConfig):
    assert sync.notes(layout_of(replica=2, data=4), 600) == []


@pytest.mark.parametrize(
    ("sync", "steps", "is_joined", "said"),
    [
        (DilocoConfig(period=2, outer=PLAIN_AVERAGE), 3, False, "after step 2 of 3. Evaluations, samples, exp"),
        (DilocoConfig(period=2, outer=PLAIN_AVERAGE), 3, True, "after step 2 of 3. The fleet's run ends with one"),
        (
            StreamingDilocoConfig(period=8, delay=1, outer=PLAIN_AVERAGE),
            16,
            False,
            "after step 16 of 16, one fragment of 4 at a time. Evaluations",
        ),
    ],
    ids=["diloco", "a fleet", "streaming"],
)
def test_a_run_that_does_not_end_on_a_synchronisation_says_so(sync: SyncConfig, steps, is_joined, said):
    (found,) = sync.notes(layout_of(replica=2, data=4), steps, is_joined)
    assert found.startswith(f"The last synchronisation comes {said}")
