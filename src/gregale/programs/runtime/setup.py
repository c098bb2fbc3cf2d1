"""Provides the setup of a run from its configuration: layout, model, method, step."""

import re
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import jax
import numpy as np
from haliax import Axis, NamedArray
from jax.sharding import Mesh

from gregale.axes.layout import BATCH, POSITION, Device, Layout
from gregale.axes.parameters import buffers_of, layer_order, parameter_count, with_arrays
from gregale.communication.pipeline import Schedule, pipelined_execution
from gregale.errors import UserError, plugin_errors
from gregale.methods.config import MethodContext, Methods
from gregale.methods.method import Method
from gregale.methods.psdp import Psdp, identity
from gregale.model.config import CompilerOptions, ModelMethods
from gregale.model.execution import Execution, execution, layers_apart
from gregale.optim.config import ParameterRule
from gregale.programs.runtime.batches import abstract_batch
from gregale.programs.runtime.initial_model import (
    base_model,
    built,
    callback_metrics,
    checked_loss,
    dropping,
    initial_model,
    reference,
    stored_base,
    updated_buffers,
    with_adapters,
)
from gregale.programs.runtime.run_layout import check_axes, checked_layout
from gregale.runs.config import TrainConfig
from gregale.runs.parsing import code_digests
from gregale.tracking.callback import Callback
from gregale.training.compiler import check_compiler_options, compiler_options
from gregale.training.state import Stepper, TrainState, abstract_state, initial_state, new_spikes, state_shardings

VOCABULARY_MULTIPLE = 64
MAX_PARAMETERS = 10**15


@dataclass(frozen=True)
class Setup:
    """The objects that a configuration describes, on a mesh."""

    config: TrainConfig
    layout: Layout  # mesh and mappings
    Vocab: Axis  # the model's vocabulary, padded
    model: object  # the abstract model, which allocates no arrays
    psdp: Psdp  # the method of the warm-up; a conversion between two methods' states goes through its state
    method: Method  # the synchronisation method
    callbacks: tuple[Callback, ...] = ()  # of the configuration; the step computes their metrics

    @property
    def batch_axes(self) -> tuple[Axis, Axis]:
        batch = self.config.batch
        return Axis(BATCH, batch.size), Axis(POSITION, batch.sequence_length)

    @property
    def abstract_batch(self) -> dict[str, NamedArray]:
        return abstract_batch(self.batch_axes, self.layout)

    @property
    def tokens(self) -> int:
        """Return a vocabulary size that `set_up` pads to this setup's."""
        return self.config.model.vocabulary or self.Vocab.size

    @property
    def method_context(self) -> MethodContext:
        """Return the context from which this configuration builds its method and methods for comparison."""
        return method_context_of(self.config, self.model, self.layout, self.callbacks)

    def method_after(self, step: int) -> Method:
        return self.psdp if step < self.config.sync.warm_up() else self.method

    def initial_state(self) -> TrainState:
        """Return the state before the first step; each device makes its shards."""
        method, key = self.method_after(0), jax.random.key(self.config.seed)
        return initial_state(method, lambda: initial_model(self.config, self.Vocab, key), self.compiler_options)

    def new_spikes(self, step: int) -> Any:
        """Return an empty window of spikes for the method that makes the step after `step` steps."""
        method = self.method_after(step)
        shardings = state_shardings(method, abstract_state(method, self.model)).spikes
        return jax.jit(lambda: new_spikes(method), out_shardings=shardings)()

    def state_from(self, model, adapters: Any = None) -> TrainState:
        """Return the state before the first step of a run that starts from a model; the model's arrays are donated.

        - `model`: in the form of `stored_base`
        - `adapters`: those to continue, in the structure of the parameters; None: new ones
        """
        config, key = self.config, jax.random.key(self.config.seed)

        def make(model, adapters):
            return model if config.adapter is None else with_arrays(with_adapters(config, model, key), adapters)

        return initial_state(self.method_after(0), make, self.compiler_options, model, adapters)

    @cached_property
    def base(self) -> Any:
        """Return the abstract model without adapters, see `base_model`."""
        return jax.eval_shape(partial(base_model, self.config, self.Vocab), jax.random.key(0))

    @cached_property
    def stored_base(self) -> Any:
        """Return the abstract model without adapters as devices hold it, see `initial_model.stored_base`."""
        return jax.eval_shape(partial(stored_base, self.config, self.Vocab), jax.random.key(0))

    @cached_property
    def frozen(self) -> Any:
        """Return the abstract weights that nothing trains, see `Method.frozen`; None if there are none."""
        return self.psdp.frozen(self.model)

    def holding(self, model: Any, frozen: Any) -> tuple[Any, Any]:
        """Return a model to evaluate that has the frozen weights of a state, and `Passes.frozen`."""
        return (with_arrays(model, frozen), None) if self.psdp.reference is None else (model, frozen)

    def abstract_state(self) -> TrainState:
        return abstract_state(self.method, self.model)

    def stepper(self, method: Method | None = None) -> Stepper:
        return Stepper(method or self.method, self.model, self.compiler_options)

    @cached_property
    def compiler_options(self) -> CompilerOptions | None:
        """Return the options of all compilations; raise `UserError` for options that the compiler rejects."""
        given, mesh = self.config.compute.compiler_options, self.layout.mesh
        options = compiler_options(given, mesh, self.config.model.experts is not None)
        if given and options:
            check_compiler_options(options, mesh)
        return options

    @cached_property
    def joined_parameters(self) -> Callable[[Any], Any]:
        """Return the program that joins parameters and buffers of a state of `method`; all saves of a run share it."""

        def joined(state):
            return self.psdp.arrays(self.method.to_psdp(state))

        return jax.jit(joined, compiler_options=self.compiler_options)

    @property
    def run_metadata(self) -> dict[str, Any]:
        """Return what a run's configuration lacks about its programs, for JSON."""
        mesh = self.layout.mesh
        kernels = execution(self.config.compute, self.layout, self.config.model).kernels
        return {
            "jax": jax.__version__,
            "devices": mesh.size,
            "device_kind": mesh.devices.flat[0].device_kind,
            "mesh": dict(mesh.shape),
            "kernels": {"rules": kernels.rules, "attention": kernels.attention},
            "compiler_options": self.compiler_options or {},
            **({"plugins": code_digests(self.config.plugins)} if self.config.plugins else {}),
        }

    def learning_rate(self, update: int) -> float:
        """Return the learning rate of an update, counted from 1; a skipped step is no update."""
        with jax.default_device(self._processor):  # on a step's device it would wait for the step in progress
            return float(self._learning_rate(update - 1))

    @cached_property
    def _processor(self) -> Device | None:
        """Return the processor as a device; None where `JAX_PLATFORMS` excludes it."""
        with suppress(RuntimeError):
            return jax.local_devices(backend="cpu")[0]
        return None

    @cached_property
    def _learning_rate(self) -> Callable[[int], jax.Array]:
        """Return the learning rate compiled as one program; separate operations would take a tenth of the start-up."""
        return jax.jit(self.psdp.optimizer.learning_rate)

    def traffic(self, step: int) -> dict[str, int]:
        """Return a device's bytes over `replica` in the first `step` steps of this setup, and the method's metrics."""
        method, warm = self.method, min(step, self.config.sync.warm_up())
        sent, before = method.bytes_sent(step), method.bytes_sent(warm)
        if not isinstance(sent, int | np.integer):
            raise UserError(f"sync.type: {type(method).__name__}.bytes_sent has to return an integer; it is {sent!r}.")
        sent += self.psdp.bytes_sent(warm) - before
        return {"replica_bytes": sent, **method.metrics(step)}

    def schedule(self) -> Schedule | None:
        pipeline = self.config.pipeline
        return None if pipeline is None else pipeline.schedule(self.layout.mesh.shape["stage"])

    def evaluation_execution(self, layout: Layout | None = None) -> Execution:
        """Return the execution of held-out losses: all replicas share the batch, without gradients.

        - `layout`: layout of the computation; default: the layout of this setup
        """
        inside = execution(self.config.compute, self.layout, self.config.model)
        return replace(inside, layout=layout or self.layout, remat="none", evaluates=True)


def padded_vocabulary(config: TrainConfig, tokens: int) -> Axis:
    """Return the model's vocabulary axis for a tokenizer of `tokens` tokens."""
    wanted = config.model.vocabulary
    if wanted is not None and wanted < tokens:
        raise UserError(
            f"model.vocabulary is {wanted}, but the tokenizer has {tokens} tokens; it has to be at least {tokens}, or "
            f"null for the tokenizer's own, padded to a multiple of {VOCABULARY_MULTIPLE}."
        )
    multiple = VOCABULARY_MULTIPLE if wanted is None else config.model.row_multiple
    return Axis("vocab", -(-(wanted or tokens) // multiple) * multiple)


def placed(config: TrainConfig, tokens: int, mesh: Mesh) -> Setup:
    """Return the setup of a configuration that says where experts lie, see `expert_parallelism.set_up`."""
    Vocab = padded_vocabulary(config, tokens)
    layout = checked_layout(config, mesh, Vocab)
    kind = config.model.get_choice_name(type(config.model))
    with plugin_errors(f"model.type {kind}: {type(config.model).__name__}.init", type(config.model)):
        model = jax.eval_shape(partial(initial_model, config, Vocab), jax.random.key(0))
    own = ModelMethods.of(model)
    if own.loss is None:
        raise UserError(f"model.type {kind}: {type(config.model).__name__}.init returns a model without `loss`.")
    if buffers_of(model) is not None and own.update_buffers is None:
        raise UserError(
            f"model.type {kind}: {type(model).__name__} has a buffer, and no `update_buffers(statistics, weight)`."
        )
    check_axes(config, layout, model)
    check_parameters(model)
    callbacks = tuple(built(each) for each in config.callbacks)
    methods = methods_of(config, method_context_of(config, model, layout, callbacks))
    return Setup(config, layout, Vocab, model, methods.psdp, methods.chosen, callbacks)


def methods_of(config: TrainConfig, parts: MethodContext) -> Methods:
    """Return the methods of a run: those of `sync` on the mesh, or those of the section that joins it with others."""
    return config.fleet.build(config.sync, parts)


def method_context_of(config: TrainConfig, model, layout: Layout, callbacks: Sequence[Callback]) -> MethodContext:
    """Return the context from which the configuration builds its methods."""
    options = compiler_options(config.compute.compiler_options, layout.mesh, config.model.experts is not None)
    psdp = partial(psdp_on, config, model, callbacks)
    return MethodContext(layout, psdp, config.reduce, config.steps, config.seed, options)


def check_parameters(model) -> None:
    """Raise `UserError` for a number of parameters whose bytes overflow the compiler's counters."""
    if (count := parameter_count(model)) > MAX_PARAMETERS:
        raise UserError(
            f"model: these sizes make up {count:,} parameters, and {MAX_PARAMETERS:,} is the most. Look at "
            "model.layers, model.hidden, model.heads times model.head_size, model.mlp and model.vocabulary."
        )


def psdp_on(config: TrainConfig, model, callbacks: Sequence[Callback], layout: Layout) -> Psdp:
    """Return the PSDP method of a configuration on a layout, the full layout or that of one replica."""
    run = execution(config.compute, layout, config.model)
    if config.pipeline is not None:
        run = pipelined_execution(config.pipeline, run)
    per_step = config.compute.gather == "per_step"
    first = first_layers(config, model, layout)
    in_loop = replace(run, weights_ready=per_step, first_layers=first)
    of_model = config.objective.is_models_own

    def loss(model, batch, frozen=None):
        return checked_loss(config.model, model, batch, dropping(config, in_loop, batch), config.objective, frozen)

    return Psdp(
        model=model,
        loss=loss,
        optimizer=config.build_optimizer(model, layout),
        layout=layout,
        reference=reference(config, model),
        microbatches=config.batch.microbatches,
        gather_fn=run.gathered if per_step else identity,
        first_layers=first,
        spikes=config.skip_spikes,
        update_buffers=partial(updated_buffers, config.model) if of_model else lambda model, *sums: model,
        measure=lambda model, batch: callback_metrics(callbacks, model, batch, run),
    )


def first_layers(config: TrainConfig, model, layout: Layout) -> int:
    """Return the number of layers behind whose passes PSDP hides the transfers of all others; 0: it hides none.

    Only TPUs overlap transfers between slices with compute. With several microbatches gradients are complete after the
    loop over them.
    """
    joined = config.sync.separate_axis(layout) is None and not config.fleet.joins
    joined = joined and config.adapter is None  # adapters are small
    scanned = config.pipeline is None and config.batch.microbatches == 1 and not config.reduce.quantised
    tpus = layout.mesh.devices.flat[0].platform == "tpu" and layout.replicas > 1
    labels = zip(layer_order(model), config.model.kind_numbers, strict=False)  # a model may have no kinds
    return layers_apart(tuple(labels)) if tpus and joined and scanned else 0


def rules_of(setup: Setup) -> dict[str, ParameterRule]:
    """Return the rule of each parameter: Muon's, `optimizer.groups` and `model.parametrisation` together.

    Nothing if all parameters have the same algorithm and rate.
    """
    rules = setup.config.optimizer.rules(setup.model, setup.config.model.scalings)
    return rules if len({rule[:2] for rule in rules.values()}) > 1 else {}


def parameter_groups(setup: Setup) -> list[dict[str, Any]]:
    """Return the groups of `rules_of`; `layer.*` stands for all layers, if they have the same rule."""
    rules = rules_of(setup)
    general = {name: re.sub(r"^layer\.\d+", "layer.*", name) for name in rules}
    of_layers: dict[str, set[ParameterRule]] = {}
    for name, rule in rules.items():
        of_layers.setdefault(general[name], set()).add(rule)
    shown = {name: general[name] if len(of_layers[general[name]]) == 1 else name for name in rules}
    return [
        {**rule._asdict(), "parameters": list(dict.fromkeys(shown[name] for name in rules if rules[name] == rule))}
        for rule in dict.fromkeys(rules.values())
    ]
