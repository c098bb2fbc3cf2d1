"""Links with a delay between network namespaces, where the kernel has no `netem`: frames wait in a process.

    with rate_limited(2, "50mbit", make=delayed(0.05)) as network:      # 50 ms one way: 100 ms round trip
        subprocess.Popen([*network.sites[0].command, ...])

Each site's link is a pair of TAP devices, one in the bridge and one in the namespace. A process of its own (`forward`)
copies frames between them, each `seconds` after it was read.
"""

from __future__ import annotations

import fcntl
import os
import select
import struct
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable

from tests.namespaces import Network

TUNSETIFF = 0x400454CA
IFF_TAP_NO_PI = 0x1002
LONGEST_FRAME_BYTES = 1 << 16
MOST_FRAMES = 4096  # that wait in one direction; more are dropped, as by a full queue


class DelayedNetwork(Network):
    """A bridge and sites whose links delay each frame by `seconds` in each direction."""

    def __init__(self, count: int, bandwidth: str | None, subnet: str, seconds: float):
        self._seconds = seconds
        self._forwarders: list[subprocess.Popen] = []
        super().__init__(count, bandwidth, subnet)

    def link(self, name: str) -> None:
        outside = tap(name)
        forwarder = (sys.executable, "-m", "benchmarks.latency", str(outside), str(self._seconds))
        command = ("ip", "netns", "exec", name, *forwarder)
        self._forwarders.append(subprocess.Popen(command, pass_fds=[outside], stdout=subprocess.PIPE))
        os.close(outside)
        ready = self._forwarders[-1].stdout
        assert ready is not None
        ready.read(1)  # the inner device is there

    def close(self) -> None:
        for each in self._forwarders:
            each.kill()
            each.wait()


def delayed(seconds: float) -> Callable[[int, str | None, str], Network]:
    """Return what `rate_limited` makes a network with."""
    return lambda count, bandwidth, subnet: DelayedNetwork(count, bandwidth, subnet, seconds)


def tap(name: str) -> int:
    """Make a TAP device in this process's namespace; return its descriptor."""
    device = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(device, TUNSETIFF, struct.pack("16sH22x", name.encode(), IFF_TAP_NO_PI))
    return device


def forward(first: int, second: int, seconds: float) -> None:
    """Copy frames between two devices, each `seconds` late, until a device is gone."""
    other = {first: second, second: first}
    waiting: dict[int, deque[tuple[float, bytes]]] = {first: deque(), second: deque()}
    while True:
        due = [queue[0][0] for queue in waiting.values() if queue]
        timeout = max(0.0, min(due) - time.monotonic()) if due else None
        readable, _, _ = select.select([first, second], [], [], timeout)
        now = time.monotonic()
        for device in readable:
            read_all(device, waiting[other[device]], now + seconds)
        for device, queue in waiting.items():
            while queue and queue[0][0] <= now:
                write(device, queue.popleft()[1])


def read_all(device: int, queue: deque[tuple[float, bytes]], at: float) -> None:
    for _ in range(64):
        try:
            frame = os.read(device, LONGEST_FRAME_BYTES)
        except BlockingIOError:
            return
        if len(queue) < MOST_FRAMES:
            queue.append((at, frame))


def write(device: int, frame: bytes) -> None:
    try:
        os.write(device, frame)
    except OSError:
        return  # the other end is down: the frame is lost


if __name__ == "__main__":
    inside = tap("eth0")
    sys.stdout.write("1")
    sys.stdout.close()
    forward(int(sys.argv[1]), inside, float(sys.argv[2]))
