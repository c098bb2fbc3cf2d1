"""What quantised averages send, in closed form: the codecs' own bytes, as transfers of a plan."""

from __future__ import annotations

from typing import Any

from gregale.audit.traffic import FLOAT32, Transfer
from gregale.communication.quantised import QuantisedReducer
from gregale.methods.psdp import Psdp

Tree = Any


def psdp_messages(method: Psdp) -> list[Transfer] | None:
    """What averaging gradients and giving updates back sends; None if it is done in float32."""
    reducer, parameters = method.reducer, method.model
    if not isinstance(reducer, QuantisedReducer):
        return None
    return [
        *send_messages(reducer, parameters),
        *measure_messages(reducer, 2),
        *give_back_messages(reducer, parameters),
    ]


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
