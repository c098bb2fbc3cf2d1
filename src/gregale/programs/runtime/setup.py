"""From a configuration to everything that is compiled: layout, model, method, step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import jax
from haliax import Axis
from jax.sharding import Mesh

from gregale.axes.layout import BATCH, Layout, check_divides, standard_layout
from gregale.axes.mesh import make_mesh
from gregale.communication.accumulate import rows_per_part
from gregale.communication.pipeline.config import pipelined_execution
from gregale.communication.pipeline.schedule import Schedule
from gregale.errors import UserError, below
from gregale.methods.config import MethodContext, Methods
from gregale.methods.method import Method
from gregale.methods.psdp import Psdp, same
from gregale.model.attention import POSITION
from gregale.model.config import CompilerOptions
from gregale.model.execution import Execution, execution
from gregale.model.llama import parameter_count
from gregale.model.registry import init_model
from gregale.runs.config import TrainConfig
from gregale.training.compiler_options import check_compiler_options, compiler_options
from gregale.training.state import TrainState, abstract_state, initial_state
from gregale.training.stepper import Stepper

VOCABULARY_MULTIPLE = 64
MOST_PARAMETERS = 10**15


@dataclass(frozen=True)
class Setup:
    """What a configuration becomes on a mesh.

    - `layout`: mesh and mappings
    - `Vocab`: the model's vocabulary, padded
    - `model`: the abstract model; nothing is allocated
    - `psdp`: the method of the warm-up, and the form through which one method's state becomes another's
    - `method`: the synchronisation method
    """

    config: TrainConfig
    layout: Layout
    Vocab: Axis
    model: object
    psdp: Psdp
    method: Method

    @property
    def batch_axes(self) -> tuple[Axis, Axis]:
        batch = self.config.batch
        return Axis(BATCH, batch.size), Axis(POSITION, batch.sequence_length)

    @property
    def parts(self) -> MethodContext:
        """What this configuration's method is built of, and those that it is compared with."""
        return parts_of(self.config, self.model, self.layout)

    def method_after(self, step: int) -> Method:
        """The method of the step that follows `step` steps."""
        return self.psdp if step < self.config.sync.warm_up() else self.method

    def method_named(self, name: str) -> Method:
        """The method with this name, of the two that a run has."""
        return self.psdp if name == self.psdp.name else self.method

    def initial_state(self) -> TrainState:
        """The state before the first step, made in shards."""
        method, options = self.method_after(0), self.compiler_options
        return initial_state(method, lambda: self.init_model(jax.random.key(self.config.seed)), options)

    def state_from(self, model) -> TrainState:
        """The state before the first step of a run that starts from a model, whose arrays are used up."""
        return initial_state(self.method_after(0), same, self.compiler_options, model)

    def init_model(self, key):
        """The model with its initial weights."""
        return init_model(self.config.model, self.Vocab, key)

    def abstract_state(self) -> TrainState:
        """The state of a run by the configured method; nothing is allocated."""
        return abstract_state(self.method, self.model)

    def stepper(self, method: Method | None = None) -> Stepper:
        """Takes the steps of the configured method, or of another one."""
        return Stepper(method or self.method, self.model, self.compiler_options)

    @cached_property
    def compiler_options(self) -> CompilerOptions | None:
        """With which all programs are compiled; raises `UserError` if the compiler does not take what is given."""
        given, mesh = self.config.compute.compiler_options, self.layout.mesh
        options = compiler_options(given, mesh)
        if given and options:
            check_compiler_options(options, mesh)
        return options

    @property
    def facts(self) -> dict[str, Any]:
        """What a run's programs are made by and for, beside its configuration; for JSON."""
        mesh = self.layout.mesh
        kernels = execution(self.config.compute, self.layout, self.config.model).kernels
        return {
            "jax": jax.__version__,
            "devices": mesh.size,
            "device_kind": mesh.devices.flat[0].device_kind,
            "mesh": dict(mesh.shape),
            "kernels": {"rules": kernels.rules, "attention": kernels.attention},
            "compiler_options": self.compiler_options or {},
        }

    def learning_rate(self, update: int) -> float:
        """The learning rate of an update, counted from 1; skipped steps make none."""
        return float(self._learning_rate(update - 1))

    @cached_property
    def _learning_rate(self) -> Callable[[int], jax.Array]:
        """Compiled as one program: as many operations, each a program of its own, would take a tenth of a start."""
        return jax.jit(self.psdp.optimizer.learning_rate)

    def traffic(self, step: int) -> dict[str, int]:
        """Bytes that a device sends over `replica` in the first `step` steps, if all are of this set-up.

        With the method's other figures.
        """
        method, warm = self.method, min(step, self.config.sync.warm_up())
        sent = self.psdp.bytes_sent(warm) + method.bytes_sent(step) - method.bytes_sent(warm)
        return {"replica_bytes": sent, **method.metrics(step)}

    def schedule(self) -> Schedule | None:
        """The pipeline's schedule; None: the layers are not pipelined."""
        pipeline = self.config.pipeline
        return None if pipeline is None else pipeline.schedule(self.layout.mesh.shape["stage"])

    def evaluation_execution(self, layout: Layout | None = None) -> Execution:
        """How held-out losses are computed: all replicas share the batch, nothing is differentiated.

        - `layout`: for those who do; default: the whole one
        """
        inside = execution(self.config.compute, self.layout, self.config.model)
        return Execution(**{**vars(inside), "layout": layout or self.layout, "remat": "none"})


def padded_vocabulary(config: TrainConfig, tokens: int) -> Axis:
    """The model's vocabulary axis for a tokenizer of so many tokens."""
    wanted = getattr(config.model, "vocabulary", None)
    if wanted is not None and wanted < tokens:
        raise UserError(
            f"model.vocabulary is {wanted}, but the tokenizer has {tokens} tokens; it has to be at least {tokens}, or "
            f"null for the tokenizer's own, padded to a multiple of {VOCABULARY_MULTIPLE}."
        )
    multiple = VOCABULARY_MULTIPLE if wanted is None else getattr(config.model, "row_multiple", 1)
    return Axis("vocab", -(-(wanted or tokens) // multiple) * multiple)


def checked_layout(config: TrainConfig, mesh: Mesh, Vocab: Axis) -> Layout:
    """The layout of a run; raises `UserError` for whatever the mesh does not divide, before anything is compiled."""
    layout = standard_layout(mesh)
    batch = config.batch
    check_divides(
        layout,
        {
            "batch.size": ("the sequences of a step", Axis(BATCH, batch.size)),
            **config.model.split_axes(),
            "model.vocabulary": (
                "the vocabulary, which model.row_multiple (of type llama and gemma, as in an import's config.yaml) "
                "fills up,",
                Vocab,
            ),
        },
    )
    rows = rows_per_part(batch.size, layout, batch.microbatches)
    check_pipeline(config, layout, rows)
    return layout


def check_pipeline(config: TrainConfig, layout: Layout, rows: int) -> None:
    """Raises `UserError` if stages, layers, rows and the rest of the configuration do not make up a pipeline.

    `rows`: of one of `batch.microbatches` on one device
    """
    stages = layout.mesh.shape["stage"]
    if config.pipeline is None:
        if stages > 1:
            raise UserError(
                f"mesh.stage is {stages}, but there is no `pipeline`, so nothing would run in stages. Give one "
                "(`pipeline: {repeats: 1}`). Set mesh.stage to 1 to give the devices to another axis."
            )
        return
    schedule = config.pipeline.schedule(stages)
    if (layers := getattr(config.model, "layers", None)) is not None:
        schedule.layers_per_stage(layers)
    if config.compute.gather == "per_step":
        raise UserError(
            "compute.gather is per_step, but a pipeline has its own window of gathered weights. Use compute.gather "
            "per_layer, and pipeline.gather once to gather all layers before the first iteration."
        )
    parts, size = schedule.columns, config.batch.size
    if rows % parts:
        raise UserError(
            f"batch.size is {size}: each of {config.batch.microbatches} microbatches has {rows} rows on a device, "
            f"which pipeline.microbatches {schedule.microbatches} / mesh.stage {stages} = {parts} does not divide. "
            f"batch.size {-(-rows // parts) * parts * size // rows} would work, or another pipeline.microbatches."
        )


def set_up(config: TrainConfig, tokens: int, mesh: Mesh | None = None) -> Setup:
    """Builds what a configuration asks for; nothing is allocated or compiled.

    Arguments:
    - `tokens`: the tokenizer's vocabulary size
    - `mesh`: default: the configured one on all devices

    Raises `UserError` for what does not fit together.
    """
    mesh = make_mesh(config.mesh) if mesh is None else mesh
    Vocab = padded_vocabulary(config, tokens)
    layout = checked_layout(config, mesh, Vocab)
    model = jax.eval_shape(partial(init_model, config.model, Vocab), jax.random.key(0))
    check_parameters(model)
    methods = methods_of(config, parts_of(config, model, layout))
    return Setup(config, layout, Vocab, model, methods.psdp, methods.chosen)


def methods_of(config: TrainConfig, parts: MethodContext) -> Methods:
    """The methods of a run: those of `sync` on the mesh, or of one island of a fleet that `sync` joins."""
    if config.islands.lighthouse is None:
        return config.sync.build(parts)
    return Methods(parts.psdp_on(parts.layout), config.sync.island(parts))


def parts_of(config: TrainConfig, model, layout: Layout) -> MethodContext:
    """What the configuration's methods are built of."""
    options = compiler_options(config.compute.compiler_options, layout.mesh)
    return MethodContext(layout, partial(psdp_on, config, model), config.reduce, config.steps, config.seed, options)


def check_parameters(model) -> None:
    """Raises `UserError` for more parameters than the compiler can count the bytes of."""
    if (count := parameter_count(model)) > MOST_PARAMETERS:
        raise UserError(
            f"model: these sizes make up {count:,} parameters, and {MOST_PARAMETERS:,} is the most. Look at "
            "model.layers, model.hidden, model.heads times model.head_size, model.mlp and model.vocabulary."
        )


def check_replicas(config: TrainConfig, layout: Layout) -> None:
    """Raises `UserError` if the replicas are not those that `data.replica_mixtures` is for."""
    mixtures = len(config.data.replica_mixtures)
    if not mixtures:
        return
    axis = config.sync.parted_over(layout)
    if axis is None:
        raise UserError(
            "data.replica_mixtures gives each replica its own text, but sync.type is "
            f"{config.sync.get_choice_name(type(config.sync))!r}: all replicas make every step together, so it would "
            "be one mixture. Use sync.type diloco or streaming_diloco, or give the sources their weights "
            "(data.sources.<name>.weight)."
        )
    replicas = layout.mesh.shape[axis]
    if mixtures != replicas:
        raise UserError(
            f"data.replica_mixtures has {mixtures} mixtures, but mesh.{axis} is {replicas}, and DiLoCo joins that many "
            f"replicas. Give {replicas} mixtures, or set mesh.{axis} to {mixtures}."
        )


def psdp_on(config: TrainConfig, model, layout: Layout) -> Psdp:
    """The PSDP step of a configuration on a layout, the whole one or one replica's."""
    run = execution(config.compute, layout, config.model)
    if config.pipeline is not None:
        run = pipelined_execution(config.pipeline, run)
    per_step = config.compute.gather == "per_step"
    in_loop = replace(run, weights_ready=per_step)
    with below("optimizer"):
        optimizer = config.optimizer.build(model, config.steps, layout)
    return Psdp(
        model=model,
        loss=lambda model, batch: model.loss(batch, in_loop),
        optimizer=optimizer,
        layout=layout,
        microbatches=config.batch.microbatches,
        prepare=run.gathered if per_step else same,
    )
