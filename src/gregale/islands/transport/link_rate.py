"""The rate of a host's link, from the segments that the kernel counts for the connections of a round.

A round does not always use the whole link: members wait for each other. So the rate of a direction is that of the
`BURST_BYTES` that passed fastest, in the last `ROUNDS` rounds. Segments count when the peer's kernel has them (sent),
or this host's (received), in any order: then neither a buffer of a host nor a repeated segment, after which many bytes
are in order at once, makes a link look faster.
"""

import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress

from gregale.islands.protocol.decision import level

BURST_BYTES = 256 << 10  # more than what a link that was idle carries at once
ROUNDS = 15
SAMPLE_SECONDS = 0.01
PAUSE_FACTOR = 50  # looks at many connections take at most a fiftieth of a processor
COUNTS = struct.Struct("16xI132xI36xI")  # of `struct tcp_info`: tcpi_snd_mss, tcpi_data_segs_in, tcpi_delivered

Count = tuple[float, float, int]  # times before and after the look; bytes so far
Sample = tuple[Count, Count]  # sent, received
Streams = Callable[[], tuple[Sequence[socket.socket], Sequence[socket.socket]]]


class LinkRate:
    """- `level`: of the slower direction (`protocol.decision`); 0: no round was large enough yet."""

    def __init__(self):
        self.level = 0
        self._rates: deque[float] = deque(maxlen=ROUNDS)

    @contextmanager
    def measured(self, streams: Streams) -> Iterator[None]:
        """Measure while the block runs; `streams`: those on which this host sends, and on which it receives."""
        samples, over = [sample(streams)], threading.Event()

        def watch() -> None:
            pause = SAMPLE_SECONDS
            while not over.wait(pause):
                samples.append(sample(streams))
                before, after, _ = samples[-1][0]
                pause = max(SAMPLE_SECONDS, (after - before) * PAUSE_FACTOR)

        thread = threading.Thread(target=watch, name="gregale-link-rate", daemon=True)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()
        self.note([*samples, sample(streams)])

    def note(self, samples: Sequence[Sample]) -> None:
        found = min(map(fastest, zip(*samples, strict=True)))
        if found:
            self._rates.append(found)
            exact = level(max(self._rates))
            if not self.level or abs(exact - self.level) > 1:  # otherwise parts would change with each small change
                self.level = exact


def fastest(counts: Sequence[Count]) -> float:
    """Return the rate of the `BURST_BYTES` that passed fastest; 0 if there are fewer bytes."""
    best, start = 0.0, 0
    for _, now, total in counts:
        while total - counts[start + 1][2] >= BURST_BYTES:
            start += 1
        if (passed := total - counts[start][2]) >= BURST_BYTES:
            best = max(best, passed / max(now - counts[start][0], SAMPLE_SECONDS))
    return best


def sample(streams: Streams) -> Sample:
    before, (sending, receiving) = time.monotonic(), streams()
    sent, received = sum(tcp_bytes(each)[0] for each in sending), sum(tcp_bytes(each)[1] for each in receiving)
    after = time.monotonic()
    return (before, after, sent), (before, after, received)


def tcp_bytes(stream: socket.socket) -> tuple[int, int]:
    """Return the bytes of a connection that the peer has, and those that have arrived here; 0 if it has ended."""
    with suppress(OSError, struct.error):
        info = stream.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, COUNTS.size)
        size, received, delivered = COUNTS.unpack(info)
        return size * delivered, size * received
    return 0, 0
