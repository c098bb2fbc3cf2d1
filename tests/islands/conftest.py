"""Headers for tests of the protocol, and servers that close at once."""

import pytest

from gregale.islands.protocol.messages import Generation, Header
from gregale.islands.transport import server

LINE = Generation(1, "line")


@pytest.fixture(autouse=True)
def servers_close_at_once(monkeypatch) -> None:
    monkeypatch.setattr(server, "POLL_SECONDS", 0.01)


@pytest.fixture
def header():
    """Makes the header of a member that is at round 5 of a fleet of three, with what is given in place of that."""

    def make(name: str, **changes) -> Header:
        fields = {"round": 5, "generation": LINE, "digest": "d5", "last": "k5", "voter": True, "voters": 3}
        fields |= {"ready": True, "weight": 10.0, "seen": 7, "holder": "s", "asked": 1, "retried": True}
        fields |= {"hosts": (f"{name}:1",), "agreement": "x", "version": "1"}
        return Header(name=name, session="s", **fields | changes)

    return make
