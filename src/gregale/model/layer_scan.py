"""The scan over a model's layers, which saves values for the backward pass by a policy."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import haliax as hax
import jax
from haliax import Axis
from haliax.jax_utils import tree_checkpoint_name
from haliax.nn import ScanCheckpointPolicy

from gregale.axes.layout import LAYERS
from gregale.model.layer_kinds import LayerSegment, cut, joined, labels_of, layer_segments
from gregale.model.remat import CARRY, WEIGHTS


@dataclass(frozen=True)
class LayerScan:
    """The settings of a scan over layers: see the fields of the same names of `gregale.model.execution.Execution`."""

    policy: ScanCheckpointPolicy
    unroll: int
    first_layers: int
    recomputes_late: bool

    def __call__(
        self, block: Callable, kinds: tuple[int, ...], carry: Any, weights: Any, *more: Any
    ) -> tuple[Any, Any]:
        """Do `Execution.scan_layers`."""
        if isinstance(weights, tuple):
            outs = []
            for layer in zip(weights, kinds, *more, strict=True):
                carry, out = block(carry, *layer)
                outs.append(out)
            return carry, tuple(outs)
        labels = labels_of(weights, kinds)
        parts, outs, mixed = layer_segments(labels, self.first_layers), [], len(set(labels)) > 1
        # Equal layers after first ones are slower if they are computed again late: 0.8 percent for an 8B model on v5e.
        late = self.recomputes_late and (mixed or not self.first_layers)
        trees = zip(*(cut(tree, parts) for tree in (weights, *more)), strict=True)
        for number, (part, of_trees) in enumerate(zip(parts, trees, strict=True)):
            layers = [list(layer) for layer in zip(*of_trees, strict=True)]
            if number and self.first_layers:
                # The weights are awaited after the first layers, and their gradients are complete before theirs.
                carry, layers = jax.lax.optimization_barrier((carry, layers))
            elif mixed:
                carry, layers = gradients_together((carry, layers))
            carry, out = self._segment(block, part, carry, layers, late)
            outs.append(out)
        return carry, joined(outs, labels, parts)

    def _segment(self, block: Callable, part: LayerSegment, carry, layers, late: bool):
        """Scan one segment; each layer of its pattern saves by the policy the same values as alone."""
        policy, Layers = self.policy, Axis(LAYERS, part.repeats)
        if late or (self.first_layers and part.repeats == 1):
            policy = replace(policy, prevent_cse=True)
        unroll = min(max(1, self.unroll // len(part.pattern)), part.repeats)
        if len(part.pattern) == 1:
            ((_, kind),) = part.pattern

            def alone(carry, weights, *more):
                return block(carry, weights, kind, *more)

            carry, out = hax.scan(alone, Layers, remat=policy, unroll=unroll)(carry, *layers[0])
            return carry, (out,)

        def one(kind: int) -> Callable:
            def layer(carry, weights, *more):
                return block(tree_checkpoint_name(carry, CARRY), weights, kind, *more)

            return policy.checkpoint(CARRY, WEIGHTS, layer)

        def pattern(carry, *layers):
            outs = []
            for (_, kind), (weights, *more) in zip(part.pattern, layers, strict=True):
                carry, out = one(kind)(*gradients_together((carry, weights)), *more)
                outs.append(out)
            return carry, tuple(outs)

        return hax.scan(pattern, Layers, unroll=unroll)(carry, *layers)


@jax.custom_vjp
def gradients_together(values):
    """Return the values, whose gradients are used only when all are complete.

    Between layers, the compiler then does not put off the products for weights, which need the layer's activations.
    """
    return values


gradients_together.defvjp(
    lambda values: (values, None), lambda _, gradients: (jax.lax.optimization_barrier(gradients),)
)
