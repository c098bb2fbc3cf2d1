"""What quantised averages send, in closed form: the codecs' own bytes, as transfers of a plan."""

from __future__ import annotations

from typing import Any

from gregale.audit.traffic import FLOAT32, Transfer
from gregale.communication.quantised import QuantisedReducer

Tree = Any


def step_messages(reducer: QuantisedReducer, tree: Tree) -> list[Transfer]:
    """What averaging a tree, measuring it and giving updates of it back sends."""
    return [*send_messages(reducer, tree), *measure_messages(reducer, 2), *give_back_messages(reducer, tree)]


def send_messages(reducer: QuantisedReducer, tree: Tree) -> list[Transfer]:
    """What `reduce` of a tree of arrays without the axis sends."""
    wire, axes = reducer.wire_bytes(tree), (reducer.axis,)
    return [
        Transfer("first leg", "all-to-all", axes, wire.first),
        Transfer("second leg", "all-gather", axes, wire.second),
        Transfer("scalars", "all-gather", axes, wire.scalars),
        *_finite(reducer, wire.finite),
    ]


def give_back_messages(reducer: QuantisedReducer, tree: Tree) -> list[Transfer]:
    """What `give_back` of a tree sends."""
    wire = reducer.wire_bytes(tree)
    second = Transfer("second leg", "all-gather", (reducer.axis,), wire.given_back)
    return [second, *_finite(reducer, wire.finite_given_back)]


def measure_messages(reducer: QuantisedReducer, totals: int) -> list[Transfer]:
    """What the total of some scalars, and a norm, send."""
    return [
        Transfer("totals", "all-gather", (reducer.axis,), totals * FLOAT32 * reducer.lanes),
        Transfer("norm", "all-gather", (reducer.axis,), FLOAT32 * reducer.lanes),
        Transfer("norm", "all-reduce", reducer.fast_axes, FLOAT32),
    ]


def _finite(reducer: QuantisedReducer, flags: int) -> list[Transfer]:
    """Whether values are finite: inside a replica as a number for each leg, over the axis as a byte."""
    return [
        Transfer("finite", "all-gather", (reducer.axis,), flags),
        Transfer("finite", "all-reduce", reducer.fast_axes, FLOAT32 * flags // reducer.lanes),
    ]
