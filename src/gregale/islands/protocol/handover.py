"""The state of the current round's message: not due, wanted, on its way, or available."""

from gregale.islands.protocol.messages import MessageReady


class Handover:
    """Not due, then wanted, then on its way, then available; wanted again when the available message is old.

    `member.Member` requests and reads the message; `trainer_side.TrainerSide` hands it over.

    - `due`: a message of this round was requested
    - `own`: this island has made its steps for the round, and announces to its peers that the round is due
    - `old`: the island has made another round of steps since the handover, so a new message contains more
    - `starved`: the trainer makes no steps, because no data is leased to it
    - `snapshot`: the available message
    - `count`: the number of the newest message, in all rounds; another number once that message is obsolete
    """

    def __init__(self) -> None:
        self.count, self.starved = 0, False
        self.forget()

    def forget(self) -> None:
        """Begin an interval in which nothing is due: the round is decided, or the state was replaced."""
        self.due = self.own = self.old = self._is_on_its_way = False
        self.snapshot: MessageReady | None = None

    def state_replaced(self) -> None:
        """Make a message on its way obsolete: it changes a state that this island no longer has."""
        self.forget()
        self.count += 1

    def want(self) -> None:
        """Request a message, replacing the available one."""
        self.due, self.old, self._is_on_its_way, self.snapshot = True, False, False, None

    def depart(self) -> int:
        """Note that the trainer has handed the message over; return its number."""
        self.count += 1
        self._is_on_its_way, self.old, self.snapshot = True, False, None
        return self.count

    def arrive(self, snapshot: MessageReady) -> None:
        self._is_on_its_way, self.snapshot = False, snapshot

    @property
    def sent(self) -> bool:
        """Whether the trainer has handed the message over."""
        return self._is_on_its_way or self.snapshot is not None

    @property
    def wanted(self) -> bool:
        """Whether the trainer must hand a message over."""
        return self.due and not self.sent

    @property
    def weighs_nothing(self) -> bool:
        """Whether the available message contributes nothing, so that the round does not depend on it."""
        return self.snapshot is not None and self.snapshot.weight == 0

    @property
    def announced(self) -> bool:
        """Whether the trainer has announced its steps: those since its message, if it has sent one."""
        return self.old if self.sent else self.own
