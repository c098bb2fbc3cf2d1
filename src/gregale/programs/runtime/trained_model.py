"""Provides the model of a complete or running training run, whole or one parameter at a time.

Also the form of the state in a checkpoint with its metadata, and adapters in files: those that a run continues, and the
export to a folder of PEFT.
"""

import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import draccus
import jax
from haliax import NamedArray

from gregale.axes.layout import BATCH, Layout, MappingConfig, MeshConfig, is_named, make_mesh, mapped_layout
from gregale.axes.parameters import QuantisedWeight, buffers_of, is_quantised, trainable, with_arrays
from gregale.checkpoint.manifest import folder_name, measured, read_manifest
from gregale.checkpoint.multihost import by_first_process, messages_of_all
from gregale.checkpoint.store import Checkpoints
from gregale.data.build import MASKS
from gregale.data.config import DataConfig
from gregale.data.mixtures import MixtureHistory, MixtureStage, with_mixture
from gregale.data.preparation import Corpus
from gregale.data.sources.base import expand
from gregale.data.tokenizers import SAVED_NAME, load_tokenizer
from gregale.distributed.config import DistributedConfig
from gregale.distributed.devices import start_devices
from gregale.errors import UserError
from gregale.huggingface.config import family_that_has
from gregale.huggingface.families import Family, Slot, parameters_of, path_of, slots_of
from gregale.huggingface.folder import ADAPTER, BESIDE, CONFIG, WEIGHTS, check_files, open_folder, read_json, write_json
from gregale.huggingface.hub import REPOSITORY
from gregale.huggingface.peft import adapter_settings, adapter_slots, read_adapters
from gregale.huggingface.weights import read_model, reader
from gregale.inference.generate import multiple_of
from gregale.methods.average import Average
from gregale.methods.method import Method
from gregale.model.adapters import factor_paths, merged_weight
from gregale.model.config import AdapterConfig
from gregale.model.llama import LlamaConfig, ModelConfig
from gregale.objectives import NextTokenConfig
from gregale.programs.runtime.build import set_up
from gregale.programs.runtime.setup import Setup
from gregale.runs import history
from gregale.runs.config import EvaluationConfig, TrainConfig
from gregale.runs.run_directory import RunDirectory
from gregale.runs.stages import changes
from gregale.storage import ObjectPath, digest, parallel_map, storage_path
from gregale.training.compiler import keep_compiled
from gregale.training.state import TrainState, abstract_state


def checkpointed(setup: Setup, method: Method, state: TrainState, step: int) -> TrainState:
    """Return the state after `step` steps as stored, with joined arrays for an evaluation that has no replicas.

    Frozen weights are not stored: the metadata has their origin.
    """
    state = state._replace(frozen=None)
    if not method.needs_full_state(step):
        return state
    assert method is setup.method
    return state._replace(joined=setup.joined_parameters(state.method))


def checkpoint_metadata(
    setup: Setup, corpus: Corpus, method: Method, step: int, counted: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the metadata that a restore reads before the state after `step` steps.

    - `method`: the method that made the state
    - `counted`: counts so far by name: `replica_bytes` that a device has sent over `replica`, `examples` seen, and
      the `mixtures` that they are of
    """
    config: dict = draccus.encode(setup.config)  # type: ignore[assignment] -- of a part alone it has no `type`
    return {
        "data": corpus.fingerprint_after(counted["mixtures"]),
        "validation": corpus.validation_fingerprints,
        "masks": MASKS,
        "method": method.name,
        "joined": method.needs_full_state(step),
        "replicas": replicas(setup.layout, method),
        "mesh": dict(setup.layout.mesh.shape),
        "spikes": spike_window(setup),
        "average": setup.config.average is not None,
        "made_by": {name: config[name] for name in ("sync", "reduce")},
        **counted,
    }


def recorded(metadata: Mapping[str, Any], key: str):
    """Return an entry of a checkpoint's metadata; raise `UserError` if another version wrote it without this entry."""
    if key not in metadata:
        raise UserError(
            f"The checkpoint's metadata.json lacks `{key}` (it has: {', '.join(metadata) or 'nothing'}): another "
            f"version of Gregale wrote it. Use that version, or start another run with a new name or with --fresh."
        )
    return metadata[key]


def newer_masks(metadata: Mapping[str, Any], corpus: Corpus) -> str:
    """Return why conversations of the same text may have other tokens than at a checkpoint; empty if nothing does.

    A version before these rules had numbers wrote none.
    """
    before = metadata.get("masks", "an older one")
    if before == MASKS or not any("chat_template" in store.manifest for store in corpus.stores.values()):
        return ""
    return (
        "this version of Gregale has newer rules for roles of conversations and for the tokens that the loss is on: "
        f"version {MASKS}, and the checkpoint's is {before}. The text may be the same"
    )


def mixtures_of(metadata: dict, config: TrainConfig) -> MixtureHistory:
    """Return the mixtures of a run up to a checkpoint.

    - `config`: of the checkpoint; an earlier version wrote no mixtures, and its runs have one
    """
    stored = metadata.get("mixtures")
    if stored is None:
        return with_mixture((), 0, *config.mixture)
    return tuple(MixtureStage(*each) for each in stored)


def saved_by(setup: Setup, metadata: dict) -> Method:
    return setup.psdp if recorded(metadata, "method") == setup.psdp.name else setup.method


def checkpoint_template(setup: Setup, metadata: dict) -> TrainState:
    """Return the abstract state that a checkpoint with this metadata holds.

    It lacks the errors of quantised averages if they are of another mesh, because their shapes depend on the mesh.
    """
    method = saved_by(setup, metadata)
    saved, now = recorded(metadata, "replicas"), replicas(setup.layout, method)
    if saved != now:
        axis = f"mesh.{method.replica_axes[0]}"
        axis += " x mesh.replicas_per_device" if setup.config.mesh.replicas_per_device > 1 else ""
        raise UserError(
            f"{axis} is {now}, but the checkpoint is of {method.name} with {saved} replicas, each with parameters and "
            f"an optimizer of its own. Resume with {axis} {saved}; to change their number, first resume with sync.type "
            f"psdp until the next checkpoint, which joins them."
        )
    state = abstract_state(method, setup.model)._replace(frozen=None)
    if not same_spikes(setup, metadata):
        state = state._replace(spikes=None)
    if not metadata.get("average"):
        state = state._replace(average=None)
    return state if same_mesh(setup, metadata) else state._replace(method=method.without_error(state.method))


def holds_more(setup: Setup, metadata: dict) -> bool:
    """Return whether a checkpoint holds more than `checkpoint_template`: joined parameters, errors of another mesh,
    another window of spikes, an average that the run does not go on with.
    """
    is_left = metadata.get("average", False) and setup.config.average is None
    return recorded(metadata, "joined") or is_left or not same_mesh(setup, metadata) or not same_spikes(setup, metadata)


def evaluation_template(setup: Setup, metadata: dict) -> TrainState:
    """Return the abstract state with only the leaves that an evaluation needs; the rest is None.

    It fits any mesh, except for an evaluation of the replicas' own parameters, which needs the same number of replicas.
    """
    method = saved_by(setup, metadata)
    if reads_average(setup):
        return _average_template(setup, metadata)
    if setup.config.sync.evaluates_replicas:
        return TrainState(None, method.eval_subset(checkpoint_template(setup, metadata).method), None, None)
    if recorded(metadata, "joined"):
        joined = setup.psdp.arrays(abstract_state(setup.psdp, setup.model).method)
        return TrainState(None, None, None, None, joined=joined)
    return TrainState(None, method.eval_subset(abstract_state(method, setup.model).method), None, None)


def reads_average(setup: Setup) -> bool:
    """Return whether the model to evaluate has the average of the parameters."""
    return setup.config.average is not None and setup.config.average.evaluate


def _average_template(setup: Setup, metadata: dict) -> TrainState:
    """Return `evaluation_template` of the average, under `params`; with what has the buffers, if the model has any."""
    if not metadata.get("average"):
        raise UserError(
            "average: the checkpoint has none: its run kept none so far (`average`). Leave --average, or "
            "average.evaluate, out."
        )
    layout, held = setup.layout, TrainState(None, None, None, None)
    average = layout.abstract(jax.eval_shape(Average.begin, trainable(setup.model)), layout.params)
    if buffers_of(setup.model) is not None:
        held = evaluation_template(replace(setup, config=reading_average(setup.config, False)), metadata)
    return held._replace(average=average._replace(count=None))


def evaluated_model(setup: Setup, metadata: dict, state: TrainState):
    """Return the model to evaluate, from the state of `evaluation_template`."""
    if state.average is not None:
        has_more = state.method is not None or state.joined is not None
        other = evaluated_model(setup, metadata, state._replace(average=None)) if has_more else None
        return setup.psdp.model_with(state.average.parameters, buffers_of(other))
    if state.joined is not None:
        return setup.psdp.model_with(state.joined)
    trained = jax.jit(saved_by(setup, metadata).eval_model, compiler_options=setup.compiler_options)
    return trained(state.method)


def same_mesh(setup: Setup, metadata: dict) -> bool:
    return recorded(metadata, "mesh") == dict(setup.layout.mesh.shape)


def same_spikes(setup: Setup, metadata: dict) -> bool:
    """Return whether a checkpoint has the window of `skip_spikes` that the configuration has, or neither has one."""
    return metadata.get("spikes") == spike_window(setup)


def spike_window(setup: Setup) -> int | None:
    return None if setup.config.skip_spikes is None else setup.config.skip_spikes.window


def replicas(layout: Layout, method: Method) -> int:
    """Return the number of replicas whose states the method keeps separately."""
    return layout.axis(method.replica_axes[0]).size if method.replica_axes else 1


AVERAGE = "read the average of the parameters, which the run's `average` keeps"  # of options
Read = Callable[[str], NamedArray]


@dataclass(frozen=True)
class Trained:
    run: RunDirectory
    setup: Setup
    model: object
    step: int
    metadata: dict

    def frozen(self) -> Any:
        """Return `Passes.frozen`, read from its origin; None: the model has the weights of its reference."""
        setup = self.setup
        if setup.psdp.reference is None:
            return None
        return weights_of(FrozenSource.recorded(setup, self.metadata), setup, setup.frozen)


def find_run(name: str) -> RunDirectory:
    """Return the named run; raise `UserError` if there is none, or if a file of its model is a link out of it."""
    run = RunDirectory(history.find_run(name).path)
    check_files(run.path, (SAVED_NAME, *(f"{run.huggingface.name}/{file}" for file in (*BESIDE, WEIGHTS))))
    return run


def find_origin(name: str | None) -> RunDirectory:
    """Return the run, or the imported model, of `start_from`; raise `UserError` if there is none."""
    name = str(name)
    if os.path.isfile(os.path.join(name, CONFIG)):
        raise UserError(
            f"start_from: {name} is a folder of the hub. `gregale import {name} NAME` makes a model to start from "
            "of it."
        )
    return find_run(name)


def reading_average(config: TrainConfig, reads: bool = True) -> TrainConfig:
    """Return a configuration whose evaluations read the average of the parameters, or these themselves."""
    if config.average is None:
        if reads:
            raise UserError("average: the run keeps none (`average` in its config.yaml). Leave --average out.")
        return config
    return replace(config, average=replace(config.average, evaluate=reads))


def open_trained(name: str, step: int | None, devices: int | MeshConfig | None, average: bool = False) -> Trained:
    """Return the model of a run, from its newest valid checkpoint or that of a step; read only parameters.

    - `devices`: the number of devices, or their mesh; None: the run's own mesh. An evaluation of DiLoCo's replicas
      always uses the run's mesh
    - `average`: the model has the average of the parameters

    Raises `UserError` if there is no such run, checkpoint or average.
    """
    run = find_run(name)
    config = on_devices(run.config_at(step), devices)
    config = reading_average(config) if average else config
    start_devices(config.cpu_devices, DistributedConfig())
    setup = set_up_run(run, config)
    model, step, metadata = restored_model(run, setup, step)
    return Trained(run, setup, model, step, metadata)


def on_devices(config: TrainConfig, devices: int | MeshConfig | None) -> TrainConfig:
    """Return a run's configuration with its model on `devices`, see `open_trained`."""
    if devices is None or config.sync.evaluates_replicas:
        return config
    mesh = MeshConfig(data=devices) if isinstance(devices, int) else devices
    cpu_devices = mesh.device_count if config.cpu_devices and mesh.device_count is not None else config.cpu_devices
    # No step and no evaluation of the run's own text runs: the mesh may not divide microbatches and lengths.
    batch, evaluation = replace(config.batch, microbatches=1), replace(config.evaluation, sequence_lengths=[])
    devices_of = {"mesh": mesh, "mapping": MappingConfig(), "cpu_devices": cpu_devices}
    return replace(config, **devices_of, pipeline=None, batch=batch, evaluation=evaluation)


def set_up_run(run: RunDirectory, config: TrainConfig) -> Setup:
    """Return the setup of a configuration with the run's model, on the first of the started devices.

    The setup makes no step, so that it rounds the size and the length of the batch up to multiples of the devices.
    """
    keep_compiled(config.compilation_cache)
    tokens = load_tokenizer(run.path).vocabulary_size
    mesh = make_mesh(config.mesh, jax.devices()[: config.mesh.device_count])
    layout = mapped_layout(mesh, config.mapping, config.mesh.replicas_per_device)
    batch = config.batch
    parts = batch.microbatches * layout.cut_into((BATCH,), layout.compute) * config.objective.rows_together
    chunks = 2 * layout.context if layout.context > 1 else 1
    rounded = {"size": multiple_of(parts, batch.size), "sequence_length": multiple_of(chunks, batch.sequence_length)}
    return set_up(replace(config, batch=replace(batch, **rounded)), tokens, mesh)


def restored_model(run: RunDirectory, setup: Setup, step: int | None) -> tuple[object, int, dict]:
    """Return a run's model on the mesh of a setup, its step, and the checkpoint's metadata.

    - `setup`: has the run's model and method
    - `step`: None: the step of the newest valid checkpoint; 0 for an imported model

    Raises `UserError` if there is no such checkpoint.
    """
    if run.is_imported:
        refuse_step(run, step)
        return read_model(open_folder(Path(str(run.huggingface))), setup.model, setup.layout), 0, {}

    def template(metadata: dict) -> TrainState:
        return evaluation_template(setup, metadata)

    with Checkpoints(run.checkpoints, report=partial(print, file=sys.stderr)) as checkpoints:
        if step is None:
            restored = checkpoints.latest(template, partial=True)
        else:
            restored = checkpoints.restore(step, template, partial=True)
    if restored is None:
        raise no_checkpoint(run, setup)
    model = evaluated_model(setup, restored.metadata, restored.tree)
    if setup.config.adapter is not None:
        model = with_arrays(model, weights_of(FrozenSource.recorded(setup, restored.metadata), setup, setup.frozen))
    return model, restored.step, restored.metadata


def refuse_step(run: RunDirectory, step: int | None) -> None:
    if step:
        raise UserError(f"{run.path} is an imported model: it has no checkpoint of step {step}.")


def no_checkpoint(run: RunDirectory, setup: Setup) -> UserError:
    config = setup.config.checkpoint
    first = f"at step {config.steps}" if config.seconds is None else f"after {config.every}"
    return UserError(f"{run.path} has no checkpoint yet; the first one comes {first}.")


# The model one parameter at a time, so that no process holds the whole model.


@dataclass(frozen=True)
class LazyModel:
    """A model of a run."""

    step: int  # the checkpoint's step; 0 for an imported model
    read: Read  # returns a parameter by its path, on the mesh of the setup
    metadata: Mapping[str, Any]  # of the checkpoint
    base: "FrozenSource | None" = None  # of a run with adapters


@contextmanager
def opened(run: RunDirectory, setup: Setup, step: int | None) -> Iterator[LazyModel]:
    """Yield the model to evaluate of a step's checkpoint; None: the newest valid checkpoint.

    Of a run with adapters it has the paths of `setup.base`, with merged weights, and those of the adapters. All
    processes of the mesh make the same calls of `read` in the same order. Raises `UserError` if there is no such
    checkpoint.
    """
    if run.is_imported:
        refuse_step(run, step)
        yield LazyModel(0, reader(open_folder(Path(str(run.huggingface))), setup.base, setup.layout), {})
        return
    with Checkpoints(run.checkpoints, report=partial(print, file=sys.stderr)) as checkpoints, ExitStack() as stack:
        found = checkpoints.sound_step() if step is None else step
        if found is None:
            raise no_checkpoint(run, setup)
        if step is not None:
            checkpoints.check(step)
        read, metadata, base = partial(_read, checkpoints, setup, found), checkpoints.metadata(found), None
        if setup.config.adapter is not None:
            base = FrozenSource.recorded(setup, metadata)
            read = merging(setup, read, stack.enter_context(base.opened(setup)).read)
        yield LazyModel(found, read, metadata, base)


def merging(setup: Setup, own: Read, base: Read) -> Read:
    """Return a function that reads what the run has trained (`own`), or a weight of its base, with its adapter."""
    trained = {*parameters_of(trainable(setup.model)), *parameters_of(buffers_of(setup.model))}
    held = {path_of(path): leaf for path, leaf in _leaves(setup.stored_base) if is_quantised(leaf)}
    scale = 1.0 if setup.config.adapter is None else setup.config.adapter.scale

    def read(path: str) -> NamedArray:
        if path in trained:
            return own(path)
        a, b = factor_paths(path)
        weight = base(path)
        if path in held:  # as the run computes with it
            weight = jax.jit(lambda form: form.decoded(form.dtype))(quantised(held[path], weight, setup))
        if a not in trained:
            return weight
        place = setup.layout.sharding(weight.axes, setup.layout.params)
        merge = jax.jit(partial(merged_weight, scale=scale), out_shardings=place)
        return merge(weight, own(a), own(b))

    return read


def _read(checkpoints: Checkpoints, setup: Setup, step: int, path: str) -> NamedArray:
    """Read a parameter from each tree of the checkpoint's state that has the structure of the model."""

    def template(metadata: dict) -> TrainState:
        return jax.tree_util.tree_map_with_path(
            lambda keys, leaf: leaf if not is_named(leaf) or f".{path_of(keys)}".endswith(f".{path}") else None,
            evaluation_template(setup, metadata),
            is_leaf=is_named,
        )

    restored = checkpoints.read(step, template, partial=True)
    return parameters_of(evaluated_model(setup, restored.metadata, restored.tree))[path]


# The frozen weights of runs: those beside adapters, and copies with which an objective compares.


@dataclass(frozen=True)
class FrozenSource:
    """The model whose weights a run freezes: the one that the run starts from.

    - `step`: of its checkpoint; 0 for an imported model
    - `digest`: of its files; for a checkpoint that of its manifest, which has those of its files
    """

    origin: RunDirectory
    step: int
    digest: str

    @property
    def record(self) -> dict[str, Any]:
        """Return the entry `base` of a checkpoint's metadata."""
        return {"origin": str(self.origin.path), "step": self.step, "digest": self.digest}

    @staticmethod
    def of(name: str | None, record: Mapping[str, Any] | None = None) -> "FrozenSource":
        """Return the base of a run by its `start_from`; all processes make this call.

        - `record`: the entry of a checkpoint that needs the same weights; None: the newest checkpoint of the origin

        Raises `UserError` if there is no such model, or if it has changed.
        """
        assert name is not None
        text = by_first_process(lambda: json.dumps(_origin(name, record)), "")
        found = json.loads(messages_of_all(text)[0])
        if record is not None and found["digest"] != record["digest"]:
            raise UserError(
                f"start_from: the weights of {found['origin']} are not those that this run began with "
                f"(digest {found['digest'][:12]}, and the checkpoint names {record['digest'][:12]}). Put the old "
                "files back, or name a copy of them in start_from."
            )
        return FrozenSource(RunDirectory(storage_path(found["origin"])), found["step"], found["digest"])

    @staticmethod
    def recorded(setup: Setup, metadata: Mapping[str, Any]) -> "FrozenSource":
        """Return the base of a checkpoint, see `of`; raise `UserError` if the run began without frozen weights."""
        objective = setup.config.objective
        if setup.config.adapter is None and "base" not in metadata:
            raise UserError(
                f"objective.type is {objective.get_choice_name(type(objective))}, which compares the model with the "
                "one before the first step, and the run began with another objective. Start another run, with this one "
                "as its start_from."
            )
        return FrozenSource.of(setup.config.start_from, recorded(metadata, "base"))

    @contextmanager
    def opened(self, setup: Setup) -> Iterator[LazyModel]:
        """Yield the model on the mesh of a setup, without adapters of the setup."""
        config = on_this_mesh(self.origin.read_config(), setup.config)
        origin = set_up(config, setup.tokens, setup.layout.mesh)
        with opened(self.origin, origin, self.step or None) as found:
            yield found


def _origin(name: str, record: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return the entry `base` of a model; one that has moved is at `record`, unless `name` leads to it."""
    try:
        run = find_run(name)
    except UserError:
        if record is None:
            raise
        run = find_run(record["origin"])
    if run.is_imported:
        folder = open_folder(Path(str(run.huggingface)))
        digests = parallel_map(lambda file: [file.name, measured(file)[1]], [folder.path / CONFIG, *folder.files])
        return {"origin": str(run.path.absolute()), "step": 0, "digest": digest(json.dumps(digests).encode())}
    with Checkpoints(run.checkpoints) as checkpoints:
        steps = checkpoints.steps()
    step = record["step"] if record is not None else max(steps, default=None)
    if step not in steps:
        raise UserError(f"start_from: {run.path} has no checkpoint of step {step}; there are: {steps or 'none'}.")
    manifest = read_manifest(run.checkpoints / folder_name(step))
    origin = run.path if isinstance(run.path, ObjectPath) else run.path.absolute()
    return {"origin": str(origin), "step": step, "digest": manifest["blake2b"]}


def on_this_mesh(theirs: TrainConfig, here: TrainConfig) -> TrainConfig:
    """Return the configuration of another run's model on the mesh of this one, without data and objective."""
    own = ("mesh", "mapping", "pipeline", "batch")
    unread = {"data": DataConfig(), "evaluation": EvaluationConfig(), "objective": NextTokenConfig()}
    # What is only for steps of this run need not fit the adapters of the other.
    compute, model = replace(here.compute, gather="per_layer", remat="full", matmul="dtype"), here.model
    if theirs.adapter is not None and model.experts is not None:
        balance = replace(model.experts.balance, bias_rate=0.0)
        model = replace(model, experts=replace(model.experts, balance=balance))
    return replace(theirs, **unread, compute=compute, model=model, **{name: getattr(here, name) for name in own})


def weights_of(base: FrozenSource, setup: Setup, like: Any) -> Any:
    """Return the base's weights in the forms of an abstract tree, read one at a time, on the mesh of a setup."""
    with base.opened(setup) as found:

        def one(path, leaf):
            weight = found.read(path_of(path))
            return quantised(leaf, weight, setup) if is_quantised(leaf) else weight.astype(leaf.dtype)

        return jax.tree_util.tree_map_with_path(one, like, is_leaf=_is_weight)


def quantised(form: QuantisedWeight, weight: NamedArray, setup: Setup) -> QuantisedWeight:
    """Return a weight in the form of another, which may be abstract, under `params`."""
    return jax.jit(form.requantised, out_shardings=setup.layout.shardings(form, setup.layout.params))(weight)


def _leaves(model: Any) -> list[tuple[Any, Any]]:
    return jax.tree_util.tree_flatten_with_path(model, is_leaf=_is_weight)[0]


def _is_weight(node: Any) -> bool:
    return is_named(node) or is_quantised(node)


EITHER = ("adapter.start_from", "adapter.base")  # settings in which adapters may differ from those that they continue


def continued(setup: Setup, base: FrozenSource) -> Any:
    """Return the adapters of `adapter.start_from` in the structure of the parameters; None: new ones are wanted.

    Raises `UserError` if they are of other targets or of another rank or scale, or were trained beside other weights.
    """
    config = setup.config.adapter
    if config is None or config.start_from is None:
        return None
    folder = Path(config.start_from)
    if (folder / ADAPTER).is_file():
        slots = adapter_slots(slots_of(setup.base, family_of(setup, base.origin)), setup.model)
        found = read_adapters(folder, config, slots, setup.model, setup.layout)
    else:
        found = _adapters_of_run(setup, config, config.start_from, base)
    return jax.tree_util.tree_map_with_path(
        lambda path, _: found[path_of(path)], trainable(setup.model), is_leaf=is_named
    )


def _adapters_of_run(setup: Setup, config: AdapterConfig, name: str, base: FrozenSource) -> dict[str, NamedArray]:
    run = find_run(name)
    theirs = run.read_config()
    if theirs.adapter is None:
        raise UserError(f"adapter.start_from: {run.path} has no adapters; start_from names the model to adapt.")
    found = [each for each in changes(theirs.adapter, config, "adapter") if each.key not in EITHER]
    if fixed := [change for change in found if change.fixed]:
        raise UserError(f"adapter.start_from: {run.path} has other adapters: {'; '.join(map(str, fixed))}.")
    other = set_up(on_this_mesh(theirs, setup.config), setup.tokens, setup.layout.mesh)
    with opened(run, other, None) as found:
        if recorded(found.metadata, "base")["digest"] != base.digest:
            raise UserError(
                f"adapter.start_from: the adapters of {run.path} were trained beside other weights than those of "
                f"{base.origin.path}. Set start_from to {theirs.start_from}, or merge them: start_from {run.path}."
            )
        return {path: found.read(path) for path in parameters_of(trainable(setup.model))}


def family_of(setup: Setup, run: RunDirectory) -> Family:
    """Return the family of a run's model: that of the imported model at its beginning, if there is one."""
    saved = read_json(run.huggingface / CONFIG) if (run.huggingface / CONFIG).is_file() else {}
    return family_that_has(decoder_of(setup.config.model), saved)


def decoder_of(model: ModelConfig) -> LlamaConfig:
    """Return a model's configuration; raise `UserError` if it is none that transformers has."""
    if not isinstance(model, LlamaConfig):
        kind = model.get_choice_name(type(model))
        raise UserError(
            f"model.type is {kind}, a model of your own: other programs have no such model, so nothing could load the "
            "folder. `gregale export` writes models of type llama, gemma and gpt_oss."
        )
    return model


def base_name(base: FrozenSource, given: str | None) -> str:
    """Return the folder or name from which PEFT reads a base (`given`: the user's); raise `UserError` if it cannot."""
    folder = Path(str(base.origin.huggingface) if given is None else expand(given, "base"))
    is_name = given is not None and not folder.exists() and REPOSITORY.fullmatch(given)
    if not base.origin.is_imported if given is None else not is_name and not (folder / CONFIG).is_file():
        raise UserError(
            f"base: {folder} is no model of transformers, which peft opens. `gregale export {base.origin.path} FOLDER "
            f"--step {base.step}` writes the model of these adapters; then add `--base FOLDER`."
        )
    return str(folder.absolute() if folder.is_dir() else folder)


def write_adapter_settings(folder: Path, setup: Setup, slots: list[Slot], base: str) -> None:
    """Write adapter_config.json; `base`: the model that the adapters are for, see `base_name`."""
    config = setup.config
    assert config.adapter is not None
    write_json(folder / ADAPTER, adapter_settings(config.adapter, slots, base, config.model.experts is not None))
