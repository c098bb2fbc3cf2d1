"""PSDP with delayed updates in the TPU compiler's schedule: what crosses two slices is sent behind the step."""

from __future__ import annotations

import re
from math import prod

import jax
import pytest
from haliax import Axis

from gregale.methods.delayed import Delayed
from gregale.methods.psdp import Psdp
from gregale.model.config import LlamaConfig
from gregale.model.execution import Execution
from gregale.model.llama import Llama
from gregale.optim import SgdConfig
from gregale.training.state import abstract_state
from gregale.training.stepper import Stepper
from tests.mesh.support import token_batch
from tests.mesh.test_tpu_diloco import layout as layout

pytestmark = pytest.mark.usefixtures("compiled_anew")  # a program for devices that are not there is not kept

VOCABULARY = 4096
CONFIG = LlamaConfig(layers=4, hidden=512, heads=4, mlp=2048)  # small weights may be sent after the loops, in no time
WEIGHT_BYTES = 1 << 17  # transfers at least as large are a weight's, not scalars
WEIGHTS = 9  # seven of the layers, embedding and head


def loops_behind_transfers(layout, delay: int) -> list[int]:
    """Of each transfer of a weight between slices, in the order in which they start, how many loops it spans."""
    inside = layout.inside_replica()
    model = jax.eval_shape(lambda key: Llama.init(CONFIG, Axis("vocab", VOCABULARY), key), jax.random.key(0))
    optimizer = SgdConfig().build(model, 100, layout)
    run = Execution(layout=inside)
    psdp = Psdp(model, lambda model, batch: model.loss(batch, run), optimizer, layout, microbatches=4)
    method = Delayed(psdp, delay)
    batch = layout.abstract(token_batch(positions=128, vocabulary=VOCABULARY), layout.compute)
    compiled = Stepper(method, model).program.lower(abstract_state(method, model), batch).compile()
    text = compiled.as_text() or ""
    lines = text[text.index("\nENTRY") :].splitlines()
    loops = [place for place, line in enumerate(lines) if re.search(r" while\(", line)]
    assert loops
    sent, received, ends = {}, {}, {}
    for place, line in enumerate(lines):
        name = re.match(r"\s*%?([\w.-]+) = ", line)
        rendezvous = re.search(r'_xla_host_transfer_rendezvous="([^"]*)"', line)
        if name and rendezvous and " send(" in line:
            sent[rendezvous[1]] = place
        elif name and rendezvous and " recv(" in line:
            shape = re.search(r"f32\[([\d,]+)\]", line)
            if shape and 4 * prod(map(int, shape[1].split(","))) >= WEIGHT_BYTES:
                received[name[1]] = rendezvous[1]
        elif name and (done := re.search(r" recv-done\(%?([\w.-]+)", line)) and done[1] in received:
            ends[received[done[1]]] = place
    return [sum(sent[each] < loop < ends[each] for loop in loops) for each in sorted(ends, key=sent.__getitem__)]


def test_with_two_steps_all_is_sent_behind_the_microbatches(layout):
    spanned = loops_behind_transfers(layout, delay=2)
    assert len(spanned) >= 2 * WEIGHTS
    assert min(spanned) >= 1
