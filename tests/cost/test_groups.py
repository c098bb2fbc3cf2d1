"""The three forms of replica groups, against groups counted out device by device."""

import itertools

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from gregale.cost.hlo import parse_groups, parse_pairs, parse_slice_target

sizes_and_axes = st.lists(st.integers(1, 4), min_size=1, max_size=4).flatmap(
    lambda sizes: st.tuples(st.just(tuple(sizes)), st.sets(st.integers(0, len(sizes) - 1), min_size=1))
)


def counted_groups(sizes, axes):
    """The groups over `axes`: devices whose other coordinates agree."""
    groups = {}
    for number, place in enumerate(itertools.product(*(range(size) for size in sizes))):
        groups.setdefault(tuple(c for axis, c in enumerate(place) if axis not in axes), []).append(number)
    return as_sets(groups.values())


def as_sets(groups):
    return sorted(tuple(sorted(group)) for group in groups)


def explicit(sizes, axes):
    return "{" + ",".join("{" + ",".join(map(str, group)) + "}" for group in counted_groups(sizes, axes)) + "}"


def iota(sizes, axes):
    outside = [axis for axis in range(len(sizes)) if axis not in axes]
    size = int(np.prod([sizes[axis] for axis in axes]))
    shape = f"[{int(np.prod(sizes)) // size},{size}]"
    order = ",".join(map(str, outside + sorted(axes)))
    return f"{shape}<=[{','.join(map(str, sizes))}]T({order})"


def by_mesh(sizes, axes):
    named = ",".join(f"'axis_{axis}'={size}" for axis, size in enumerate(sizes))
    used = ",".join(f"'axis_{axis}'" for axis in sorted(axes, reverse=True))
    return f"mesh[{named}] {{{used}}}"


@settings(deadline=None)
@given(sizes_and_axes)
def test_every_form_lists_the_same_groups(case):
    sizes, axes = case
    expected = counted_groups(sizes, axes)
    for printed in (explicit, iota, by_mesh):
        assert as_sets(parse_groups(printed(sizes, axes), int(np.prod(sizes)))) == expected, printed(sizes, axes)


@settings(deadline=None)
@given(st.lists(st.integers(1, 3), min_size=2, max_size=4), st.data())
def test_a_part_of_a_mesh_axis_is_an_axis_of_a_finer_mesh(factors, data):
    """`'x':(b)p` of an axis x = b * p * rest: the same groups as over the middle of three axes."""
    first, last = sorted(data.draw(st.tuples(*[st.integers(0, len(factors) - 1)] * 2)))
    before, part = int(np.prod(factors[:first])), int(np.prod(factors[first : last + 1]))
    text = f"mesh['x'={int(np.prod(factors))}] {{'x':({before}){part}}}"
    assert as_sets(parse_groups(text, 0)) == counted_groups(factors, set(range(first, last + 1)))


def test_forms_that_are_rarer():
    assert as_sets(parse_groups("mesh['x'=8] {'x':(1)2,'x':(4)2}", 8)) == counted_groups((2, 2, 2), {0, 2})
    listed = parse_groups("mesh['a'=2,'b'=2], device_ids=(3,1,2,0) {'b'}", 4)
    assert as_sets(listed) == [(0, 2), (1, 3)]
    transposed = parse_groups("mesh['a'=2,'b'=4], device_ids=([4,2]T(1,0)) {'b'}", 8)
    assert as_sets(transposed) == [(0, 2, 4, 6), (1, 3, 5, 7)]
    assert parse_groups("[2,3]<=[6]", 6) == ((0, 1, 2), (3, 4, 5))
    assert parse_groups("{}", 3) == ((0, 1, 2),)


def test_pairs_and_targets_between_slices():
    assert parse_pairs("{{0,4},{4, 0},{1,1}}") == ((0, 4), (4, 0), (1, 1))
    assert parse_pairs("{{100000->200000},{100001->200001}}") == ((100000, 200000), (100001, 200001))
    assert parse_slice_target('"{1,2}x{0:2}"') == ((100000, 200000), (100001, 200001), (100002, 200002))
    assert parse_slice_target("{{100000,300000},{200001,400001}}") == ((100000, 300000), (200001, 400001))
    assert parse_slice_target("{{100000->200000}}") == ((100000, 200000),)
