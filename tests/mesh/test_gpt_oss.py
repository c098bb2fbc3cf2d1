"""gpt-oss on meshes, with sinks and biases that are not zero: gradients and texts are those of one device."""

from itertools import cycle

import jax
import numpy as np
import pytest

from gregale.axes.layout import REPLICA, MeshConfig
from gregale.communication.pipeline import PipelineConfig
from gregale.errors import UserError
from gregale.inference.generate import BLOCK, Generator
from gregale.model.config import BalanceConfig, ExpertsConfig
from gregale.model.llama import GptOssConfig, Llama
from gregale.optim.config import decays
from tests.inference.test_generate import GREEDY, NO_END, PROMPTS, rows_of
from tests.mesh.support import executed, kernels_of, layout_of, placed, small_model
from tests.mesh.test_experts import EMPTY, EXCHANGED, assert_close, set_up_on
from tests.mesh.test_mapping import step_of
from tests.model.test_llama import VOCABULARY, perturbed

EXPERTS = ExpertsConfig(8, 2, width=16, balance=BalanceConfig(loss=0.1, z_loss=0.01))
MODEL = GptOssConfig(
    layers=2, hidden=32, heads=8, kv_heads=4, init_scale=0.2, sliding_window=5, full_layers=(1,), experts=EXPERTS
)


@pytest.fixture(scope="module", autouse=True)
def perturbed_init():
    init = Llama.init
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Llama, "init", lambda *arguments: perturbed(init(*arguments)))
        yield


@pytest.fixture(scope="module")
def exact(perturbed_init):
    return step_of(set_up_on(MeshConfig(data=1), MODEL))[:2]


CASES = {
    "2x2x2": (MeshConfig(replica=2, data=2, model=2), EMPTY, {}),
    "2x2x2, exchanged": pytest.param(  # `test_experts` exchanges biased experts
        MeshConfig(replica=2, data=2, model=2), EXCHANGED, {}, marks=pytest.mark.soak
    ),
    "pipeline": pytest.param(
        MeshConfig(stage=2, data=2), EMPTY, {"pipeline": PipelineConfig(microbatches=4)}, marks=pytest.mark.soak
    ),
}


@pytest.mark.parametrize(("mesh", "mapping", "changes"), CASES.values(), ids=CASES.keys())
def test_gradients_are_those_of_one_device(exact, mesh, mapping, changes):
    loss, gradients, sent = step_of(set_up_on(mesh, MODEL, 1, mapping=mapping, **changes))
    np.testing.assert_allclose(loss, exact[0], rtol=1e-5)
    for name, expected in exact[1].items():
        assert np.any(expected), name
        assert_close(gradients[name], expected, name)
    assert [each for each in sent.over(REPLICA) if each.loop] == []


def test_devices_that_share_slots_give_the_tokens_of_one():
    model, found = small_model(MODEL, VOCABULARY), []
    for layout in (layout_of().inside_replica(), layout_of(context=2, model=2).inside_replica()):
        run = executed(layout, kernels=kernels_of(layout))
        generator = Generator(run, VOCABULARY, [NO_END])
        held = placed(model, layout, layout.params)
        found.append(rows_of(generator.blocks(held, PROMPTS, 12, GREEDY, cycle([BLOCK]))))
    assert found[0] == found[1]


def test_biases_of_experts_do_not_decay():
    leaves = jax.tree_util.tree_leaves_with_path(
        small_model(MODEL, VOCABULARY), is_leaf=lambda leaf: hasattr(leaf, "axes")
    )
    kept = {jax.tree_util.keystr(path).rpartition(".")[2] for path, leaf in leaves if not decays(leaf)}
    assert {"bias", "router_bias", "gate_bias", "up_bias", "down_bias", "sinks"} <= kept
    assert not kept & {"router", "gate", "up", "down"}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"experts": None}, "experts is null, and a layer of type gpt_oss has experts"),
        ({"dense_layers": 1}, "dense_layers is 1, and a layer of type gpt_oss"),
        ({"experts": ExpertsConfig(shared=24)}, "experts.shared is 24, and a layer of type gpt_oss"),
    ],
)
def test_other_mlps_are_refused(changes, words):
    with pytest.raises(UserError, match=words):
        GptOssConfig(**changes)
