"""The function that a run minimises: of a batch, of a model, and of its frozen weights."""

from gregale.objectives.base import NextTokenConfig, ObjectiveConfig, Passes, of_pairs
from gregale.objectives.dpo import DpoConfig
