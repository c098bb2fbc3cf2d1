"""The choice of the replicas' average: exact, or by codecs."""

from __future__ import annotations

from gregale.axes.layout import REPLICA, Layout
from gregale.codecs.config import ReduceConfig
from gregale.communication.quantised import QuantisedReducer
from gregale.communication.reduce import ExactReducer

Reducer = ExactReducer | QuantisedReducer


def reducer_of(config: ReduceConfig, layout: Layout, axis: str = REPLICA) -> Reducer:
    """Return the reducer of a configuration: exact unless a phase has a codec."""
    return QuantisedReducer(layout, config, axis) if config.quantised else ExactReducer(layout, axis)
