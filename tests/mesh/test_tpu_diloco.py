"""Streaming DiLoCo in the TPU compiler's schedule for two slices: transfers are hidden behind the microbatch loop."""

import jax
import pytest
from haliax import Axis
from jax.experimental import topologies

from gregale.axes.layout import MeshConfig, make_mesh, standard_layout
from gregale.cost import audit
from gregale.cost.hlo import parse
from gregale.cost.overlap import ends
from gregale.methods.diloco import Diloco
from gregale.methods.psdp import Psdp
from gregale.methods.schedule import Fragment, Schedule
from gregale.model.execution import Execution
from gregale.model.llama import Llama, LlamaConfig
from gregale.optim import SgdConfig
from gregale.training.state import Stepper, abstract_state
from tests.mesh.support import token_batch

pytestmark = pytest.mark.usefixtures("compiled_anew")  # plans tell what the compiler warns of

LAYERS, VOCABULARY = 4, 512
CONFIG = LlamaConfig(layers=LAYERS, hidden=256, heads=4, mlp=512)
FRAGMENT_BYTES = 1 << 15  # transfers at least as large are a fragment's weights, not its norms or the scalars


@pytest.fixture(scope="module")
def layout():
    devices = topologies.get_topology_desc("v5e:2x2", platform="tpu", num_slices=2).devices
    return standard_layout(make_mesh(MeshConfig(replica=2, data=2, model=2), devices))


def program_of(layout, delay: int) -> str:
    """The compiled text of a step that sends and applies."""
    schedule = Schedule(8, 5, delay, LAYERS)
    inside = layout.inside("replica")
    execution = Execution(layout=inside)
    model = jax.eval_shape(lambda key: Llama.init(CONFIG, Axis("vocab", VOCABULARY), key), jax.random.key(0))
    optimizer = SgdConfig().build(model, 100, inside)
    inner = Psdp(model, lambda model, batch: model.loss(batch, execution), optimizer, inside, microbatches=4)
    outer = SgdConfig(learning_rate=0.7, nesterov=True, clip_norm=None).build(model, 100).whole()
    method = Diloco(inner, outer, layout, schedule, mixing=0.5)
    batch = layout.abstract(token_batch(positions=128, vocabulary=VOCABULARY), layout.compute)
    send = Fragment.at(schedule, 1, 8)
    apply = send if delay == 1 else Fragment.at(schedule, 4, 8)
    return Stepper(method, model).program.lower(abstract_state(method, model), batch, send, apply).compile().as_text()


def exposed(layout, delay: int) -> list[str]:
    """The fragment's transfers between slices that do not span the microbatch loop."""
    text = program_of(layout, delay)
    module = parse(text)
    order = module.computations[module.entry].instructions
    place = list(order).index
    (loop,) = (name for name, each in order.items() if each.opcode == "while")
    far, end_of = audit(text, layout.mesh).over("replica"), ends(module)
    large = [each.name for each in far if each.bytes >= FRAGMENT_BYTES]
    assert len(large) >= 14, "seven weights each way"
    return [name for name in large if not place(name) < place(loop) < place(end_of[name])]


def test_one_leg_a_step_is_hidden(layout):
    assert exposed(layout, delay=2) == []


@pytest.mark.soak
def test_both_legs_in_one_step_are_not(layout):
    """The negative: with tau = 1 the all-gather waits for the reduce-scatter, and one of them is not hidden."""
    assert len(exposed(layout, delay=1)) >= 7
