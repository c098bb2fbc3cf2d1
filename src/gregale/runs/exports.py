"""The configuration of the exports that a run makes while it trains."""

from dataclasses import dataclass

from gregale.runs.run_paths import RunPaths
from gregale.settings import Settings, setting, whole
from gregale.storage import StoragePath, storage_path

EXPORTS = "exports"


@dataclass(frozen=True)
class ExportConfig(Settings):
    """Folders for transformers that a run writes in the background, as `gregale export` does."""

    every: int | None = setting(None, "steps between Hugging Face folders; null: none", range=whole(1), by_topic=True)
    folder: str | None = setting(None, "their folder; null: exports in the run's directory", by_topic=True)
    keep_last: int | None = setting(None, "number of newest folders to keep; null: all", range=whole(1), by_topic=True)
    dtype: str | None = setting(
        None,
        "dtype of all tensors; null: as `gregale export`",
        choices=("float32", "bfloat16", "float16"),
        by_topic=True,
    )

    def is_due(self, step: int) -> bool:
        return self.every is not None and step % self.every == 0

    def folder_of(self, run: RunPaths) -> StoragePath:
        return run.path / EXPORTS if self.folder is None else storage_path(self.folder)
