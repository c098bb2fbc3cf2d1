"""Groups of parameters, by their names, with rates and weight decays of their own."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from haliax import NamedArray

from gregale.axes.layout import is_named
from gregale.axes.parameters import has_name, layers_axis, names_of_arrays, trainable
from gregale.errors import KeyedError
from gregale.model.parametrisation import Scaling
from gregale.settings import Settings, at_least, setting

SHOWN = 4  # names in a message


@dataclass(frozen=True)
class GroupConfig(Settings):
    """Parameters by the names that `inspect.granularity: array` shows, such as `layer.3.attention.query.weight`."""

    match: str = setting("*", "names: `*` any characters, `|` between alternatives", by_topic=True)
    learning_rate: float = setting(1.0, "factor of the learning rate", range=at_least(0), by_topic=True)
    weight_decay: float | None = setting(
        None, "in place of the optimizer's; null: the same", range=at_least(0), by_topic=True
    )

    def has(self, name: str) -> bool:
        return has_name(self.match, name)


class ParameterRule(NamedTuple):
    """How an optimizer changes a parameter; `rate` is the peak."""

    algorithm: str
    rate: float
    weight_decay: float


@dataclass(frozen=True)
class Groups:
    """The groups of an optimizer, and the scalings of its model. Of several that have a parameter the first counts.

    Factors of groups and of scalings multiply. A scaling changes the rate and not the product of rate and decay.

    - `rate`: the field of `Scaling` for the rate of this optimizer
    """

    groups: Sequence[GroupConfig]
    scalings: Sequence[Scaling] = ()
    rate: str = "elements"

    def __bool__(self) -> bool:
        return bool(self.groups or self.scalings)

    def check(self, parameters: Any) -> None:
        """Raise `KeyedError` for a group without parameters."""
        names = [name for _, own in names_of_arrays(trainable(parameters)) for name in own]
        for number, group in enumerate(self.groups):
            check_match(f"groups.{number}.match", group.match, names)

    def rates(self, parameters: Any) -> optax.GradientTransformation:
        """Return the factors of the learning rate, for updates; without groups nothing."""
        if not self:
            return optax.identity()
        return _scaling(self._values(parameters, self.rate_of))

    def sizes(self, parameters: Any) -> optax.GradientTransformation:
        """Return what gives gradients the size of the base model's, so that epsilon has the same weight."""
        return _scaling(self._values(parameters, lambda leaf, name: 1 / self._scaled(name, "gradient")))

    def rate_of(self, leaf: Any, name: str) -> float:
        """Return the factor of a parameter's learning rate."""
        return self._own(name, lambda group: group.learning_rate, 1.0) * self._scaled(name, self.rate)

    def decay_of(self, leaf: Any, name: str, others: Callable[[Any], float]) -> float:
        """Return a parameter's weight decay; `others`: as for `decay`."""
        return self._own(name, lambda group: group.weight_decay, others(leaf)) / self._scaled(name, self.rate)

    def decay(self, parameters: Any, others: Callable[[Any], float]) -> optax.GradientTransformation:
        """Return the weight decay; `others`: leaf -> that of a parameter whose group has none."""
        decays = self._values(parameters, lambda leaf, name: self.decay_of(leaf, name, others))

        def one(values: "_Values", update, parameter):
            return update if _is_masked(update) else _added(update, _times(values, parameter))

        return optax.stateless(lambda updates, given: jax.tree.map(one, decays, updates, given))

    def _own(self, name: str, of: Callable[[GroupConfig], float | None], otherwise: float) -> float:
        found = next((of(group) for group in self.groups if group.has(name)), None)
        return otherwise if found is None else found

    def _scaled(self, name: str, factor: str) -> float:
        return next((getattr(each, factor) for each in self.scalings if has_name(each.match, name)), 1.0)

    def _values(self, parameters: Any, value: Callable[[Any, str], float]) -> Any:
        """Return a tree with the values of every parameter."""
        arrays = names_of_arrays(trainable(parameters))
        found = [_Values(tuple(value(leaf, name) for name in names), layers_axis(leaf)) for leaf, names in arrays]
        return jax.tree.structure(trainable(parameters), is_leaf=is_named).unflatten(found)


def check_match(key: str, match: str, names: Sequence[str]) -> None:
    """Raise `KeyedError` if a pattern has none of the names."""
    if not any(has_name(match, name) for name in names):
        shown = ", ".join(names[:: max(1, len(names) // SHOWN)][:SHOWN])
        reason = f", and no parameter has such a name. Some of the {len(names)} names: {shown}."
        raise KeyedError(key, f"is {match!r}", reason)


@dataclass(frozen=True)
class _Values:
    """A number for a parameter, or one for each of its layers."""

    values: tuple[float, ...]
    layers: str | None


def _scaling(factors: Any) -> optax.GradientTransformation:
    return optax.stateless(lambda updates, _: jax.tree.map(_times, factors, updates))


def _is_masked(leaf) -> bool:
    return isinstance(leaf, optax.MaskedNode)


def _times(by: _Values, leaf):
    """Multiply an array, if it is not masked."""
    if _is_masked(leaf) or set(by.values) == {1.0}:
        return leaf
    if len(set(by.values)) == 1:
        return jax.tree.map(lambda array: array * jnp.asarray(by.values[0], array.dtype), leaf)
    assert by.layers is not None, "only rows along layers have several names"
    return leaf * NamedArray(jnp.asarray(np.asarray(by.values), leaf.dtype), (by.layers,))


def _added(update, addend):
    return jax.tree.map(jnp.add, update, addend.rearrange(update.axes) if is_named(update) else addend)
