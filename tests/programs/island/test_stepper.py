"""What an island that has diverged begins again with."""

import jax.numpy as jnp
import numpy as np

from gregale.programs.island.stepper import without_nonfinite


def test_of_an_optimizer_of_its_own_only_what_is_finite_stays():
    moments = {"mu": jnp.array([1.0, jnp.nan, -2.0]), "nu": jnp.array([jnp.inf]), "count": jnp.array(7)}
    found = without_nonfinite(moments)
    np.testing.assert_array_equal(found["mu"], [1.0, 0.0, -2.0])
    np.testing.assert_array_equal(found["nu"], [0.0])
    assert found["count"] == 7
