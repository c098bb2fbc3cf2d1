"""An island's status for clients with the fleet's secret, and the small messages that it accepts."""

import time
from typing import Any

from gregale.islands.driver import Driver
from gregale.islands.protocol.messages import RoundDue
from gregale.islands.transport.client import RequestRejected
from gregale.tracking.callback import Callback, Callbacks, Metrics, finite


class StatusTracker(Callback):
    """A callback before all others: it adds the fleet's metrics to those of each step, and keeps the newest values.

    - `state`: starting, joining, training, complete or left
    - `callbacks`: receive the metrics
    """

    def __init__(self, name: str, steps: int, step: int):
        self.state = "starting"
        self.callbacks = Callbacks([])
        self._name, self._steps, self._step = name, steps, step
        self._values: dict[str, float | int | None] = {}
        self._driver: Driver | None = None
        self._began, self._lost_before = time.monotonic(), 0.0

    def follow(self, driver: Driver) -> None:
        """Report this driver's rounds too."""
        self._driver = driver

    def on_step(self, step: int, metrics: Metrics) -> None:
        """Pass on the metrics of a step, with those of the fleet."""
        if self.state == "joining":
            self._began, self._lost_before = time.monotonic(), self._lost()
        self._step, self.state = step, "training"
        self._keep(metrics)
        self.callbacks.on_step(step, {**metrics, **self.fleet_metrics()})

    def on_evaluation(self, step: int, metrics: Metrics) -> None:
        """Pass on the metrics of an evaluation."""
        self._keep(metrics)
        self.callbacks.on_evaluation(step, metrics)

    def on_end(self, step: int) -> None:
        """Pass it on; the callbacks are closed where they were opened."""
        self.callbacks.on_end(step)

    def _keep(self, metrics: Metrics) -> None:
        self._values |= {name: metrics[name] for name in ("loss", "tokens_per_second", "eval_loss") if name in metrics}

    def fleet_metrics(self) -> dict[str, float | int]:
        """Return the metrics of the fleet's rounds for this island.

        `goodput`: the share of the time since the first step in which it neither waited for the network nor healed.
        """
        if (driver := self._driver) is None:
            return {}
        lost, elapsed = self._lost() - self._lost_before, time.monotonic() - self._began
        return {
            "round": driver.round,
            "members": len(driver.members),
            "waiting_seconds": driver.waiting_seconds,
            "healing_seconds": driver.healing_seconds,
            "network_bytes_sent": driver.worker.count.sent,
            "network_bytes_received": driver.worker.count.received,
            "goodput": max(0.0, 1 - lost / elapsed) if elapsed > 0 else 1.0,
        }

    def _lost(self) -> float:
        """Return the seconds of waiting and of healing so far."""
        return self._driver.waiting_seconds + self._driver.healing_seconds if self._driver is not None else 0.0

    def status(self) -> dict[str, Any]:
        """Return the newest metrics that are finite, with the names of the members."""
        fixed = {"name": self._name, "state": self.state, "step": self._step, "steps": self._steps, "round": -1}
        driver = self._driver
        members, stalled = (list(driver.members), driver.stalls.line) if driver is not None else ([], None)
        return {**fixed, **self.fleet_metrics(), "members": members, "stalled": stalled, **finite(self._values)}

    def on_message(self, message: dict) -> dict:
        """Handle a peer's message; raise RequestRejected for one that this version does not know."""
        if message.get("kind") == "due" and type(message.get("round")) is int and self._driver is not None:
            self._driver.post(RoundDue(message["round"]))
            return {}
        # The server has checked the name; only this island's own hosts may speak for it.
        if message.get("kind") == "host" and message.get("name") == self._name and self._driver is not None:
            return self._driver.worker.handle(message)
        if message.get("kind") == "inner" and self._driver is not None:
            return self._driver.show()
        raise RequestRejected("unknown message")
