"""The reducer over a network: the average of islands' messages, beside `ExactReducer` and `QuantisedReducer`.

Those reduce over an axis of the mesh, this one over a `Link` between processes. Each member's device encodes its values
as uint8 rows (`communication.row_layout`). Codecs, feedback and the two phases are the same.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol

import jax
import numpy as np

from gregale.codecs.codec import QuantisedArray, ReduceConfig
from gregale.communication.quantised import RowLayout, RowPrograms, no_error, row_programs
from gregale.islands.shards import host_device

BUCKET_BYTES = 4 << 20
UNEQUAL_BUCKETS = 16  # for each member, of unequal parts: a slow link waits for the averages of the last wave
WAVES_AHEAD = 2  # first phases in progress: the one being decoded, and the next
TIMEOUT_SECONDS = 60.0


Row = tuple[str, int]
"""A row, by the key of its shard and its number there."""


class Handle(Protocol):
    """A transfer in progress."""

    def wait(self, timeout_seconds: float) -> None:
        """Return when the transfer is done; raise the link's exception if it failed or took longer."""


class Link(Protocol):
    """Point-to-point messages between the members of a group.

    `send` and `recv` return at once. An array is contiguous, uint8 [bytes], and the link owns it until `wait` of its
    handle returns. A message goes to the `recv` of the same peer and tag. Tags are below 2^31; each reduce uses a tag
    once.
    """

    @property
    def size(self) -> int: ...

    @property
    def rank(self) -> int: ...

    def send(self, peer: int, data: np.ndarray, tag: int) -> Handle: ...

    def recv(self, peer: int, data: np.ndarray, tag: int) -> Handle: ...


class OwnError(NamedTuple):
    """The unsent rest of the second phase for a member's own rows; it stays in host memory."""

    steps: int  # reductions of this group so far
    rows: dict[Row, QuantisedArray]  # by key and row: NumPy arrays


class Reduced(NamedTuple):
    gradient: dict[str, np.ndarray]  # by key, float32 [size]; the same bits on every member
    error: OwnError  # of the second phase, if this average is committed


class NetworkReducer:
    """Averages shards over the members of a group; all members of the link run the same steps.

        first phase:  member k sends its message m_k of a bucket to the bucket's owner
                    g = sum_k w_k decode(m_k) / sum_k w_k               in the order of ranks, float32
        second phase: the owner sends encode2(g + e) to all, and all members decode the same bytes

    Buckets are consecutive rows, of about `bucket_bytes` of message; bucket i belongs to member i mod R, or to members
    in turn by the parts that they average. They are pipelined: while one is decoded, the first phases of the next
    buckets and the second phase of the last are in progress. Bucket and owner of a row depend only on `rows`, R and the
    parts, so a member's second-phase error stays valid while these do.

    With `phases: 1` of the configuration each member sends m_k to all others, and everybody averages all buckets.

    - `config`: the codecs of both phases, and the feedback
    - `rows`: how each shard is cut, by its key; the same on every member
    - `bucket_bytes`: of a message of the first phase
    """

    def __init__(self, config: ReduceConfig, rows: Mapping[str, RowLayout], bucket_bytes: int = BUCKET_BYTES):
        self.config, self.rows, self.bucket_bytes = config, dict(sorted(rows.items())), bucket_bytes

    def reduce(
        self,
        messages: Mapping[str, np.ndarray] | None,
        weights: Sequence[float],
        link: Link,
        error: OwnError | None = None,
        timeout_seconds: float = TIMEOUT_SECONDS,
        parts: Sequence[int] = (),
    ) -> Reduced:
        """Return the weighted average of the members' messages, the same bits on all of them.

        - `messages`: this member's, by key uint8 [count, bytes of a row]; not read, and None, if its weight is 0
        - `weights`: w_k by rank, the same on all members; a member with 0 sends nothing of its own, but owns buckets
        - `error`: of the last committed reduce of these rows by the same group; None if there is none
        - `timeout_seconds`: of each wait for the link
        - `parts`: of the message, that members average, by rank, the same on all members; (): all the same

        Raises the link's exceptions; nothing has changed then. Raises `ValueError` if no weight is above 0.
        """
        if not sum(weights) > 0:
            raise ValueError(f"the weights of {link.size} members are {list(weights)}: nobody contributes")
        with jax.default_device(host_device()):
            if self.config.phases == 1:
                return _OnePhase(self, messages or {}, weights, link, error, timeout_seconds, ()).run()
            return _Reduce(self, messages or {}, weights, link, error, timeout_seconds, parts).run()

    def compile(self) -> None:
        """Compile the programs of the first `reduce`, so that no member waits for another's compiler."""
        with jax.default_device(host_device()):
            for key, rows in self.rows.items():
                programs, sizes = self.programs(key), self.row_bytes(key)
                first, second = (np.zeros(size, np.uint8) for size in sizes)
                if self.config.phases == 1:
                    programs.decode(first)
                    continue
                total = programs.add(np.zeros(rows.row, np.float32), first, np.float32(1))
                programs.encode(total, np.float32(1), no_error(rows.row) if programs.keeps_error else None)
                programs.decode(second)

    def bytes_sent(self, members: int, rank: int = 0, sends: bool = True) -> int:
        """Return the bytes that a member sends in a `reduce`; `sends`: whether its weight is above 0."""
        total = 0
        if self.config.phases == 1:
            return (members - 1) * sends * sum(each.count * self.row_bytes(key)[0] for key, each in self.rows.items())
        for place, bucket in enumerate(self.buckets(members)):
            if place % members == rank:
                total += (members - 1) * sum(self.row_bytes(key)[1] for key, _ in bucket)
            elif sends:
                total += sum(self.row_bytes(key)[0] for key, _ in bucket)
        return total

    def buckets(self, members: int, each: int = 1) -> list[list[Row]]:
        """Return the rows of each bucket; there are at least `each` for every member of a small group."""
        sizes = {(key, row): self.row_bytes(key)[0] for key, rows in self.rows.items() for row in range(rows.count)}
        bucket_limit = min(self.bucket_bytes, -(-sum(sizes.values()) // (members * each)))
        found, filled = [], bucket_limit
        for row, size in sizes.items():
            if filled + size > bucket_limit and filled:
                found.append([])
                filled = 0
            found[-1].append(row)
            filled += size
        return found

    def row_bytes(self, key: str) -> tuple[int, int]:
        """Return the bytes of the message of a shard's row in the first phase and in the second, 0 without one."""
        rows = self.rows[key]
        first, second = rows.first_codec(self.config), rows.second_codec(self.config)
        return first.message_bytes(rows.row), second.message_bytes(rows.row) if self.config.phases == 2 else 0

    def programs(self, key: str) -> RowPrograms:
        rows, config = self.rows[key], self.config
        if config.phases == 1:
            return row_programs(rows.first_codec(config), rows.first_codec(config), None, rows.row)
        keeps = config.feedback is not None and config.second != "none" and not rows.exact
        beta = config.beta if keeps else None
        return row_programs(rows.first_codec(config), rows.second_codec(config), beta, rows.row)


class _Incoming(NamedTuple):
    data: np.ndarray
    handle: Handle


class _Reduce:
    """One `reduce`. Wave w is the buckets w R to w R + R - 1: one of each member, unless parts differ.

    All members go through the waves in one order, and post all of a wave's messages before they wait for a later wave.
    So no two members wait for each other.
    """

    def __init__(
        self,
        reducer: NetworkReducer,
        messages: Mapping[str, np.ndarray],
        weights: Sequence[float],
        link: Link,
        error: OwnError | None,
        timeout_seconds: float,
        parts: Sequence[int],
    ):
        self._reducer, self._messages, self._link, self._timeout = reducer, messages, link, timeout_seconds
        self._weights = np.asarray(weights, np.float32)
        self._buckets = reducer.buckets(link.size, UNEQUAL_BUCKETS if parts else 1)
        self._owners = owners(parts or [1] * link.size, len(self._buckets))
        self._waves = -(-len(self._buckets) // link.size)
        self._first: dict[int, dict[int, _Incoming]] = {}  # by own bucket: by peer
        self._second: dict[int, _Incoming | np.ndarray] = {}  # by bucket: in transfer, or this member's own
        self._sends: dict[int, list[Handle]] = {}  # by wave
        self._steps, self._kept = _to_begin_with(error, reducer.config)
        self._gradient = {key: np.empty((rows.count, rows.row), np.float32) for key, rows in reducer.rows.items()}

    def run(self) -> Reduced:
        posted = 0
        for wave in range(self._waves + 1):
            while posted < min(wave + WAVES_AHEAD, self._waves):
                self._post_first(posted)
                posted += 1
            if wave < self._waves:
                self._post_second(wave)
            if wave > 0:
                self._finish(wave - 1)
        return self._result()

    def _result(self) -> Reduced:
        joined = {key: rows.reshape(-1)[: self._reducer.rows[key].size] for key, rows in self._gradient.items()}
        return Reduced(joined, OwnError(self._steps, jax.tree.map(np.asarray, self._kept)))

    def _buckets_of(self, wave: int, owner: int) -> list[int]:
        """Return the indices of an owner's buckets in a wave."""
        first = wave * self._link.size
        wave_owners = self._owners[first : first + self._link.size]
        return [first + place for place, each in enumerate(wave_owners) if each == owner]

    def _peers(self) -> list[int]:
        """Return the other ranks, beginning with the next, so that members send to different peers."""
        link = self._link
        return [(link.rank + step) % link.size for step in range(1, link.size)]

    def _post_first(self, wave: int) -> None:
        """Send this member's messages to their owners, and receive those of its own bucket."""
        link, sends = self._link, self._sends.setdefault(wave, [])
        for own in self._buckets_of(wave, link.rank):
            peers = [peer for peer in self._peers() if self._weights[peer] > 0]
            self._first[own] = {peer: self._receive(peer, own, phase=0) for peer in peers}
        for peer in self._peers() if self._weights[link.rank] > 0 else []:
            for bucket in self._buckets_of(wave, peer):
                data = np.concatenate([self._messages[key][row] for key, row in self._buckets[bucket]])
                sends.append(link.send(peer, data, tag=2 * bucket))

    def _receive(self, peer: int, bucket: int, phase: int) -> _Incoming:
        size = sum(self._reducer.row_bytes(key)[phase] for key, _ in self._buckets[bucket])
        data = np.empty(size, np.uint8)
        return _Incoming(data, self._link.recv(peer, data, tag=2 * bucket + phase))

    def _post_second(self, wave: int) -> None:
        """Average this member's buckets, send the averages to all, and receive those of the others' buckets."""
        link = self._link
        for peer in self._peers():
            for bucket in self._buckets_of(wave, peer):
                self._second[bucket] = self._receive(peer, bucket, phase=1)
        for own in self._buckets_of(wave, link.rank):
            data = self._average(own)
            self._second[own] = data
            self._sends[wave] += [link.send(peer, data, tag=2 * own + 1) for peer in self._peers()]

    def _average(self, bucket: int) -> np.ndarray:
        """Return the second phase's message of a bucket of this member."""
        arrived = self._first.pop(bucket)
        for incoming in arrived.values():
            incoming.handle.wait(self._timeout)
        total, start, messages = self._weights.sum(), 0, []
        for key, row in self._buckets[bucket]:
            programs, (size, _) = self._reducer.programs(key), self._reducer.row_bytes(key)
            summed = np.zeros(programs.size, np.float32)
            for rank in range(self._link.size):
                if self._weights[rank] > 0:
                    own = rank == self._link.rank
                    message = self._messages[key][row] if own else arrived[rank].data[start : start + size]
                    summed = programs.add(summed, message, self._weights[rank])
            error = self._kept.get((key, row), no_error(programs.size)) if programs.keeps_error else None
            message, kept = programs.encode(summed, total, error)
            messages.append(message)
            if kept is not None:
                self._kept[key, row] = kept
            start += size
        return np.concatenate([np.asarray(message) for message in messages])

    def _finish(self, wave: int) -> None:
        link = self._link
        for owner in (link.rank, *self._peers()):
            for bucket in self._buckets_of(wave, owner):
                second = self._second.pop(bucket)
                if isinstance(second, _Incoming):
                    second.handle.wait(self._timeout)
                    second = second.data
                self._decode(bucket, second)
        for handle in self._sends.pop(wave):
            handle.wait(self._timeout)

    def _decode(self, bucket: int, data: np.ndarray) -> None:
        start, decoded = 0, []
        for key, row in self._buckets[bucket]:
            _, size = self._reducer.row_bytes(key)
            decoded.append((key, row, self._reducer.programs(key).decode(data[start : start + size])))
            start += size
        for key, row, values in decoded:
            self._gradient[key][row] = values


class _OnePhase(_Reduce):
    """One `reduce` with one phase, a bucket after the other; members post the messages of two buckets at a time.

    Averages are NumPy's, a product and a sum apart, so that processors of different kinds agree on all bits.
    """

    def run(self) -> Reduced:
        for number in range(len(self._buckets) + WAVES_AHEAD):
            if (done := number - WAVES_AHEAD) >= 0:
                self._average_all(done)
            if number < len(self._buckets):
                self._post(number)
        return self._result()

    def _post(self, bucket: int) -> None:
        peers = [peer for peer in self._peers() if self._weights[peer] > 0]
        self._first[bucket] = {peer: self._receive(peer, bucket, phase=0) for peer in peers}
        self._sends[bucket] = []
        if self._weights[self._link.rank] > 0:
            data = np.concatenate([self._messages[key][row] for key, row in self._buckets[bucket]])
            self._sends[bucket] = [self._link.send(peer, data, tag=2 * bucket) for peer in self._peers()]

    def _average_all(self, bucket: int) -> None:
        arrived, start = self._first.pop(bucket), 0
        for handle in [*self._sends.pop(bucket), *(each.handle for each in arrived.values())]:
            handle.wait(self._timeout)
        for key, row in self._buckets[bucket]:
            programs, (size, _) = self._reducer.programs(key), self._reducer.row_bytes(key)
            total = np.zeros(programs.size, np.float32)
            for rank in map(int, np.flatnonzero(self._weights > 0)):
                own = rank == self._link.rank
                message = self._messages[key][row] if own else arrived[rank].data[start : start + size]
                total += self._weights[rank] * np.asarray(programs.decode(message))
            self._gradient[key][row] = total / self._weights.sum()
            start += size


def owners(parts: Sequence[int], count: int) -> list[int]:
    """Return the owners of buckets, in turn by their parts: of each number of first buckets, everyone has its part."""
    credits, found = [0] * len(parts), []
    for _ in range(count):
        credits = [credit + part for credit, part in zip(credits, parts, strict=True)]
        found.append(max(range(len(parts)), key=lambda rank: (credits[rank], -rank)))
        credits[found[-1]] -= sum(parts)
    return found


def _to_begin_with(error: OwnError | None, config: ReduceConfig) -> tuple[int, dict[Row, QuantisedArray]]:
    """Return the step count including this one, and the errors at its start: none after `reset_every` steps."""
    steps, rows = (0, {}) if error is None else error
    every = config.feedback.reset_every if config.feedback is not None else None
    return steps + 1, {} if every is not None and steps % every == 0 else dict(rows)
