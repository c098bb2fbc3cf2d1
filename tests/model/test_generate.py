"""Generation: tokens beside whole forward passes of the plain model, whatever the blocks and the mesh; no copies."""

from __future__ import annotations

from dataclasses import replace
from itertools import chain, cycle
from math import prod

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from gregale.audit.hlo import parse
from gregale.audit.walk import walk
from gregale.axes.layout import BATCH
from gregale.model import generate
from gregale.model.execution import Execution
from gregale.model.generate import BLOCK, Generator, Sampling, draw
from tests.mesh.support import layout_of, one_device, placed, small_model
from tests.model import oracle
from tests.model.test_llama import CONFIGS, VOCABULARY, made

GREEDY, DRAWN, CUT = Sampling(0), Sampling(1.0, seed=3), Sampling(1.3, top_k=9, top_p=0.9, seed=5)
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


def generator_and_model(name: str, end: int = NO_END):
    """On one device, with the blocks of the model apart."""
    run = one_device(weights_ready=True)
    return Generator(run, VOCABULARY, end), made(name).unstacked()


@pytest.fixture(scope="module")
def llama3():
    generator, model = generator_and_model("llama3")
    return generator, model, list(generator.tokens(model, PROMPT, 40, DRAWN))


@pytest.mark.parametrize(("name", "sampling"), [*((name, CUT) for name in CONFIGS), ("mistral", GREEDY)])
def test_tokens_are_those_of_full_passes(name, sampling):
    generator, model = generator_and_model(name)
    assert list(generator.tokens(model, PROMPT, 12, sampling)) == by_full_passes(made(name), PROMPT, 12, sampling)


def test_blocks_of_any_size_give_the_same_tokens(llama3):
    generator, model, expected = llama3
    assert len(expected) == 40 > BLOCK
    for sizes in ([1], [3, 1, 7], [BLOCK]):
        blocks = list(generator.blocks(model, PROMPT, 40, DRAWN, cycle(sizes)))
        assert [len(block) for block in blocks[:2]] == [1, sizes[0]]
        assert list(chain(*blocks)) == expected
    assert list(generator.tokens(model, PROMPT, 1, DRAWN)) == expected[:1]


@pytest.mark.parametrize("place", [0, 1, 7, 39])
def test_it_ends_before_the_end(llama3, place):
    _, model, expected = llama3
    end = expected[place]
    generator = Generator(one_device(weights_ready=True), VOCABULARY, end)
    assert list(generator.tokens(model, PROMPT, 40, DRAWN)) == expected[: expected.index(end)]


def test_caches_that_grow_change_nothing(monkeypatch):
    """From 64 slots to 128, to 192: a prompt that leaves one slot, tokens past each border."""
    monkeypatch.setattr(generate, "FIRST_SLOTS", 64)
    generator, model = generator_and_model("mistral")
    prompt = [(7 * place) % VOCABULARY for place in range(63)]
    tokens = list(generator.tokens(model, prompt, 80, GREEDY))
    assert len(prompt + tokens) == 143
    monkeypatch.undo()
    assert generate.slots_for(len(prompt), 143) == 192
    assert list(generator.tokens(model, prompt, 80, GREEDY)) == tokens


def test_attention_goes_over_twice_the_tokens_at_most():
    assert [generate.slots_for(tokens, 10**6) for tokens in (1, 511, 512, 1500)] == [512, 512, 1024, 2048]
    assert [generate.slots_for(tokens, most) for tokens, most in ((9, 20), (9, 65), (600, 700))] == [64, 128, 704]


@pytest.mark.parametrize("mesh", [(1, 2, 2), (2, 2, 1)], ids=str)
@pytest.mark.parametrize("apart", [True, False], ids=["gathered once", "gathered by layer"])
def test_on_a_mesh_tokens_are_the_same(llama3, mesh, apart):
    layout = layout_of(*mesh).inside_replica()
    layout = replace(layout, compute={name: axes for name, axes in layout.compute.items() if name != BATCH})
    model, run = placed(made("llama3"), layout, layout.params), Execution(layout=layout)
    if apart:
        model, run = jax.jit(lambda model: run.gathered(model).unstacked())(model), replace(run, weights_ready=True)
    assert list(Generator(run, VOCABULARY, NO_END).tokens(model, PROMPT, 40, DRAWN)) == llama3[2]


def instructions_of_the_loop(program: str) -> list[tuple[str, int]]:
    """Operation and size of what a compiled program does for a token; fusions are looked into."""
    sites = (site for site in walk(parse(program), {}) if site.context.loops)
    return [(site.instruction.opcode, prod(shape.sizes)) for site in sites for shape in site.instruction.shapes]


@pytest.mark.parametrize("kv_heads", [4, 2, 1])
def test_a_token_copies_neither_caches_nor_weights(kv_heads):
    """The compiled program writes one slot of each cache, in place, and moves nothing of a weight's size.

    The sizes are such that no activation has that of a cache or of a weight.
    """
    config = replace(CONFIGS["llama2"], kv_heads=kv_heads, head_size=6)
    model, generator = small_model(config, VOCABULARY).unstacked(), generator_and_model("llama2")[0]
    ids = np.zeros((1, 64), np.int32)
    _, caches = jax.eval_shape(lambda: generator.read(model, ids, 4, 0, slots=320, sampling=GREEDY))
    compiled = generator.draw.lower(model, 1, caches, 4, BLOCK, 0, sampling=GREEDY).compile()
    leaves = jax.tree.leaves(caches)
    assert {leaf.size for leaf in leaves} == {kv_heads * 320 * 6}
    for_a_token = instructions_of_the_loop(compiled.as_text())
    assert [opcode for opcode, size in for_a_token if size == leaves[0].size and opcode not in PASSED_ON] == [
        "dynamic-update-slice"
    ] * len(leaves)
    weights = {leaf.size for leaf in jax.tree.leaves(model) if leaf.ndim > 1}
    assert {opcode for opcode, size in for_a_token if size in weights} <= PASSED_ON
    assert compiled.memory_analysis().alias_size_in_bytes >= sum(leaf.size * leaf.dtype.itemsize for leaf in leaves)
