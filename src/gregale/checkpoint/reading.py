"""Reading the arrays of a checkpoint under whatever shardings are asked for."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import jax
import numpy as np

from gregale.checkpoint.leaves import sharding_of
from gregale.checkpoint.manifest import PIECES
from gregale.checkpoint.parts import THREADS, read_parts
from gregale.checkpoint.shard_layout import Region, RowRange, block_of, from_json, rows_for, wanted
from gregale.storage import StoragePath

Structs = dict[str, jax.ShapeDtypeStruct | jax.Array]


def read_arrays(root: StoragePath, structs: Structs) -> dict[str, jax.Array]:
    """Some arrays of a checkpoint, by name; none of them is empty. This process reads what its own devices need."""
    plan, part_bytes = from_json((root / PIECES).read_bytes())
    buffers: dict[str, dict[Region, np.ndarray]] = {}
    jobs: list[tuple[RowRange, dict[Region, np.ndarray]]] = []
    for name, struct in structs.items():
        blocks = wanted(sharding_of(struct), struct.shape)
        buffers[name] = {block: np.empty(block.shape, struct.dtype) for block in blocks}
        found = (rows for piece in plan[name] for rows in rows_for(piece, blocks, struct.dtype.itemsize))
        jobs += [(rows, buffers[name]) for rows in found]
    with ThreadPoolExecutor(THREADS) as pool:
        list(pool.map(lambda job: _fill(root, part_bytes, *job), jobs))
    jobs.clear()  # so that each buffer goes as soon as its array is made

    def made(name: str, struct: jax.ShapeDtypeStruct | jax.Array) -> jax.Array:
        of = buffers.pop(name)
        return jax.make_array_from_callback(
            struct.shape, sharding_of(struct), lambda index: of[block_of(index or (), struct.shape)]
        )

    return {name: made(name, struct) for name, struct in structs.items()}


def _fill(root: StoragePath, part_bytes: int, rows: RowRange, buffers: dict[Region, np.ndarray]) -> None:
    """Reads some rows of a piece and puts what blocks have of them into their buffers."""
    content = np.empty(rows.stop - rows.start, np.uint8)
    read_parts(content, root, f"{rows.process:05d}", part_bytes, rows.start)
    values = content.view(next(iter(buffers.values())).dtype).reshape(rows.block.shape)
    for block, buffer in buffers.items():
        if overlap := rows.block.overlap(block):
            buffer[overlap.within(block)] = values[overlap.within(rows.block)]
