"""The stages of a run: changes of its configuration, each from a step on.

Also the differences between two configurations, and whether a run can resume with them.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any, NamedTuple

import draccus

from gregale.errors import KeyedError, UserError, below
from gregale.formatting import format_setting
from gregale.runs.parsing import FROM, STAGES, decoded
from gregale.settings import Fixed, in_steps, shown
from gregale.settings.decoding import TYPE, choice_name, join


@dataclass(frozen=True)
class Change:
    """A key with its old and new value; `fixed` is set if a run cannot resume with the change."""

    key: str
    before: Any
    now: Any
    fixed: Fixed | None = None

    def __str__(self) -> str:
        return f"{self.key} {format_setting(self.before)} -> {format_setting(self.now)}"


def changes(before: Any, now: Any, prefix: str = "") -> list[Change]:
    """Return the keys that differ between two configurations of one class, in the order of the fields.

    Another choice is a change of `type`, in addition to the other differences. Below a field whose metadata has
    `begins_anew` no key is fixed, because a change resets its part of the state, or no state depends on it.
    """
    found = []
    declared = {each.name: each for each in (*fields(before), *fields(now))}
    for name, each in declared.items():
        old, new = getattr(before, name, None), getattr(now, name, None)
        below = _changes(join(prefix, name), old, new, each.metadata.get("fixed"))
        found += [replace(one, fixed=None) for one in below] if "begins_anew" in each.metadata else below
    return found


def _changes(key: str, before: Any, now: Any, fixed: Fixed | None) -> list[Change]:
    if before == now:
        return []
    if is_dataclass(before) and is_dataclass(now):
        inner = changes(before, now, key)
        if type(before) is type(now):
            return inner
        return [_change(join(key, TYPE), choice_name(type(before), before), choice_name(type(now), now), fixed), *inner]
    if isinstance(before, dict) and isinstance(now, dict):
        names = [] if list(before) == list(now) else [_change(key, list(before), list(now), fixed)]
        common = [name for name in before if name in now]
        return names + [each for name in common for each in _changes(join(key, name), before[name], now[name], None)]
    return [_change(key, before, now, fixed)]


def _change(key: str, before: Any, now: Any, fixed: Fixed | None) -> Change:
    before, now = draccus.encode(before), draccus.encode(now)
    return Change(key, before, now, fixed if fixed and fixed.forbids(before, now) else None)


# Keys of the whole run, and of a process when it starts.
OF_A_RUN = ("name", "runs", "steps", STAGES, "start_from", "plugins", "cpu_devices", "compilation_cache", "distributed")
JOINING = {"sync", "reduce"}  # keys with which the replicas are joined, and part anew
# Keys that are fixed when a run resumes with another configuration, but that a stage can change.
BY_STAGE = ("batch.sequence_length", "model.rotary_base", "model.rotary_scaling")


class Stage(NamedTuple):
    """The steps of a run after step `first`, up to the next stage, and their whole configuration."""

    first: int
    config: Any  # a `TrainConfig`


def stages_of(config: Any) -> tuple[Stage, ...]:
    """Return the stages of a `TrainConfig`; the first one begins with the run.

    Each stage has the configuration of the stage before it with its own changes. Mappings are merged by key, and a
    section that names another `type` is replaced.

    Raises `KeyedError` for a stage outside of the run, an invalid change, or one that a run cannot make.
    """
    found, firsts = [Stage(0, replace(config, stages=[]) if config.stages else config)], [0]
    for number, given in enumerate(config.stages):
        firsts.append(first_step(given, join(STAGES, number), firsts[-1], config.steps))
    scheduled = [first for first, given in zip(firsts[1:], config.stages, strict=True) if own_schedule(given)]
    syncs = [first for first, given in zip(firsts[1:], config.stages, strict=True) if JOINING & given.keys()] + [None]
    if syncs[0] is not None:
        found = [Stage(0, replace(found[0].config, sync=config.sync.between(None, syncs[0])))]
    for number, (first, given) in enumerate(zip(firsts[1:], config.stages, strict=True)):
        stage = changed(found[-1].config, given, join(STAGES, number))
        if schedule := own_schedule(given):
            span = {"begin": first, "end": next((later for later in scheduled if later > first), None)}
            if "initial" not in schedule:
                span["initial"] = initial_rate(found[-1].config, stage, number, first)
            own = {name: value for name, value in span.items() if name not in schedule}
            optimizer = stage.optimizer
            stage = replace(stage, optimizer=replace(optimizer, schedule=replace(optimizer.schedule, **own)))
        if JOINING & given.keys():
            own = given.get("sync", {})  # valid, as `changed` has read it
            span = own.get("begin", first), own.get("end", syncs[syncs.index(first) + 1])
            stage = replace(stage, sync=stage.sync.between(*span))
        found.append(Stage(first, stage))
    return tuple(found)


def own_schedule(given: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the keys of `optimizer.schedule` that a stage gives."""
    optimizer = given.get("optimizer")
    schedule = optimizer.get("schedule") if isinstance(optimizer, Mapping) else None
    return schedule if isinstance(schedule, Mapping) else {}


def initial_rate(before: Any, stage: Any, number: int, first: int) -> float:
    """Return the rate of the step before stage `number` of the list, divided by the stage's peak; 0 if it is not read.

    Raises `KeyedError` for a schedule that does not fit the run, or has no closed form.
    """
    peak, schedule = stage.optimizer.learning_rate, before.optimizer.schedule
    if not stage.optimizer.schedule.warmup or not peak:
        return 0.0
    with below(join(join(STAGES, number - 1) if number else "", "optimizer.schedule")):
        fraction = schedule.fraction(first - 1, before.steps)
    if fraction is None:
        kind = choice_name(type(schedule), schedule)
        raise KeyedError(
            join(STAGES, f"{number}.optimizer.schedule.initial"),
            "is missing",
            f": the schedule before the stage, {kind}, has no closed form. Give its rate divided by the stage's peak.",
        )
    return fraction * before.optimizer.learning_rate / peak


def first_step(given: Mapping[str, Any], key: str, before: int, steps: int) -> int:
    """Return the number of steps before a stage that begins after step `before`."""
    wanted = given.get(FROM)
    if isinstance(wanted, bool) or not isinstance(wanted, int | float) or not wanted >= 0:
        raise KeyedError(
            join(key, FROM),
            f"is {'missing' if FROM not in given else shown(str(given[FROM]))}",
            "; a stage begins after a number of steps, or after a fraction of the run below 1.",
        )
    first = in_steps(wanted, steps)
    if not before < first < steps:
        raise KeyedError(
            join(key, FROM),
            f"is {shown(wanted)}",
            f", step {first:,}; it has to be after step {before:,}, at which the stage before it begins, and before "
            f"step {steps:,}, the end of the run.",
        )
    return first


def changed(config: Any, given: Mapping[str, Any], key: str) -> Any:
    """Return a configuration with the changes of a stage, which is at the dotted `key`."""
    own = {name: value for name, value in given.items() if name != FROM}
    if whole := [name for name in own if name in (*OF_A_RUN, *config.sections, *config.fleet.run_keys)]:
        raise KeyedError(join(key, whole[0]), "is given", f", but `{whole[0]}` holds for the whole run. Leave it out.")
    try:
        found = decoded(type(config), merged(draccus.encode(config), own))
    except UserError as error:
        raise KeyedError(key, "has an invalid change", f": {error}") from None
    fixed = [each for each in changes(config, found) if each.fixed and not each.key.startswith(BY_STAGE)]
    if fixed:
        named = "; ".join(f"{change} ({change.fixed.why})" for change in fixed if change.fixed)
        raise KeyedError(key, "has a change", f" that a run cannot make: {named}.")
    if found.adapter is None and found.objective.needs_reference != config.objective.needs_reference:
        raise KeyedError(
            f"{key}.objective",
            "is another",
            ": only some stages have an objective with a reference, which is the model before the run's first step. "
            "Make the others a run of their own, and name the first run in start_from of the second.",
        )
    if found.data.tokenizer.trained and found.data.sources.keys() != config.data.sources.keys():
        raise KeyedError(
            f"{key}.data.sources",
            "has another source",
            ", but data.tokenizer.type bpe is trained on the sources. Name the source from the beginning with "
            "`weight: 0`, or use a tokenizer of type file.",
        )
    return found


def merged(before: Any, given: Any) -> Any:
    """Return plain values with changes: mappings are merged by key unless they name another `type`."""
    both = isinstance(before, dict) and isinstance(given, Mapping)
    if not both or (TYPE in given and given[TYPE] != before.get(TYPE)):
        return given
    return {**before, **{name: merged(before.get(name), value) for name, value in given.items()}}


def number_after(stages: Sequence[Stage], step: int) -> int:
    """Return the number of the stage to which the step after `step` belongs."""
    return max(number for number, stage in enumerate(stages) if stage.first <= step)
