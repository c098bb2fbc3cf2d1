"""The costs of an island besides its steps, in closed form: network traffic, host memory, device memory."""

from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Any

import jax

from gregale.axes.layout import with_shardings
from gregale.cost.chips import GBIT
from gregale.cost.memory import bytes_on_device
from gregale.cost.roofline import Roofline
from gregale.islands.config import IslandsConfig
from gregale.islands.method import Island
from gregale.islands.network_reducer import WAVES_AHEAD, NetworkReducer
from gregale.islands.outer import HostOuter
from gregale.methods.method import Method
from gregale.programs.plan.text import size
from gregale.runs.sections import JoiningCosts
from gregale.terminal import Console, print_table

FLOAT32 = 4
SHOWN_GBIT_PER_SECOND = (0.05, 0.2, 1.0, 10.0, 100.0)
MIN_MEMBERS = 2


@dataclass(frozen=True)
class IslandTraffic(JoiningCosts):
    """The costs of one of several equal islands that all contribute; nothing is allocated.

    Values count the devices that this process addresses: those of one host in a plan that simulates one.
    """

    island: Island  # the method
    members: int  # R, islands
    hosts: int = 1  # of the island; each sends its own shards over its own link
    lockstep: bool = False

    def bytes_sent(self, index: int) -> int:
        """Return one host's most bytes sent (and received) in a round of a fragment: (R - 1) / R of each phase."""
        return max(self._reducers[index].bytes_sent(self.members, rank) for rank in range(self.members))

    def bytes_a_period(self) -> int:
        """Return the bytes that one host sends in H steps: each fragment once."""
        return sum(self.bytes_sent(index) for index in self._fragments)

    def seconds(self, index: int, bytes_per_second: float) -> float:
        return self.bytes_sent(index) / bytes_per_second

    def hiding_steps(self, number: int) -> int:
        """Return the number of steps between the send of round `number` and its island's wait for it.

        It is tau if tau = 0, or in lockstep. Otherwise it is the steps until the next round is due: an island applies a
        late round on arrival, and waits only at the next send.
        """
        schedule = self.island.schedule
        if self.lockstep or schedule.delay == 0:
            return schedule.delay
        return schedule.round_step(number + 1) - schedule.round_step(number)

    def period_seconds(self, step_seconds: float, bytes_per_second: float) -> float:
        """Return the time of H steps of `step_seconds` with their rounds, one at a time, over such a link:

        H s + sum_n max(0, seconds(fragment of n) - hiding_steps(n) s)
        """
        schedule, waited = self.island.schedule, 0.0
        for number in self._fragments:
            round_seconds = self.seconds(schedule.round_fragment(number), bytes_per_second)
            waited += max(0.0, round_seconds - self.hiding_steps(number) * step_seconds)
        return schedule.period * step_seconds + waited

    def host_bytes(self) -> int:
        """Return the host memory of theta and the outer optimizer's state between rounds."""
        return sum(part.size for part in self._host.parts)

    def host_bytes_in_flight(self) -> int:
        """Return a round's maximum of additional host memory.

        It holds the fragment's next version, its message, its average in float32, and buffers of the buckets in
        transfer: those of the first phases from all others, and of the second phases of two waves.
        """
        return max(self._in_flight(index) for index in self._fragments)

    def device_bytes(self) -> int:
        """Return a device's memory between rounds beside PSDP's state: the first phase's error."""
        abstract = jax.eval_shape(self.island.init)
        return bytes_on_device(with_shardings(abstract.error, self.island.shardings(abstract).error))

    def device_bytes_in_flight(self) -> int:
        """Return a round's maximum of additional device memory: one fragment of theta and its message.

        During the round it also holds the fragment's next error, and at its ends theta's fragment under `params`.
        """
        return max(self._on_device(index) for index in self._fragments)

    def to_dict(self, bound: Roofline, gbit_per_second: float | None) -> dict[str, Any]:
        schedule, seconds = self.island.schedule, bound.overlapped
        asked = () if gbit_per_second is None else (gbit_per_second,)
        links: list[float] = sorted({*SHOWN_GBIT_PER_SECOND, *asked})
        return {
            "members": self.members,
            "hosts": self.hosts,
            "period": schedule.period,
            "fragments": schedule.fragments,
            "delay": schedule.delay,
            "bytes_per_round": max(map(self.bytes_sent, self._fragments)),
            "bytes_per_period": self.bytes_a_period(),
            "host_bytes": self.host_bytes(),
            "host_bytes_in_flight": self.host_bytes_in_flight(),
            "device_bytes": self.device_bytes(),
            "device_bytes_in_flight": self.device_bytes_in_flight(),
            "step_seconds": seconds,
            "hidden_gbit_per_second": self._hidden(seconds),
            "links": {f"{link:g}": self._at(link, seconds) for link in links},
        }

    def _at(self, gbit_per_second: float, step_seconds: float) -> dict[str, float]:
        """Return the longest round, and compute time / elapsed time, on a host link with this rate each way."""
        speed = gbit_per_second * GBIT
        return {
            "round_seconds": max(self.seconds(index, speed) for index in self._fragments),
            "utilisation": self.island.schedule.period * step_seconds / self.period_seconds(step_seconds, speed),
        }

    def _hidden(self, step_seconds: float) -> float | None:
        """Return the host link in Gbit/s on which no step waits for a round; None: each round delays a step."""
        needed = 0.0
        for number in self._fragments:
            if (steps := self.hiding_steps(number)) == 0:
                return None
            sent = self.bytes_sent(self.island.schedule.round_fragment(number))
            needed = max(needed, sent / (steps * step_seconds) / GBIT)
        return needed

    def _in_flight(self, index: int) -> int:
        reducer = self._reducers[index]
        phases = [[rows.count * size for size in reducer.row_bytes(key)] for key, rows in reducer.rows.items()]
        message, second = (sum(sizes) for sizes in zip(*phases, strict=True))
        values = sum(rows.count * rows.row for rows in reducer.rows.values())
        buckets = len(reducer.buckets(self.members))
        waves = -(-buckets // self.members)
        if reducer.config.phases == 1:
            buffers = self.members * min(WAVES_AHEAD, buckets) * message // buckets
            return self._host.parts[index].size + message + FLOAT32 * values + buffers
        buffers = (min(WAVES_AHEAD, waves) * 2 * message + min(2, waves) * second) // waves
        return self._host.parts[index].size + message + FLOAT32 * values + buffers

    def _on_device(self, index: int) -> int:
        part, total = self._host.parts[index], 0
        for leaf, array in zip(part.leaves, jax.tree.leaves(part.tree), strict=True):
            rows = self.island.rows(leaf)
            total += prod(leaf.shape) * array.dtype.itemsize
            total += rows.count * rows.first_codec(self.island.reduce).message_bytes(rows.row)
        return total

    @property
    def _fragments(self) -> range:
        return range(self.island.schedule.fragments)

    @cached_property
    def _host(self) -> HostOuter:
        return HostOuter(self.island)

    @cached_property
    def _reducers(self) -> list[NetworkReducer]:
        return [self._host.reducer(index) for index in self._fragments]


def island_costs(islands: IslandsConfig, method: Method, count: int | None) -> IslandTraffic | None:
    """Return the costs of an island; None for another method.

    - `count`: number of islands; None: the configured minimum, and at least two
    """
    if not isinstance(method, Island):
        return None
    members = count or max(MIN_MEMBERS, islands.min_members_to_start, islands.min_members)
    hosts = len({device.process_index for device in method.layout.mesh.devices.flat})
    return IslandTraffic(method, members, hosts, islands.lockstep)


def print_costs(island: dict[str, Any], console: Console) -> None:
    hidden = island["hidden_gbit_per_second"]
    rows = [
        ("sent in a round, at most", size(island["bytes_per_round"])),
        (f"sent in {island['period']} steps", size(island["bytes_per_period"])),
        ("outer parameters and optimizer, in host memory", size(island["host_bytes"])),
        ("a round, in host memory, at most", size(island["host_bytes_in_flight"])),
        ("error feedback, on a device", size(island["device_bytes"])),
        ("a round, on a device, at most", size(island["device_bytes_in_flight"])),
    ]
    rows.append(("no step waits from", "no link" if hidden is None else f"{hidden:.3g} Gbit/s"))
    hosts = f", {island['hosts']} hosts each" if island["hosts"] > 1 else ""
    print_table(console, f"One host of one of {island['members']} islands{hosts}", ("", ""), rows)
    rows = [
        (link, f"{each['round_seconds']:.3g} s", f"{each['utilisation']:.1%}") for link, each in island["links"].items()
    ]
    title = f"Rounds over a host's link, with steps of {island['step_seconds']:.3g} s (the roofline's)"
    print_table(console, title, ("Gbit/s each way", "longest round", "utilisation"), rows)
