"""What a link's rate is taken from."""

import socket

import numpy as np

from gregale.islands.protocol.decision import level
from gregale.islands.transport.link_rate import BURST_BYTES, LinkRate, fastest, sample

MB = 1_000_000


def counts(*steps: tuple[float, float]) -> list[tuple[float, float, int]]:
    """Looks at a link that carries bytes a second for so many seconds, every 10 ms; each look takes 1 ms."""
    found, now, total = [(0.0, 0.001, 0)], 0.0, 0.0
    for rate, seconds in steps:
        for _ in range(round(seconds * 100)):
            now, total = now + 0.01, total + rate / 100
            found.append((now, now + 0.001, int(total)))
    return found


def test_pauses_of_a_round_do_not_make_a_link_slow():
    found = fastest(counts((0, 1.0), (10 * MB, 0.05), (0, 1.0), (MB, 2.0), (0, 0.5)))
    assert 0.8 * 10 * MB < found <= 10 * MB
    assert fastest(counts((BURST_BYTES - 10, 1.0))) == 0.0


def test_the_level_follows_the_fastest_of_the_last_rounds_and_not_small_changes():
    link = LinkRate()
    link.note([(each, each) for each in counts((1000, 1.0))])
    assert link.level == 0, "too few bytes"
    for rate, expected in ((8 * MB, 8 * MB), (MB, 8 * MB), (10 * MB, 8 * MB), (32 * MB, 32 * MB)):
        link.note([(each, other) for each, other in zip(counts((rate, 1)), counts((4 * rate, 1)), strict=True)])
        assert abs(link.level - level(expected)) <= 1, "the slower direction"
    for _ in range(20):
        link.note([(each, each) for each in counts((2 * MB, 1))])
    assert abs(link.level - level(2 * MB)) <= 1


def test_the_kernel_counts_what_a_peer_has_whether_it_reads_it_or_not():
    with socket.create_server(("127.0.0.1", 0)) as server, socket.socket() as sending:
        sending.setsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG, 1400)  # a segment counts as a whole one
        sending.connect(server.getsockname())
        receiving, _ = server.accept()
        with receiving:
            sending.sendall(bytes(100_000))
            received = 0
            while received < 50_000:
                received += len(receiving.recv(50_000))
            counts = [0, 0]
            while min(counts) < 90_000:  # they come with the acknowledgements
                counts = [each[2] for each in sample(lambda: ([sending], [receiving]))]
    np.testing.assert_allclose(counts, 100_000, rtol=0.1)
