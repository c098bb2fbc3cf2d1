"""The pairs of blocks, of queries and of keys, that attention's kernels compute, in the order in which they do."""

from dataclasses import dataclass
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np

from gregale.axes.layout import CONTEXT
from gregale.axes.parameters import chunk_order

# Kinds of pairs: all scores are visible; those at and below the diagonal; some, by a window; none.
WHOLE, DIAGONAL, EDGE, NOTHING = range(4)
FIRST, LAST, OPENS, CLOSES = (1 << bit for bit in range(2, 6))
_FLAGS = 6  # bits of the kind and the flags
_HALF = 16
WORDS = 3  # of 32 bits for a pair


@dataclass(frozen=True)
class Step:
    """One pair of a kernel's grid.

    - `row`, `key`: numbers of the block of queries on this device, and of keys among all
    - `distance`: blocks from the keys to the queries, by positions
    - `kind`: which scores are visible
    - `first`, `last`: the pair begins, or ends, the outer block: of queries in `by_rows`, else of keys
    - `opens`, `closes`: the pair is the first, or the last, of the inner block
    - `head`: number of the query head in its group
    - `output`: the inner block that is complete at or after this pair: head * rows + row
    """

    row: jax.Array
    key: jax.Array
    distance: jax.Array
    kind: jax.Array
    first: jax.Array
    last: jax.Array
    opens: jax.Array
    closes: jax.Array
    head: jax.Array
    output: jax.Array

    @staticmethod
    def of(table, step) -> "Step":
        """Read a row of a table."""
        places, state, heads = (table[WORDS * step + word] for word in range(WORDS))
        low = (1 << _HALF) - 1
        flags = ((state & flag) != 0 for flag in (FIRST, LAST, OPENS, CLOSES))
        return Step(
            places & low, places >> _HALF, state >> _FLAGS, state & 3, *flags, head=heads & low, output=heads >> _HALF
        )


@dataclass(frozen=True)
class Pairs:
    """The visible pairs of blocks of equal size.

    - `length`: positions of the keys
    - `size`: positions of a block, which divides the chunks of `devices`
    - `devices`: that share a sequence
    - `window`: see `Attend`
    - `before`: blocks of keys before each of two chunks of queries (`halo`); None: the keys are a sequence
    """

    length: int
    size: int
    devices: int
    window: int | None
    before: int | None = None

    @property
    def rows(self) -> int:
        """Return the number of blocks of queries of a device."""
        return self.keys // self.devices - 2 * (self.before or 0)

    @property
    def keys(self) -> int:
        return self.length // self.size

    def kind(self, distance: int) -> int:
        if self.window is not None and (distance + 1) * self.size > self.window:
            return EDGE
        return WHOLE if distance else DIAGONAL

    @property
    def cases(self) -> list[tuple[int, int]]:
        """Return the kinds that occur, but `NOTHING`, each with a distance: of edges with all that there are."""
        found = {(self.kind(distance), distance) for distance in range(self.reach + 1)}
        return sorted({(kind, distance if kind == EDGE else min(distance, 1)) for kind, distance in found})

    @property
    def reach(self) -> int:
        """Return the largest distance of a visible pair."""
        return self.keys - 1 if self.window is None else min(self.keys - 1, -(-(self.window - 1) // self.size))

    def of_device(self, device: int) -> list[tuple[int, int, int]]:
        """Return row, key and distance of the visible pairs, ordered by rows."""
        chunks = self._chunks(device)
        blocks = [first + block for first in chunks for block in range(self.rows // len(chunks))]
        return [
            (row, key, block - key)
            for row, block in enumerate(blocks)
            for key in range(max(0, block - self.reach), block + 1)
        ]

    def _chunks(self, device: int) -> list[int]:
        """Return the number of the first block of keys of each chunk of queries."""
        each = self.rows // 2
        if self.before is not None:
            return [self.before, 2 * self.before + each]
        if self.devices == 1:
            return [0]
        return [int(chunk) * each for chunk in chunk_order(self.devices)[2 * device : 2 * device + 2]]

    def by_rows(self) -> "Table":
        """Return the table of this device, a block of queries after the other."""
        return self._own(_by_rows(self))

    def by_keys(self, groups: int) -> "Table":
        """Return the table of this device, a block of keys after the other, and the heads of a group in each."""
        return self._own(_by_keys(self, groups))

    def _own(self, tables: np.ndarray) -> "Table":
        words = jnp.asarray(tables[0] if self.devices == 1 else tables)
        return Table(words if self.devices == 1 else words[jax.lax.axis_index(CONTEXT)], counts_of(tables))


@dataclass(frozen=True)
class Table:
    """The pairs of one device, as a kernel reads them.

    - `words`: int32 [pair * WORDS]
    - `counts`: of steps, outer blocks, and pairs of each kind, on the device that has most
    """

    words: jax.Array
    counts: dict[str, int]


def counts_of(tables: np.ndarray) -> dict[str, int]:
    state = tables[:, 1::WORDS]
    kinds = {name: ((state & 3) == kind).sum(1) for kind, name in enumerate(("whole", "diagonal", "edge"))}
    found = {"steps": np.array(state.shape[1:]), "outer": ((state & FIRST) != 0).sum(1), **kinds}
    return {name: int(each.max()) for name, each in found.items()}


@cache
def _by_rows(pairs: Pairs) -> np.ndarray:
    tables = []
    for device in range(pairs.devices):
        found = pairs.of_device(device)
        words = []
        for place, (row, key, distance) in enumerate(found):
            first = place == 0 or found[place - 1][0] != row
            last = place + 1 == len(found) or found[place + 1][0] != row
            words.append((row | key << _HALF, _state(pairs.kind(distance), distance, first, last), 0))
        tables.append(words)
    return _even(tables)


@cache
def _by_keys(pairs: Pairs, groups: int) -> np.ndarray:
    tables = []
    for device in range(pairs.devices):
        seen: list[list[tuple[int, int]]] = [[] for _ in range(pairs.keys)]
        ends: dict[int, tuple[int, int]] = {}  # of a row: its first key and its last
        for row, key, distance in pairs.of_device(device):
            seen[key].append((row, distance))
            ends[row] = (ends.get(row, (key, key))[0], key)
        words = []
        ended = sorted((last, row) for row, (_, last) in ends.items())
        for key, rows in enumerate(seen):
            done = next((row for last, row in ended if last >= key), ended[-1][1])
            idle = (groups - 1) * (key > ended[-1][0]), -1, 0  # its output is not written after it is complete
            steps = [(head, *each) for head in range(groups) for each in rows] or [idle]
            for place, (head, row, distance) in enumerate(steps):
                kind = NOTHING if row < 0 else pairs.kind(distance)
                opens, closes = (row >= 0 and end == key for end in ends.get(row, (-1, -1)))
                state = _state(kind, distance, place == 0, place + 1 == len(steps), opens, closes)
                words.append((max(row, 0) | key << _HALF, state, head | (head * pairs.rows + done) << _HALF))
        tables.append(words)
    return _even(tables)


def _state(kind: int, distance: int, *flags: bool) -> int:
    named = zip((FIRST, LAST, OPENS, CLOSES), flags, strict=False)
    return kind | sum(flag for flag, given in named if given) | distance << _FLAGS


def _even(tables: list[list[tuple[int, int, int]]]) -> np.ndarray:
    """Fill up the tables of all devices to equal lengths with pairs at the end that do nothing."""
    most = max(map(len, tables))
    filled = [[*words, *[(words[-1][0], NOTHING, words[-1][2])] * (most - len(words))] for words in tables]
    return np.array(filled, np.int32).reshape(len(tables), -1)
