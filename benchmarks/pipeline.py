"""What the pipeline's backward pass holds, and how long it takes to compile, over microbatches M and repeats R.

    python benchmarks/pipeline.py [--stages 4] [--data 2] [--rounds 5]

Gradients of a stack of layers of 2 MiB, compiled for simulated CPU devices; nothing is run. Memory is what the compiler
says of temporaries on one device. The window with the backward pass by hand stands beside gathers in each iteration,
with the same backward pass and with the one that JAX derives. Times are CPU seconds of all threads, medians.
"""

from __future__ import annotations

import argparse
import os
from statistics import median
from time import process_time
from unittest.mock import patch

HIDDEN, WIDE, ROWS = 256, 1024, 4  # a layer's widths; rows of a microbatch on a device
TABLE = [(4, 2), (16, 2), (4, 8), (16, 8)]  # (M, R)
MIB = 2**20


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="The pipeline's memory and compile time.")
    for name, default in (("stages", 4), ("data", 2), ("rounds", 5)):
        parser.add_argument(f"--{name}", type=int, default=default)
    return parser.parse_args()


def lowered(options: argparse.Namespace, microbatches: int, repeats: int, gather: str, by_hand: bool):
    """The gradients of weights and inputs by the sum of the squared outputs, traced; and the pipeline's schedule."""
    import haliax as hax
    import jax
    import jax.numpy as jnp
    from haliax import Axis

    from gregale.axes.layout import LAYERS, standard_layout
    from gregale.axes.mesh import MeshConfig, make_mesh
    from gregale.communication.pipeline import stack
    from gregale.communication.pipeline.schedule import Schedule

    layout = standard_layout(make_mesh(MeshConfig(stage=options.stages, data=options.data)))
    schedule = Schedule(options.stages, microbatches, repeats)
    chosen = stack.Pipeline(schedule, layout, gather)  # type: ignore[arg-type]
    Layers, Hidden, Wide = Axis(LAYERS, options.stages * repeats), Axis("embed", HIDDEN), Axis("wide", WIDE)
    axes = {"up": (Layers, Hidden, Wide), "down": (Layers, Wide, Hidden)}
    weights = jax.eval_shape(lambda: {name: hax.zeros(each) for name, each in axes.items()})
    inputs = jax.eval_shape(lambda: hax.zeros((Axis("batch", options.data * microbatches * ROWS), Hidden)))

    def layer(x, weights, extras):
        del extras
        return x + hax.dot(hax.tanh(hax.dot(x, weights["up"], axis=Hidden)), weights["down"], axis=Wide)

    def loss(weights, inputs):
        return jnp.sum(jnp.square(stack.pipelined(layer, weights, inputs, {}, chosen).array))

    def derived(run, *arguments):
        return run.forward(*arguments)[0]

    abstract = layout.abstract(weights, layout.params), layout.abstract(inputs, layout.compute)
    with patch.object(stack._Run, "__call__", stack._Run.__call__ if by_hand else derived):
        return jax.jit(jax.grad(loss, argnums=(0, 1))).lower(*abstract), schedule


def temporaries(options: argparse.Namespace, *case) -> float:
    """MiB on one device."""
    from gregale.audit.memory import compiler_memory

    return compiler_memory(lowered(options, *case)[0].compile()).temporaries / MIB


def memory_table(options: argparse.Namespace) -> None:
    from gregale.communication.pipeline.schedule import Schedule

    print("MiB of temporaries on a device. `stage inputs` is what T iterations keep of the loop's state.")
    print("| M | R | stage inputs | window, by hand | per iteration, by hand | per iteration, JAX's |")
    print("|---|---|---|---|---|---|")
    for M, R in TABLE:
        inputs = Schedule(options.stages, M, R).iterations * ROWS * HIDDEN * 4 / MIB
        forms = [("per_repeat", True), ("per_iteration", True), ("per_iteration", False)]
        found = [temporaries(options, M, R, *form) for form in forms]
        print(f"| {M} | {R} | {inputs:.2f} | " + " | ".join(f"{each:.1f}" for each in found) + " |", flush=True)


def compile_table(options: argparse.Namespace) -> None:
    import jax

    seconds: dict[int, list[float]] = {2: [], 8: []}
    for _ in range(options.rounds):
        for repeats, found in seconds.items():
            jax.clear_caches()
            start = process_time()
            lowered(options, 8, repeats, "per_repeat", True)[0].compile()
            found.append(process_time() - start)
    few, many = (median(found) for found in seconds.values())
    print(f"\nCPU seconds to trace and compile, M = 8, median of {options.rounds}: ", end="")
    print(f"{few:.2f} with R = 2, {many:.2f} with R = 8, ratio {many / few:.2f}")
    print("all: " + "; ".join(f"R = {R}: {', '.join(f'{s:.2f}' for s in found)}" for R, found in seconds.items()))


def main() -> None:
    options = arguments()
    devices = options.stages * options.data
    os.environ["JAX_PLATFORMS"] = "cpu"
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={devices}"
    memory_table(options)
    compile_table(options)


if __name__ == "__main__":
    main()
