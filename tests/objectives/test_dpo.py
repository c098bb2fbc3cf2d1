"""DPO's loss by hand, from log-probabilities that are given."""

from types import SimpleNamespace
from typing import Any

import jax.numpy as jnp
import numpy as np
from haliax import NamedArray

from gregale.objectives import DpoConfig


def test_the_chosen_answer_is_the_first_row_of_a_pair():
    """Two pairs; the second has no target in its rejected row, and counts nothing."""
    rows = {"model": [-1.0, -3.0, -2.0, -2.0], "reference": [-2.0, -2.5, 0.0, 0.0]}
    named = {name: NamedArray(jnp.asarray(values), ("batch",)) for name, values in rows.items()}
    supervised = NamedArray(jnp.asarray([3.0, 2.0, 4.0, 0.0]), ("batch",))
    passes: Any = SimpleNamespace(model="model", reference="reference", supervised=supervised, log_probs=named.get)
    found = DpoConfig(beta=0.5).loss(passes)
    chosen, rejected = 0.5 * (-1 + 2), 0.5 * (-3 + 2.5)
    np.testing.assert_allclose(found.loss, np.log1p(np.exp(rejected - chosen)), rtol=1e-6)
    assert found.weight == 1
    assert {name: float(value) for name, value in found.metrics.items()} == {
        "reward_margin": chosen - rejected,
        "reward_accuracy": 1.0,
        "reward_chosen": chosen,
        "reward_rejected": rejected,
    }
