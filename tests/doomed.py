"""`gregale` as it is, in a process that kills itself at a moment that no signal from outside could hit.

    DOOM=FILE python tests/doomed.py island CONFIG ...

As long as there is no FILE nothing happens. Once there is, the word in it says where this process dies of SIGKILL:

    reduce         when the first of a round's messages is under way, and the others wait for its bytes
    held           when the round is reduced, and not yet committed
    step           in the middle of the inner phase
    healing-other  when a part of the state was sent to an island that heals
    healing        when a part of a peer's state has arrived

The file is removed first, so that the next process of that island lives. With PACE=SECONDS in the environment a step
takes at least so long, as if the device were not this machine's processor, for which all islands compete.
"""

import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from gregale.cli import main
from gregale.islands.driver import Driver
from gregale.islands.host_worker import HostWorker
from gregale.islands.transport.group import Group
from gregale.islands.transport.server import Handler
from gregale.islands.transport.transfer import Assembly

DOOM = Path(os.environ["DOOM"])
POINTS = {
    "reduce": (Group, "send"),
    "held": (HostWorker, "reduce"),
    "step": (Driver, "stepped"),
    "healing-other": (Handler, "_send_all"),
    "healing": (Assembly, "put"),
}


def dies_after(owner: Any, name: str, point: str) -> None:
    """After the next call of a method the process dies, if that is its doom."""
    method: Callable = getattr(owner, name)

    def doomed(*arguments: Any, **named: Any) -> Any:
        result = method(*arguments, **named)
        if DOOM.exists() and DOOM.read_text() == point:
            DOOM.unlink()
            os.kill(os.getpid(), signal.SIGKILL)
        return result

    setattr(owner, name, doomed)


def pace(seconds: float) -> None:
    """Every step takes at least so long, from the end of the one before."""
    stepped, last = Driver.stepped, [0.0]

    def paced(driver: Driver) -> None:
        time.sleep(max(0.0, seconds - (time.monotonic() - last[0])))
        last[0] = time.monotonic()
        stepped(driver)

    Driver.stepped = paced


if __name__ == "__main__":
    for point, (owner, name) in POINTS.items():
        dies_after(owner, name, point)
    if float(os.environ.get("PACE", "0")) > 0:
        pace(float(os.environ["PACE"]))
    sys.argv[0] = "gregale"
    sys.exit(main())
