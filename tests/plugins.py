"""Plugins in this process, which are forgotten afterwards: other tests list all choices."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from gregale.codecs.codec import FIRST_LEGS, SECOND_LEGS
from gregale.data.sources import SourceConfig
from gregale.data.tokenizers import TokenizerConfig
from gregale.huggingface.families import FAMILIES
from gregale.methods.config import OuterConfig, SyncConfig
from gregale.model.config import ModelConfig
from gregale.objectives import ObjectiveConfig
from gregale.optim import OptimizerConfig, ScheduleConfig
from gregale.settings.decoding import known_entries
from gregale.tracking.callback import CallbackConfig
from gregale.tracking.trackers import TrackerConfig

EXAMPLES = Path(__file__).parents[1] / "docs" / "examples"
REGISTRIES = (
    *(ModelConfig, OptimizerConfig, ScheduleConfig, SourceConfig, TokenizerConfig, SyncConfig, TrackerConfig),
    *(CallbackConfig, ObjectiveConfig, OuterConfig),
)


@contextmanager
def plugins_from(folder: Path) -> Iterator[None]:
    """Modules of a folder can be imported; at the end they are gone, with all that they have registered."""
    known: list[dict] = [FIRST_LEGS, SECOND_LEGS, FAMILIES, *(registry.get_known_choices() for registry in REGISTRIES)]
    before, path = [dict(each) for each in known], list(sys.path)
    sys.path.insert(0, str(folder))
    try:
        yield
    finally:
        sys.path[:] = path
        for each, old in zip(known, before, strict=True):
            each.clear()
            each.update(old)
        for name, module in list(sys.modules.items()):
            if (file := getattr(module, "__file__", None)) and Path(file).parent == folder:
                del sys.modules[name]
        known_entries.cache_clear()
