"""`gregale lighthouse`: the coordinator of islands. It knows who is there, and nothing else."""

from __future__ import annotations

import signal
import threading
from dataclasses import dataclass, field

from gregale.islands.engine.coordinator import serve
from gregale.islands.protocol.settings import LAN
from gregale.services.command import Command
from gregale.services.islands import SECONDS
from gregale.settings import Settings, whole
from gregale.streams import say


@dataclass(frozen=True)
class LighthouseOptions(Settings):
    """Options of the command."""

    bind: str = field(default="127.0.0.1:29510", metadata={"help": "HOST:PORT to listen at; port 0: any that is free"})
    minimum: int = field(default=1, metadata={"help": "islands below which it answers nobody", "range": whole(1)})
    heartbeat_seconds: float = field(
        default=LAN.heartbeat_seconds,
        metadata={"help": "silence after which an island is out; as islands.heartbeat_seconds", "range": SECONDS},
    )
    join_seconds: float = field(
        default=LAN.join_seconds,
        metadata={"help": "how long the first to ask waits for islands that live", "range": SECONDS},
    )


def main(options: LighthouseOptions) -> int:
    """Serves until SIGINT or SIGTERM."""
    stopped = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stopped.set())
    lighthouse = serve(options.bind, options.minimum, options.join_seconds, options.heartbeat_seconds)
    say(
        f"The lighthouse listens at {lighthouse.address}. Islands come with --islands.lighthouse {lighthouse.address}",
        flush=True,
    )
    stopped.wait()
    lighthouse.close()
    say("The lighthouse is closed.", flush=True)
    return 0


COMMAND = Command(main=main, options=LighthouseOptions)
