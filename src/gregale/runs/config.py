"""The configuration of a run, filled from the YAML file and the command line."""

from dataclasses import dataclass, field, fields
from functools import cached_property
from typing import Any, TypeVar

from gregale.axes.layout import Layout, MappingConfig, MeshConfig
from gregale.checkpoint.manifest import CheckpointConfig, ExportConfig
from gregale.codecs.codec import ReduceConfig
from gregale.communication.pipeline import PipelineConfig
from gregale.data.config import DataConfig
from gregale.data.sources.base import expand
from gregale.distributed.config import AUTO, DistributedConfig
from gregale.errors import KeyedError, UserError, below
from gregale.methods.average import AverageConfig
from gregale.methods.config import PsdpConfig, SyncConfig
from gregale.methods.method import SpikesConfig
from gregale.model.config import SHAPE, AdapterConfig, ComputeConfig
from gregale.model.llama import LlamaConfig, ModelConfig
from gregale.objectives import NextTokenConfig, ObjectiveConfig
from gregale.optim.config import AdamWConfig, Optimizer, OptimizerConfig
from gregale.runs.rules import check
from gregale.runs.sections import OF_PLUGINS, Section, add_section, section_classes
from gregale.runs.stages import Stage, number_after, stages_of
from gregale.settings import Fixed, Settings, at_least, check_name, check_path, setting, shown, whole
from gregale.storage import StoragePath, is_url, storage_path
from gregale.tracking.callback import CallbackConfig
from gregale.tracking.trackers import TrackerConfig, check_each_once

S = TypeVar("S", bound=Section)


@dataclass(frozen=True)
class BatchConfig(Settings):
    """The batch of one step."""

    size: int = setting(
        64, "number of sequences in a step, over all replicas", range=whole(1, 1_000_000), aliases=("batch_size", "bs")
    )
    sequence_length: int = setting(
        1024,
        "number of tokens in a sequence",
        range=whole(1),
        aliases=("context_length", "seq_length", "context", "n_ctx", "max_position_embeddings", "model.context"),
        fixed=Fixed("examples are cut to this length, and others would repeat or leave out text"),
    )
    microbatches: int = setting(
        1,
        "parts of a step's batch (gradient accumulation)",
        range=whole(1),
        aliases=("grad_accum", "accumulation_steps", "gradient_accumulation"),
    )

    @property
    def tokens(self) -> int:
        return self.size * self.sequence_length


@dataclass(frozen=True)
class SamplesConfig(Settings):
    """Texts that the model continues at every evaluation, written to samples.txt."""

    prompts: list[str] = setting(list, "beginnings for the model to continue", aliases=("prompt",))
    tokens: int = setting(128, "tokens to add to each prompt", range=whole(1), aliases=("max_new_tokens", "max_tokens"))
    temperature: float = setting(0.8, "randomness; 0: always the likeliest token", range=at_least(0))


MAX_NAME_BYTES = 240  # a file system allows 255; an archived run appends `.old-12`


@dataclass(frozen=True)
class EvaluationConfig(Settings):
    """The schedule and the amount of evaluation, and the tasks to score."""

    every: int | None = setting(
        None,
        "steps between evaluations; null: only at the end",
        range=whole(1),
        aliases=("eval_steps", "evaluation_steps", "interval", "samples.every"),
    )
    batches: int | None = setting(
        None,
        "held-out batches to evaluate on; null: all",
        range=whole(1),
        aliases=("eval_batches", "eval_iters", "num_batches"),
    )
    sequence_lengths: list[int] = setting(list, "further lengths of held-out sequences", range=whole(2), unique=True)
    by_position: bool = setting(False, "also the loss by a token's position in its document")
    bigram: bool = setting(False, "at the end, show a bigram model of the same text")
    tasks: list[str] = setting(list, "files of tasks (globs), also published ones", aliases=("eval_tasks",))
    parse_special: bool = setting(False, "names of special tokens in tasks are tokens, not text", by_topic=True)
    chat: bool = setting(False, "a prompt whose answer is generated is the message of a user", by_topic=True)


@dataclass(frozen=True)
class InspectConfig(Settings):
    """Inspection of layers: norms of parameters and gradients, update-to-weight ratios, largest attention logits."""

    every: int | None = setting(None, "steps between inspections; null: never", range=whole(1), aliases=("interval",))
    granularity: str = setting(
        "layer", "of what there are norms: of each layer, or of each array", choices=("layer", "array")
    )


@dataclass(frozen=True)
class TrainConfig(Settings):
    """A training run."""

    name: str = field(metadata={"help": "the run's name; its directory is runs/<name>", "aliases": ("run_id",)})
    steps: int = field(
        metadata={
            "help": "length of the run in optimizer steps",
            "range": whole(1),
            "aliases": ("num_steps", "total_steps", "max_iters", "n_steps"),
        }
    )
    stages: list[dict[str, Any]] = setting(
        list, "changes of configuration, each `from` a step or a fraction of the run", by_topic=True
    )
    notes: str | None = setting(None, "a remark, for the report", aliases=("description",), by_topic=True)
    seed: int = setting(
        0,
        "seed of weights and data order",
        range=whole(0, 2**32 - 1),
        aliases=("random_seed",),
        fixed=Fixed("it orders the data, and another order would repeat and leave out examples"),
    )
    start_from: str | None = setting(
        None,
        "run or imported model to start from; null: random",
        aliases=("init_from", "from_pretrained", "pretrained", "load_from"),
    )
    runs: str = setting("runs", "folder or URL of the run directories", aliases=("save_dir", "log_dir"))
    plugins: list[str] = setting(list, "your modules to import first", aliases=("imports",))
    cpu_devices: int | None = setting(None, "simulate this many CPU devices", range=whole(1, 4096))
    compilation_cache: str | None = setting(AUTO, "compiled programs; auto: ~/.cache/gregale; null: none")
    log_every: int = setting(
        1, "number of steps between lines of metrics.jsonl", range=whole(1), aliases=("log_steps",)
    )
    skip_spikes: SpikesConfig | None = setting(
        None, "steps far above the last ones that change nothing; null: none", by_topic=True
    )
    average: AverageConfig | None = setting(
        None, "a moving average of the parameters; null: none", aliases=("ema", "ema_decay"), by_topic=True
    )
    max_skipped: int = setting(10, "stop after this many non-finite steps in a row", range=whole(1))
    mesh: MeshConfig = setting(MeshConfig(), "sizes of the mesh axes")
    mapping: MappingConfig = setting(MappingConfig(), "the mesh axes over which arrays are split")
    model: ModelConfig = setting(LlamaConfig(), "the model's shape", fixed=SHAPE)
    adapter: AdapterConfig | None = setting(
        None,
        "small weights to train beside those of start_from, which are frozen; null: none",
        aliases=("lora", "peft"),
        fixed=SHAPE,
        by_topic=True,
    )
    objective: ObjectiveConfig = setting(NextTokenConfig(), "what is minimised: next_token, dpo", by_topic=True)
    compute: ComputeConfig = setting(ComputeConfig(), "how the model is computed")
    pipeline: PipelineConfig | None = setting(None, "layers pipelined over mesh.stage; null: no pipeline")
    data: DataConfig = setting(DataConfig(), "the data to train on", aliases=("dataset",))
    batch: BatchConfig = setting(BatchConfig(), "the batch of one step")
    optimizer: OptimizerConfig = setting(
        AdamWConfig(),
        "the optimizer",
        aliases=("optim", "optimizer_name"),
        fixed=Fixed("each optimizer keeps a state of its own kind"),
    )
    sync: SyncConfig = setting(PsdpConfig(), "the method that synchronises replicas", begins_anew=True)
    reduce: ReduceConfig = setting(ReduceConfig(), "the data sent between replicas")
    checkpoint: CheckpointConfig = setting(CheckpointConfig(), "when to save, what to keep")
    export: ExportConfig = setting(ExportConfig(), "folders for transformers", by_topic=True)
    evaluation: EvaluationConfig = setting(EvaluationConfig(), "the held-out loss, and tasks", aliases=("eval",))
    samples: SamplesConfig = setting(SamplesConfig(), "texts to continue")
    inspect: InspectConfig = setting(InspectConfig(), "metrics of each layer")
    trackers: list[TrackerConfig] = setting(list, "further trackers: tensorboard, wandb, trackio", aliases=("logger",))
    callbacks: list[CallbackConfig] = setting(list, "your callbacks, which `plugins` register")
    distributed: DistributedConfig = setting(DistributedConfig(), "the rendezvous and timeouts of several processes")

    def __post_init__(self):
        super().__post_init__()
        if not self.name or "/" in self.name or self.name.startswith("."):
            raise KeyedError(
                "name",
                f"is {shown(self.name)}",
                "; it names a directory, so it has no '/' and does not begin with '.'.",
            )
        check_name("name", self.name)
        check_path("runs", self.runs)
        if self.compilation_cache is not None:
            check_path("compilation_cache", self.compilation_cache)
            if is_url(self.compilation_cache):
                try:
                    storage_path(self.compilation_cache)
                except UserError as error:
                    is_what = f"is {shown(self.compilation_cache)}"
                    raise KeyedError("compilation_cache", is_what, f". {error}") from None
        if (size := len(self.name.encode())) > MAX_NAME_BYTES:
            raise KeyedError(
                "name",
                f"has {size} bytes ({self.name[:20]}...)",
                f"; it names a directory, so it has at most {MAX_NAME_BYTES}.",
            )
        check_each_once(self.trackers)
        object.__setattr__(self, "sync", self.sync.following(self.reduce))
        check(self)
        _ = self.each_stage  # rejects invalid ones

    @property
    def folder(self) -> StoragePath:
        """The run's directory."""
        return storage_path(expand(self.runs, "runs")) / self.name

    @property
    def sections(self) -> dict[str, Section]:
        return {key: getattr(self, key) for key in section_classes()}

    @property
    def fleet(self) -> Section:
        """The section that joins this run with others over a network; a section without effect if it is alone."""
        return next((each for each in self.sections.values() if each.joins), Section())

    @cached_property
    def each_stage(self) -> tuple[Stage, ...]:
        """The stages of the run, each with its whole configuration; without `stages` one."""
        return stages_of(self)

    def after(self, step: int) -> "TrainConfig":
        """Return the configuration of the stage to which the step after `step` belongs."""
        return self.each_stage[number_after(self.each_stage, step)].config

    def at(self, step: int) -> "TrainConfig":
        """Return the configuration of the stage to which step `step` belongs, and its checkpoint."""
        return self.after(max(0, step - 1))

    @property
    def mixture(self) -> tuple[dict[str, float], int, list[dict[str, float]]]:
        """The weights of the sources, the length of their rows, and the weights of each replica, if they differ."""
        return self.data.weights, self.batch.sequence_length, self.data.replica_mixtures

    @property
    def evaluates(self) -> bool:
        """Whether there is text or a task to evaluate on."""
        return self.data.evaluates or bool(self.evaluation.tasks)

    def build_optimizer(self, parameters, layout: Layout) -> Optimizer:
        """Return the optimizer of the model's parameters, an abstract tree, on a layout."""
        scalings = self.model.scalings
        with below("optimizer"):
            # A plugin's optimizer may have a `build` without scalings.
            return self.optimizer.build(parameters, self.steps, layout, **({"scalings": scalings} if scalings else {}))


for each in section_classes().values():
    add_section(TrainConfig, each)


def register_section(section: type[S]) -> type[S]:
    """Add a plugin's section, a frozen dataclass, to the configuration."""
    if section.key in {each.name for each in fields(TrainConfig)}:
        raise ValueError(f"Cannot register the section {section.key}: the key is taken")
    OF_PLUGINS[section.key] = section
    add_section(TrainConfig, section)
    return section
