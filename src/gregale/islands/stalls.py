"""Stall reports of an island: when its rounds stop, why, and when they continue."""

from __future__ import annotations

from collections.abc import Callable

from gregale.islands.protocol.headers import NO_ROUND, OuterRecord
from gregale.islands.protocol.member import Member
from gregale.islands.protocol.silence import Silence
from gregale.islands.protocol.trainer_side import TrainerSide


class Stalls:
    """The stall reports of one member.

    - `tell(text, stalled)`: receives a line; `stalled`: rounds have stopped, otherwise they continue
    """

    def __init__(self, member: Member, trainer: TrainerSide, tell: Callable[[str, bool], None]):
        self._member, self._trainer, self._tell = member, trainer, tell
        self._silence = Silence(member.timing)

    @property
    def line(self) -> str | None:
        """The last report while rounds have stopped; None otherwise."""
        return self._silence.line

    def look(self, now: float) -> None:
        """Report a stall if one is due at time `now`."""
        member = self._member
        is_due = member.handover.due or member.outer.round == NO_ROUND
        if not member.done and (text := self._silence.look(now, is_due, self._why)) is not None:
            self._tell(text, True)

    def went_on(self, now: float, outer: OuterRecord, is_healed: bool = False) -> None:
        """Note that a state was committed, or fetched from a peer."""
        if (text := self._silence.went_on(now, outer.round, is_healed)) is not None:
            self._tell(text, False)

    def _why(self) -> str:
        number = self._member.outer.round
        if number == NO_ROUND:
            return self._member.stall_reason() or "the fleet has not begun"
        made, needed = self._trainer.progress(number)
        why = self._member.stall_reason() or f"this island has made {made} of the {needed} steps of a round"
        return f"{why}; all data leased to this island is used" if self._member.handover.starved else why
