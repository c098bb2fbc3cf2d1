"""Gregale: a named-axis training toolkit for language models in JAX.

    result = gregale.train("config/quickstart.yaml", steps=100)
    model = gregale.load(result.run)

Every name of `__all__` is imported at its first use, so that `import gregale` imports no other package.
"""

from gregale.version import __version__

TYPE_CHECKING = False  # as `typing` has it, whose import would take longer than all of this module's
if TYPE_CHECKING:
    from gregale.data.sources import SourceConfig
    from gregale.data.tokenizers import TokenizerConfig
    from gregale.errors import UserError
    from gregale.methods.config import SyncConfig
    from gregale.model.config import ModelConfig
    from gregale.optim.config import OptimizerConfig
    from gregale.optim.schedules import ScheduleConfig
    from gregale.programs.python_api import LoadedModel, TrainingResult, load, train
    from gregale.runs.config import TrainConfig
    from gregale.settings import setting
    from gregale.tracking.callback import Callback, CallbackConfig
    from gregale.tracking.trackers import TrackerConfig

__all__ = [
    "Callback",
    "CallbackConfig",
    "LoadedModel",
    "ModelConfig",
    "OptimizerConfig",
    "ScheduleConfig",
    "SourceConfig",
    "SyncConfig",
    "TokenizerConfig",
    "TrackerConfig",
    "TrainConfig",
    "TrainingResult",
    "UserError",
    "__version__",
    "load",
    "setting",
    "train",
]

_MODULES = {
    "Callback": "gregale.tracking.callback",
    "CallbackConfig": "gregale.tracking.callback",
    "LoadedModel": "gregale.programs.python_api",
    "ModelConfig": "gregale.model.config",
    "OptimizerConfig": "gregale.optim.config",
    "ScheduleConfig": "gregale.optim.schedules",
    "SourceConfig": "gregale.data.sources",
    "SyncConfig": "gregale.methods.config",
    "TokenizerConfig": "gregale.data.tokenizers",
    "TrackerConfig": "gregale.tracking.trackers",
    "TrainConfig": "gregale.runs.config",
    "TrainingResult": "gregale.programs.python_api",
    "UserError": "gregale.errors",
    "load": "gregale.programs.python_api",
    "setting": "gregale.settings",
    "train": "gregale.programs.python_api",
}


def __getattr__(name: str):
    """Import a name of `__all__` at its first use."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    globals()[name] = found = getattr(import_module(_MODULES[name]), name)
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
