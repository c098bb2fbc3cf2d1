"""The function that a run minimises: of a batch, of a model, and of its frozen weights."""

from gregale.objectives.base import NextTokenConfig as NextTokenConfig
from gregale.objectives.base import ObjectiveConfig as ObjectiveConfig
from gregale.objectives.base import Passes as Passes
from gregale.objectives.base import of_pairs as of_pairs
from gregale.objectives.dpo import DpoConfig as DpoConfig
