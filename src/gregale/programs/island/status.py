"""What an island tells of itself to whoever has the fleet's secret, and the small messages that it takes."""

from __future__ import annotations

from typing import Any

from gregale.islands.driver import Driver
from gregale.islands.engine.server import Refused
from gregale.services.tracking.tracker import Values


class StatusTracker:
    """A tracker whose newest figures the island's server gives out.

    - `state`: starting, joining, training, healing, complete or left
    """

    def __init__(self, name: str, steps: int, step: int):
        self.state = "starting"
        self._name, self._steps, self._step = name, steps, step
        self._values: dict[str, float | int | None] = {}
        self._driver: Driver | None = None

    def follow(self, driver: Driver) -> None:
        """Tells of this driver's rounds too."""
        self._driver = driver

    def log(self, step: int, values: Values) -> None:
        """Takes the figures of a step."""
        self._step, self.state = step, "training"
        self._values |= {name: values[name] for name in ("loss", "tokens_per_second", "eval_loss") if name in values}

    def close(self) -> None:
        """Nothing is held back."""

    def status(self) -> dict[str, Any]:
        """The newest figures."""
        told = {"name": self._name, "state": self.state, "step": self._step, "steps": self._steps, "round": -1}
        if (driver := self._driver) is not None:
            told |= {
                "round": driver.round,
                "members": list(driver.members),
                "waiting_seconds": driver.seconds.waiting,
                "healing_seconds": driver.seconds.healing,
                "bytes_sent": driver.worker.count.sent,
                "bytes_received": driver.worker.count.received,
            }
        return {**told, **self._values}

    def on_message(self, message: dict) -> dict:
        """Takes a peer's message; raises Refused for one that this version does not know."""
        if message.get("kind") == "due" and type(message.get("round")) is int and self._driver is not None:
            self._driver.due(message["round"])
            return {}
        if message.get("kind") == "inner" and self._driver is not None:
            return self._driver.show()
        raise Refused("unknown message")
