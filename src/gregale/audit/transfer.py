"""Provides the record of a collective of the closed forms of traffic, and the bytes that a device sends for it."""

from dataclasses import dataclass
from math import prod

from gregale.codecs.formats import WireFormat


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


def bytes_by_part(held: WireFormat | None, values: int, width: int) -> dict[str, int]:
    """Return the bytes of values of a weight: of floats of a width, or of codes and of scales of at least this width.

    - `held`: the format of the weight's blocks; None: it is an array of floats
    """
    if held is None:
        return {"weights": values * width}
    return {"weights": values * held.bits // 8, "scales": values // held.block * max(held.scale_bits // 8, width)}


def sent_bytes(transfer: Transfer, sizes: dict[str, int]) -> float:
    """Return the bytes that one device sends for a transfer in a step, in a ring; of a permutation all."""
    if transfer.kind == "collective-permute":
        return transfer.bytes * transfer.times
    devices = prod(sizes[axis] for axis in transfer.axes)
    share = (devices - 1) / devices * (2 if transfer.kind == "all-reduce" else 1)
    return transfer.bytes * transfer.times * share
