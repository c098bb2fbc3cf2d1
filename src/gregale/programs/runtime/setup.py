"""Provides the setup of a run from its configuration: layout, model, method, step."""

import re
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property, partial
from math import lcm
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from equinox import is_array
from haliax import Axis, NamedArray
from jax.sharding import Mesh

from gregale.axes.layout import (
    BATCH,
    POSITION,
    Device,
    Layout,
    check_arrays,
    check_divides,
    check_mapping,
    is_named,
    make_mesh,
    mapped_layout,
    with_rank,
)
from gregale.axes.parameters import (
    buffers_of,
    is_buffer,
    is_parameter,
    is_quantised,
    layer_order,
    parameter_count,
    position_order,
    trainable,
    with_arrays,
)
from gregale.communication.pipeline import Schedule, pipelined_execution
from gregale.errors import UserError, plugin_errors
from gregale.methods.config import MethodContext
from gregale.methods.method import Method
from gregale.methods.psdp import Psdp, identity
from gregale.model.adapters import adapted, hashed, quantised
from gregale.model.config import DTYPES, CompilerOptions, ModelConfig, ModelMethods
from gregale.model.execution import Execution, execution, layers_apart
from gregale.model.losses import LARGEST_LOGITS, Losses, losses_of
from gregale.objectives import NextTokenConfig, ObjectiveConfig, Passes
from gregale.optim.config import ParameterRule
from gregale.programs.runtime.batches import abstract_batch
from gregale.runs.config import TrainConfig
from gregale.runs.parsing import code_digests
from gregale.runs.rules import check
from gregale.settings import LAYOUT
from gregale.tracking.callback import Callback, CallbackConfig, own_metrics
from gregale.tracking.metrics import metric_of
from gregale.training.compiler import check_compiler_options, compiler_options
from gregale.training.state import (
    Stepper,
    TrainState,
    abstract_state,
    initial_state,
    new_average,
    new_spikes,
    state_shardings,
)

VOCABULARY_MULTIPLE = 64
MAX_PARAMETERS = 10**15
QK = re.compile(r"\battention\.(query|key)\.")  # of a parameter's name


@dataclass(frozen=True)
class Setup:
    """The objects that a configuration describes, on a mesh."""

    config: TrainConfig
    layout: Layout  # mesh and mappings
    Vocab: Axis  # the model's vocabulary, padded
    model: object  # the abstract model, which allocates no arrays
    psdp: Psdp  # the method of the warm-up; a conversion between two methods' states goes through its state
    method: Method  # the synchronisation method
    method_context: MethodContext  # from which the configuration builds it, and methods for comparison
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

    def new_average(self, step: int, state: Any) -> Any:
        """Return an average without additions of the parameters of a method's state after `step` steps."""
        method = self.method_after(step)
        shardings = state_shardings(method, abstract_state(method, self.model)).average
        return jax.jit(lambda state: new_average(method, state), out_shardings=shardings)(state)

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
        """Return the abstract model without adapters as devices hold it, see `stored_base`."""
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
        options = self.method_context.compiler_options
        if self.config.compute.compiler_options and options:
            check_compiler_options(options, self.layout.mesh)
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


def placed(config: TrainConfig, tokens: int, mesh: Mesh | None) -> Setup:
    """Return the setup of a configuration that says where experts lie, see `build.set_up`."""
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
    check_clipped(config, model)
    # The axes of Gregale's own models are checked by their keys, see `checked_layout`.
    leaves = jax.tree.leaves(model, is_leaf=lambda leaf: is_named(leaf) or is_quantised(leaf))
    weights = [leaf for leaf in leaves if is_named(leaf) or is_quantised(leaf)]
    own = type(config.model).__module__.startswith("gregale.")
    for weight in filter(is_quantised, weights):
        weight.check_blocks(layout)
    check_arrays(config.mapping, layout, [weight.axes for weight in weights], divides=own)
    check_parameters(model)
    callbacks = tuple(built(each) for each in config.callbacks)
    has_largest = execution(config.compute, layout, config.model).kernels.attend_with_largest is not None
    plain_layers = config.model.experts is None and (has_largest or config.optimizer.qk_clip is None)
    options = compiler_options(config.compute.compiler_options, layout.mesh, plain_layers)
    psdp = partial(psdp_on, config, model, callbacks)
    context = MethodContext(layout, psdp, config.reduce, config.steps, config.seed, options)
    methods = config.fleet.build(config.sync, context)
    return Setup(config, layout, Vocab, model, methods.psdp, methods.chosen, context, callbacks)


def check_clipped(config: TrainConfig, model) -> None:
    """Raise `UserError` if a model has no `optimizer.qk_clip`, or if it would change weights that a group keeps."""
    if config.optimizer.qk_clip is None:
        return
    if ModelMethods.of(model).with_logits_below is None:
        raise UserError(
            f"optimizer.qk_clip is {config.optimizer.qk_clip:g}, but {type(model).__name__} has no "
            "`with_logits_below(limit, maxima)`. Set it to null."
        )
    rules = config.optimizer.rules(model, config.model.scalings)
    if kept := [name for name, rule in rules.items() if QK.search(name) and rule.rate == 0]:
        raise UserError(
            f"optimizer.qk_clip is {config.optimizer.qk_clip:g}, but the learning rate of {kept[0]} is 0 "
            "(optimizer.groups), and it shrinks weights of queries and keys. Leave one of them out."
        )


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
    limit = config.optimizer.qk_clip
    in_loop = replace(run, weights_ready=per_step, first_layers=first, measures_logits=limit is not None)
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
        average=config.average,
        update_buffers=partial(updated_buffers, config.model) if of_model else lambda model, *sums: model,
        after_update=None if limit is None else lambda model, maxima: model.with_logits_below(limit, maxima),
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
    tpus = layout.mesh.devices.flat[0].platform == "tpu" and layout.mesh.shape["replica"] > 1
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


# The layout, with the checks of mesh and mappings against model, batch and pipeline.


def checked_layout(config: TrainConfig, mesh: Mesh | None, Vocab: Axis) -> Layout:
    """Return the layout of a run; raise `UserError` for sizes that the mesh does not divide, before any compilation."""
    mesh = make_mesh(config.mesh) if mesh is None else mesh
    layout = mapped_layout(mesh, config.mapping, config.mesh.replicas_per_device)
    if config.adapter is not None:
        layout = with_rank(layout, config.adapter.rank)
    check_mapping(config.mapping, layout)
    batch = config.batch
    check_divides(
        layout,
        {
            "batch.size": ("the sequences of a step", Axis(BATCH, batch.size)),
            **config.model.split_axes(),
            "model.vocabulary": (
                "the vocabulary, which model.row_multiple (of type llama, gemma and gpt_oss, as in an import's "
                "config.yaml) fills up,",
                Vocab,
            ),
        },
    )
    check(config, layout, LAYOUT)
    return layout


def rows_multiple(config: TrainConfig, mesh: Mesh) -> int:
    """Return the number of which `batch.size` has to be a multiple, see `checked_layout`; raise `UserError`."""
    layout, columns = mapped_layout(mesh, config.mapping, config.mesh.replicas_per_device), 1
    if config.pipeline is not None:
        columns = config.pipeline.schedule(mesh.shape["stage"]).columns
    parts = layout.cut_into((BATCH,), layout.compute) * config.batch.microbatches
    return parts * lcm(config.objective.rows_together, columns)


# The model before the first step, its adapters, and checked calls of the methods of models and callbacks.


NEXT_TOKEN = NextTokenConfig()


def checked_loss(
    config: ModelConfig, model, batch, run: Execution, objective: ObjectiveConfig = NEXT_TOKEN, frozen: Any = None
) -> Losses:
    """Return the loss of a model; raise `UserError` if a plugin's model or objective does not return scalars.

    - `frozen`: as in `Passes`
    """
    what, owner = f"model.type {config.get_choice_name(type(config))}: {type(model).__name__}.loss", type(model)
    if not objective.is_models_own:
        owner = type(objective)
        what = f"objective.type {objective.get_choice_name(owner)}: {owner.__name__}.loss"
    with plugin_errors(what, owner):
        found = objective.loss(Passes(model, batch, run, config.logit_rows, frozen))
    pair = isinstance(found, tuple) and [jnp.shape(each) for each in found[:2] if is_array(each)] == [(), ()]
    if not pair or not (isinstance(found, Losses) or len(found) == 2):
        raise UserError(
            f"{what} has to return two scalar arrays, the sum of losses and the sum of weights "
            "(`hax.sum(...).scalar()`), or `gregale.model.losses.Losses` of them."
        )
    losses = losses_of(found)
    if run.measures_logits and LARGEST_LOGITS not in losses.maxima:
        raise UserError(
            f"optimizer.qk_clip is set, but {what} returns no maxima of the name {LARGEST_LOGITS!r}. The loss of a "
            "subclass hands on the `maxima` of `losses_of(super().loss(...))`. Or set optimizer.qk_clip to null."
        )
    if twice := losses.auxiliary.keys() & losses.metrics.keys():
        raise UserError(f"{what}: auxiliary and metrics both have {min(twice)!r}; rename one of them.")
    for name, value in losses.named.items():
        if metric_of(name) is not None:
            raise UserError(f"{what}: {name!r} is the name of another metric; choose another.")
        if jnp.shape(value) != ():
            raise UserError(f"{what}: {name!r} has the shape {jnp.shape(value)}; it has to be a scalar, a sum.")
    return losses


def updated_buffers(config: ModelConfig, model, statistics: dict[str, NamedArray], weight: jax.Array):
    """Return a model with new buffers; raise `UserError` if a plugin's model does not return arrays as before."""
    what = f"model.type {config.get_choice_name(type(config))}: {type(model).__name__}.update_buffers"
    with plugin_errors(what, type(model)):
        updated = model.update_buffers(statistics, weight)
    before, after = (jax.eval_shape(buffers_of, each) for each in (model, updated))
    if before != after:
        raise UserError(f"{what} has to return the model with buffers of the axes and dtypes that they had.")
    return updated


def callback_metrics(callbacks: Sequence[Callback], model, batch, run: Execution) -> dict[str, jax.Array]:
    """Return the metrics of callbacks as float32 scalars; raise `UserError` for a name that two of them give."""
    found: dict[str, jax.Array] = {}
    for callback in callbacks:
        for name, value in own_metrics(callback, "metrics", model, batch, run).items():
            if name in found:
                raise UserError(f"callbacks: two callbacks give the metric {name!r}; rename one of them.")
            found[name] = jnp.asarray(value, jnp.float32)
    return found


def built(config: CallbackConfig) -> Callback:
    """Return the callback of a configuration; raise `UserError` if a plugin's `build` fails."""
    what = f"callbacks: {type(config).__name__}.build"
    with plugin_errors(what, type(config)):
        callback = config.build()
    if not isinstance(callback, Callback):
        raise UserError(f"{what} returns {type(callback).__name__}; it has to return a Callback.")
    return callback


def base_model(config: TrainConfig, Vocab: Axis, key: jax.Array) -> Any:
    """Return the model without adapters; beside adapters its weights are in the compute dtype."""
    model, dtype = config.model.init(Vocab, key), DTYPES[config.compute.dtype]
    if config.adapter is None:
        return model

    def cast(leaf):
        return leaf.astype(dtype) if is_parameter(leaf.array if is_named(leaf) else leaf) else leaf

    return jax.tree.map(cast, model, is_leaf=lambda leaf: is_named(leaf) or is_buffer(leaf))


def stored_base(config: TrainConfig, Vocab: Axis, key: jax.Array) -> Any:
    """Return the model without adapters in the form in which devices hold it, by `adapter.base`."""
    model = base_model(config, Vocab, key)
    return model if config.adapter is None else quantised(model, config.adapter.base)


def initial_model(config: TrainConfig, Vocab: Axis, key: jax.Array) -> Any:
    """Return the model before the first step; beside adapters its own weights are marked as frozen."""
    model = stored_base(config, Vocab, key)
    return model if config.adapter is None else with_adapters(config, model, key)


def with_adapters(config: TrainConfig, model: Any, key: jax.Array) -> Any:
    """Return a model with new adapters, and with marks on its own weights."""
    assert config.adapter is not None
    return adapted(model, config.adapter, jax.random.fold_in(key, 1))


def reference(config: TrainConfig, model: Any) -> Any:
    """Return the abstract parameters of the objective's frozen copy of a model; None: it needs none."""
    if config.adapter is not None or not config.objective.needs_reference:
        return None
    dtype = DTYPES[config.compute.dtype]
    return jax.eval_shape(lambda own: jax.tree.map(lambda leaf: leaf.astype(dtype), own), trainable(model))


def dropping(config: TrainConfig, run: Execution, batch) -> Execution:
    """Return the execution of training on a batch; a row's tokens determine what adapters drop of it.

    So a resume repeats it, and other rows beside it, microbatches, stages or replicas, do not change it.
    """
    if config.adapter is None or config.adapter.dropout == 0:
        return run
    tokens, seed = batch["tokens"].rearrange((BATCH, ...)).array, jax.random.key(config.seed)
    order = position_order(tokens.shape[1], run.layout.context)
    keys = jax.vmap(lambda row: jax.random.fold_in(seed, hashed(row, order)))(tokens)
    return replace(run, dropout_keys=NamedArray(keys, (BATCH,)))
