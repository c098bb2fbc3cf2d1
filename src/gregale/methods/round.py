"""The outer round of one fragment: the replicas' send, the outer step, and the application of its result."""

from dataclasses import dataclass
from functools import partial

import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
from haliax import NamedArray

from gregale.axes.layout import Layout, Tree, vmap_over
from gregale.methods.agreement import PseudoGradient, products
from gregale.methods.fragments import FRAGMENT, Fragment, fragments_alike
from gregale.methods.outer import ExactOuter, OuterState, QuantisedOuter
from gregale.methods.schedule import Schedule


@dataclass(frozen=True)
class Round:
    """SEND and APPLY of a fragment (docs/diloco.md, "Algorithm").

    SEND:  g = theta_f - sum_k w_k theta_k,f / sum_k w_k;  theta_f += outer(g)     w_k: tokens of replica k
    APPLY: theta_k,f = alpha theta_k,f + (1 - alpha) theta_f
    """

    layout: Layout  # the whole mesh
    outer_layout: Layout  # of the outer parameters
    outer_store: ExactOuter | QuantisedOuter  # stores the outer parameters, sends and gathers them
    mixing: float  # alpha
    dropout: float  # probability that a replica is left out
    seed: int  # of the dropout

    @property
    def axis(self) -> str:
        """Return the axis whose indices are joined."""
        return self.outer_store.reducer.axis

    def send(
        self, outer: OuterState, own: Tree, seen: NamedArray, fragment: Fragment
    ) -> tuple[OuterState, PseudoGradient]:
        """Return the outer state after the fragment's outer step, and the measurements of its pseudo-gradient.

        - `outer`: the whole outer state
        - `own`: theta_k of the whole model, [replica, ...]
        - `seen`: [fragment, replica], see `DilocoState`; without a token since the last send nothing changes
        """
        outer_store = self.outer_store
        weights = seen[FRAGMENT, fragment.index] * self.participation_mask(fragment)
        (weight,) = outer_store.reducer.totals(weights)
        own, before = fragment.take(own), fragment.take(outer)
        sent = outer_store.send(before, own, weights, weight)
        after = jax.tree.map(lambda new, old: jnp.where(weight > 0, new, old), sent.outer, before)
        after = outer_store.placed(after)
        norm = jnp.where(weight > 0, outer_store.reducer.norm(sent.gradient), 0)
        agreement = products(own, sent.parameters, sent.gradient, self.outer_layout, self.axis)
        return fragment.put(outer, after), PseudoGradient(norm, weights.array, *agreement)

    def send_due(
        self, schedule: Schedule, outer: OuterState, own: Tree, seen: NamedArray, step: jax.Array
    ) -> OuterState:
        """Return the outer state after the SEND that is due after `step` steps; unchanged if none is.

        `step` is an int32 scalar of the device, so all kinds of fragments are compiled and one is chosen.
        """
        at = jnp.asarray([schedule.offset(fragment) for fragment in range(schedule.fragments)])
        due = (step > 0) & (step % schedule.period == at)  # [fragment], at most one
        index = jnp.argmax(due).astype(jnp.int32)
        alike = fragments_alike(schedule)

        def sent(rows: dict[str, np.ndarray] | None) -> OuterState:
            own_rows = jax.tree.map(lambda of_each: jnp.asarray(of_each)[index], rows)
            fragment = Fragment(index, step, own_rows, whole=schedule.fragments == 1)
            return self.send(outer, own, seen, fragment)[0]

        kind = jnp.where(due.any(), 1 + jnp.asarray(alike.kind)[index], 0)
        branches = [lambda: outer, *(partial(sent, rows) for rows in alike.rows)]
        return jax.lax.switch(kind, branches)

    def apply(self, parameters: Tree, outer: OuterState, fragment: Fragment) -> tuple[Tree, OuterState]:
        """Return each replica's parameters mixed with theta's fragment, and the changes of its outer state."""
        layout = self.layout
        arrived, changed = self.outer_store.arrive(fragment.take(outer))
        arrived = layout.constrain(arrived, layout.params)
        keep = self.participation_mask(fragment) * (self.mixing - 1) + 1  # alpha, or 1 for a replica that is left out

        def mixed(own: Tree, keep: NamedArray) -> Tree:
            return mixed_with(own, arrived, keep.array)

        mixed_all = vmap_over(mixed, self.axis, layout)(fragment.take(parameters), keep)
        return layout.constrain(fragment.put(parameters, mixed_all), layout.params), changed

    def participation_mask(self, fragment: Fragment) -> NamedArray:
        """Return 1 for each replica in this synchronisation, 0 for one that is left out, [replica] float32."""
        SyncAxis = self.layout.axis(self.axis)
        if self.dropout == 0:
            return hax.ones(SyncAxis)
        key = jax.random.fold_in(jax.random.key(self.seed), fragment.sent)
        return hax.random.bernoulli(key, SyncAxis, 1 - self.dropout).astype(jnp.float32)


def mixed_with(own: Tree, arrived: Tree, keep: jax.Array) -> Tree:
    """Return keep own + (1 - keep) arrived: the next parameters of a replica or an island.

    With keep 0 it is `arrived`, even if `own` is not finite.
    """
    return jax.tree.map(lambda own, new: jnp.where(keep == 0, new, keep * own + (1 - keep) * new), own, arrived)


def forget(seen: NamedArray, fragment: Fragment | None) -> NamedArray:
    """Return `seen` with zero tokens for a fragment that was sent."""
    if fragment is None:
        return seen
    return NamedArray(seen.array.at[fragment.index].set(0), seen.axis_names)
