"""Milliseconds of a layer's operations by the TPU compiler's estimates: an 8B layer, forward and backward, on one chip.

    python benchmarks/layer_cycles.py [v5e] [--above 0.1] [--hlo FILE]

Two layers with the shapes of Llama 3 8B are compiled with 2 rows of 8,192 tokens. The table has the operations of the
loops over layers, by computation. Kernels without an estimate count as 0.
"""

import argparse
import os
import re

from gregale.audit.chips import CHIPS
from gregale.audit.hlo import parse
from gregale.programs.plan.devices import topology_target

TOPOLOGIES = {"v5e": "v5e:2x2", "v5p": "v5p:2x2x1", "v6e": "v6e:2x2"}
ROWS, POSITIONS, VOCABULARY = 2, 8192, 256
CYCLES = re.compile(r'"estimated_cycles":"(\d+)"')


def compiled(chip: str, remat: str) -> str:
    import haliax as hax
    import jax
    import jax.numpy as jnp
    from haliax import Axis

    from gregale.axes.layout import standard_layout
    from gregale.axes.mesh import MeshConfig, make_mesh
    from gregale.model.config import ComputeConfig, LlamaConfig
    from gregale.model.execution import execution
    from gregale.model.llama import Llama
    from gregale.training.compiler_options import compiler_options

    target = topology_target(TOPOLOGIES[chip], 1, None)
    layout = standard_layout(make_mesh(MeshConfig(data=1), target.devices[:1]))
    config = LlamaConfig(
        layers=2, hidden=4096, heads=32, kv_heads=8, mlp=14336, vocabulary=VOCABULARY, rotary_base=500000.0
    )
    run = execution(ComputeConfig(dtype="bfloat16", remat=remat), layout, config)
    model = jax.eval_shape(lambda key: Llama.init(config, Axis("vocab", VOCABULARY), key), jax.random.key(0))
    Batch, Position = Axis("batch", ROWS), Axis("position", POSITIONS)

    def step(model, tokens, by_hidden):
        positions = hax.arange(Position).broadcast_axis(Batch)
        out, pull = jax.vjp(lambda model: model.hidden(tokens, positions, None, run), model)
        return out, pull(by_hidden)

    tokens = jax.eval_shape(lambda: hax.zeros((Batch, Position), jnp.int32))
    by_hidden = jax.eval_shape(lambda: hax.zeros((Batch, Position, config.Embed), jnp.bfloat16))
    given = layout.abstract(model, layout.params), *layout.abstract((tokens, by_hidden), layout.compute)
    options = compiler_options({}, layout.mesh)
    return jax.jit(step).lower(*given).compile(compiler_options=options).as_text() or ""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("chip", nargs="?", default="v5e", choices=TOPOLOGIES)
    parser.add_argument("--above", type=float, default=0.1, help="milliseconds from which an operation is listed")
    parser.add_argument("--remat", default="context")
    parser.add_argument("--hlo", help="file that takes the compiled text; read if it exists")
    options = parser.parse_args()
    if options.hlo and os.path.exists(options.hlo):
        text = open(options.hlo).read()
    else:
        text = compiled(options.chip, options.remat)
        if options.hlo:
            open(options.hlo, "w").write(text)
    per_ms = CHIPS[options.chip].cycles_per_second / 1e3
    module = parse(text)
    for computation in module.computations.values():
        if "region" not in computation.name and "while" not in computation.name and "body" not in computation.name:
            continue
        rows = []
        for each in computation.instructions.values():
            found = CYCLES.search(each.attributes)
            cycles = int(found[1]) if found else 0
            if cycles or each.opcode == "custom-call":
                rows.append((cycles / per_ms, each))
        if sum(ms for ms, _ in rows) < 1:
            continue
        print(f"== {computation.name}: {sum(ms for ms, _ in rows):.2f} ms")
        for ms, each in sorted(rows, key=lambda row: -row[0]):
            if ms >= options.above or each.opcode == "custom-call" and each.name:
                print(f"{ms:8.3f}  {each.name:44s} {each.shape_text[:60]:60s} {each.op_name.replace('closed_call/','').split('jit(step)')[-1][-110:]}")


if __name__ == "__main__":
    main()
