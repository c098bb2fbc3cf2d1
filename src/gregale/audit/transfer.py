"""Provides the record of a collective of the closed forms of traffic, and the bytes that a device sends for it."""

from dataclasses import dataclass
from math import prod


@dataclass(frozen=True)
class Transfer:
    """A collective, or several equal ones, of a step.

    - `purpose`: name of the payload.
    - `kind`: the collective's name in the audit.
    - `axes`: mesh axes that it crosses, in mesh order.
    - `bytes`: payload on one device for one execution.
    - `times`: executions in one step.
    """

    purpose: str
    kind: str
    axes: tuple[str, ...]
    bytes: int
    times: int = 1


def sent_bytes(transfer: Transfer, sizes: dict[str, int]) -> float:
    """Return the bytes that one device sends for a transfer in a step, in a ring; of a permutation all."""
    if transfer.kind == "collective-permute":
        return transfer.bytes * transfer.times
    devices = prod(sizes[axis] for axis in transfer.axes)
    share = (devices - 1) / devices * (2 if transfer.kind == "all-reduce" else 1)
    return transfer.bytes * transfer.times * share
