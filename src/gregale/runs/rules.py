"""The table of rules between settings; a piece, such as a method, has its own in `Settings.incompatible`."""

from functools import partial
from operator import attrgetter
from typing import Any

from gregale.axes.layout import BATCH, EMBED, MAPPINGS, REPLICA, Layout
from gregale.communication.reduce import further_splits, rows_per_part
from gregale.data.config import SOURCES, VALIDATION
from gregale.errors import Mistakes, multiples_near
from gregale.settings import CONFIGURATION, LAYOUT, TRAINING, Rule, Settings
from gregale.storage import is_url

Found = dict[str, Any] | None  # names and arithmetic of a rule that is broken
on_mesh, in_training = partial(Rule, at=LAYOUT), partial(Rule, at=TRAINING)


def check(config: Any, layout: Layout | None = None, at: str = CONFIGURATION) -> None:
    """Raise `Mistakes` of the rules that a `TrainConfig` breaks; `at`: see `Rule`."""
    sections = (section for section in vars(config).values() if isinstance(section, Settings))
    rules = [*RULES, *(rule for section in sections for rule in section.incompatible)]
    if found := [error for rule in rules if rule.at == at and (error := rule.mistake(config, layout))]:
        raise Mistakes(found)


def unlike_source(wants_pairs: bool, config: Any, _: Any) -> Found:
    """Find a source whose rows belong together otherwise than the objective takes them."""
    groups = ((group, getattr(config.data, group)) for group in (SOURCES, VALIDATION))
    every = {f"{group}.{name}": each.rows_together for group, sources in groups for name, each in sources.items()}
    wanted = config.objective.rows_together
    wrong = (of for of, rows in every.items() if rows != wanted and wants_pairs == (wanted > 1))
    return next(({"source": of} for of in wrong), None)


def own_rows(config: Any, _: Any) -> Found:
    """Find a mapping of rows, or of the axis that all weights have."""
    every = (f"{of}.{axis}" for of in MAPPINGS for axis in getattr(config.mapping, of) if axis in (BATCH, EMBED))
    return next(({"axis": of} for of in every), None)


def uncut(key: str, config: Any, layout: Layout) -> Found:
    """Find a length that the chunks of a sequence do not divide."""
    count, lengths = 2 * layout.context, attrgetter(key)(config)
    every = [lengths] if isinstance(lengths, int) else lengths
    wrong = next((each for each in every if each % count), 0) if count > 2 else 0
    near, share = multiples_near(wrong, count), f"{wrong / count:.4g}"
    return {"length": wrong, "devices": count // 2, "chunks": count, "share": share, "near": near} if wrong else None


def cut_rows(config: Any, layout: Layout) -> Found:
    """Find microbatches of which a device would have a part of a pair, or stages unequal parts.

    Raises `UserError` for other numbers of a pipeline that do not fit together.
    """
    rows, size = rows_per_part(config.batch.size, layout, config.batch.microbatches), config.batch.size
    parts, names = config.objective.rows_together, {}
    if config.pipeline is not None:
        schedule = config.pipeline.schedule(layout.mesh.shape["stage"])
        if config.model.layers is not None:
            schedule.layers_per_stage(config.model.layers)
        parts, names = schedule.columns, {"count": schedule.microbatches, "stages": schedule.stages}
    near = -(-rows // parts) * parts * size // rows
    return {"rows": rows, "parts": parts, "near": near, **names} if rows % parts else None


def split_messages(config: Any, layout: Layout) -> Found:
    """Find an axis of messages that `opt_state` splits further than `params`, and not only over `replica`."""
    every = ((name, axis) for name in layout.opt_state for axis in further_splits((name,), layout)[0])
    wrong = ({"name": name, "axis": axis} for name, axis in every if axis != REPLICA and layout.mesh.shape[axis] > 1)
    return next(wrong, None) if config.reduce.quantised or config.fleet.joins else None


def restaged(config: Any, _: Any) -> bool:
    data = (each.get("data") for each in config.stages)
    return any(isinstance(each, dict) and "replica_mixtures" in each for each in data)


def other_mixtures(config: Any, layout: Layout) -> Found:
    axis, count = config.sync.separate_axis(layout), len(config.data.replica_mixtures)
    replicas = count if axis is None else layout.axis(axis).size
    return {"axis": axis, "replicas": replicas, "mixtures": count} if replicas != count else None


RATES = "the rates by the model's size are those of "
NORMS_BOUND = (
    "norms of queries and keys bound the logits, and undo a scaling of the weights before them. Leave {0} out."
)
IN_BLOCKS = "{1} would keep the weights of all layers in {compute.dtype}. Set adapter.base to dtype, or {1} to "
OF_EXPERTS = "adapters of matrices of experts (expert_...) do not take {1}. Leave these out, or set {1} to "
NO_TEXT = "data.held_out: 0 & data.validation: {}"
TEXT = "there is no text to evaluate on. Hold out a part of the sources (data.held_out 0.02), name other text in "
TEXT += "data.validation, or leave {0} out."
OTHER_LOSS = "objective.is_models_own: false"
ONE_LOSS = "{0} is for the loss of the next token. Leave it out."
CHUNKS = "a sequence is cut into 2 x {devices} = {chunks} chunks, and {length} / {chunks} = {share} is not a whole "
CHUNKS += "number of tokens. {0} {near} would work."
WHOLE = "Set mesh.context to 1; to save memory, give its devices to mesh.data or mesh.model."
ROWS = "each of {batch.microbatches} microbatches has {rows} rows on a device, "
PAIRS = ROWS + "and a pair is {parts} rows. batch.size {near} would work, or fewer microbatches."
COLUMNS = ROWS + "which pipeline.microbatches {count} / mesh.stage {stages} = {parts} does not divide. "
COLUMNS += "batch.size {near} would work, or another pipeline.microbatches."

RULES = (
    Rule("adapter & start_from: null", "an adapter needs a model to adapt. Set start_from to a run or imported model."),
    Rule(
        "adapter & model.experts.balance.bias & model.experts.balance.bias_rate",
        "biases of experts are frozen. Set model.experts.balance.bias_rate to 0.",
    ),
    Rule("adapter.targets & adapter.dropout", OF_EXPERTS + "0.", "adapter.expert_targets"),
    Rule("adapter.targets & compute.matmul != dtype", OF_EXPERTS + "dtype.", "adapter.expert_targets"),
    Rule("adapter.base != dtype & compute.gather: per_step", IN_BLOCKS + "per_layer."),
    Rule("adapter.base != dtype & compute.remat: none & pipeline: null", IN_BLOCKS + "full."),
    Rule("adapter & model.parametrisation", RATES + "whole weights. Leave {1} out.", "model.scalings"),
    Rule(
        "optimizer.type & model.parametrisation",
        RATES + "adamw, lion and muon. Choose one of these, or leave model.parametrisation out.",
        "model.scalings & optimizer.scales_rates: false",
    ),
    Rule("optimizer.qk_clip & model.qk_norm", NORMS_BOUND),
    Rule("optimizer.qk_clip & model.score_softcap", "the cap bounds attention's logits already. Leave {0} out."),
    Rule(
        "optimizer.qk_clip & pipeline", "stages add what layers return, and do not compare it. Leave one of them out."
    ),
    Rule("optimizer.qk_clip & adapter", "the weights of queries and keys are frozen beside adapters. Leave {0} out."),
    Rule("optimizer.qk_clip & objective.type", ONE_LOSS, OTHER_LOSS),
    Rule(
        "average.evaluate & sync.evaluate != outer",
        "both say what evaluations read: the average, or replicas. Leave one of them out.",
    ),
    Rule(
        "objective.type & start_from: null",
        "its reference is the model before the first step. Set start_from to the run or imported model to tune.",
        "objective.needs_reference",
    ),
    Rule(
        "data.{source} & objective.type",
        "the source has no pairs. Give it the form: pairs.",
        partial(unlike_source, True),
    ),
    Rule(
        "data.{source} & objective.type",
        "the source has pairs. Set objective.type to dpo.",
        partial(unlike_source, False),
    ),
    Rule("pipeline & objective.type", ONE_LOSS, OTHER_LOSS),
    Rule("evaluation.by_position & objective.type", ONE_LOSS, OTHER_LOSS),
    Rule("evaluation.bigram & objective.type", ONE_LOSS, OTHER_LOSS),
    Rule(f"evaluation.every & {NO_TEXT}", TEXT, "evaluation.tasks: []"),
    Rule(f"evaluation.bigram & {NO_TEXT}", TEXT),
    Rule(f"reduce.measure & {NO_TEXT}", TEXT),
    Rule(
        "data.replica_mixtures & stages",
        "each replica keeps its part of every source, so no stage changes the mixtures. Leave them out of the stages.",
        restaged,
    ),
    Rule(
        "export.every & runs",
        "the run is in a store. Leave export.every out: `gregale export` writes a checkpoint to a disk.",
        lambda config, _: is_url(config.runs),
    ),
    Rule(
        "compute.gather: per_step & pipeline",
        "a pipeline has its own window of gathered weights. Use compute.gather per_layer, and pipeline.gather once to "
        "gather all layers before the first iteration.",
    ),
    Rule(
        "mapping.{axis} & pipeline",
        "stages pass rows on in the default order of `batch` and `embed`. Leave these two out, or the pipeline.",
        own_rows,
    ),
    Rule(
        "mapping.compute.experts & pipeline",
        "a stage has the experts of its layers gathered. Remove mapping.compute.experts, or pipeline and mesh.stage.",
        "mapping.leaves_experts_open: false",
    ),
    on_mesh(
        "mesh.stage & pipeline: null",
        "nothing would run in stages. Give a pipeline (`pipeline: {{repeats: 1}}`), or set mesh.stage to 1.",
    ),
    on_mesh("mesh.context & pipeline", "stages hold whole sequences. " + WHOLE, lambda _, layout: layout.context > 1),
    on_mesh(
        "mesh.context & model.type",
        "its loss does not know the order of split positions (splits_positions). " + WHOLE,
        lambda config, layout: layout.context > 1 and not config.model.splits_positions,
    ),
    on_mesh("batch.sequence_length & mesh.context", CHUNKS, partial(uncut, "batch.sequence_length")),
    on_mesh("evaluation.sequence_lengths & mesh.context", CHUNKS, partial(uncut, "evaluation.sequence_lengths")),
    on_mesh("batch.size & objective.type & pipeline: null", PAIRS, cut_rows),
    on_mesh("batch.size & mesh.stage & pipeline", COLUMNS, cut_rows),
    on_mesh(
        "mapping.opt_state.{name}",
        "messages (reduce.codec, islands) are a replica's part of a shard of `params`, which {axis} does not split. "
        "Split {name} over {axis} in params too, or leave it out of opt_state.",
        split_messages,
    ),
    in_training(
        "data.replica_mixtures & sync.type",
        "all replicas make every step together, so it would be one mixture. Use sync.type diloco or streaming_diloco, "
        "or give the sources their weights (data.sources.<name>.weight).",
        lambda config, layout: config.sync.separate_axis(layout) is None,
    ),
    in_training(
        "data.replica_mixtures & mesh.{axis}",
        "{replicas} replicas train separately, with {mixtures} mixtures. Give {replicas} mixtures, or set mesh.{axis} "
        "to {mixtures}.",
        other_mixtures,
    ),
)
