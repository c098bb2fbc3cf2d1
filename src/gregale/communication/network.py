"""The reducer over a network: the average of islands' messages, beside `ExactReducer` and `QuantisedReducer`.

What an axis of the mesh is to those, a `Link` between processes is to this one. Each member's values arrive as the
uint8 rows that its device encoded (`communication.rows`); the same codecs and feedback make the same two legs of them.

    reducer = NetworkReducer(config, rows)          # rows: how each shard is cut, by its key
    reduced = reducer.reduce(messages, weights, link, error)
    reduced.gradient[key]                           # float32 [size], the same bits on every member
    reduced.error                                   # to be kept once the round is committed, and given to the next
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property, lru_cache
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from gregale.codecs.codec import Codec
from gregale.codecs.config import ReduceConfig
from gregale.codecs.feedback import Stored, load, stored_block
from gregale.communication.legs import encoded, remember
from gregale.communication.rows import Rows

BUCKET_BYTES = 4 << 20
WAVES_AHEAD = 2  # first legs under way: the one that is decoded, and the one behind it
TIMEOUT_SECONDS = 60.0


class Handle(Protocol):
    """Something under way."""

    def wait(self, timeout_seconds: float) -> None:
        """Returns when it is done; raises whatever the link raises if it failed or took longer."""
        ...


class Link(Protocol):
    """Point-to-point messages between the members of a group.

    `send` and `recv` return at once. An array is contiguous, uint8 [bytes], and belongs to the link until its handle
    was waited for. A message goes to the `recv` of the same peer and tag; tags are below 2^31, each used once a reduce.
    """

    @property
    def size(self) -> int:
        """R, members of the group."""
        ...

    @property
    def rank(self) -> int:
        """This member's place among them."""
        ...

    def send(self, peer: int, data: np.ndarray, tag: int) -> Handle: ...

    def recv(self, peer: int, data: np.ndarray, tag: int) -> Handle: ...


class OwnError(NamedTuple):
    """What the second leg has not sent yet of the rows that a member owns; it lives in host memory."""

    steps: int  # reductions of this group so far
    rows: dict[tuple[str, int], Stored]  # by key and row: NumPy arrays


class Reduced(NamedTuple):
    """An average over the members."""

    gradient: dict[str, np.ndarray]  # by key, float32 [size]
    error: OwnError  # of the second leg, if this average is taken over


class NetworkReducer:
    """Averages shards over the members of a group; whoever holds the same link's other ends does the same.

        first leg:  member k sends its message m_k of a bucket to the bucket's owner
                    g = sum_k w_k decode(m_k) / sum_k w_k               in the order of ranks, float32
        second leg: the owner sends encode2(g + e) to all, and everybody, the owner too, decodes the same bytes

    Buckets are consecutive rows, of about `bucket_bytes` of message; bucket i belongs to member i mod R. They are
    pipelined: the first legs of the next buckets and the second leg of the last are under way while one is decoded.
    Bucket and owner of a row depend on `rows` and R alone, so a member's second-leg error fits as long as R does.

    - `config`: the codecs of both legs, and the feedback
    - `rows`: how each shard is cut, by its key; the same on every member
    - `bucket_bytes`: of a message of the first leg
    """

    def __init__(self, config: ReduceConfig, rows: Mapping[str, Rows], bucket_bytes: int = BUCKET_BYTES):
        self.config, self.rows, self.bucket_bytes = config, dict(sorted(rows.items())), bucket_bytes

    def reduce(
        self,
        messages: Mapping[str, np.ndarray] | None,
        weights: Sequence[float],
        link: Link,
        error: OwnError | None = None,
        timeout_seconds: float = TIMEOUT_SECONDS,
    ) -> Reduced:
        """The weighted average of the members' messages, the same bits on all of them.

        Arguments:
        - `messages`: this member's, by key uint8 [count, bytes of a row]; not read, and None, if its weight is 0
        - `weights`: w_k by rank, the same on all members; a member with 0 sends nothing of its own, but owns buckets
        - `error`: of the last reduce of these rows that was committed, by the same group; None: there is none
        - `timeout_seconds`: of each wait for the link

        Raises what the link raises; nothing has changed then. Raises `ValueError` if no weight is above 0.
        """
        raise NotImplementedError

    def bytes_sent(self, members: int, rank: int = 0, sends: bool = True) -> int:
        """Bytes that a member of so many sends in a `reduce`; `sends`: whether its weight is above 0."""
        raise NotImplementedError
