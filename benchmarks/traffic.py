"""Bytes that one training step sends over each mesh axis: PSDP beside the conventional step (`conventional.py`).

    python benchmarks/traffic.py [--replica 2] [--data 2] [--model 2] [--microbatches 4] [--list]

Both are compiled for simulated CPU devices and read by `gregale.audit`; nothing is run. Bytes are what one device sends
in one step by ring algorithms, loops counted (`Collective.bytes_sent`). The model is of about the
quickstart's size, in float32.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterable

VOCABULARY, POSITIONS, ROWS_A_DEVICE = 256, 128, 2


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Bytes a step over each mesh axis: PSDP and the conventional step.")
    for name, default in (("replica", 2), ("data", 2), ("model", 2), ("microbatches", 4)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--list", action="store_true", help="list every collective")
    return parser.parse_args()


def audits(options: argparse.Namespace) -> dict:
    """The audit of each step's compiled program, by its name."""
    import equinox as eqx
    import haliax as hax
    import jax
    import jax.numpy as jnp
    from conventional import conventional_step
    from haliax import Axis

    from gregale.audit import audit
    from gregale.axes.layout import standard_layout, with_shardings
    from gregale.axes.mesh import MeshConfig, make_mesh
    from gregale.methods.psdp import Psdp
    from gregale.model.config import LlamaConfig
    from gregale.model.execution import Execution
    from gregale.model.llama import Llama
    from gregale.optim import AdamWConfig

    layout = standard_layout(make_mesh(MeshConfig(replica=options.replica, data=options.data, model=options.model)))
    model = eqx.filter_eval_shape(
        Llama.init, LlamaConfig(layers=4, hidden=128, heads=8, mlp=384), Axis("vocab", VOCABULARY), jax.random.key(0)
    )
    optimizer = AdamWConfig().build(model, steps=100)
    rows = Axis("batch", ROWS_A_DEVICE * options.replica * options.data * options.microbatches)
    names = {"tokens": jnp.int32, "targets": jnp.int32, "positions": jnp.int32, "loss_mask": jnp.float32}
    axes = (rows, Axis("position", POSITIONS))
    batch = jax.eval_shape(lambda: {name: hax.zeros(axes, dtype) for name, dtype in names.items()})
    batch = layout.abstract(batch, layout.compute)

    def loss(layout):
        return lambda model, batch: model.loss(batch, Execution(layout=layout))

    psdp = Psdp(model, loss(layout.inside_replica()), optimizer, layout, options.microbatches)
    state = jax.eval_shape(psdp.init, model)
    state = with_shardings(state, psdp.shardings(state))
    usual = conventional_step(loss(layout), optimizer.whole(), layout, options.microbatches)
    usual_state = layout.abstract(jax.eval_shape(optimizer.whole().init, model), layout.params)
    programs = {
        "PSDP": jax.jit(psdp.step).lower(state, batch),
        "conventional": jax.jit(usual).lower(layout.abstract(model, layout.params), usual_state, batch),
    }
    return {name: audit(program.compile(), layout.mesh) for name, program in programs.items()}


def sent_bytes(collectives: Iterable) -> float:
    return sum(collective.bytes_sent * collective.times for collective in collectives)


def table(found: dict) -> str:
    """Bytes over each axis, inside loops and outside of them, a column for each step."""
    lines = [f"{'bytes that a device sends in a step':38}" + "".join(f"{name:>16}" for name in found)]
    for axis in ("replica", "data", "model"):
        for inside, place in ((True, "in loops"), (False, "outside")):
            sums = [sent_bytes(c for c in one.over(axis) if bool(c.loop) == inside) for one in found.values()]
            lines.append(f"{f'over {axis}, {place}':38}" + "".join(f"{size:16,.0f}" for size in sums))
    return "\n".join(lines)


def main() -> None:
    options = arguments()
    devices = options.replica * options.data * options.model
    os.environ["JAX_PLATFORMS"] = "cpu"
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={devices}"
    found = audits(options)
    if options.list:
        for name, one in found.items():
            print(f"{name}\n{one.table()}\n")
    print(table(found))


if __name__ == "__main__":
    main()
