"""The message of the round under way: whether it is asked for, on its way or here. There is no other record of it."""

from __future__ import annotations

from gregale.islands.protocol.messages import MessageReady


class Handover:
    """Not due, then wanted, then on its way, then here; wanted once more when the message that is here is old.

    `member.Member` asks for the message and reads it; `trainer_side.TrainerSide` hands it over.

    - `due`: a message of this round was asked for
    - `own`: this island has made its steps for the round, and tells its peers that the round is due
    - `old`: since it handed its message over, it has made as many steps again: a new message has more in it
    - `starved`: the trainer makes no steps, because no data is leased to it
    - `snapshot`: the message that is here
    - `count`: messages handed over so far, in all rounds
    """

    def __init__(self) -> None:
        self.count, self.starved = 0, False
        self.forget()

    def forget(self) -> None:
        """Begins an interval in which nothing is due: the round is decided, or the state is another one."""
        self.due = self.own = self.old = self._is_on_its_way = False
        self.snapshot: MessageReady | None = None

    def want(self) -> None:
        """Asks for a message, in place of the one that is here."""
        self.due, self.old, self._is_on_its_way, self.snapshot = True, False, False, None

    def depart(self) -> int:
        """Takes note that the trainer has handed the message over; returns its number."""
        self.count += 1
        self._is_on_its_way, self.old, self.snapshot = True, False, None
        return self.count

    def arrive(self, snapshot: MessageReady) -> None:
        """Takes the message."""
        self._is_on_its_way, self.snapshot = False, snapshot

    @property
    def sent(self) -> bool:
        """Whether the trainer has handed the message over."""
        return self._is_on_its_way or self.snapshot is not None

    @property
    def wanted(self) -> bool:
        """Whether the trainer has to hand a message over."""
        return self.due and not self.sent

    @property
    def weighs_nothing(self) -> bool:
        """Whether the message is here and contributes nothing: the round does not depend on it."""
        return self.snapshot is not None and self.snapshot.weight == 0

    @property
    def said(self) -> bool:
        """Whether the trainer has already said that its steps are made: since its message, if it has sent one."""
        return self.old if self.sent else self.own
