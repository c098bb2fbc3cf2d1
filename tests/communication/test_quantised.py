"""Quantised averages over replicas against a slow NumPy rewrite, and their bytes in the compiled program."""

from dataclasses import replace
from functools import cache

import haliax as hax
import jax
import ml_dtypes
import numpy as np
import pytest
from haliax import Axis

from gregale.axes.layout import REPLICA, is_named
from gregale.codecs.codec import FeedbackConfig, ReduceConfig, load
from gregale.communication.quantised import QuantisedReducer
from gregale.cost import audit
from tests.codecs.wire_format import round_trip as quantised
from tests.mesh.support import layout_of

EMBED = Axis("embed", 64)
SHAPES = {
    "embedding": (Axis("vocab_part", 10), EMBED),  # pieces of 80 values at R = 8: no multiple of a block
    "kernel": (Axis("layers", 2), EMBED, Axis("hidden", 8)),
    "norm": (Axis("head", 13),),  # not split by `opt_state`
}
PLAIN = (7, 3)
MESHES = [(8, 1), (4, 2)]
LEVELS = {"none": 2**20, "bfloat16": 256, "int8": 128, "int4": 8, "int2": 2, "e3m0": 2}
FOUR_BITS = ReduceConfig(codec="int4", gather_codec="int4")
TOPK = ReduceConfig(codec="topk", block=128)  # 2 values of a block, 1 or 2 of a shorter one
ONE_PHASE = replace(TOPK, phases=1)
LOAD = jax.jit(load)
NO_FEEDBACK = ReduceConfig(codec="int4", gather_codec="int4", feedback=None)


class Program:
    """One step's two phases, compiled: (sums, weights, error) -> (averages, given back, error, given back as it is)."""

    def __init__(self, replica: int, data: int, config: ReduceConfig, dtype=np.float32, per_device: int = 1):
        devices = layout_of(replica=replica // per_device, data=data)
        self.layout, self.config = replace(devices, replicas_per_device=per_device), config
        if config.phases == 1:
            self.layout = replace(self.layout, opt_state=self.layout.params)
        tree, reducer = gradients(replica, dtype=dtype), QuantisedReducer(self.layout, config)
        start = reducer.init(averaged(tree))
        self.start = jax.device_put(start, reducer.shardings(start))

        def step(sums, weights, error):
            averages, error = reducer.reduce(sums, reducer.all_reduce_scalars(weights)[0], error)
            given, error = reducer.all_gather_params(averages, error)
            return averages, given, error

        self.compiled = jax.jit(step).lower(*self.placed(tree)).compile()

    def __call__(self, sums, weights=None, error=None):
        averages, given, error = self.compiled(*self.placed(sums, weights, error))
        return arrays(averages), arrays(given), error, given

    def placed(self, sums, weights=None, error=None):
        layout = self.layout
        weights = np.ones(layout.replicas, np.float32) if weights is None else weights
        weights = hax.named(weights, (layout.Replica,))
        sums, weights = (jax.device_put(tree, input_shardings(tree, layout)) for tree in (sums, weights))
        return sums, weights, self.start if error is None else error


program = cache(Program)


def input_shardings(tree, layout):
    def one(leaf, sharding):
        return sharding if is_named(leaf) else layout.sharding((REPLICA,), layout.params)

    return jax.tree.map(one, tree, layout.shardings(tree, layout.params), is_leaf=is_named)


def gradients(replicas: int, seed: int = 0, dtype=np.float32):
    """Buffers with different values on every replica, and a mean that is not zero."""
    random, Replica = np.random.default_rng(seed), Axis(REPLICA, replicas)

    def draw(*shape):
        return (random.normal(size=(replicas, *shape)) + 0.3).astype(dtype)

    tree = {name: hax.named(draw(*(a.size for a in axes)), (Replica, *axes)) for name, axes in SHAPES.items()}
    return {**tree, "plain": draw(*PLAIN), "loss": hax.named(draw().astype(np.float32), (Replica,))}


def averaged(tree):
    """The shapes of buffers without their axis `replica`."""

    def first():
        return jax.tree.map(lambda x: x[REPLICA, 0] if is_named(x) else x[0], tree, is_leaf=is_named)

    return jax.eval_shape(first)


def arrays(tree) -> dict[str, np.ndarray]:
    return {name: np.asarray(x.array if is_named(x) else x) for name, x in tree.items()}


def errors(stored) -> dict[str, np.ndarray]:
    return {path: loaded(type(one)(one.codes.array, one.scales.array)) for path, one in stored.items()}


def loaded(stored) -> np.ndarray:
    return np.asarray(LOAD(stored))


def pieces(name: str, array: np.ndarray, replicas: int, data: int) -> np.ndarray:
    """[...] -> [data, replicas, n]: what each replica of each data shard averages, as `opt_state` lies."""
    axes = [axis.name for axis in SHAPES.get(name, ())]
    if "embed" not in axes:
        flat = np.pad(array.ravel(), (0, -array.size % replicas)).reshape(1, replicas, -1)
        return np.repeat(flat, data, axis=0)
    parts = np.split(array, data * replicas, axis=axes.index("embed"))
    return np.stack([part.ravel() for part in parts]).reshape(data, replicas, -1)


def whole(name: str, parts: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """The inverse of `pieces`."""
    axes = [axis.name for axis in SHAPES.get(name, ())]
    if "embed" not in axes:
        return parts[0].ravel()[: int(np.prod(shape))].reshape(shape)
    place, count = axes.index("embed"), parts.shape[0] * parts.shape[1]
    small = [size // count if axis == place else size for axis, size in enumerate(shape)]
    return np.concatenate([part.reshape(small) for part in parts.reshape(count, -1)], axis=place)


def round_trip(name: str, array: np.ndarray, codec: str, replicas: int, data: int, block: int = 64) -> np.ndarray:
    """What an array is after its pieces went through a codec."""
    return whole(name, quantised(codec, pieces(name, array, replicas, data), block), array.shape)


def slow_average(name, sums, weights, config: ReduceConfig, mesh) -> np.ndarray:
    """The averages; of arrays that are not split, after their second phase."""
    scaled = np.float32(len(weights) / weights.sum())
    sent = [round_trip(name, one * scaled, config.codec, *mesh) for one in sums.astype(np.float32)]
    average = np.mean(sent, axis=0, dtype=np.float32)
    return average if is_split(name) else round_trip(name, average, config.gather_codec, *mesh)


def is_split(name: str) -> bool:
    return "embed" in [axis.name for axis in SHAPES.get(name, ())]


def assert_same_but_for_ties(actual, desired, levels: int):
    """A value in the middle between two codes may fall either way if its last bit differs; few do."""
    difference = np.abs(actual - desired)
    apart = difference > 1e-6
    assert apart.mean() <= 0.01
    assert difference.max() <= 1.01 * np.abs(desired).max() / levels


@pytest.mark.parametrize("mesh", MESHES)
def test_averages_are_those_of_the_slow_rewrite(mesh):
    check_against_the_slow_rewrite(program(*mesh, FOUR_BITS), mesh)


@pytest.mark.parametrize(
    ("first", "second", "options"), [("int2", "bfloat16", {"dtype": ml_dtypes.bfloat16}), ("e3m0", "int8", {})]
)
def test_every_codec_and_bfloat16_buffers(first, second, options):
    run = program(2, 1, ReduceConfig(codec=first, gather_codec=second), **options)
    check_against_the_slow_rewrite(run, (2, 1), gradients(2, **options))


def check_against_the_slow_rewrite(run: Program, mesh, tree=None):
    replicas = mesh[0]
    tree = gradients(replicas) if tree is None else tree
    weights = np.linspace(0, 3, replicas, dtype=np.float32)
    averages, given, _, _ = run(tree, weights)
    for name, sums in arrays(tree).items():
        if name == "loss":
            np.testing.assert_allclose(averages[name], sums.sum() / weights.sum(), rtol=1e-6)
            continue
        assert averages[name].dtype == np.float32
        average = slow_average(name, sums, weights, run.config, mesh)
        assert_same_but_for_ties(averages[name], average, LEVELS[run.config.codec])
        back = round_trip(name, averages[name], run.config.gather_codec, *mesh) if is_split(name) else averages[name]
        assert_same_but_for_ties(given[name], back, LEVELS[run.config.gather_codec])


@pytest.mark.quick
def test_what_is_sent_plus_what_is_kept_is_what_went_in():
    """sum of sent = sum of gone in - (e_K - e_0 - sum of storing errors) / (1 - beta), in the mean over replicas.

    Storing error: the 8-bit error less the float32 one that it was made of; at most half a step of 8 bits.
    """
    steps, beta, run, mesh = 6, 0.8, program(8, 1, FOUR_BITS), (8, 1)
    error, sent, gone_in, storing = None, 0.0, 0.0, 0.0
    kept = np.zeros(arrays(gradients(8))["kernel"].shape, np.float32)
    for step in range(steps):
        tree = gradients(8, seed=step)
        sums = arrays(tree)["kernel"]
        averages, _, error, _ = run(tree, error=error)
        lost = [h - round_trip("kernel", h, "int4", *mesh) for h in sums + kept]
        wanted = beta * kept + (1 - beta) * np.stack(lost)
        kept = errors(error.first)["kernel"]
        assert np.abs(kept - wanted).max() <= 1.01 * np.abs(wanted).max() / 128
        sent, gone_in = sent + averages["kernel"], gone_in + sums.mean(0)
        storing = storing + (kept - wanted).mean(0)
    expected = gone_in - (kept.mean(0) - storing) / (1 - beta)
    assert np.linalg.norm(sent - expected) <= 1e-5 * np.linalg.norm(gone_in)
    assert np.linalg.norm(sent - gone_in) > 1e-4 * np.linalg.norm(gone_in), "the check must see the error itself"
    assert np.linalg.norm(storing) / (1 - beta) < 0.1 * np.linalg.norm(kept.mean(0)) * steps


def test_the_second_legs_error_is_kept_too():
    beta, run, mesh = 0.8, program(8, 1, FOUR_BITS), (8, 1)
    _, _, error, _ = run(gradients(8))
    before = errors(error.second)
    averages, given, error, _ = run(gradients(8, seed=1), error=error)
    after = errors(error.second)
    for name in ("kernel", "embedding"):
        compensated = averages[name] + before[name]
        back = round_trip(name, compensated, "int4", *mesh)
        np.testing.assert_allclose(given[name], back, atol=1e-6)
        wanted = beta * before[name] + (1 - beta) * (compensated - back)
        np.testing.assert_allclose(after[name], wanted, atol=1.01 * np.abs(wanted).max() / 128)
    norm = after["norm"]  # [replica, head]: each replica keeps the error of its own piece, here 2 of 13
    assert [set(np.flatnonzero(row) // 2) <= {replica} for replica, row in enumerate(norm)] == [True] * 8
    assert norm.any()


@pytest.mark.parametrize(("mesh", "per_device"), [((2, 2), 1), ((4, 2), 2)])
def test_twenty_rounds_in_one_phase_are_those_of_the_slow_rewrite(mesh, per_device):
    """All replicas have the mean of whole messages; ties and zeros as below, and one round is not finite."""
    run, error, alone = program(*mesh, ONE_PHASE, per_device=per_device), None, (1, mesh[1])
    for step in range(20):
        tree = gradients(mesh[0], seed=step)
        if step % 4 == 1:
            tree = jax.tree.map(lambda x: np.sign(np.round(x)), tree)
        waiting = {name: np.zeros_like(x) for name, x in arrays(tree).items()} if error is None else errors(error.first)
        if step == 7:
            bad = jax.tree.map(lambda x: np.where(np.arange(x.size).reshape(x.shape) == 0, np.nan, x), tree)
            averages, _, after, _ = run(bad, error=error)
            assert all(np.isnan(each).any() for each in averages.values())
            assert all((each == waiting[name]).all() for name, each in errors(after.first).items())
        averages, given, error, whole = run(tree, error=error)
        for name in error.first:
            h = arrays(tree)[name] + waiting[name]
            sent = np.stack([round_trip(name, one, "topk", *alone, block=128) for one in h])
            check_stored(error.first[name], 0.95 * (h - sent))
            np.testing.assert_allclose(averages[name], np.mean(sent, axis=0), rtol=1e-6, atol=1e-7, err_msg=name)
            np.testing.assert_array_equal(given[name], averages[name])
    assert not error.second
    for each in jax.tree.leaves(whole):
        own = {}
        for shard in each.addressable_shards:
            own.setdefault(str(shard.index), set()).add(np.asarray(shard.data).tobytes())
        assert [len(copies) for copies in own.values()] == [1] * len(own)


@pytest.mark.parametrize(("mesh", "per_device"), [((2, 2), 1), ((4, 2), 1), ((4, 2), 2), ((4, 2), 4)])
def test_twenty_rounds_of_the_largest_values_with_both_errors_are_those_of_the_slow_rewrite(mesh, per_device):
    """e = 0.95 (h - sent), of each phase; sums of ones have ties, and zeros everywhere but at some places."""
    run, error = program(*mesh, TOPK, per_device=per_device), None
    for step in range(20):
        tree = gradients(mesh[0], seed=step)
        if step % 4 == 1:
            tree = jax.tree.map(lambda x: np.sign(np.round(x)), tree)
        waiting = {name: (np.zeros_like(x), np.zeros_like(x[0])) for name, x in arrays(tree).items()}
        if error is not None:
            waiting = {name: (errors(error.first)[name], errors(error.second)[name]) for name in error.first}
        averages, given, error, _ = run(tree, error=error)
        for name in error.first:
            h = arrays(tree)[name] + waiting[name][0]
            sent = np.stack([round_trip(name, one, "topk", *mesh, block=128) for one in h])
            check_stored(error.first[name], 0.95 * (h - sent))
            average = np.mean(sent, axis=0, dtype=np.float32)
            second = waiting[name][1] if is_split(name) else waiting[name][1].sum(0)  # each replica keeps its own piece
            h = average + second
            back = round_trip(name, h, "topk", *mesh, block=128)
            np.testing.assert_allclose(given[name], back, rtol=1e-6, err_msg=name)
            if is_split(name):
                np.testing.assert_allclose(averages[name], average, rtol=1e-6, atol=1e-7)
                check_stored(error.second[name], 0.95 * (h - back))


def check_stored(stored, wanted):
    """An error is what is wanted, but for what 8 bits lose: `store` has the bound."""
    codes, scales = np.asarray(stored.codes.array), np.asarray(stored.scales.array, np.float32)
    blocks = wanted.reshape(*scales.shape, -1)
    found = loaded(type(stored)(codes, stored.scales.array)).reshape(blocks.shape)
    assert (np.abs(found - blocks) <= 1.01 * 3 / 256 * np.abs(blocks).max(-1, keepdims=True)).all()


@pytest.mark.parametrize(("bad", "config"), [(np.nan, FOUR_BITS), (np.inf, TOPK)])
def test_a_step_that_is_not_finite_shows_and_keeps_the_error(bad, config):
    run = program(4, 2, config)
    _, _, error, _ = run(gradients(4))
    tree = gradients(4, seed=1)
    kernel = np.array(tree["kernel"].array)
    kernel[1, 0, 3, 5] = bad
    averages, _, after, _ = run({**tree, "kernel": hax.named(kernel, tree["kernel"].axes)}, error=error)
    assert not np.isfinite(averages["kernel"][0, 3, 5])
    assert np.isfinite(averages["embedding"]).all()
    for old, new in zip(jax.tree.leaves(error.first), jax.tree.leaves(after.first), strict=True):
        np.testing.assert_array_equal(old, new)
    _, _, moved, _ = run(tree, error=error)
    assert (np.asarray(moved.first["norm"].codes.array) != np.asarray(error.first["norm"].codes.array)).any()


def test_the_reset_counts_steps():
    config = ReduceConfig(codec="int4", gather_codec="int4", feedback=FeedbackConfig(reset_every=3))
    run, error = program(2, 1, config), None
    for step in range(7):
        averages, given, error, _ = run(gradients(2, seed=step), error=error)
        first, first_given, _, _ = run(gradients(2, seed=step))
        same = all((averages[name] == first[name]).all() for name in averages)
        same_given = all((given[name] == first_given[name]).all() for name in given)
        assert same == same_given == (step % 3 == 0), f"only at steps 0, 3 and 6 is there no error, not at {step}"
    assert int(error.steps) == 7


def test_the_error_lies_as_the_buffers_do_in_about_a_byte_a_value():
    run = program(4, 2, FOUR_BITS)
    _, _, error, _ = run(gradients(4))
    stored = error.first["kernel"]
    assert stored.codes.axis_names == stored.scales.axis_names == (REPLICA, "layers", "embed", "hidden")
    assert stored.codes.array.sharding.spec[2] == "data"
    places = QuantisedReducer(run.layout, FOUR_BITS).shardings(error)
    for given, stored in zip(jax.tree.leaves(error), jax.tree.leaves(places), strict=True):
        assert given.sharding.is_equivalent_to(stored, given.ndim)
    assert set(error.first) == set(error.second) == {*SHAPES, "plain"}
    assert not QuantisedReducer(run.layout, ReduceConfig()).init(averaged(gradients(4))).first
    assert not QuantisedReducer(run.layout, NO_FEEDBACK).init(averaged(gradients(4))).second


@pytest.mark.parametrize(
    ("mesh", "config"),
    [((8, 1), FOUR_BITS), ((4, 2), FOUR_BITS), ((4, 2), TOPK), ((4, 2), ONE_PHASE), ((2, 1), ReduceConfig())],
)
def test_only_bytes_cross_replicas_and_as_many_as_the_closed_form_says(mesh, config):
    run = program(*mesh, config)
    over = audit(run.compiled, run.layout.mesh).over(REPLICA)
    assert {collective.dtype for collective in over} == {"u8"}
    reducer, tree = QuantisedReducer(run.layout, config), averaged(gradients(mesh[0]))
    weights = 4 * (mesh[0] - 1)
    assert sum(each.bytes_sent for each in over) == reducer.bytes_sent(tree) + weights
    assert reducer.bytes_sent(tree) == reducer.reduce_bytes(tree) + reducer.gather_bytes(tree)


def test_what_is_lost_is_measured():
    """On 2 replicas x data 2: each device's shard is a row of blocks."""
    layout = layout_of(replica=2, data=2)
    random = np.random.default_rng(3)
    values = random.normal(size=(2, 64, 8)).astype(np.float32)
    tree = {"kernel": hax.named(values, (layout.Replica, EMBED, Axis("hidden", 8)))}
    reducer = QuantisedReducer(layout, FOUR_BITS)
    start = reducer.init(averaged(tree))
    lost = jax.jit(reducer.measure)(jax.device_put(tree, input_shardings(tree, layout)), np.float32(4), start)
    whole = values / 2  # the mean weight
    shards = whole.reshape(2, 2, -1)
    sent = quantised("int4", shards)
    expected = np.sqrt(np.sum(np.square(shards - sent)) / np.sum(np.square(whole)))
    np.testing.assert_allclose(lost.relative_error, expected, rtol=1e-5)
    assert lost.error_norm == 0
