"""The network traffic of an island and its memory beside its steps, in closed form."""

from dataclasses import dataclass
from functools import cached_property
from math import prod

import jax

from gregale.audit.estimate import bytes_on_device
from gregale.axes.layout import with_shardings
from gregale.communication.network import WAVES_AHEAD, NetworkReducer
from gregale.methods.island import Island
from gregale.methods.island_outer import HostOuter

FLOAT32 = 4


@dataclass(frozen=True)
class IslandTraffic:
    """The traffic of one of several islands that all contribute; nothing is allocated.

    Values count the devices that this process addresses: those of one host in a plan that simulates one.
    """

    island: Island  # the method
    members: int  # R, islands

    def bytes_sent(self, index: int) -> int:
        """Return one host's most bytes sent (and received) in a round of a fragment: (R - 1) / R of each phase."""
        return max(self._reducers[index].bytes_sent(self.members, rank) for rank in range(self.members))

    def bytes_a_period(self) -> int:
        """Return the bytes that one host sends in H steps: each fragment once."""
        return sum(self.bytes_sent(index) for index in self._fragments)

    def seconds(self, index: int, bytes_per_second: float) -> float:
        """Return the time of a fragment's two phases over a host's link with this bandwidth each way."""
        return self.bytes_sent(index) / bytes_per_second

    def hiding_steps(self, number: int, lockstep: bool = False) -> int:
        """Return the number of steps between the send of round `number` and its island's wait for it.

        It is tau if tau = 0, or in lockstep. Otherwise it is the steps until the next round is due: an island applies a
        late round on arrival, and waits only at the next send.
        """
        schedule = self.island.schedule
        if lockstep or schedule.delay == 0:
            return schedule.delay
        return schedule.round_step(number + 1) - schedule.round_step(number)

    def period_seconds(self, step_seconds: float, bytes_per_second: float, lockstep: bool = False) -> float:
        """Return the time of H steps of `step_seconds` with their rounds, one at a time, over such a link:

        H s + sum_n max(0, seconds(fragment of n) - hiding_steps(n) s)
        """
        schedule, waited = self.island.schedule, 0.0
        for number in self._fragments:
            round_seconds = self.seconds(schedule.round_fragment(number), bytes_per_second)
            waited += max(0.0, round_seconds - self.hiding_steps(number, lockstep) * step_seconds)
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

    def _in_flight(self, index: int) -> int:
        reducer = self._reducers[index]
        phases = [[rows.count * size for size in reducer.row_bytes(key)] for key, rows in reducer.rows.items()]
        message, second = (sum(sizes) for sizes in zip(*phases, strict=True))
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
