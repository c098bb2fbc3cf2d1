"""Losses of fleets of equal and of unequal islands: the real protocol in simulated time, real steps of a small model.

    python benchmarks/unequal_losses.py [SEEDS] [STEPS]

Four islands train a small transformer on the bytes of docs/ by Streaming DiLoCo. The simulator of the tests
(tests/islands/simulator) decides who contributes when; the arithmetic is that of `methods.island` on vectors. Compared
at equal wall time (STEPS of the fastest island) and at equal tokens: four equal islands, and islands of which one is 5
and one 20 times slower, by what a round without an island's message does with its steps:

- keep: its parameters stay, and its next message has what the others did in the meantime, with the opposite sign
- rebase: its parameters move with theta, so that its next message has its own steps alone
- age: as rebase; its weight is divided by the number of rounds of the fragment since it last contributed
"""

import statistics
import sys
from collections import defaultdict
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.flatten_util import ravel_pytree

from gregale.islands.protocol import messages as m
from gregale.islands.protocol.member import Member
from gregale.islands.protocol.messages import LAN
from gregale.islands.trainer_command import ApplyRound, LoadOuterState
from gregale.methods.schedule import Schedule
from tests.islands.simulator.speeds import Observed
from tests.islands.simulator.trainer import DOWN_SECONDS, Trainer

WIDTH, HEADS, LENGTH, ROWS = 64, 4, 64, 8
STEP_SECONDS, FRAGMENTS, ALPHA = 0.3, 2, 0.5
INNER, OUTER = optax.adamw(3e-3, weight_decay=0.1), optax.sgd(0.7, momentum=0.9, nesterov=True)
TEXT = np.frombuffer(b"".join(path.read_bytes() for path in sorted(Path("docs").glob("*.md"))), np.uint8)
HELD_OUT = len(TEXT) // 10


def initial(key):
    def normal(*shape):
        nonlocal key
        key, own = jax.random.split(key)
        return jax.random.normal(own, shape) / np.sqrt(shape[0])

    def layer():
        return {"qkv": normal(WIDTH, 3 * WIDTH), "out": normal(WIDTH, WIDTH),
                "up": normal(WIDTH, 4 * WIDTH), "down": normal(4 * WIDTH, WIDTH)}  # fmt: skip

    ends = {"embed": normal(256, WIDTH), "place": normal(LENGTH, WIDTH), "head": normal(WIDTH, 256)}
    return [{**layer(), **ends}, layer()]  # one for each fragment


START, UNRAVEL = ravel_pytree(initial(jax.random.PRNGKey(0)))
PARTS = np.cumsum([0] + [ravel_pytree(each)[0].size for each in UNRAVEL(START)])


def norm(x):
    return x * jax.lax.rsqrt(jnp.mean(x**2, -1, keepdims=True) + 1e-6)


@jax.jit
def loss_of(vector, batch):
    layers = UNRAVEL(vector)
    first, x = layers[0], 0
    x = first["embed"][batch[:, :-1]] + first["place"]
    mask = jnp.tril(jnp.ones((LENGTH, LENGTH), bool))
    for each in layers:
        q, k, v = (t.reshape(-1, LENGTH, HEADS, WIDTH // HEADS) for t in jnp.split(norm(x) @ each["qkv"], 3, -1))
        scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) / np.sqrt(WIDTH // HEADS)
        weights = jax.nn.softmax(jnp.where(mask, scores, -1e9))
        x += jnp.einsum("bhqk,bkhd->bqhd", weights, v).reshape(x.shape) @ each["out"]
        x += jax.nn.relu(norm(x) @ each["up"]) @ each["down"]
    return optax.softmax_cross_entropy_with_integer_labels(norm(x) @ first["head"], batch[:, 1:]).mean()


@partial(jax.jit, donate_argnums=(0, 1))
def step(vector, state, batch):
    updates, state = INNER.update(jax.grad(loss_of)(vector, batch), state, vector)
    return optax.apply_updates(vector, updates), state


def batch_of(rng, first, last, rows=ROWS):
    return np.stack([TEXT[at : at + LENGTH + 1] for at in rng.integers(first, last - LENGTH - 1, rows)]).astype(
        np.int32
    )


class Learner(Trainer):
    """A trainer of the simulator that has parameters, and messages of them."""

    def __init__(self, node, *arguments):
        super().__init__(node, *arguments)
        self.theta = np.asarray(START)  # what each fragment of the parameters is based on
        self.parameters, self.state = jnp.asarray(START), INNER.init(START)
        self.rng = np.random.default_rng([node.world.seed, int(node.name[1:])])
        self.ages, self.messages = [0] * FRAGMENTS, {}

    def _stepped(self):
        self.parameters, self.state = step(self.parameters, self.state, batch_of(self.rng, HELD_OUT, len(TEXT)))
        super()._stepped()

    def _depart(self, number):
        node, fragment = self._node, self._pace.schedule.round_fragment(number)
        count = self.side.message_sent(number, node.clock)
        self._departed = self._tokens[fragment]
        part = slice(*PARTS[fragment : fragment + 2])
        message = self.theta[part] - np.asarray(self.parameters)[part]
        self.messages[f"{node.identity} {count}"] = message
        weight = self._departed / (1 + self.ages[fragment]) if node.world.rule == "age" else self._departed
        size, used = float(np.sqrt(np.mean(message**2))), self._leases.used_after(self._batches)
        shot = m.MessageReady(number, weight, used, False, size)
        node.world.later(node.world.rng.random() * DOWN_SECONDS, lambda: self._down(count, shot, fragment))

    def _follow(self, order):
        super()._follow(order)
        new = self._node.world.outer[self._node.member.outer.digest][0]
        if isinstance(order, LoadOuterState):
            self.theta, self.parameters = new, jnp.asarray(new)
        elif isinstance(order, ApplyRound):
            fragment = self._pace.schedule.round_fragment(order.round)
            part = slice(*PARTS[fragment : fragment + 2])
            own, before = np.array(self.parameters), self.theta
            self.theta = np.concatenate([before[: part.start], new[part], before[part.stop :]])
            self.ages[fragment] = 0 if order.weight else self.ages[fragment] + 1
            if order.weight:
                own[part] = ALPHA * own[part] + (1 - ALPHA) * new[part]
            elif self._node.world.rule != "keep":
                own[part] += new[part] - before[part]
            self.parameters = jnp.asarray(own)


class Learning(Observed):
    """A world whose outer states are vectors, by their digest."""

    def __init__(self, steps, seed, rule):
        super().__init__(steps, LAN, Schedule(12, FRAGMENTS, 1, FRAGMENTS), Member)
        self.trainer_class, self.seed, self.rule = Learner, seed, rule
        empty = OUTER.init(np.asarray(START))
        self.outer = defaultdict(lambda: (np.asarray(START), empty))

    def committed(self, node, action, digest):
        if action.outer.digest not in self.outer:
            spec, there, parent = self.reduces[action.key]
            fragment = self.pace.schedule.round_fragment(spec.round)
            part = slice(*PARTS[fragment : fragment + 2])
            weights = {peer.name: weight for peer, weight in zip(spec.members, spec.weights, strict=True) if weight}
            theta, state = self.outer[parent]
            gradient = np.zeros_like(theta)
            for name, weight in weights.items():
                message = self.nodes[name].trainer.messages[there[name]]
                gradient[part] += weight / sum(weights.values()) * message
            updates, new = OUTER.update(gradient, state, theta)
            inside = np.zeros(len(theta), bool)
            inside[part] = True
            after = np.where(inside, theta + updates, theta)
            self.outer[action.outer.digest] = after, jax.tree.map(lambda a, b: np.where(inside, a, b), new, state)
        super().committed(node, action, digest)

    def loss(self):
        rng = np.random.default_rng(1)
        theta = self.outer[max(self.states.values(), key=lambda each: each.round).digest][0]
        return float(np.mean([loss_of(theta, batch_of(rng, 0, HELD_OUT, 32)) for _ in range(40)]))


def trained(slower, seed, rule, steps):
    """Return the loss after `steps` of the fastest island, and the share of each island's steps in rounds."""
    world = Learning([STEP_SECONDS * each for each in slower], seed, rule)
    world.run_until(steps * STEP_SECONDS + 1)
    return world.loss()


def main(seeds=3, steps=300):
    equal, unequal, two = (1, 1, 1, 1), (1, 1, 5, 20), (1, 1)
    longer = round(steps * sum(1 / each for each in equal) / sum(1 / each for each in unequal))
    cases = [
        ("four equal", equal, "rebase", steps),
        ("two equal", two, "rebase", steps),
        ("two equal", two, "rebase", 2 * steps),
    ]
    cases += [
        (f"1, 1, 5, 20: {rule}", unequal, rule, each) for each in (steps, longer) for rule in ("keep", "rebase", "age")
    ]
    for name, slower, rule, count in cases:
        losses = [trained(slower, seed, rule, count) for seed in range(seeds)]
        print(
            f"{name:22} {count:5} steps  {statistics.mean(losses):.4f}  {' '.join(f'{each:.4f}' for each in losses)}",
            flush=True,
        )


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
