import haliax as hax
import jax.numpy as jnp
import pytest
from haliax import Axis

from gregale.optim import MatrixAxes, decays, matrix_axes

SIZES = {"layers": 2, "embed": 4, "heads": 2, "head_size": 3, "mlp": 6, "vocab": 5}


def leaf(names: str):
    return hax.zeros(tuple(Axis(name, SIZES[name]) for name in names.split()))


@pytest.mark.parametrize(
    ("names", "sides", "decay"),
    [
        ("layers mlp embed", MatrixAxes(("mlp",), ("embed",)), True),
        ("embed layers heads head_size", MatrixAxes(("embed",), ("heads", "head_size")), True),
        ("embed vocab", None, True),
    ],
)
def test_named_parameters_are_judged_by_their_axes_in_any_order(names, sides, decay):
    """`test_optimizers.py` has the others."""
    assert matrix_axes(leaf(names)) == sides
    assert decays(leaf(names)) == decay


@pytest.mark.parametrize(
    ("shape", "matrix", "decay"), [((3, 4), True, True), ((3,), False, False), ((2, 3, 4), False, True)]
)
def test_plain_arrays_are_judged_by_their_rank(shape, matrix, decay):
    assert (matrix_axes(jnp.zeros(shape)) is not None) == matrix
    assert decays(jnp.zeros(shape)) == decay
