"""Provides the parser of a collective's device groups, as XLA prints them.

Groups have three forms: explicit `{{0,1},{2,3}}`, iota `[4,2]<=[2,2,2]T(1,0,2)`, and by the compiler's mesh
`mesh['a'=2,'b'=4] {'a'}`. The numbers are the program's device numbers;
`gregale.audit.device_axes` maps them to a mesh.
"""

import math
import re

import numpy as np

Groups = tuple[tuple[int, ...], ...]

_IOTA = re.compile(r"\[([\d,]+)\](?:<=\[([\d,]+)\])?(?:T\(([\d,]+)\))?")
_MESH = re.compile(r"@?mesh[\[<]([^\]>]*)[\]>](?:\s*,?\s*device_ids=\(([^)]*(?:T\([\d,]+\))?)\))?\s*\{([^}]*)\}")
_AXIS = re.compile(r"'?([^',=\s]+)'?=(\d+)")
_AXIS_USE = re.compile(r"'?([^',:\s]+)'?(?::\((\d+)\)(\d+))?")
_NUMBERED = re.compile(r"\{([\d,\s]+)\}")
_PAIR = re.compile(r"(\d+)\s*(?:,|->)\s*(\d+)")
_PRODUCT = re.compile(r"((?:\{[\d,{}\s]*\}))x\{?(\d+):(\d+)\}?")


def _integers(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(",") if part.strip())


def _iota(shape: str, source: str | None, order: str | None) -> np.ndarray:
    """Return the numbers 0, 1, ... reshaped to `source`, transposed by `order` and reshaped to `shape`."""
    sizes = _integers(source or shape)
    numbers = np.arange(math.prod(sizes)).reshape(sizes)
    if order:
        numbers = numbers.transpose(_integers(order))
    return numbers.reshape(_integers(shape))


def _mesh_groups(mesh: re.Match) -> Groups:
    """Return the groups over the axes in the braces; `'a':(2)4` is the factor 4 of axis `a` after a factor 2."""
    sizes = {name: int(size) for name, size in _AXIS.findall(mesh.group(1))}
    count = math.prod(sizes.values())
    listed = mesh.group(2)
    if listed is None:
        numbers = np.arange(count)
    elif iota := _IOTA.match(listed):
        # `[4,16]T(1,0)` is the transpose of the numbers laid out as 4 x 16.
        numbers = _iota(str(count), iota.group(2) or iota.group(1), iota.group(3)).reshape(-1)
    else:
        numbers = np.array(_integers(listed))
    factors, inside = [], []
    for name, size in sizes.items():
        done = 1
        for before, part in sorted(_uses(mesh.group(3), name, size)):
            factors += [before // done, part]
            inside.append(len(factors) - 1)
            done = before * part
        factors.append(size // done)
    outside = [index for index in range(len(factors)) if index not in inside]
    arranged = numbers.reshape(factors).transpose(outside + inside)
    return tuple(map(tuple, arranged.reshape(-1, math.prod(factors[index] for index in inside)).tolist()))


def _uses(used: str, axis: str, size: int) -> list[tuple[int, int]]:
    """Return (size before it, size) of each part of an axis in the groups; a whole axis is (1, size)."""
    uses = [(before, part) for name, before, part in _AXIS_USE.findall(used) if name == axis]
    return [(int(before or 1), int(part or size)) for before, part in uses]


def parse_groups(text: str, devices: int) -> Groups:
    """Return the groups of a `replica_groups` attribute in any of the three forms; `{}` is one group of all."""
    text = text.strip()
    if mesh := _MESH.match(text):
        return _mesh_groups(mesh)
    if iota := _IOTA.match(text):
        return tuple(map(tuple, _iota(*iota.groups()).tolist()))
    groups = tuple(_integers(group) for group in _NUMBERED.findall(text))
    return groups or (tuple(range(devices)),)


def parse_pairs(text: str) -> Groups:
    """Return the (source, target) pairs of a permutation, printed `{{0,1},{1,0}}` or `{{0->1},{1->0}}`."""
    return tuple((int(source), int(target)) for source, target in _PAIR.findall(text))


def parse_slice_target(text: str) -> Groups:
    """Return the groups of `jax.Device.id` of a transfer between TPU slices.

    Printed as lists of ids, as pairs `{{100000->200000}}`, or as `{1,2}x{0:3}`: for each device 0 to 3 of a slice, the
    group of that device in slices 1 and 2. A device id is 100000 times the slice (from one) plus the device.
    """
    if "->" in text:
        return parse_pairs(text)
    product = _PRODUCT.search(text)
    if product is None:
        return tuple(_integers(group) for group in _NUMBERED.findall(text))
    first, last = int(product.group(2)), int(product.group(3))
    slices = [_integers(group) for group in _NUMBERED.findall(product.group(1))]
    return tuple(tuple(100000 * s + device for s in group) for group in slices for device in range(first, last + 1))
