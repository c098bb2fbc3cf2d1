"""The lookup and its gradient against numpy in float64, with repeated ids and the table split over devices."""

from collections import Counter
from dataclasses import dataclass, replace

import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from haliax import Axis

from gregale.axes.layout import BATCH, Layout
from gregale.cost import audit
from gregale.model.embedding import embed
from gregale.model.execution import Execution
from gregale.programs.runtime.sampler import unsplit
from tests.mesh.support import layout_of, placed

Rows, Position, Embed = Axis(BATCH, 8), Axis("position", 512), Axis("embed", 16)
FEW, MANY = Axis("vocab", 8), Axis("vocab", 1 << 15)
IDS = 7  # every one of them is looked up some hundred times
# (data, model, stage), and rows of the table: if they are few against the tokens the table is gathered.
CASES = {
    "one device": ((1, 1), FEW),
    "table over data": ((4, 1), FEW),
    "table over model": ((1, 8), FEW),
    "table over both": ((2, 4), FEW),
    "rows over data": ((4, 1), MANY),
    "rows over both": ((2, 4), MANY),
    "rows over data and stage": ((2, 2, 2), MANY),
}


@dataclass
class Case:
    layout: Layout
    run: Execution
    table: hax.NamedArray
    ids: hax.NamedArray
    cotangent: np.ndarray

    @staticmethod
    def of(name: str, dtype, **options) -> "Case":
        sizes, Vocab = CASES[name]
        layout = layout_of(1, *sizes)
        generator = np.random.default_rng(0)
        rows = generator.permutation(Vocab.size)[:IDS]  # on all devices of `model`
        ids = rows[generator.integers(0, IDS, (Rows.size, Position.size))]
        cotangent = generator.uniform(0.5, 1.5, (Rows.size, Position.size, Embed.size)).astype(np.float32)
        table = generator.standard_normal((Vocab.size, Embed.size), dtype=np.float32)
        run = Execution(layout=layout.inside_replica(), dtype=jnp.dtype(dtype), **options)
        return Case(
            layout,
            run,
            placed(hax.named(table, (Vocab, Embed)), layout, layout.params),
            placed(hax.named(ids, (Rows, Position)), layout, layout.compute),
            np.asarray(jnp.asarray(cotangent, dtype), np.float32),
        )

    def program(self, table, ids):
        """The rows found, and the gradient by the table."""
        found, back = jax.vjp(lambda table: embed(table, ids, self.run).array, table)
        return found, back(jnp.asarray(self.cotangent, self.run.dtype))[0].array

    def expected(self) -> np.ndarray:
        """The gradient, added up in float64."""
        sums = np.zeros(self.table.array.shape)
        np.add.at(sums, np.asarray(self.ids.array), self.cotangent.astype(np.float64))
        return sums


@pytest.mark.parametrize("name", CASES)
def test_lookup_and_gradient_in_float32(name):
    case = Case.of(name, jnp.float32)
    found, gradient = jax.jit(case.program)(case.table, case.ids)
    np.testing.assert_array_equal(found, np.asarray(case.table.array)[np.asarray(case.ids.array)])
    np.testing.assert_allclose(gradient, case.expected(), rtol=1e-5)
    params = case.layout.sharding(case.table.axes, case.layout.params)
    assert gradient.sharding.is_equivalent_to(params, 2)


@pytest.mark.parametrize("name", ["one device", "table over both", "rows over both"])
def test_gradient_in_bfloat16_adds_up_in_float32(name):
    """A sum of 500 ones in bfloat16 stops at 256; added in float32 and rounded at the end it is right."""
    case = Case.of(name, jnp.bfloat16)
    found, gradient = jax.jit(case.program)(case.table, case.ids)
    assert found.dtype == jnp.bfloat16
    table = jnp.asarray(case.table.array, jnp.bfloat16)
    np.testing.assert_array_equal(found, np.asarray(table)[np.asarray(case.ids.array)])
    assert gradient.dtype == jnp.float32, "the table's own dtype"
    # One rounding to bfloat16 for a device's sum, and one for each addition over `data`; none where rows are exchanged.
    exact = CASES[name][1] is MANY
    np.testing.assert_allclose(gradient, case.expected(), rtol=1e-5 if exact else (1 + CASES[name][0][0]) * 2**-8)


@pytest.mark.parametrize("name", ["rows over both", "table over both"])
def test_a_table_that_was_gathered_before(name):
    """The way back is the same; only the gradient has the gathered table's dtype."""
    case = Case.of(name, jnp.bfloat16, weights_ready=True)
    gathered = replace(case.run, weights_ready=False).gathered(case.table)
    found, gradient = jax.jit(case.program)(gathered, case.ids)
    np.testing.assert_array_equal(found, np.asarray(gathered.array)[np.asarray(case.ids.array)])
    assert gradient.dtype == jnp.bfloat16
    np.testing.assert_allclose(gradient.astype(jnp.float32), case.expected(), rtol=3 * 2**-8)


def test_a_batch_that_is_not_split():
    """All devices have the same tokens, as where text is drawn: nothing but rows is brought together."""
    case = Case.of("rows over both", jnp.float32)
    case.run = replace(case.run, layout=unsplit(case.run.layout, BATCH))
    case.ids = placed(case.ids, case.layout, {})
    program = jax.jit(case.program).lower(case.table, case.ids).compile()
    found, gradient = program(case.table, case.ids)
    np.testing.assert_array_equal(found, np.asarray(case.table.array)[np.asarray(case.ids.array)])
    np.testing.assert_allclose(gradient, case.expected(), rtol=1e-5)
    sent = [each.bytes for each in audit(program, case.layout.mesh).collectives]
    assert sent == [Rows.size * Position.size * Embed.size * 4] * 2, "over `data`, and over `model`"


@pytest.mark.parametrize("name", ["rows over data", "rows over both", "rows over data and stage"])
def test_what_is_sent_where_rows_are_exchanged(name):
    """Ids, and rows there and back: nothing of the table's size."""
    case = Case.of(name, jnp.float32)
    compiled = jax.jit(case.program).lower(case.table, case.ids).compile()
    found = [each for each in audit(compiled, case.layout.mesh).collectives if {*each.axes} & {"data", "stage"}]
    tokens, shards = Rows.size * Position.size, case.layout.mesh.size // case.layout.mesh.shape["model"]
    rows = tokens // shards * Embed.size * 4
    assert Counter((each.kind, each.bytes) for each in found) == {
        ("all-gather", tokens * 4): 1,
        ("all-to-all", rows): 2,
    }


def test_a_sum_in_bfloat16_would_be_far_off():
    """So the tolerance above tells the two apart."""
    ids = np.repeat(np.arange(FEW.size), Position.size)
    added = jnp.zeros(FEW.size, jnp.bfloat16).at[ids].add(jnp.ones(ids.size, jnp.bfloat16))
    assert (np.asarray(added, np.float32) < 0.9 * Position.size).all()
