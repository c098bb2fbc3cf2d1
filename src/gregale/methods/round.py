"""The outer round of one fragment: the replicas' send, the outer step, and the application of its result."""

from dataclasses import dataclass, replace

import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
from haliax import NamedArray

from gregale.axes.layout import Layout, Tree, is_named, vmap_over
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
        after, measured = self._sent(fragment.take(outer), fragment.take(own), seen, fragment)
        return fragment.put(outer, after), measured

    def _sent(
        self, before: OuterState, own: Tree, seen: NamedArray, fragment: Fragment
    ) -> tuple[OuterState, PseudoGradient]:
        """Compute `send` with the fragment's parts."""
        outer_store = self.outer_store
        weights = seen[FRAGMENT, fragment.index] * self.participation_mask(fragment)
        (weight,) = outer_store.reducer.totals(weights)
        sent = outer_store.send(before, own, weights, weight)
        after = jax.tree.map(lambda new, old: jnp.where(weight > 0, new, old), sent.outer, before)
        norm = jnp.where(weight > 0, outer_store.reducer.norm(sent.gradient), 0)
        agreement = products(own, sent.parameters, sent.gradient, self.outer_layout, self.axis)
        return outer_store.placed(after), PseudoGradient(norm, weights.array, *agreement)

    def send_all(
        self, schedule: Schedule, outer: OuterState, own: Tree, seen: NamedArray, step: jax.Array
    ) -> OuterState:
        """Return the outer state after a SEND of all fragments after `step` steps; one on its way arrives first.

        `step` is an int32 scalar of the device.
        """
        at = jnp.asarray([schedule.offset(fragment) for fragment in range(schedule.fragments)])
        since = (step - at) % schedule.period  # [fragment]: steps since its last SEND
        on_its_way = (since > 0) & (since < jnp.minimum(schedule.delay, step))
        alike = fragments_alike(schedule)

        def sent(outer: OuterState, each: tuple) -> tuple[OuterState, None]:
            index, rows = each
            fragment = Fragment(index, step, rows, whole=schedule.fragments == 1)
            part, mine = fragment.take(outer), fragment.take(own)
            if schedule.delay > 1:
                before = replace(fragment, sent=step - since[index])
                arrive, stay = lambda: self._arrived(mine, part, before), lambda: (mine, part)
                mine, part = jax.lax.cond(on_its_way[index], arrive, stay)
            return fragment.put(outer, self._sent(part, mine, seen, fragment)[0]), None

        for kind, rows in enumerate(alike.rows):
            numbers = np.flatnonzero(alike.kind == kind)
            own_rows = jax.tree.map(lambda of_each, numbers=numbers: of_each[numbers], rows)
            outer, _ = jax.lax.scan(sent, outer, (numbers.astype(np.int32), own_rows))
        return outer

    def apply(self, parameters: Tree, outer: OuterState, fragment: Fragment) -> tuple[Tree, OuterState]:
        """Return each replica's parameters mixed with theta's fragment, and the changes of its outer state."""
        mixed, changed = self._mixed(fragment.take(parameters), fragment.take(outer), fragment)
        return self.layout.constrain(fragment.put(parameters, mixed), self.layout.params), changed

    def _mixed(self, own: Tree, outer: OuterState, fragment: Fragment) -> tuple[Tree, OuterState]:
        """Compute `apply` with the fragment's parts."""
        layout = self.layout
        arrived, changed = self.outer_store.arrive(outer)
        arrived = layout.constrain(arrived, layout.params)
        keep = self.participation_mask(fragment) * (self.mixing - 1) + 1  # alpha, or 1 for a replica that is left out

        def mixed(own: Tree, keep: NamedArray) -> Tree:
            return mixed_with(own, arrived, keep.array)

        return vmap_over(mixed, self.axis, layout)(own, keep), changed

    def _arrived(self, own: Tree, outer: OuterState, fragment: Fragment) -> tuple[Tree, OuterState]:
        """Return the fragment's parts after its APPLY."""
        mixed, changed = self._mixed(own, outer, fragment)
        return mixed, jax.tree.map(lambda old, new: old if new is None else new, outer, changed, is_leaf=is_named)

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
