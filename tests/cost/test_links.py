"""Times of collectives on the links of a slice, against closed forms and a count of each link's traffic."""

from collections import Counter
from itertools import product

import numpy as np
import pytest

from gregale.cost.chips import chip
from gregale.cost.collectives import Collective, Grid

BYTES = 1 << 20
V5E = 45e9  # bytes a second of a link


def grid(name: str, *sizes: int) -> Grid:
    coordinates = np.array(list(product(*map(range, sizes))))
    return Grid(chip(name).ici, sizes, coordinates)


def collective(kind: str, sent: float, *groups: tuple[int, ...]) -> Collective:
    fields = dict.fromkeys(("dtype", "link", "name", "op_name"), "") | dict.fromkeys(("shapes", "axes", "touched"), ())
    return Collective(
        kind=kind, bytes=BYTES, bytes_sent=sent * BYTES, groups=groups, loops=(), conditional=False, is_async=False,
        **fields,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("name", "sizes", "links"),
    [
        ("v5e", (8, 8), (1, 1)),
        ("v6e", (8, 16), (1, 2)),
        ("v5e", (16, 16), (2, 2)),
        ("v5p", (4, 4, 4), (2, 2, 2)),
        ("v5p", (4, 4, 8), (2, 2, 2)),
        ("v4", (2, 4, 4), (1, 1, 1)),
        ("v4", (2, 2, 1), (1, 1, 0)),
    ],
)
def test_rings_and_lines(name, sizes, links):
    found = chip(name)
    assert found.ici.links(sizes) == links
    assert found.in_slice(sizes).link_bytes_per_second == sum(links) * found.ici.bytes_per_second
    assert 6 * found.ici.bytes_per_second >= 0.9 * found.link_bytes_per_second, "nine tenths of the datasheet's"


def test_what_has_no_links_keeps_its_rate():
    assert chip("H100").in_slice((8,)) is chip("H100")
    assert chip("v5e").in_slice((1, 1)) is chip("v5e")


def test_a_gather_is_bound_by_the_corner_of_its_group():
    """All chips of 8x8 have two links at the corner, of 16x16 four; a line has one, half of one if two groups share."""
    whole, pod = grid("v5e", 8, 8), grid("v5e", 16, 16)
    sent = 63 / 64
    assert whole.seconds(collective("all-gather", sent, tuple(range(64)))) == sent * BYTES / (2 * V5E)
    assert pod.seconds(collective("all-reduce", 2 * sent, tuple(range(256)))) == 2 * sent * BYTES / (4 * V5E)
    row = tuple(range(8))
    assert whole.seconds(collective("all-gather", 7 / 8, row)) == 7 / 8 * BYTES / V5E
    for group, links in (((0, 1, 2, 3), 1), ((0, 2, 4, 6), 1 / 2), ((0, 1, 8, 9), 2), ((0, 4), 1 / 4)):
        assert whole.seconds(collective("reduce-scatter", 0.75, group)) == 0.75 * BYTES / (links * V5E), group
    assert pod.seconds(collective("all-gather", 1, tuple(range(0, 16, 2)))) == BYTES / V5E, (
        "a ring of two links, shared"
    )
    assert whole.seconds(collective("all-gather", 1)) is None


def busiest(sizes: tuple[int, ...], rings: tuple[bool, ...]) -> float:
    """The most parts that cross a link if each chip sends one to each other, axis by axis on the shortest way."""
    loads: Counter = Counter()
    for start, end in product(product(*map(range, sizes)), repeat=2):
        at = list(start)
        for axis, size in enumerate(sizes):
            forward = (end[axis] - at[axis]) % size if rings[axis] else end[axis] - at[axis]
            ways = [(forward, 1.0)]
            if rings[axis]:
                ways = [(forward, 0.5), (forward - size, 0.5)] if 2 * forward == size else ways
                ways = [(forward - size, 1.0)] if 2 * forward > size else ways
            for distance, share in ways:
                step, here = (1 if distance > 0 else -1), list(at)
                for _ in range(abs(distance)):
                    loads[axis, tuple(here), step] += share
                    here[axis] = (here[axis] + step) % size
            at[axis] = end[axis]
    return max(loads.values())


@pytest.mark.parametrize(
    ("name", "sizes"), [("v5e", (4, 4)), ("v5e", (8, 2)), ("v6e", (16, 3)), ("v5p", (4, 4, 4)), ("v5p", (2, 3, 4))]
)
def test_an_all_to_all_is_bound_by_the_middle_of_the_grid(name, sizes):
    found = grid(name, *sizes)
    count = int(np.prod(sizes))
    seconds = found.seconds(collective("all-to-all", (count - 1) / count, tuple(range(count))))
    rings = tuple(links == 2 for links in found.ici.links(sizes))
    assert seconds == pytest.approx(busiest(sizes, rings) * BYTES / count / found.ici.bytes_per_second)


def test_a_permutation_shares_the_links_between_its_pairs():
    whole, pod = grid("v5e", 8, 8), grid("v5e", 16, 16)
    next_ = [(index, (index + 1) % 8) for index in range(8)]
    assert whole.seconds(collective("collective-permute", 1, *next_)) == BYTES / V5E, "the way back is free"
    far = [(index, index + 4) for index in range(4)]
    assert whole.seconds(collective("collective-permute", 1, *far)) == 4 * BYTES / V5E
    around = [(index, (index + 12) % 16) for index in range(16)]
    assert pod.seconds(collective("collective-permute", 1, *around)) == 4 * BYTES / V5E
