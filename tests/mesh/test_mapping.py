"""Mappings of one's own: gradients are those of one device, and nothing crosses `replica` in a loop."""

import re
from dataclasses import replace
from functools import cache
from itertools import count
from pathlib import Path

import jax
import numpy as np
import pytest
import yaml
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from gregale.axes.layout import REPLICA, MappingConfig, MeshConfig, make_mesh
from gregale.cost import Audit, audit
from gregale.errors import UserError
from gregale.methods.method import PsdpState
from gregale.model.config import ComputeConfig, ModelConfig
from gregale.model.llama import LlamaConfig
from gregale.optim import ConstantSchedule, SgdConfig
from gregale.programs.runtime.build import set_up
from gregale.programs.runtime.setup import Setup
from gregale.runs.config import BatchConfig, TrainConfig
from gregale.runs.parsing import load
from tests.mesh.support import held, token_batch
from tests.plugins import EXAMPLES, plugins_from

ROWS, POSITIONS, VOCABULARY = 16, 16, 64
ONE = TrainConfig(
    name="mapping",
    steps=1,
    mesh=MeshConfig(data=1),
    model=LlamaConfig(layers=2, hidden=32, heads=8, kv_heads=4, mlp=64, init_scale=0.2),
    compute=ComputeConfig(dtype="float32", loss_block=16),
    batch=BatchConfig(size=ROWS, sequence_length=POSITIONS, microbatches=2),
    optimizer=SgdConfig(learning_rate=0.1, schedule=ConstantSchedule()),
)
EMPTY = MappingConfig()


def set_up_on(mesh: MeshConfig, mapping: MappingConfig = EMPTY, **changes) -> Setup:
    config = replace(ONE, mesh=mesh, mapping=mapping, **changes)
    return set_up(config, VOCABULARY, make_mesh(mesh, jax.devices()[: mesh.device_count]))


def step_of(setup: Setup) -> tuple[float, dict[str, np.ndarray], Audit]:
    """The mean loss of a step, its gradients under `opt_state`, and what the program sends."""
    psdp, state = setup.psdp, initial_arrays(setup.config.model)
    state = jax.device_put(state, psdp.shardings(state))
    batch = held(token_batch(ROWS, POSITIONS, VOCABULARY), setup.layout)

    def gradients(state, batch):
        _, grads, metrics = psdp._moved(state, psdp.gathered_params(state), batch)
        return metrics.loss, grads

    program = jax.jit(gradients).lower(state, batch).compile()
    loss, found = jax.device_get(program(state, batch))
    named = {jax.tree_util.keystr(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(found)}
    return float(loss), named, audit(program, setup.layout.mesh)


@cache
def initial_arrays(model: ModelConfig) -> PsdpState:
    """The state before the first step, in the memory of the host: a mesh only places it."""
    return jax.device_get(set_up_on(MeshConfig(data=1), model=model).initial_state().method)


@cache
def one_device(model: ModelConfig = ONE.model) -> tuple[float, dict[str, np.ndarray]]:
    return step_of(set_up_on(MeshConfig(data=1), model=model))[:2]


def assert_as_on_one_device(setup: Setup) -> Audit:
    loss, gradients, sent = step_of(setup)
    exact_loss, exact = one_device(setup.config.model)
    np.testing.assert_allclose(loss, exact_loss, rtol=1e-5)
    for name, expected in exact.items():
        assert np.linalg.norm(gradients[name] - expected) <= 1e-5 * np.linalg.norm(expected), name
    assert [each for each in sent.over(REPLICA) if each.loop] == [], "nothing crosses replica but once a step"
    return sent


@st.composite
def valid_mappings(draw) -> tuple[MeshConfig, MappingConfig]:
    """Eight devices as axes of two, each of which splits something, and mappings that keep the rules."""
    replica = draw(st.booleans())
    fast = draw(st.permutations(["context", "data", "model", "first", "second"]))[: 3 - replica]
    own = [axis for axis in fast if axis in ("first", "second")]
    inside = {axis: 2 for axis in fast if axis not in own}
    mesh = MeshConfig(**{"data": 1, "replica": 1 + replica, **inside}, axes=dict.fromkeys(own, 2))

    def some(of: list[str]) -> list[str]:
        return draw(st.lists(st.sampled_from(of), unique=True, max_size=2)) if of else []

    free = [axis for axis in fast if axis != "context"]
    rows = some(free)
    free = [axis for axis in free if axis not in rows]
    heads = some(free)[:1]
    compute = {"heads": heads, "kv_heads": heads, "mlp": some(free), "vocab": some(free)}
    params = dict(compute)
    split = {axis for axes in compute.values() for axis in axes}
    params["embed"] = some([axis for axis in fast if axis not in split])
    for name in ("mlp", "vocab"):
        rest = [axis for axis in fast if axis not in (*params["embed"], *compute[name])]
        params[name] = [*compute[name], *(some(rest) if len(compute[name]) < 2 else [])]
    opt_state = {name: list(axes) for name, axes in params.items()}
    over = draw(st.sampled_from(["embed", "mlp", None]))
    if over is not None:
        opt_state[over].append("replica")
    used = {axis for axes in (*compute.values(), *opt_state.values(), rows, ["context"]) for axis in axes}
    rows += [axis for axis in fast if axis not in used]  # nothing is left without use
    compute["batch"] = ["island", "replica", *rows]
    return mesh, MappingConfig(compute=compute, params=params, opt_state=opt_state)


# `params` splits `mlp` over an axis along which its gradient is the same.
WITHOUT_SUM = MappingConfig(
    compute={"heads": [], "kv_heads": [], "vocab": [], "batch": ["island", "replica"]},
    params={"heads": [], "kv_heads": [], "vocab": [], "mlp": ["model", "data"], "embed": ["context"]},
)


@pytest.mark.parametrize("examples", [8, pytest.param(1000, marks=pytest.mark.soak)])
def test_any_valid_mapping_computes_as_one_device(examples):
    numbers = count()

    @settings(max_examples=examples, derandomize=True, suppress_health_check=list(HealthCheck))
    @given(valid_mappings())
    @example((MeshConfig(context=2, data=2, model=2), WITHOUT_SUM))
    def check(drawn):
        if next(numbers) % 100 == 99:
            jax.clear_caches()  # a process may not map the memory of a thousand programs
        assert_as_on_one_device(set_up_on(*drawn))

    check()


PAGE = Path(__file__).parents[2] / "docs" / "mapping.md"
EXAMPLES_OF_PAGE = dict(re.findall(r"```yaml\n# (.*)\n((?:.*\n)*?)```", PAGE.read_text()))
CELLS = {name: cells for name, *cells in re.findall(r"^\| ([\w ]+) \| (`.*) \| `(\w+)` \|$", PAGE.read_text(), re.M)}


@pytest.mark.parametrize("example", EXAMPLES_OF_PAGE)
def test_an_example_of_the_page_sends_over_the_mesh_axes_that_it_names(example):
    given = yaml.safe_load(EXAMPLES_OF_PAGE[example])
    with plugins_from(EXAMPLES):
        config = load(TrainConfig, {"name": "mapping", "steps": 1, **given})
        model = config.model if "model" in given else ONE.model
        sent = assert_as_on_one_device(set_up_on(config.mesh, config.mapping, model=model))
    microbatch, step = CELLS[example]
    looped, once = (
        {axis for each in sent.collectives if bool(each.loop) == in_loop for axis in each.axes}
        for in_loop in (True, False)
    )
    assert looped == {axis for axes in re.findall("`([^`]+)`", microbatch) for axis in axes.split(", ")}
    assert step in once


FAST = MeshConfig(data=2, model=2, axes={"own": 2})
R = ["island", "replica"]
# Each with words of the one line that refuses it.
INVALID = [
    ({"compute": {"mlp": "nowhere"}}, "mapping.compute.mlp names 'nowhere', which is no mesh axis"),
    ({"params": {"embed": ["data", "tp"]}}, "mapping.params.embed names 'tp', which is no mesh axis"),
    ({"compute": {"mlp": ["model", "model"]}}, "mlp is [model, model]: one mesh axis can split an array only once"),
    ({"params": {"embed": ["data", "data"]}}, "embed is [data, data]: one mesh axis can split an array only once"),
    ({"compute": {"replica": "data"}}, "the axis replica always lies on the mesh axis replica"),
    ({"params": {"island": None}}, "the axis island always lies on the mesh axis island"),
    ({"params": {"layers": "data"}}, "mapping.params.layers is [data]: layers run one after another"),
    ({"compute": {"layers": "model"}}, "mapping.compute.layers is [model]: layers run one after another"),
    ({"opt_state": {"layers": "replica"}}, "mapping.opt_state.layers is [replica]: layers run one after another"),
    ({"params": {"batch": "data"}}, "mapping.params.batch: no parameter has the axis batch"),
    ({"opt_state": {"position": "data"}}, "mapping.opt_state.position: no parameter has the axis position"),
    ({"compute": {"position": "data"}}, "attention exchanges keys over the mesh axis context, no other"),
    ({"compute": {"batch": "data"}}, "it has to begin with island, replica, because each replica trains on its own"),
    ({"compute": {"batch": ["data", *R]}}, "mapping.compute.batch is [data, island, replica]; it has to begin with"),
    ({"compute": {"batch": None}}, "mapping.compute.batch is null; it has to begin with island, replica"),
    ({"params": {"embed": ["data", "replica"]}}, "replica splits nothing in params, because every replica has all"),
    ({"params": {"mlp": ["model", "island"]}}, "island splits nothing in params, because every replica has all"),
    ({"compute": {"mlp": ["model", "replica"]}}, "replica splits nothing in compute, because every replica has all"),
    ({"compute": {"embed": "model"}}, "norms, embedding and loss take whole hidden vectors"),
    ({"compute": {"experts": "own"}}, "devices send tokens to the experts of others, so that they need rows of their"),
    ({"compute": {"head_size": "model"}}, "attention takes whole heads; split heads and kv_heads"),
    ({"compute": {"heads": ["model", "own"]}}, "compute.kv_heads [model]: queries attend on the device of their keys"),
    ({"compute": {"kv_heads": None}}, "compute.heads is [model] and compute.kv_heads null"),
    ({"compute": {"heads": "data", "kv_heads": "data"}}, "mapping.compute.heads is [data], but data splits batch"),
    ({"compute": {"vocab": ["data", "model"]}}, "mapping.compute.vocab is [data, model], but data splits batch"),
    ({"compute": {"batch": [*R, "data", "model"]}}, "mapping.compute.heads is [model], but model splits batch"),
    ({"params": {"mlp": None}}, "mapping.params.mlp is null; it has to begin with compute.mlp, [model]"),
    (
        {"params": {"vocab": ["own", "model"]}},
        "mapping.params.vocab is [own, model]; it has to begin with compute.vocab",
    ),
    ({"opt_state": {"embed": "replica"}}, "mapping.opt_state.embed is [replica]; it has to begin with params.embed"),
    ({"opt_state": {"embed": ["replica", "data"]}}, "so that the reduction over replica is a reduce-scatter"),
    ({"opt_state": {"mlp": None}}, "mapping.opt_state.mlp is null; it has to begin with params.mlp, [model]"),
    ({"params": {"mlp": ["model", "data"]}}, "mapping.params splits both embed and mlp over data, and an"),
    ({"opt_state": {"mlp": ["model", "replica"]}}, "mapping.opt_state splits both"),
    ({"compute": {"heights": "own"}}, "mapping.compute.heights: no array has the axis heights; axes of this model:"),
    ({}, "mesh.own is 2, but nothing in this configuration is split over `own`"),
]


@pytest.mark.parametrize(("given", "words"), INVALID, ids=range(len(INVALID)))
def test_an_invalid_mapping_is_refused_in_one_line(given, words):
    config = replace(ONE, mesh=FAST, mapping=MappingConfig(**given))
    with pytest.raises(UserError) as refused:
        set_up(config, VOCABULARY, make_mesh(FAST))
    assert words in str(refused.value)
    assert "\n" not in str(refused.value)
