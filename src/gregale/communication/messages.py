"""The transfers of quantised averages in closed form, from the codecs' own bytes."""

from typing import Any

from gregale.audit.traffic import FLOAT32, Transfer
from gregale.communication.quantised import QuantisedReducer

Tree = Any


def step_messages(reducer: QuantisedReducer, tree: Tree) -> list[Transfer]:
    """Return the transfers for the average of a tree, its measurement and the gather of its updates."""
    return [*send_messages(reducer, tree), *measure_messages(reducer, 2), *give_back_messages(reducer, tree)]


def send_messages(reducer: QuantisedReducer, tree: Tree) -> list[Transfer]:
    """Return the transfers of `reduce` for a tree of arrays without the axis."""
    wire, axes = reducer.wire_bytes(tree), (reducer.axis,)
    return [
        Transfer("first leg", "all-to-all", axes, wire.first),
        Transfer("second leg", "all-gather", axes, wire.second),
        Transfer("scalars", "all-gather", axes, wire.scalars),
        *_finite(reducer, wire.finite),
    ]


def give_back_messages(reducer: QuantisedReducer, tree: Tree) -> list[Transfer]:
    """Return the transfers of `all_gather_params` for a tree."""
    wire = reducer.wire_bytes(tree)
    second = Transfer("second leg", "all-gather", (reducer.axis,), wire.given_back)
    return [second, *_finite(reducer, wire.finite_given_back)]


def measure_messages(reducer: QuantisedReducer, totals: int) -> list[Transfer]:
    """Return the transfers for the total of some scalars, and for a norm."""
    return [
        Transfer("totals", "all-gather", (reducer.axis,), totals * FLOAT32 * reducer.lanes),
        Transfer("norm", "all-gather", (reducer.axis,), FLOAT32 * reducer.lanes),
        Transfer("norm", "all-reduce", reducer.fast_axes, FLOAT32),
    ]


def _finite(reducer: QuantisedReducer, flags: int) -> list[Transfer]:
    """Return the transfers of finiteness flags: numbers inside a replica for each phase, bytes over the axis."""
    return [
        Transfer("finite", "all-gather", (reducer.axis,), flags),
        Transfer("finite", "all-reduce", reducer.fast_axes, FLOAT32 * flags // reducer.lanes),
    ]
