"""The choice of how replicas average: exactly, or through codecs."""

from __future__ import annotations

from gregale.axes.layout import REPLICA, Layout
from gregale.codecs.config import ReduceConfig
from gregale.communication.quantised import QuantisedReducer
from gregale.communication.reduce import ExactReducer

Reducer = ExactReducer | QuantisedReducer


def reducer_of(config: ReduceConfig, layout: Layout, axis: str = REPLICA) -> Reducer:
    """The reducer that a configuration asks for: an exact one unless a leg has a codec."""
    return QuantisedReducer(layout, config, axis) if config.quantised else ExactReducer(layout, axis)
