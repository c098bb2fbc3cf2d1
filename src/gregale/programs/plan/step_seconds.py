"""Provides the time of a step in closed form, and by the schedule of a program that is compiled to the memory report.

Both compare settings of one model on the same devices: transfers count on the links that their mesh axes have. They do
not predict, because products run at the chip's peak.
"""

from __future__ import annotations

from collections import Counter
from itertools import pairwise
from math import prod
from typing import TYPE_CHECKING

import numpy as np

from gregale.audit.collectives import BETWEEN, INSIDE, Grid, grid_of
from gregale.audit.estimate import ACCELERATOR
from gregale.audit.roofline import Roofline, link_rates, roofline
from gregale.audit.traffic import Transfer, sent_bytes
from gregale.programs.plan.devices import Target
from gregale.programs.plan.shapes import (
    FAR_AXES,
    Bytes,
    estimated_link_bytes,
    estimated_work,
    step_transfers,
)

if TYPE_CHECKING:
    from gregale.programs.runtime.setup import Setup

# Transfers of which the compilers' default options start most beside products (docs/tpu.md, docs/gpu.md).
BEHIND_PRODUCTS = ("weights", "gradients")


def closed_form_seconds(setup: Setup, target: Target, bandwidth: float | None, trees: Bytes | None = None) -> float:
    """Return the seconds of a step: weights and gradients inside a slice travel behind products, all else in between.

    - `bandwidth`: bytes per second that a device sends between slices; None: the chip's share of its network
    - `trees`: the sizes of the setup's trees, if they are known
    """
    work = estimated_work(setup, estimated_link_bytes(setup) or {INSIDE: 0.0, BETWEEN: 0.0}, trees)
    bound = roofline(work, target.chip, target.devices_a_chip, bandwidth)
    rate, grid = link_rates(target.chip, target.devices_a_chip, bandwidth)[INSIDE], link_grid(setup, target)
    loads: Counter[tuple[bool, str, tuple[str, ...]]] = Counter()
    for each in step_transfers(setup, ACCELERATOR):
        if not set(each.axes) & set(FAR_AXES):
            behind = each.purpose in BEHIND_PRODUCTS and "model" not in each.axes
            loads[behind, each.kind, each.axes] += each.bytes * each.times
    parts = dict.fromkeys((True, False), 0.0)
    for (behind, kind, axes), size in loads.items():
        parts[behind] += _seconds(Transfer("", kind, axes, size), setup, grid, rate)
    return joined(bound, parts[True], parts[False] + bound.host)


def joined(bound: Roofline, behind: float, between: float) -> float:
    """Return the time of a step whose transfers inside a slice go behind products, and between them."""
    far = sum(bound.links.values()) - bound.links[INSIDE]
    return max(bound.compute, bound.memory, behind) + between + far


def link_grid(setup: Setup, target: Target) -> Grid | None:
    return None if target.simulated else grid_of(setup.layout.mesh, target.chip, target.devices_a_chip)


def _seconds(each: Transfer, setup: Setup, grid: Grid | None, rate: float) -> float:
    """Return the seconds of a transfer inside a slice."""
    sizes = dict(setup.layout.mesh.shape)
    sent = sent_bytes(each, sizes)
    if grid is None:
        return sent / rate
    numbers = np.arange(prod(sizes.values())).reshape(tuple(sizes.values()))
    group = numbers[tuple(slice(None) if axis in each.axes else 0 for axis in sizes)].ravel().tolist()
    groups = tuple(pairwise(group)) if each.kind == "collective-permute" else (tuple(group),)
    found = grid.seconds_of(each.kind, each.bytes, sent, groups)
    return sent / rate if found is None else found
