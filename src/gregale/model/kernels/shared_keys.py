"""Keys that a device's queries see, of sequences that several devices share; for use inside of `jax.shard_map`."""

import jax
import jax.numpy as jnp
import numpy as np

from gregale.axes.layout import CONTEXT
from gregale.axes.parameters import chunk_order


def whole(x: jax.Array, devices: int) -> jax.Array:
    """Turn this device's positions [batch, position, ...] into all, in the order of the sequence."""
    chunks = x.reshape(x.shape[0], 2, -1, *x.shape[2:])
    held = jax.lax.all_gather(chunks, CONTEXT, axis=1, tiled=True)
    inverse = np.argsort(chunk_order(devices))
    return held.at[:, inverse].get(unique_indices=True).reshape(x.shape[0], -1, *x.shape[2:])


def halo(x: jax.Array, devices: int, reach: int) -> jax.Array:
    """Turn this device's positions [batch, position, ...] into each of its chunks after the `reach` chunks before it.

    A device's first chunk follows that of the device before it, and its second chunk that of the device after it, or on
    the last device its own first chunk. So chunks move by one device at a time. Those before the sequence are zeros.
    """
    up = [(device, device + 1) for device in range(devices - 1)]
    down = [(after, before) for before, after in up]
    is_last = jax.lax.axis_index(CONTEXT) == devices - 1
    first, second = jnp.split(x, 2, axis=1)
    firsts, seconds = [first], [second]
    for _ in range(reach):
        sent = (jax.lax.ppermute(each, CONTEXT, pairs) for each, pairs in ((first, up), (second, down)))
        before, above = sent
        first, second = before, jnp.where(is_last, first, above)
        firsts.insert(0, first)
        seconds.insert(0, second)
    return jnp.concatenate([*firsts, *seconds], axis=1)


def halo_of(whole: jax.Array, devices: int, reach: int) -> jax.Array:
    """Return the part of whole sequences [batch, position] that `halo` has, -1 before the sequence.

    For segments, which are small and the same in all layers.
    """
    device, before = jax.lax.axis_index(CONTEXT), jnp.arange(-reach, 1)
    chunks = jnp.concatenate([device + before, 2 * devices - 1 - device + before])
    beyond = jnp.where(chunks < 0, 2 * devices, chunks)
    held = whole.reshape(whole.shape[0], 2 * devices, -1)
    return held.at[:, beyond].get(mode="fill", fill_value=-1).reshape(whole.shape[0], -1)
