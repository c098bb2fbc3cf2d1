"""Provides the traffic that an optimizer of a plugin adds to a step, from its compiled update."""

import haliax as hax
import jax
import jax.numpy as jnp

from gregale.audit import Collective, audit
from gregale.axes.parameters import trainable
from gregale.programs.plan.shapes import FAR_AXES
from gregale.programs.runtime.setup import Setup


def optimizer_note(setup: Setup) -> str | None:
    """Return a note if the optimizer of a plugin sends over the slow axes, with its bytes; None if it does not.

    `Method.bytes_sent` counts gradients and updates, so that it leaves these bytes out.
    """
    config = setup.config.optimizer
    if type(config).__module__.partition(".")[0] == "gregale":
        return None
    found = optimizer_collectives(setup)
    if not found:
        return None
    axes = ", ".join(dict.fromkeys(f"`{axis}`" for each in found for axis in each.touched if axis in FAR_AXES))
    sent = sum(each.bytes_sent * each.counted for each in found)
    return (
        f"optimizer.type is {config.get_choice_name(type(config))}, whose update reduces over shards: a device sends "
        f"{sent:,.0f} bytes a step for it over {axes}, in addition to the {setup.method.bytes_sent(1):,} bytes of "
        "gradients and updates. `bytes_sent` and `replica_bytes` leave them out."
    )


def optimizer_collectives(setup: Setup) -> list[Collective]:
    """Return the collectives over the slow axes in the compiled update of the optimizer, without gathers of updates."""
    layout = setup.method.step_layout
    optimizer = setup.config.build_optimizer(setup.model, layout).sharded
    weights = layout.abstract(trainable(setup.model), layout.opt_state)
    state = layout.abstract(jax.eval_shape(optimizer.init, weights), layout.opt_state)

    def update(grads, state, weights, norm):
        return layout.constrain(optimizer.update(grads, state, weights, gradient_norm=norm), layout.opt_state)

    with hax.axis_mapping({}):
        compiled = jax.jit(update, compiler_options=setup.compiler_options)
        program = compiled.lower(weights, state, weights, jax.ShapeDtypeStruct((), jnp.float32)).compile()
    return [each for each in audit(program, layout.mesh).collectives if set(each.touched) & set(FAR_AXES)]
