"""Provides the memory of one device: the compiler's report of a program, and the bytes of trees from shardings."""

from dataclasses import dataclass
from math import prod
from typing import Any

import jax

from gregale.axes.layout import Tree


@dataclass(frozen=True)
class CompilerMemory:
    """Bytes on one device by the compiler's plan.

    `peak` is the compiler's, or else arguments + results + temporaries without the results that overwrite arguments:
    an upper bound, because not all of them exist at the same time.
    """

    arguments: int
    results: int
    temporaries: int
    aliased: int
    reported_peak: int | None = None

    @property
    def peak(self) -> int:
        if self.reported_peak is not None:
            return self.reported_peak
        return self.arguments + self.results + self.temporaries - self.aliased


def compiler_memory(compiled: jax.stages.Compiled, has_peak: bool = False) -> CompilerMemory:
    """Return the compiler's memory report of a program.

    - `has_peak`: the report's peak is valid; XLA:CPU omits the temporaries
    """
    found: Any = compiled.memory_analysis()
    return CompilerMemory(
        arguments=found.argument_size_in_bytes,
        results=found.output_size_in_bytes,
        temporaries=found.temp_size_in_bytes,
        aliased=found.alias_size_in_bytes,
        reported_peak=found.peak_memory_in_bytes if has_peak else None,
    )


def bytes_on_device(tree: Tree) -> int:
    """Return the bytes on one device of a tree of `ShapeDtypeStruct`s with shardings."""
    return sum(
        prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize
        for leaf in jax.tree.leaves(tree)
        if isinstance(leaf, jax.ShapeDtypeStruct) and leaf.sharding is not None
    )
