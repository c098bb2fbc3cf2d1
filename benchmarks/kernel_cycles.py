"""Cycles of the attention kernels by the TPU compiler's bundles: writes src/gregale/cost/kernel_cycles.json.

    python benchmarks/kernel_cycles.py [--chips v5e v6e] [--head-sizes 128] [--blocks 2048] [--passes forward]
    python benchmarks/kernel_cycles.py --chips v5e --blocks 1024,512,256 2048,512,256   # prints, and writes nothing

The kernels are compiled for each chip, head size and block, forward and backward, with the compiler's dump of its final
bundles. A bundle is what the chip starts in one cycle. A kernel is one loop over the grid, with predicated regions:

- a region with matrix products runs for the pairs of one kind: whole, diagonal, edge. It takes its bundles, or the rows
  that one matrix unit takes, whichever are more
- large regions without products run once for an outer block: they clear sums and write results
- the other bundles of the loop run in each step

The compiler splits the grid over the cores of a chip, so that the figures are divided by their number. A block of three
numbers is a candidate: positions, keys in one computation, and at the diagonal. For candidates the milliseconds of a
layer are printed: two rows of 8,192 tokens, 32 heads and 8 of keys. `gregale.model.kernels.tpu.blocks` has the best. A
row takes ten seconds of a processor and a gigabyte of temporary files. Rows that are not asked for stay as they are.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import re
import subprocess
import sys
import tempfile
from dataclasses import asdict, astuple, replace
from pathlib import Path

from gregale.cost.chips import CHIPS, Chip
from gregale.cost.pallas_cost import Kernel, Pairs, kernel_of
from gregale.model.kernels.tpu.blocks import Block, blocks_for

TABLE = Path(__file__).parents[1] / "src/gregale/cost/kernel_cycles.json"
TOPOLOGIES = {"v4": "v4:2x2x1", "v5e": "v5e:2x2", "v5p": "v5p:2x2x1", "v6e": "v6e:2x2", "v7x": "tpu7x:2x2x1"}
ROWS_OF_TOKENS, HEADS, KV_HEADS = 2, 8, 2
BLOCKS_OF_A_ROW = 4
LAYER = 8192, 2 * 32  # tokens and heads
BY_KEYS = ("splash_mha_fused", "splash_mha_dkv")  # an outer block is of keys, for a group of heads
PASSES = ("forward", "fused", "split")
LARGE = 64  # bundles of a region that runs once for an outer block
STAGES = 2  # more turns of a loop than its grid has steps: loads and stores are pipelined
WITHOUT_A_TPU = {"JAX_PLATFORMS": "cpu", "TPU_SKIP_MDS_QUERY": "1", "ALLOW_MULTIPLE_LIBTPU_LOAD": "1"}
BUNDLE = re.compile(r"^ *(0x[0-9a-f]+|0) +(?:[A-Z]{2})? *: ", re.MULTILINE)
BRANCH = re.compile(r"sbr\.rel \([^)]*\) target = \$region(\d+)")
EMPTY = re.compile(r"Start/End empty region (\d+)")
TURNS = re.compile(r", (\d+) /\* loop exit test")
PRODUCT = re.compile(r"vmatmul\.(?:mubr\.|msk\.)*([a-z0-9]+)\S*\.mxu(\d)")
ROWS = {"bf16": 16, "f32": 8}  # in one instruction


def bundles_of(text: str) -> list[str]:
    """Return the bundles of a dump, each with its comments."""
    starts = [found.start() for found in BUNDLE.finditer(text)]
    return [text[start:end] for start, end in itertools.pairwise([*starts, len(text)])]


def rows_of(bundles: list[str]) -> list[int]:
    """Return the rows that each matrix unit takes."""
    units: dict[str, int] = {}
    for dtype, unit in PRODUCT.findall("\n".join(bundles)):
        units[unit] = units.get(unit, 0) + ROWS[dtype]
    return list(units.values())


def regions_of(bundles: list[str]) -> list[range]:
    """Return the innermost predicated regions: from a branch to the empty region that it names."""
    ends = {number: index for index, each in enumerate(bundles) for number in EMPTY.findall(each)}
    found = []
    for index, each in enumerate(bundles):
        for number in BRANCH.findall(each):
            if ends.get(number, 0) > index:
                found.append(range(index + 1, ends[number]))
    return [each for each in found if not any(set(other) < set(each) for other in found if len(other) > LARGE)]


def cycles_of(text: str, steps: int, chip: Chip) -> list[int]:
    """Return the cycles of a step, an outer block, and a pair of each kind.

    - `steps`: of the whole grid
    """
    bundles = bundles_of(text)
    loops = [index for index, each in enumerate(bundles) if re.match(r" *0x[0-9a-f]+ +LB", each)]
    exits = [index for index, each in enumerate(bundles) if "loop exit test" in each]
    assert len(loops) == len(exits) == 1, "one loop over the grid"
    cores = round(steps / (int(TURNS.search(bundles[exits[0]])[1]) - STAGES))
    loop = bundles[loops[0] : exits[0] + 1]
    regions = [(len(each), rows_of([loop[index] for index in each])) for each in regions_of(loop)]
    rows_a_cycle = chip.flops_per_second / chip.devices / chip.cycles_per_second / (2 * chip.matrix_unit**2) / cores
    pairs = [max(size, max(rows) * len(rows) / rows_a_cycle) for size, rows in regions if rows]
    outer = sum(size for size, rows in regions if not rows and size > LARGE)
    step = len(loop) - sum(size for size, rows in regions if rows or size > LARGE)
    print(f"bundles and rows of units: {[each for each in regions if each[1]]}, {rows_a_cycle:.3g} rows a cycle")
    assert len(pairs) == 3, "a region with products for each kind"
    return [round(count / cores) for count in (step, outer, *pairs)]


def measured(chip: str, head_size: int, block: Block, run: str) -> list[tuple[Kernel, list[int]]]:
    """Return the kernels of a pass for a chip, head size and block, and their cycles."""
    with tempfile.TemporaryDirectory() as folder:
        flags = f"--xla_jf_dump_to={folder} --xla_jf_dump_llo_text=true"
        command = [sys.executable, __file__, "--worker", run, chip, str(head_size), *map(str, astuple(block)), folder]
        environment = {**os.environ, **WITHOUT_A_TPU, "LIBTPU_INIT_ARGS": flags}
        subprocess.run(command, env=environment, check=True, stderr=subprocess.DEVNULL)
        found = []
        for name, pairs in json.loads((Path(folder) / "kernels.json").read_text()).items():
            dump = next(Path(folder).glob(f"*{name}*-final_bundles.txt")).read_text()
            kernel = Kernel(name, block.size, head_size, Pairs(**pairs))
            found.append((kernel, cycles_of(dump, kernel.pairs.steps, CHIPS[chip])))
            print(f"{chip}: {kernel.key}: {found[-1][1]}", flush=True)
        return found


def worker(run: str, chip: str, head_size: int, block: Block, folder: str) -> None:
    """Compile the kernels of a pass, and write the pairs of their grids. The window is such that all kinds occur."""
    import jax
    import jax.numpy as jnp
    import numpy as np
    from jax.experimental import topologies
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    from gregale.cost.hlo import parse
    from gregale.model.kernels.tpu.attention import Inputs, forward, fused, split
    from gregale.model.kernels.tpu.attention import Kernel as Grid
    from gregale.model.kernels.tpu.attention_block_grid import Pairs as Sequence

    device = topologies.get_topology_desc(TOPOLOGIES[chip], platform="tpu").devices[0]
    sharding = NamedSharding(Mesh(np.array([device]), "a"), PartitionSpec())
    length = BLOCKS_OF_A_ROW * block.size
    limits = blocks_for(device.device_kind, length, None, head_size, HEADS // KV_HEADS)
    grid = Grid(Sequence(length, block.size, 1, 2 * block.size), block, None, False, limits.vector_memory)

    def array(*shape: int, dtype=jnp.bfloat16):
        return jax.ShapeDtypeStruct((ROWS_OF_TOKENS, *shape), dtype, sharding=sharding)

    def computed(q, k, ids, exponent):
        if run == "forward":
            return forward(grid, q, k, k, ids)
        return (fused if run == "fused" else split)(grid, Inputs(q, k, k, ids, exponent, exponent, q))

    q, k = (array(heads, length, head_size) for heads in (HEADS, KV_HEADS))
    ids, exponent = array(length, dtype=jnp.int32), array(HEADS, length, dtype=jnp.float32)
    text = jax.jit(computed).lower(q, k, (ids, ids), exponent).compile().as_text()
    found = [
        kernel
        for computation in parse(text).computations.values()
        for instruction in computation.instructions.values()
        if (kernel := kernel_of(computation, instruction))
    ]
    (Path(folder) / "kernels.json").write_text(json.dumps({each.name: asdict(each.pairs) for each in found}))


def milliseconds(chip: str, found: list[tuple[Kernel, list[int]]]) -> dict[str, float]:
    """Return the time of each kernel in a layer."""
    length, heads = LAYER
    times = {}
    for kernel, cycles in found:
        pairs = Pairs.causal(length, kernel.block, heads)
        if kernel.name in BY_KEYS:
            pairs = replace(pairs, outer=pairs.outer * KV_HEADS // HEADS)
        total = sum(count * each for count, each in zip(astuple(pairs), cycles, strict=True))
        times[kernel.name] = round(1e3 * total / CHIPS[chip].cycles_per_second, 2)
    return times


def block_of(text: str) -> Block:
    size, *parts = map(int, text.split(","))
    return Block(size, *parts) if parts else Block.of(size)


def main() -> None:
    if sys.argv[1:2] == ["--worker"]:
        run, chip, head_size, *block, folder = sys.argv[2:]
        return worker(run, chip, int(head_size), Block(*map(int, block)), folder)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--chips", nargs="+", default=["v5e", "v5p", "v6e"], choices=TOPOLOGIES)
    parser.add_argument("--head-sizes", nargs="+", type=int, default=[128])
    parser.add_argument("--blocks", nargs="+", type=block_of, default=[Block.of(1024)])
    parser.add_argument("--passes", nargs="+", default=PASSES, choices=PASSES)
    options = parser.parse_args()
    for chip, head_size, block in itertools.product(options.chips, options.head_sizes, options.blocks):
        found = [each for run in options.passes for each in measured(chip, head_size, block, run)]
        print(chip, block, milliseconds(chip, found), flush=True)
        if block == Block.of(block.size):
            table = json.loads(TABLE.read_text())
            table.setdefault(chip, {}).update({kernel.key: cycles for kernel, cycles in found})
            write(table)


def write(table: dict[str, dict[str, list[int]]]) -> None:
    """Write the table, a kernel a line."""
    chips = []
    for chip, kernels in sorted(table.items()):
        lines = [f'  "{key}": {json.dumps(cycles)}' for key, cycles in sorted(kernels.items())]
        chips.append(f' "{chip}": {{\n' + ",\n".join(lines) + "\n }")
    TABLE.write_text("{\n" + ",\n".join(chips) + "\n}\n")


if __name__ == "__main__":
    main()
