"""Reading of a checkpoint's arrays under any shardings."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import jax
import numpy as np

from gregale.checkpoint.leaves import sharding_of
from gregale.checkpoint.manifest import SHARDS
from gregale.checkpoint.parts import THREADS, read_parts
from gregale.checkpoint.shard_layout import Region, RowRange, from_json, region_of, rows_for, wanted
from gregale.storage import StoragePath

Structs = dict[str, jax.ShapeDtypeStruct | jax.Array]


def read_arrays(root: StoragePath, structs: Structs) -> dict[str, jax.Array]:
    """Read non-empty arrays of a checkpoint by name; each process reads only the rows that its devices need."""
    plan, part_bytes = from_json((root / SHARDS).read_bytes())
    buffers: dict[str, dict[Region, np.ndarray]] = {}
    jobs: list[tuple[RowRange, dict[Region, np.ndarray]]] = []
    for name, struct in structs.items():
        regions = wanted(sharding_of(struct), struct.shape)
        buffers[name] = {region: np.empty(region.shape, struct.dtype) for region in regions}
        found = (rows for shard in plan[name] for rows in rows_for(shard, regions, struct.dtype.itemsize))
        jobs += [(rows, buffers[name]) for rows in found]
    with ThreadPoolExecutor(THREADS) as pool:
        list(pool.map(lambda job: _fill(root, part_bytes, *job), jobs))
    jobs.clear()  # frees each buffer as soon as its array exists

    def make(name: str, struct: jax.ShapeDtypeStruct | jax.Array) -> jax.Array:
        regions = buffers.pop(name)
        return jax.make_array_from_callback(
            struct.shape, sharding_of(struct), lambda index: regions[region_of(index or (), struct.shape)]
        )

    return {name: make(name, struct) for name, struct in structs.items()}


def _fill(root: StoragePath, part_bytes: int, rows: RowRange, buffers: dict[Region, np.ndarray]) -> None:
    """Read rows of a shard and copy them into the buffers of the overlapping regions."""
    content = np.empty(rows.stop - rows.start, np.uint8)
    read_parts(content, root, f"{rows.process:05d}", part_bytes, rows.start)
    values = content.view(next(iter(buffers.values())).dtype).reshape(rows.region.shape)
    for region, buffer in buffers.items():
        if overlap := rows.region.overlap(region):
            buffer[overlap.within(region)] = values[overlap.within(rows.region)]
