"""Generation: tokens beside whole forward passes of the plain model, whatever the blocks and the mesh; no copies."""

from dataclasses import replace
from itertools import cycle
from math import prod

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from gregale.axes.layout import BATCH
from gregale.cost.hlo import parse, walk
from gregale.inference import generate
from gregale.inference.generate import BLOCK, Generator, Last, Prompt, Sampling, draw, width_of
from gregale.model.execution import Execution
from tests.mesh.support import executed, kernels_of, layout_of, one_device, placed, small_model
from tests.model import oracle
from tests.model.test_llama import CONFIGS, VOCABULARY, made

GREEDY, DRAWN = Sampling(0), Sampling(1.3, top_k=9, top_p=0.9, seed=5)
PROMPT = [3, 1, 4, 1, 5]
NO_END = VOCABULARY  # no token ends a text
PASSED_ON = {"parameter", "get-tuple-element", "bitcast", "tuple", "while", "fusion", "call"}  # nothing is moved


def by_full_passes(model, prompt: list[int], count: int, sampling: Sampling) -> list[int]:
    """One token after another, each from a whole forward pass of the plain model; the place gives the randomness."""
    weights, length = oracle.plain_weights(model), len(prompt) + count
    where = np.arange(length)

    @jax.jit
    def following(ids, place):
        logits = oracle.logits(weights, ids, where, np.zeros(length), model.config)[place]
        return draw(logits.astype(jnp.float32), sampling, jax.random.fold_in(jax.random.key(sampling.seed), place))

    ids = np.zeros(length, np.int32)
    ids[: len(prompt)] = prompt
    for place in range(len(prompt), length):
        ids[place] = following(ids, place - 1)
    return ids[len(prompt) :].tolist()


def prompted(sampling: Sampling, tokens: list[int] = PROMPT) -> Prompt:
    return Prompt(tokens, sampling.seed)


def tokens_of(generator: Generator, model, prompt: Prompt, count: int, sampling: Sampling) -> list[int]:
    """The tokens that continue one prompt, before one that ends the text."""
    tokens = np.concatenate(list(generator.blocks(model, [prompt], count, sampling, cycle([BLOCK]))), axis=1)[0]
    return tokens[: next(iter(np.flatnonzero(np.isin(tokens, generator._ends))), count)].tolist()


def generator_and_model(name: str, end: int = NO_END):
    """On one device, with the blocks of the model apart."""
    run = one_device(weights_ready=True)
    return Generator(run, VOCABULARY, [end]), made(name).unstacked()


@pytest.fixture(scope="module")
def llama3():
    generator, model = generator_and_model("llama3")
    return generator, model, tokens_of(generator, model, prompted(DRAWN), 40, DRAWN)


CASES = [("mistral", GREEDY), ("qwen3", DRAWN), ("gemma", DRAWN)]
CASES += [pytest.param("llama3", DRAWN, marks=pytest.mark.quick)]


@pytest.mark.parametrize(("name", "sampling"), CASES)
def test_tokens_are_those_of_full_passes(name, sampling):
    generator, model = generator_and_model(name)
    found = tokens_of(generator, model, prompted(sampling), 12, sampling)
    assert found == by_full_passes(made(name), PROMPT, 12, sampling)


def test_blocks_of_any_size_give_the_same_tokens(llama3):
    generator, model, expected = llama3
    assert len(expected) == 40 > BLOCK
    for sizes in ([1], [3, 1, 7], [BLOCK]):
        blocks = list(generator.blocks(model, [prompted(DRAWN)], 40, DRAWN, cycle(sizes)))
        assert [block.shape for block in blocks[:2]] == [(1, 1), (1, sizes[0])]
        assert np.concatenate(blocks, axis=1)[0].tolist() == expected
    assert tokens_of(generator, model, prompted(DRAWN), 1, DRAWN) == expected[:1]


@pytest.mark.parametrize("place", [0, 7])
def test_it_ends_before_the_end(llama3, place):
    _, model, expected = llama3
    end = expected[place]
    generator = Generator(one_device(weights_ready=True), VOCABULARY, [NO_END, end])
    assert tokens_of(generator, model, prompted(DRAWN), 40, DRAWN) == expected[: expected.index(end)]


def test_caches_that_grow_change_nothing(monkeypatch):
    """From 64 slots to 128, to 192: a prompt that leaves none, tokens past each border."""
    monkeypatch.setattr(generate, "FIRST_SLOTS", 64)
    generator, model = generator_and_model("llama2")
    prompt = prompted(GREEDY, [(7 * place) % VOCABULARY for place in range(63)])
    tokens = tokens_of(generator, model, prompt, 80, GREEDY)
    assert len(tokens) == 80
    monkeypatch.undo()
    assert generate.slots_for(64, 144, None) == 192
    assert tokens_of(generator, model, prompt, 80, GREEDY) == tokens


def test_attention_goes_over_twice_the_tokens_at_most():
    assert [generate.slots_for(tokens, 10**6, None) for tokens in (1, 511, 512, 1500)] == [512, 512, 1024, 2048]
    assert [generate.slots_for(tokens, most, None) for tokens, most in ((9, 20), (9, 65), (600, 700))] == [64, 128, 704]
    assert [generate.slots_for(tokens, 10**6, 600) for tokens in (1, 511, 512, 1500)] == [512, 512, 640, 640]


def test_prompts_are_filled_up_to_few_lengths():
    assert [width_of(tokens) for tokens in (1, 64, 65, 300, 513, 1025, 1280)] == [64, 64, 128, 320, 640, 1280, 1280]
    assert len({width_of(tokens) for tokens in range(512, 4096)}) == 13
    assert all(tokens <= width_of(tokens) < tokens + max(64, tokens / 4 + 1) for tokens in range(1, 5000))


def test_a_sliding_window_keeps_no_more_slots_than_it_needs():
    """Slots are written again, by a prompt that is longer than they are many and by what is drawn after it."""
    generator, model = generator_and_model("mistral")
    prompt, count = [(5 * place) % VOCABULARY for place in range(150)], 24
    ids, rows = generate.filled([Prompt(prompt)])
    slots = generate.slots_for(ids.shape[1], ids.shape[1] + count, model.config.sliding_window)
    _, caches = jax.eval_shape(lambda: generator.read(model, ids, rows, slots=slots, sampling=GREEDY))
    assert {leaf.shape[0] for leaf in jax.tree.leaves(caches)} == {64}
    found = tokens_of(generator, model, prompted(DRAWN, prompt), count, DRAWN)
    assert found == by_full_passes(made("mistral"), prompt, count, DRAWN)


PROMPTS = [Prompt(PROMPT, 3), Prompt([7], 5), Prompt([2, 7, 1, 8, 2, 8, 1, 8], 11), Prompt([7], 6)]


def rows_of(blocks) -> list[list[int]]:
    return np.concatenate(list(blocks), axis=1).tolist()


@pytest.fixture(scope="module")
def alone(llama3):
    """What each prompt gives by itself."""
    generator, model, _ = llama3
    return [tokens_of(generator, model, prompt, 20, DRAWN) for prompt in PROMPTS]


def test_a_row_knows_nothing_of_the_others(llama3, alone):
    """Neither of what they are, nor of their order, nor of how many there are."""
    generator, model, _ = llama3
    for order in ([0, 1, 2, 3], [3, 2, 0, 1], [2, 2, 1, 0]):
        found = rows_of(generator.blocks(model, [PROMPTS[i] for i in order], 20, DRAWN, cycle([BLOCK])))
        assert found == [alone[i] for i in order]
    assert alone[1] != alone[3], "the seed alone is another"


def test_rows_end_each_for_itself(llama3, alone):
    _, model, _ = llama3
    end, stopped, asked = alone[2][6], 3, []
    generator = Generator(one_device(weights_ready=True), VOCABULARY, [end])

    def is_over(row: int) -> bool:
        asked.append(row)
        return row == stopped

    blocks = list(generator.blocks(model, PROMPTS, 20, DRAWN, cycle([4]), is_over))
    for row, (found, expected) in enumerate(zip(rows_of(blocks), alone, strict=True)):
        lasts = expected.index(end) if end in expected else 20
        assert found[:lasts] == expected[:lasts] if row != stopped else found[0] == expected[0]
    assert asked[:4] == [0, 1, 2, 3]
    (only,) = generator.blocks(model, PROMPTS, 20, DRAWN, cycle([4]), lambda row: True)
    assert only.shape == (4, 1)


@pytest.mark.parametrize(("mesh", "apart"), [((2, 2, 1), True), ((1, 2, 2), False)])
def test_a_batch_that_no_axis_splits_gives_the_same_tokens(alone, mesh, apart):
    """As a run samples on its mesh: heads are split, rows are not; layers are gathered once, or in their turn."""
    layout = layout_of(*mesh).inside_replica()
    layout = replace(layout, compute={name: axes for name, axes in layout.compute.items() if name != BATCH})
    model, run = placed(made("llama3"), layout, layout.params), Execution(layout=layout)
    if apart:
        model, run = jax.jit(lambda model: run.gathered(model).unstacked())(model), replace(run, weights_ready=True)
    generator = Generator(run, VOCABULARY, [NO_END])
    assert rows_of(generator.blocks(model, PROMPTS, 20, DRAWN, cycle([BLOCK]))) == alone


@pytest.mark.parametrize("axis", ["model", "context"])
def test_a_batch_that_is_split_gives_the_same_tokens_and_caches_stay_where_they_are(alone, axis):
    """Rows over `data`, heads or slots over another axis; caches are written in place, and never brought together."""
    layout = layout_of(data=2, **{axis: 2}).inside_replica()
    model, run = placed(made("llama3"), layout, layout.params), executed(layout, kernels=kernels_of(layout))
    model = jax.jit(lambda model: run.gathered(model).unstacked())(model)
    generator = Generator(replace(run, weights_ready=True), VOCABULARY, [NO_END])
    assert rows_of(generator.blocks(model, PROMPTS, 20, DRAWN, cycle([BLOCK]))) == alone
    ids, rows = generate.filled(PROMPTS)
    _, caches = generator.read(model, ids, rows, slots=128, sampling=DRAWN)
    for leaf in jax.tree.leaves(caches):
        assert leaf.size == 4 * 2 * 128 * 4
        assert leaf.sharding.spec[0] == ("data", axis)
    last = Last(ids[:, -1], np.zeros(4, bool), ids.shape[1])
    compiled = generator.draw.lower(model, rows, last, caches, BLOCK, sampling=DRAWN).compile()
    part = 4 * 2 * 128 * 4 // 4  # of one cache, on a device
    for_a_token = instructions_of_the_loop(compiled.as_text())
    moved = [opcode for opcode, size in for_a_token if size >= part and opcode not in PASSED_ON]
    assert set(moved) == {"dynamic-update-slice"}
    sent = [size for opcode, size in for_a_token if opcode.startswith(("all-", "collective", "reduce-scatter"))]
    assert max(sent) <= 2 * VOCABULARY, "logits of a device's two rows, or its sums of attention, and no weight"
    held = sum(leaf.nbytes for leaf in jax.tree.leaves(caches)) // 4
    assert compiled.memory_analysis().alias_size_in_bytes >= held
    written = jax.tree.leaves(compiled.output_shardings[1])
    assert all(a.is_equivalent_to(b.sharding, 3) for a, b in zip(written, jax.tree.leaves(caches), strict=True))


def instructions_of_the_loop(program: str) -> list[tuple[str, int]]:
    """Operation and size of what a compiled program does for a token; fusions are looked into."""
    sites = (site for site in walk(parse(program), {}) if site.context.loops)
    return [(site.instruction.opcode, prod(shape.sizes)) for site in sites for shape in site.instruction.shapes]


@pytest.mark.parametrize(("kv_heads", "rows"), [(1, 1), (2, 3)])
def test_a_token_copies_neither_caches_nor_weights(kv_heads, rows):
    """The compiled program writes one slot of each cache, in place, and moves nothing of a weight's size.

    The sizes are such that no activation has that of a cache or of a weight.
    """
    config = replace(CONFIGS["llama2"], kv_heads=kv_heads, head_size=6)
    model, generator = small_model(config, VOCABULARY).unstacked(), generator_and_model("llama2")[0]
    ids, batch = generate.filled([Prompt(PROMPT)] * rows)
    _, caches = jax.eval_shape(lambda: generator.read(model, ids, batch, slots=320, sampling=GREEDY))
    last = Last(ids[:, -1], np.zeros(rows, bool), 64)
    compiled = generator.draw.lower(model, batch, last, caches, BLOCK, sampling=GREEDY).compile()
    leaves = jax.tree.leaves(caches)
    assert {leaf.size for leaf in leaves} == {rows * kv_heads * 320 * 6}
    for_a_token = instructions_of_the_loop(compiled.as_text())
    assert [opcode for opcode, size in for_a_token if size == leaves[0].size and opcode not in PASSED_ON] == [
        "dynamic-update-slice"
    ] * len(leaves)
    weights = {leaf.size for leaf in jax.tree.leaves(model) if leaf.ndim > 1}
    assert {opcode for opcode, size in for_a_token if size in weights} <= PASSED_ON
    assert compiled.memory_analysis().alias_size_in_bytes >= sum(leaf.size * leaf.dtype.itemsize for leaf in leaves)
