"""Cycles of the splash kernels by the TPU compiler's bundles: writes src/gregale/audit/kernel_cycles.json.

    python benchmarks/kernel_cycles.py [--chips v5e v6e] [--lengths 8192] [--head-sizes 128]

A kernel is compiled for each chip, length and head size, forward and backward, with the compiler's dump of its final
bundles. A bundle is what the chip starts in one cycle. The kernel is one loop over the grid, with predicated regions:

- the region with matrix products runs once for a visible block. It takes its bundles, or the rows that one matrix unit
  takes, whichever are more
- large regions without products run once for a row of blocks: they clear sums and write results
- the other bundles of the loop run in each step

The compiler splits the grid over the cores of a chip, so that the figures are divided by their number. A row takes half
a minute of a processor and a gigabyte of temporary files. Rows that are not asked for stay as they are.
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
from pathlib import Path

from gregale.audit.chips import CHIPS, Chip

TABLE = Path(__file__).parents[1] / "src/gregale/audit/kernel_cycles.json"
TOPOLOGIES = {"v4": "v4:2x2x1", "v5e": "v5e:2x2", "v5p": "v5p:2x2x1", "v6e": "v6e:2x2", "v7x": "tpu7x:2x2x1"}
ROWS_OF_TOKENS, HEADS, KV_HEADS = 2, 8, 2
LARGE = 64  # bundles of a region that runs once for a row of blocks
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


def cycles_of(text: str, steps: int, chip: Chip) -> tuple[list[int], int]:
    """Return the cycles of a step, a row and a visible block of a kernel, and the number of cores that share its grid.

    - `steps`: of the grid of all heads
    """
    bundles = bundles_of(text)
    loops = [index for index, each in enumerate(bundles) if re.match(r" *0x[0-9a-f]+ +LB", each)]
    exits = [index for index, each in enumerate(bundles) if "loop exit test" in each]
    assert len(loops) == len(exits) == 1, "one loop over the grid"
    turns = int(TURNS.search(bundles[exits[0]])[1])
    cores = round(steps / (turns - STAGES))
    loop = bundles[loops[0] : exits[0] + 1]
    regions = [(len(each), rows_of([loop[index] for index in each])) for each in regions_of(loop)]
    rows_a_cycle = chip.flops_per_second / chip.devices / chip.cycles_per_second / (2 * chip.matrix_unit**2) / cores
    block = sum(max(size, max(rows) * len(rows) / rows_a_cycle) for size, rows in regions if rows)
    row = sum(size for size, rows in regions if not rows and size > LARGE)
    step = len(loop) - sum(size for size, rows in regions if rows or size > LARGE)
    print(f"bundles and rows of units: {[each for each in regions if each[1]]}, {rows_a_cycle:.3g} rows a cycle")
    assert block > 0, "a region with products"
    return [round(count / cores) for count in (step, row, block)], cores


def measured(chip: str, length: int, head_size: int) -> dict[str, list[int]]:
    """Return the rows of a chip's kernels for one length and head size, by the names of `gregale.audit.pallas_cost`."""
    with tempfile.TemporaryDirectory() as folder:
        flags = f"--xla_jf_dump_to={folder} --xla_jf_dump_llo_text=true"
        command = [sys.executable, __file__, "--worker", chip, str(length), str(head_size), folder]
        environment = {**os.environ, **WITHOUT_A_TPU, "LIBTPU_INIT_ARGS": flags}
        subprocess.run(command, env=environment, check=True, stderr=subprocess.DEVNULL)
        kernels = json.loads((Path(folder) / "kernels.json").read_text())
        found = {}
        for kind, (key, steps) in kernels.items():
            dump = next(Path(folder).glob(f"*{kind}*-final_bundles.txt"))
            found[key], cores = cycles_of(dump.read_text(), ROWS_OF_TOKENS * HEADS * steps, CHIPS[chip])
            print(f"{chip} {length}: {key}: {found[key]} on {cores} core(s)", flush=True)
        return found


def worker(chip: str, length: int, head_size: int, folder: str) -> None:
    """Compile attention, forward and backward, and write the names of its kernels and the steps of their grids."""
    import jax
    import jax.numpy as jnp
    import numpy as np
    from jax.experimental import topologies
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    from gregale.audit.hlo import parse
    from gregale.audit.pallas_cost import kernel_of
    from gregale.model.kernels.tpu.splash import Splash

    device = topologies.get_topology_desc(TOPOLOGIES[chip], platform="tpu").devices[0]
    sharding = NamedSharding(Mesh(np.array([device]), "a"), PartitionSpec())
    q, k = (
        jax.ShapeDtypeStruct((ROWS_OF_TOKENS, length, heads, head_size), jnp.bfloat16, sharding=sharding)
        for heads in (HEADS, KV_HEADS)
    )
    segments = jax.ShapeDtypeStruct((ROWS_OF_TOKENS, length), jnp.int32, sharding=sharding)
    attend = Splash(device.device_kind)

    def both(q, k, v, segments):
        out, pull = jax.vjp(lambda q, k, v: attend(q, k, v, segments, None), q, k, v)
        return out, pull(out)

    text = jax.jit(both).lower(q, k, k, segments).compile().as_text()
    kernels = {}
    for computation in parse(text).computations.values():
        for instruction in computation.instructions.values():
            if kernel := kernel_of(computation, instruction):
                kind = kernel.name.replace("fused", "dkv").removeprefix("splash_")
                kernels[kind] = (kernel.key, kernel.grid(None)[0])
    (Path(folder) / "kernels.json").write_text(json.dumps(kernels))


def main() -> None:
    if sys.argv[1:2] == ["--worker"]:
        chip, length, head_size, folder = sys.argv[2:]
        return worker(chip, int(length), int(head_size), folder)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--chips", nargs="+", default=["v5e", "v5p", "v6e"], choices=TOPOLOGIES)
    parser.add_argument("--lengths", nargs="+", type=int, default=[2048, 8192, 32768])
    parser.add_argument("--head-sizes", nargs="+", type=int, default=[128])
    options = parser.parse_args()
    for row in itertools.product(options.chips, options.lengths, options.head_sizes):
        found = measured(*row)
        table = json.loads(TABLE.read_text())
        for key, cycles in found.items():
            table.setdefault(row[0], {}).setdefault(key, {})[str(row[1])] = cycles
        write(table)


def write(table: dict[str, dict[str, dict[str, list[int]]]]) -> None:
    """Write the table, a kernel a line."""
    chips = []
    for chip, kernels in sorted(table.items()):
        lines = [f'  "{key}": {json.dumps(dict(sorted(cycles.items())))}' for key, cycles in sorted(kernels.items())]
        chips.append(f' "{chip}": {{\n' + ",\n".join(lines) + "\n }")
    TABLE.write_text("{\n" + ",\n".join(chips) + "\n}\n")


if __name__ == "__main__":
    main()
