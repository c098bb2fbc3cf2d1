"""How an island that has diverged begins again: from the outer parameters, with a peer's inner optimizer."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from gregale.islands.hands import Hands
from gregale.islands.protocol.headers import Peer


class Recovery:
    """Of one island.

    - `restart(inherits)`: has the trainer begin again, with the inner optimizer that was inherited, or its own
    - `in_thread`: does something slow
    """

    def __init__(
        self, worker: Hands, restart: Callable[[bool], None], in_thread: Callable[[Callable[[], None]], object]
    ):
        self._worker, self._restart, self._in_thread = worker, restart, in_thread
        self._has_inherited = False

    def contributed(self) -> None:
        """The island has contributed to a round: its message was like the others'."""
        self._has_inherited = False

    def begin(self, peers: Sequence[Peer]) -> None:
        """The island has diverged; `peers` have not.

        It inherits once only until it has contributed again: a copy costs the peer a moment.
        """
        self._restart(False)
        if peers and not self._has_inherited:
            self._has_inherited = True
            self._worker.wants_inner = True
            self._in_thread(lambda: self._inherit(peers))

    def _inherit(self, peers: Sequence[Peer]) -> None:
        self._worker.inherit(peers)
        if self._worker.takes_inner():
            self._restart(True)
