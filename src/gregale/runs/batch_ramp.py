"""Provides the short form of stages that change the batch size: `batch.size: {0: 256, 2000: 512}`."""

from collections.abc import Mapping
from typing import Any, NamedTuple

from gregale.errors import UserError
from gregale.settings import in_steps, shown
from gregale.settings.decoding import Decoder, Text

SIZE, STAGES, FROM = "batch.size", "stages", "from"


class _Given(NamedTuple):
    key: str  # at which the stage is given
    first: float  # steps before the stage
    values: dict[str, Any]


def expanded(decoder: Decoder, raw: dict[str, Any], origins: dict[str, str]) -> dict[str, Any]:
    """Return the plain values of a configuration, in which sizes by step in `batch.size` are stages.

    A stage of `stages` at the same step takes the size in, unless it has a `batch.size` itself. The `origins` of stages
    move with them.

    Raises `UserError` for a key that is no step, or without a size for step 0.
    """
    batch = raw.get("batch")
    size = batch.get("size") if isinstance(batch, dict) else None
    is_ramp = isinstance(size, dict) or (isinstance(size, Text) and size.lstrip().startswith("{"))
    if not isinstance(batch, dict) or not is_ramp or "steps" not in raw:
        return raw
    steps, at = decoder.decode(int, raw["steps"], "steps"), origins.get(SIZE)
    sizes = decoder.decode(dict[str, int], size, SIZE)
    ramp = sorted((in_steps(begin := _step(name, at), steps), begin, name) for name in sizes)
    if not ramp or ramp[0][0]:
        raise _refusal("has no size for step 0", at)
    written = decoder.decode(list[dict[str, Any]], raw.get(STAGES, []), STAGES)
    found = [_Given(f"{STAGES}.{number}", _first(each, steps), each) for number, each in enumerate(written)]
    for first, begin, name in ramp[1:]:
        if at is not None:
            origins.setdefault(f"{SIZE}.{name}", at)
        _add(found, _Given(f"{SIZE}.{name}", first, {FROM: begin, "batch": {"size": sizes[name]}}))
    before = {key: origins.pop(key) for key in [*origins] if key.startswith((f"{STAGES}.", f"{SIZE}."))}
    for number, each in enumerate(found):
        below = [key for key in before if key == each.key or key.startswith(f"{each.key}.")]
        origins.update({f"{STAGES}.{number}{key.removeprefix(each.key)}": before[key] for key in below})
    return {**raw, "batch": {**batch, "size": sizes[ramp[0][2]]}, STAGES: [each.values for each in found]}


def _add(found: list[_Given], stage: _Given) -> None:
    """Add a size to the written stage at its step, or as a stage before the first one that begins later."""
    for place, each in enumerate(found):
        if each.first == stage.first and each.key.startswith(STAGES):
            if isinstance(own := each.values.get("batch", {}), dict):
                found[place] = each._replace(values={**each.values, "batch": {**stage.values["batch"], **own}})
            return
    place = next((place for place, each in enumerate(found) if each.first > stage.first), len(found))
    found.insert(place, stage)


def _first(stage: Mapping[str, Any], steps: int) -> float:
    """Return the steps before a written stage; infinite for an invalid `from`, which `stages_of` refuses."""
    begin = stage.get(FROM)
    if isinstance(begin, bool) or not isinstance(begin, int | float) or not begin >= 0:
        return float("inf")
    return in_steps(begin, steps)


def _step(name: str, at: str | None) -> float:
    try:
        step = float(name)
    except ValueError:
        step = -1.0
    if not 0 <= step < float("inf"):
        raise _refusal(f"has the key {shown(str(name))}", at)
    return int(step) if step == step // 1 else step


def _refusal(found: str, at: str | None) -> UserError:
    return UserError(
        f"{SIZE} {found}{f' ({at})' if at else ''}; sizes by step are a mapping of steps, or fractions of the run, to "
        "numbers of sequences, and begin with step 0: `{0: 256, 2000: 512}`."
    )
