"""Optimizers and learning-rate schedules from optax, chosen by configuration."""

from gregale.optim.config import (
    AdamWConfig,
    GroupConfig,
    LionConfig,
    MatrixAxes,
    Optimizer,
    OptimizerConfig,
    SgdConfig,
    clip_by_norm,
    decays,
    global_norm,
    matrix_axes,
)
from gregale.optim.muon import MuonConfig
from gregale.optim.schedules import (
    ConstantSchedule,
    CosineSchedule,
    LinearSchedule,
    ScheduleConfig,
    WarmupStableDecaySchedule,
)
