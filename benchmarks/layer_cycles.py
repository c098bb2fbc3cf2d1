"""Milliseconds of the operations of an 8B layer, forward and backward on one TPU chip, by the compiler's estimates.

    python benchmarks/layer_cycles.py [v5e|v5p|v6e] [--positions 8192] [--above 0.1]

Two layers are compiled, with 2 rows a chip and `compute.remat: context`. The two tables are the bodies of the loops
over layers. A kernel has no estimate and counts as 0. The estimates count a value of bfloat16 as four bytes: a pass
over arrays of bfloat16 that is bound by memory takes half of its estimate. It takes two minutes of a processor.
"""

import argparse
import re

from gregale.cost.chips import CHIPS
from gregale.cost.hlo import Computation, parse
from gregale.programs.plan.devices import topology_target

TOPOLOGIES = {"v5e": "v5e:2x2", "v5p": "v5p:2x2x1", "v6e": "v6e:2x2"}
ROWS, VOCABULARY = 2, 256
CYCLES = re.compile(r'"estimated_cycles":"(\d+)"')


def compiled(chip: str, length: int) -> str:
    """Return the text of the hidden states' program and of its gradients."""
    import haliax as hax
    import jax
    import jax.numpy as jnp
    from haliax import Axis

    from gregale.axes.layout import MeshConfig, make_mesh, standard_layout
    from gregale.model.config import ComputeConfig
    from gregale.model.execution import execution
    from gregale.model.llama import Llama, LlamaConfig
    from gregale.training.compiler import compiler_options

    target = topology_target(TOPOLOGIES[chip], 1, None)
    layout = standard_layout(make_mesh(MeshConfig(data=1), target.devices[:1]))
    config = LlamaConfig(layers=2, hidden=4096, heads=32, kv_heads=8, mlp=14336, vocabulary=VOCABULARY)
    run = execution(ComputeConfig(dtype="bfloat16", remat="context"), layout, config)
    model = jax.eval_shape(lambda key: Llama.init(config, Axis("vocab", VOCABULARY), key), jax.random.key(0))
    Batch, Position = Axis("batch", ROWS), Axis("position", length)

    def step(model, tokens, by_hidden):
        positions = hax.arange(Position).broadcast_axis(Batch)
        hidden, pull = jax.vjp(lambda model: model.hidden(tokens, positions, None, run), model)
        return hidden, pull(by_hidden)

    tokens = jax.eval_shape(lambda: hax.zeros((Batch, Position), jnp.int32))
    by_hidden = jax.eval_shape(lambda: hax.zeros((Batch, Position, config.Embed), jnp.bfloat16))
    given = layout.abstract(model, layout.params), *layout.abstract((tokens, by_hidden), layout.compute)
    program = jax.jit(step, compiler_options=compiler_options({}, layout.mesh))
    return program.lower(*given).compile().as_text() or ""


def rows_of(computation: Computation, chip: str) -> list[tuple[float, str]]:
    """Return milliseconds and a description of each operation that has an estimate, longest first."""
    rows, cycles_per_second = [], CHIPS[chip].cycles_per_second or 1
    for each in computation.instructions.values():
        if found := CYCLES.search(each.attributes):
            scope = each.op_name.removeprefix("jit(step)/")
            rows.append((1e3 * int(found[1]) / cycles_per_second, f"{each.shape_text[:60]:62}{scope[-80:]}"))
    return sorted(rows, reverse=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("chip", nargs="?", default="v5e", choices=TOPOLOGIES)
    parser.add_argument("--positions", type=int, default=8192)
    parser.add_argument("--above", type=float, default=0.1, help="milliseconds of the shortest operation listed")
    options = parser.parse_args()
    module = parse(compiled(options.chip, options.positions))
    loops = [
        each for one in module.computations.values() for each in one.instructions.values() if each.opcode == "while"
    ]
    for loop in loops:
        rows = rows_of(module.computations[loop.called("body") or ""], options.chip)
        print(f"{sum(ms for ms, _ in rows):8.3f}  all of {loop.name}")
        for ms, what in rows:
            if ms >= options.above:
                print(f"{ms:8.3f}  {what}")


if __name__ == "__main__":
    main()
