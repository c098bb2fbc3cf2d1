"""The walk over jaxprs beside counts by hand."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from gregale.cost.work import Work, work_of
from gregale.scopes import AGAIN, FURTHER_ROUNDS, runs, sees

A, B = jnp.ones((4, 6)), jnp.ones((6, 10))
PRODUCT = 2 * 4 * 6 * 10
GROUPS = jnp.array([1, 3])


def work(function, *arguments) -> Work:
    return work_of(jax.make_jaxpr(function)(*arguments))


def carried(a):
    """Four products of [4, 6] by [6, 6], in a loop that tells how often it runs."""
    return jax.lax.scan(lambda x, _: (x @ jnp.ones((6, 6)), x[0]), a, None, length=4)


def until(a, scope=None):
    def grow(a):
        return jax.lax.while_loop(lambda x: x.sum() < 9, lambda x: x @ jnp.ones((6, 6)), a)

    if scope is None:
        return grow(a)
    with scope:
        return grow(a)


def branched(a, b):
    return jax.lax.cond(a.sum() > 0, lambda: (a @ b).sum(), lambda: a.sum())


def seen(a, b):
    with sees(4, 2):
        return a @ b


def kernel(a, cost=None, grid=(4,)):
    """A kernel that multiplies each row of [4, 6] by [6, 6], in a grid of rows."""

    def body(x, y):
        y[...] = jnp.dot(x[...], jnp.ones((6, 6)))

    spec = pl.BlockSpec((1, 6), lambda row: (row, 0))
    shape = jax.ShapeDtypeStruct((4, 6), jnp.float32)
    return pl.pallas_call(body, shape, grid=grid, in_specs=[spec], out_specs=spec, interpret=True, cost_estimate=cost)(
        a
    )


def declared(a):
    return kernel(a, pl.CostEstimate(flops=7, transcendentals=0, bytes_accessed=0))


def recomputed(a, b):
    return jax.grad(jax.checkpoint(lambda a, b: jnp.sin(jnp.sin(a @ b) @ b.T).sum()))(a, b)


ONES = jnp.ones
FLOPS = {
    "product": (jnp.dot, (A, B), PRODUCT),
    "batched": (lambda x, y: jnp.einsum("nij,njk->nik", x, y), (ONES((3, 4, 6)), ONES((3, 6, 10))), 3 * PRODUCT),
    "gradients": (jax.grad(lambda a, b: jnp.sin(a @ b).sum(), (0, 1)), (A, B), 3 * PRODUCT),
    "recomputed": (recomputed, (A, B), (2 + 2) * PRODUCT),
    "unused": (lambda a, b: (a @ b, a.sum())[1], (A, B), 0),
    "scan": (carried, (A,), 4 * 2 * 4 * 6 * 6),
    "while with its count": (lambda a: until(a, runs(5)), (A,), 5 * 2 * 4 * 6 * 6),
    "while that never runs": (lambda a: until(a, jax.named_scope(AGAIN)), (A,), 0),
    "further rounds": (lambda a: until(a, jax.named_scope(FURTHER_ROUNDS)), (A,), 0),
    "the larger branch": (branched, (A, B), PRODUCT),
    "groups": (jax.lax.ragged_dot, (A, ONES((2, 6, 10)), GROUPS), PRODUCT),
    "gradients of groups": (
        *(jax.grad(lambda *given: jnp.sin(jax.lax.ragged_dot(*given)).sum(), (0, 1)), (A, ONES((2, 6, 10)), GROUPS)),
        3 * PRODUCT,
    ),
    "convolution": (
        *(lambda x, k: jax.lax.conv(x, k, (1,), "VALID"), (ONES((2, 3, 9)), ONES((5, 3, 4)))),
        2 * 2 * 5 * 6 * 3 * 4,
    ),
    "triangular": (lambda a, b: jax.scipy.linalg.solve_triangular(a, b), (jnp.eye(6), B), 6 * 6 * 10),
    "kernel by its grid": (kernel, (A,), 4 * 2 * 6 * 6),
    "kernel that declares": (declared, (A,), 7),
}


@pytest.mark.parametrize("name", FLOPS)
def test_flops_by_hand(name):
    function, arguments, expected = FLOPS[name]
    found = work(function, *arguments)
    assert found.flops == expected
    assert not found.unknown


def test_what_is_not_known_is_told_and_counts_once():
    found = work(until, A)
    assert (found.flops, found.unknown) == (2 * 4 * 6 * 6, {"while"})
    called = work(lambda a: jax.pure_callback(np.sin, jax.ShapeDtypeStruct(a.shape, a.dtype), a), A)
    assert (called.flops, called.unknown) == (0, {"pure_callback"})
    assert called.memory_bytes == 2 * A.nbytes


def test_a_kernel_of_other_shapes_and_a_decomposition():
    """By its grid, not as rows of experts."""
    stacked = jnp.ones((4, 8, 16))

    def body(x, y):
        y[...] = x[...] + 1

    added = work(lambda x: pl.pallas_call(body, jax.ShapeDtypeStruct(x.shape, x.dtype), interpret=True)(x), stacked)
    assert (added.flops, added.unknown) == (0, frozenset())
    assert work(jnp.linalg.cholesky, jnp.eye(4)).unknown == {"cholesky"}


def test_devices_of_a_shard_map_count_each():
    mesh = Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("a", "b"))
    split = jax.shard_map(jnp.dot, mesh=mesh, in_specs=(P("a"), P()), out_specs=P("a"))
    assert work(split, A, B).flops == 4 * PRODUCT / 2, "both devices of `b` compute the same"


def test_bytes_hidden_pairs_and_numbers_of_8_bits():
    found = work(seen, A, B)
    assert found.memory_bytes == A.nbytes + B.nbytes + 4 * 4 * 10
    assert found.visible_flops == pytest.approx(PRODUCT * (1 + 2 + 2 + 2) / 16)
    gathered = work(lambda b: b[jnp.array([0, 2])], B)
    assert gathered.memory_bytes == 2 * 2 * 10 * 4
    narrow = work(
        lambda a, b: jax.lax.dot(a, b, preferred_element_type=jnp.int32), A.astype(jnp.int8), B.astype(jnp.int8)
    )
    assert (narrow.eight_bit_flops, found.eight_bit_flops) == (PRODUCT, 0)


def test_loops_keep_their_results_and_hosts_hold_their_own():
    assert work(carried, A).saved_bytes == 4 * 6 * 4
    places = {"offload_src": "device", "offload_dst": "pinned_host"}
    policy = jax.checkpoint_policies.save_and_offload_only_these_names(
        names_which_can_be_saved=[], names_which_can_be_offloaded=["kept"], **places
    )

    def layer(x, _):
        return jnp.sin(jax.ad_checkpoint.checkpoint_name(x, "kept")) @ jnp.ones((6, 6)), None

    def loss(a, policy):
        return jax.lax.scan(jax.checkpoint(layer, policy=policy), a, None, length=4)[0].sum()

    on_device, on_host = (work(jax.grad(lambda a, own=own: loss(a, own)), A) for own in (None, policy))
    carries = 4 * A.nbytes
    assert (on_device.saved_bytes, on_device.host_bytes) == (carries, 0)
    assert on_host.host_bytes == 2 * carries
    assert on_host.saved_bytes <= carries
