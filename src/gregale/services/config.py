"""The one configuration of a run: what the YAML file and the command line fill in."""

from __future__ import annotations

from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any

from gregale.axes.mesh import MeshConfig
from gregale.codecs.config import ReduceConfig
from gregale.communication.pipeline.config import PipelineConfig
from gregale.data.config import DataConfig
from gregale.errors import UserError
from gregale.methods.config import PsdpConfig, SyncConfig
from gregale.model.config import ComputeConfig, LlamaConfig, ModelConfig
from gregale.optim.config import AdamWConfig, OptimizerConfig
from gregale.services.checkpoint.retention import CheckpointConfig
from gregale.services.tracking.choices import TrackerConfig


def at_least(minimum: int, key: str, value: int | None) -> None:
    if value is not None and value < minimum:
        raise UserError(f"{key} is {value}; it has to be at least {minimum}.")


@dataclass(frozen=True)
class BatchConfig:
    """What one step sees."""

    size: int = field(default=64, metadata={"help": "sequences in a step, over all replicas and microbatches"})
    sequence_length: int = field(default=1024, metadata={"help": "tokens in a sequence"})
    microbatches: int = field(default=1, metadata={"help": "parts of a step's batch, computed one after the other"})

    def __post_init__(self):
        for each in fields(self):
            at_least(1, f"batch.{each.name}", getattr(self, each.name))

    @property
    def tokens(self) -> int:
        return self.size * self.sequence_length


@dataclass(frozen=True)
class EvaluationConfig:
    """When and on how much the held-out loss is taken."""

    every: int | None = field(default=None, metadata={"help": "steps between evaluations; null: at the end only"})
    batches: int | None = field(default=None, metadata={"help": "held-out batches to evaluate on; null: all"})
    bigram: bool = field(default=False, metadata={"help": "at the end, show a bigram model of the same text beside it"})

    def __post_init__(self):
        at_least(1, "evaluation.every", self.every)
        at_least(1, "evaluation.batches", self.batches)


@dataclass(frozen=True)
class SamplesConfig:
    """Texts that the model continues at every evaluation, written to samples.txt."""

    prompts: list[str] = field(default_factory=list, metadata={"help": "beginnings for the model to continue"})
    tokens: int = field(default=128, metadata={"help": "tokens to add to each"})
    temperature: float = field(default=0.8, metadata={"help": "randomness; 0 takes the likeliest token"})

    def __post_init__(self):
        at_least(1, "samples.tokens", self.tokens)
        if self.temperature < 0:
            raise UserError(f"samples.temperature is {self.temperature:g}; it has to be at least 0.")


AUTO = "auto"
MOST_TIMEOUT_SECONDS = 86_400
MOST_NAME_BYTES = 240  # of the 255 that a file system allows; `.old-12` follows it when a run is set aside


@dataclass(frozen=True)
class DistributedConfig:
    """How the processes of a run on several hosts find one another."""

    coordinator: str | None = field(
        default=None, metadata={"help": "HOST:PORT of process 0; auto: the cluster knows it"}
    )
    processes: int = field(default=1, metadata={"help": "number of processes"})
    process: int = field(default=0, metadata={"help": "this process's number, from 0"})
    timeout_seconds: float = field(
        default=60.0, metadata={"help": "a process that gives no sign of life for so long is lost, and the others end"}
    )

    def __post_init__(self):
        at_least(1, "distributed.processes", self.processes)
        if not 1 <= self.timeout_seconds <= MOST_TIMEOUT_SECONDS:
            raise UserError(
                f"distributed.timeout_seconds is {self.timeout_seconds:g}; it has to be from 1 to "
                f"{MOST_TIMEOUT_SECONDS:,} seconds."
            )
        if not 0 <= self.process < self.processes:
            raise UserError(
                f"distributed.process is {self.process}; the {self.processes} processes have the numbers 0 to "
                f"{self.processes - 1}."
            )
        if self.coordinator not in (None, AUTO) and not self.coordinator.rpartition(":")[2].isdecimal():
            raise UserError(
                f"distributed.coordinator is {self.coordinator!r}; it has to be HOST:PORT, for example 10.0.0.2:8476, "
                f"or {AUTO} where the cluster knows it."
            )


@dataclass(frozen=True)
class TrainConfig:
    """A training run."""

    name: str = field(metadata={"help": "the run's name; its directory is runs/<name>"})
    steps: int = field(metadata={"help": "length of the run in optimizer steps"})
    seed: int = field(default=0, metadata={"help": "of the initial weights and the data order"})
    runs: str = field(default="runs", metadata={"help": "folder of the run directories"})
    cpu_devices: int | None = field(
        default=None, metadata={"help": "simulate this many CPU devices instead of accelerators"}
    )
    log_every: int = field(default=1, metadata={"help": "steps between lines of metrics.jsonl"})
    max_skipped: int = field(default=10, metadata={"help": "stop after this many non-finite steps in a row"})
    mesh: MeshConfig = field(default=MeshConfig(), metadata={"help": "sizes of the mesh axes"})
    model: ModelConfig = field(default=LlamaConfig(), metadata={"help": "the model's shape"})
    compute: ComputeConfig = field(default=ComputeConfig(), metadata={"help": "how the model is computed"})
    pipeline: PipelineConfig | None = field(
        default=None, metadata={"help": "layers pipelined over mesh.stage; null: no pipeline"}
    )
    data: DataConfig = field(default=DataConfig(), metadata={"help": "what to train on"})
    batch: BatchConfig = field(default=BatchConfig(), metadata={"help": "what one step sees"})
    optimizer: OptimizerConfig = field(default=AdamWConfig(), metadata={"help": "the optimizer"})
    sync: SyncConfig = field(default=PsdpConfig(), metadata={"help": "how replicas are kept together"})
    reduce: ReduceConfig = field(default=ReduceConfig(), metadata={"help": "what is sent between replicas"})
    checkpoint: CheckpointConfig = field(default=CheckpointConfig(), metadata={"help": "when to save, what to keep"})
    evaluation: EvaluationConfig = field(default=EvaluationConfig(), metadata={"help": "the held-out loss"})
    samples: SamplesConfig = field(default=SamplesConfig(), metadata={"help": "texts to continue"})
    trackers: list[TrackerConfig] = field(
        default_factory=list, metadata={"help": "beside console and metrics.jsonl: tensorboard, wandb, trackio"}
    )
    distributed: DistributedConfig = field(
        default=DistributedConfig(), metadata={"help": "how several processes find one another"}
    )

    def __post_init__(self):
        if not self.name or "/" in self.name or self.name.startswith("."):
            raise UserError(
                f"name is {self.name!r}; it names a directory, so it has no '/' and does not begin with '.'."
            )
        if (size := len(self.name.encode())) > MOST_NAME_BYTES:
            raise UserError(
                f"name has {size} bytes ({self.name[:20]}...); it names a directory, so it has at most "
                f"{MOST_NAME_BYTES}."
            )
        for key in ("steps", "cpu_devices", "log_every", "max_skipped"):
            at_least(1, key, getattr(self, key))


# What a run may change when it resumes; a change of anything else makes another run of it.
MAY_CHANGE = (
    "steps",
    "runs",
    "cpu_devices",
    "log_every",
    "max_skipped",
    "mesh",
    "compute",
    "pipeline",
    "data.cache",
    "data.workers",
    "batch.microbatches",
    "sync",
    "reduce",
    "checkpoint",
    "evaluation",
    "samples",
    "trackers",
    "distributed",
)


def incompatible_changes(before: TrainConfig, now: TrainConfig) -> list[str]:
    """The changes that keep a run from resuming, each as `key: old -> new`."""
    changes = []
    for key, (old, new) in _differences(before, now).items():
        if not any(key == allowed or key.startswith(allowed + ".") for allowed in MAY_CHANGE):
            changes.append(f"{key}: {old!r} -> {new!r}")
    return changes


def _differences(before: Any, now: Any, key: str = "") -> dict[str, tuple[Any, Any]]:
    if before == now:
        return {}
    if is_dataclass(before) and type(before) is type(now):
        names = [each.name for each in fields(before)]
        pairs = {name: (getattr(before, name), getattr(now, name)) for name in names}
    elif isinstance(before, dict) and isinstance(now, dict):
        pairs = {name: (before.get(name), now.get(name)) for name in {**before, **now}}
    else:
        return {key: (before, now)}
    found = {}
    for name, (old, new) in pairs.items():
        found |= _differences(old, new, f"{key}.{name}" if key else str(name))
    return found
