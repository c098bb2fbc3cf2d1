"""Counts the FLOPs of a model for one token, forward and backward: those that a utilisation is a share of.

They are counted in the jaxpr of the gradients of one device and one row, in plain JAX: without recomputation, padding
of the loss, pipelines and products of 8-bit numbers. An embedding that is looked up has none, a token has those of its
own experts, and a frozen weight has no gradient. For a decoder they are

    6 N + 12 * layers * heads * head_size * keys

with N the weights of a token's products, and `keys` those that the mask leaves a query on average (PaLM, arXiv
2204.02311, appendix B; there all).
"""

from dataclasses import replace
from typing import NamedTuple

import haliax as hax
import jax
from haliax import Axis

from gregale.axes.layout import BATCH, POSITION, MappingConfig, MeshConfig, make_mesh
from gregale.axes.parameters import buffers_of, trainable
from gregale.cost.work import work_of
from gregale.optim import AdamWConfig
from gregale.programs.runtime.batches import abstract_batch
from gregale.programs.runtime.setup import Setup, checked_layout, psdp_on


class ModelFlops(NamedTuple):
    """FLOPs of the model for a token."""

    visible: float  # with the pairs of a query and a key that the mask leaves
    full: float  # with all pairs


def model_flops(setup: Setup) -> ModelFlops:
    """Return the FLOPs of a setup's model for a token; for a model with attention of its own, `visible` is `full`."""
    config, batch = setup.config, setup.config.batch
    rows = config.objective.rows_together
    plain = {"autodiff_rules": "plain", "attention": "xla", "remat": "none", "matmul": "dtype", "gather": "per_layer"}
    config = replace(
        config,
        mesh=MeshConfig(data=1),
        batch=replace(batch, size=rows, microbatches=1),
        compute=replace(config.compute, **plain, loss_block=rows * batch.sequence_length, compiler_options={}),
        mapping=MappingConfig(),
        optimizer=AdamWConfig(),  # without the largest logits of `qk_clip`, which are no part of the model
        adapter=config.adapter and replace(config.adapter, base="dtype"),  # other bases take no `remat: none`
        pipeline=None,
    )
    layout = checked_layout(config, make_mesh(config.mesh, [setup.layout.mesh.devices.flat[0]]), setup.Vocab)
    psdp = psdp_on(config, setup.model, (), layout)
    with hax.axis_mapping({}):
        traced = jax.jit(lambda frozen, *own: psdp.holding(frozen).accumulate_gradients(*own)).trace(
            psdp.frozen(setup.model),
            layout.abstract(trainable(setup.model), layout.params),
            abstract_batch((Axis(BATCH, rows), Axis(POSITION, batch.sequence_length)), layout),
            buffers_of(setup.model),
        )
    work, tokens = work_of(traced.jaxpr), rows * batch.sequence_length
    return ModelFlops(work.visible_flops / tokens, work.flops / tokens)
