"""`gregale lighthouse`: the coordinator of islands. It tracks live islands, and knows nothing of their training."""

import signal
import threading
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from gregale.data.sources.base import expand
from gregale.errors import UserError
from gregale.islands.transport.lighthouse import NAME, Lighthouse, records_beside
from gregale.islands.transport.tls import read_credentials
from gregale.programs.command import Command
from gregale.settings import Settings, setting
from gregale.streams import say


@dataclass(frozen=True)
class LighthouseOptions(Settings):
    bind: str = setting("127.0.0.1:29510", "HOST:PORT to listen at; port 0: any free port")
    token_file: str | None = setting(
        None, "file with the fleet's token, or the key of `lighthouse`; readable by you alone"
    )


def main(options: LighthouseOptions) -> int:
    if options.token_file is None:
        raise UserError(
            "token_file is not set: a lighthouse takes requests of its own fleet only, which shares a secret. "
            "Give --token_file and the file that the islands have as islands.token_file. "
            "`umask 077; head -c 32 /dev/urandom | base64 > islands.token` makes one."
        )
    path = Path(expand(options.token_file))
    token = read_credentials(path, "token_file", NAME)
    stopped = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stopped.set())
    lighthouse = Lighthouse(options.bind, token, print_line, records_beside(path))
    address = lighthouse.address
    print_line(f"The lighthouse listens at {address}. Islands come with --islands.lighthouse {address}")
    stopped.wait()
    lighthouse.close()
    print_line("The lighthouse is closed.")
    return 0


def print_line(line: str) -> None:
    """Print a line; ignore a closed output."""
    with suppress(OSError):
        say(line, flush=True)


COMMAND = Command(main=main, options=LighthouseOptions)
