"""Optimizers and learning-rate schedules from optax, chosen by configuration."""

from gregale.optim.clipping import clip_by_norm, global_norm
from gregale.optim.config import AdamWConfig, LionConfig, Optimizer, OptimizerConfig, SgdConfig
from gregale.optim.groups import GroupConfig
from gregale.optim.matrices import MatrixAxes, decays, matrix_axes
from gregale.optim.muon import MuonConfig
from gregale.optim.schedules import (
    ConstantSchedule,
    CosineSchedule,
    LinearSchedule,
    ScheduleConfig,
    WarmupStableDecaySchedule,
)
