"""`gregale` as it is, in a process that kills or poisons itself at a moment that no signal from outside could hit.

    DOOM=FILE python tests/doomed.py island CONFIG ...

As long as there is no FILE nothing happens. Once there is, the word in it says where this process dies of SIGKILL:

    reduce         when the first of a round's messages is under way, and the others wait for its bytes
    held           when the round is reduced, and not yet committed
    step           in the middle of the inner phase
    healing-other  when a part of the state was sent to an island that heals
    healing        when a part of a peer's state has arrived

or lives on, with NaN in all parameters and in the inner optimizer:

    poison         after an inner step

or waits until the file is removed, and only its heartbeats go on:

    saved          when the run is complete and saved, before it tells a coordinator so

Otherwise the file is removed first, so that the next process of that island lives. With PACE=SECONDS in the environment
a step takes at least so long, as if the device were not this machine's processor, for which all islands compete.
"""

import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from gregale.cli import main
from gregale.islands.driver import Driver
from gregale.islands.hosts import HostWorker
from gregale.islands.steps import IslandSteps
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


def dies(_: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def is_poisoned(steps: IslandSteps) -> None:
    def broken(array: jax.Array) -> jax.Array:
        return array * jnp.nan if jnp.issubdtype(array.dtype, jnp.inexact) else array

    method = steps.state.method
    method = method._replace(psdp=jax.tree.map(broken, method.psdp))
    steps.state = steps.state._replace(method=method)


def happens_after(owner: Any, name: str, point: str, doom: Callable[[Any], None]) -> None:
    """After the next call of a method its object meets its doom, if the file says so."""
    method: Callable = getattr(owner, name)

    def doomed(*arguments: Any, **named: Any) -> Any:
        result = method(*arguments, **named)
        if DOOM.exists() and DOOM.read_text() == point:
            DOOM.unlink()
            doom(arguments[0])
        return result

    setattr(owner, name, doomed)


def wait_when_saved() -> None:
    """A complete island tells no coordinator of its state while the file says `saved`."""
    confirm = Driver.confirm

    def waits(driver: Driver) -> None:
        while DOOM.exists() and DOOM.read_text() == "saved":
            time.sleep(0.05)
        confirm(driver)

    Driver.confirm = waits


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
        happens_after(owner, name, point, dies)
    wait_when_saved()
    happens_after(IslandSteps, "take", "poison", is_poisoned)
    if float(os.environ.get("PACE", "0")) > 0:
        pace(float(os.environ["PACE"]))
    sys.argv[0] = "gregale"
    sys.exit(main())
