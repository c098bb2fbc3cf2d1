"""What an island sends over the network, and the memory that it takes beside its steps, in closed form."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from math import prod

import jax

from gregale.audit.memory import bytes_on_device
from gregale.axes.layout import with_shardings
from gregale.communication.network import WAVES_AHEAD, NetworkReducer
from gregale.methods.island import Island
from gregale.methods.island_outer import HostOuter

FLOAT32 = 4


@dataclass(frozen=True)
class IslandTraffic:
    """An island among others that all contribute; nothing is allocated.

    Figures are of the devices that this process addresses: of one host, where a plan simulates one.

    - `island`: the method
    - `members`: R, islands
    """

    island: Island
    members: int

    def bytes_sent(self, index: int) -> int:
        """Bytes that one host sends in a round of a fragment: of the member that sends most, (R - 1) / R of each leg.

        As many arrive.
        """
        return max(self._reducers[index].bytes_sent(self.members, rank) for rank in range(self.members))

    def bytes_a_period(self) -> int:
        """Bytes that one host sends in H steps: each fragment once."""
        return sum(self.bytes_sent(index) for index in self._fragments)

    def seconds(self, index: int, bytes_per_second: float) -> float:
        """A fragment's two legs over a link of a host that carries so much each way at the same time."""
        return self.bytes_sent(index) / bytes_per_second

    def hiding_steps(self, number: int, lockstep: bool = False) -> int:
        """Steps behind which round `number` is on its way before its island waits for it.

        With tau = 0, or in lockstep, tau. Else those until the next round is due: an island takes a late round where
        it arrives, and waits only where the next one would depart.
        """
        schedule = self.island.schedule
        if lockstep or schedule.delay == 0:
            return schedule.delay
        return schedule.round_step(number + 1) - schedule.round_step(number)

    def period_seconds(self, step_seconds: float, bytes_per_second: float, lockstep: bool = False) -> float:
        """What H steps of `step_seconds` take with their rounds, one at a time, over such a link:

        H s + sum_n max(0, seconds(fragment of n) - hiding_steps(n) s)
        """
        schedule, waited = self.island.schedule, 0.0
        for number in self._fragments:
            round_seconds = self.seconds(schedule.round_fragment(number), bytes_per_second)
            waited += max(0.0, round_seconds - self.hiding_steps(number, lockstep) * step_seconds)
        return schedule.period * step_seconds + waited

    def host_bytes(self) -> int:
        """What theta and the outer optimizer's state take of host memory between rounds."""
        return sum(part.size for part in self._host.parts)

    def host_bytes_in_flight(self) -> int:
        """The most that a round takes of host memory beside them.

        The fragment's next version, its message, its average in float32, and buffers of the buckets under way: those of
        the first phases from all others, and of the second phases of two waves.
        """
        return max(self._in_flight(index) for index in self._fragments)

    def device_bytes(self) -> int:
        """What a device holds between rounds beside PSDP's state: the first phase's error."""
        abstract = jax.eval_shape(self.island.init)
        return bytes_on_device(with_shardings(abstract.error, self.island.shardings(abstract).error))

    def device_bytes_in_flight(self) -> int:
        """The most that a round takes of a device's memory beside them: one fragment of theta and its message.

        While the round is under way the fragment's next error, and at its ends theta's fragment as `params` has it.
        """
        return max(self._on_device(index) for index in self._fragments)

    def _in_flight(self, index: int) -> int:
        reducer = self._reducers[index]
        legs = [[rows.count * size for size in reducer.row_bytes(key)] for key, rows in reducer.rows.items()]
        message, second = (sum(sizes) for sizes in zip(*legs, strict=True))
        values = sum(rows.count * rows.row for rows in reducer.rows.values())
        waves = -(-len(reducer.buckets(self.members)) // self.members)
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
