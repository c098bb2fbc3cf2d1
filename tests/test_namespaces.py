"""Networks of several sites on this machine. Needs root and the tools `ip` and `tc`."""

import os
import subprocess
import sys

import pytest

from tests import namespaces
from tests.namespaces import Network, NoNetworkError, rate_limited

RECEIVE = """
import socket, sys, time
listener = socket.create_server((sys.argv[1], 5555))
listener.settimeout(20)
print("listens", flush=True)
connection, _ = listener.accept()
print("accepts", flush=True)
connection.settimeout(float(sys.argv[2]))
begin, total = time.monotonic(), 0
try:
    while content := connection.recv(1 << 16):
        total += len(content)
except TimeoutError:
    print("silence", flush=True)
    sys.exit()
print(total * 8 / (time.monotonic() - begin) / 1e6)
"""
SEND = """
import socket, sys
connection = socket.create_connection((sys.argv[1], 5555), 5.0)
connection.sendall(bytes(int(sys.argv[2])))
"""


@pytest.fixture(scope="module")
def needs_root() -> None:
    """Skips where a network cannot be made, and says why."""
    try:
        with rate_limited(1, "50mbit"):
            pass
    except NoNetworkError as error:
        pytest.skip(str(error))


def sent(network: Network, count: int, timeout_seconds: float, before=lambda: None) -> str:
    """What the second site says of `count` bytes from the first."""
    to, origin = network.sites[1], network.sites[0]
    receive = [*to.command, sys.executable, "-c", RECEIVE, to.address, str(timeout_seconds)]
    with subprocess.Popen(receive, stdout=subprocess.PIPE, text=True) as receiver:
        assert receiver.stdout.readline() == "listens\n"
        send = [*origin.command, sys.executable, "-c", SEND, to.address, str(count)]
        with subprocess.Popen(send, stderr=subprocess.DEVNULL) as sender:
            assert receiver.stdout.readline() == "accepts\n"
            before()
            said = receiver.stdout.read().strip()
            sender.kill()
    return said


@pytest.mark.usefixtures("needs_root")
def test_links_have_the_bandwidth_and_can_be_cut_and_sites_know_their_addresses():
    with rate_limited(2, "40mbit") as network:
        for site in network.sites:
            program = "import socket; print(socket.gethostbyname(socket.gethostname()))"
            result = subprocess.run([*site.command, sys.executable, "-c", program], capture_output=True, text=True)
            assert result.stdout.strip() == site.address
        assert 30 < float(sent(network, 4_000_000, 20.0)) < 44
        assert sent(network, 200_000_000, 0.5, lambda: network.cut(1)) == "silence"
        network.restore(1)
        assert float(sent(network, 1_000_000, 20.0)) > 10
    assert namespaces.names_of(os.getpid()) == []


@pytest.mark.usefixtures("needs_root")
def test_what_a_killed_run_has_left_is_removed():
    program = (
        "import os\nfrom tests.namespaces import rate_limited\nwith rate_limited(2, '1gbit'): os.kill(os.getpid(), 9)"
    )
    killed = subprocess.Popen([sys.executable, "-c", program])
    killed.wait()
    assert len(namespaces.names_of(killed.pid)) == 3
    assert len(namespaces.names_of(killed.pid // 10)) == 0
    with rate_limited(1, None):
        assert namespaces.names_of(killed.pid) == []
