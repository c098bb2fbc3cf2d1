"""Provides the record of a collective of the closed forms of traffic."""

from dataclasses import dataclass


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
