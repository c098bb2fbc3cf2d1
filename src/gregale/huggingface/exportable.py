"""Provides the check that other programs compute the same outputs from a model's weights."""

from typing import Any

import equinox as eqx
import jax

from gregale.errors import UserError


def check_family(module: Any) -> None:
    """Raise `UserError` if the class of a model, or of a part of it, may compute other outputs than Gregale's own.

    A class outside of Gregale and Haliax has to say that it does not, itself: a subclass of it may differ again.
    """
    kind = type(module)
    if kind.__module__.partition(".")[0] not in ("gregale", "haliax") and not vars(kind).get("exports_as_llama"):
        raise UserError(
            f"the model has a {kind.__name__}, a class of your own, so that other programs may compute other outputs "
            f"from its weights. If only its loss differs, write `exports_as_llama = True` into the body of "
            f"{kind.__name__}."
        )
    for part in jax.tree.leaves(list(vars(module).values()), is_leaf=lambda part: isinstance(part, eqx.Module)):
        if isinstance(part, eqx.Module):
            check_family(part)
