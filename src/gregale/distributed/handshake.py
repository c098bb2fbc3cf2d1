"""The join request that a process sends to process 0, and the mutual proof of the run's secret."""

import os
import socket
from typing import NamedTuple

from gregale.distributed.config import DistributedConfig
from gregale.distributed.signing import is_signed, sign

MAX_DIGITS = 10  # of a number of processes, or a pid


class JoinRequest(NamedTuple):
    """The fields of a join line: `join`, these fields, and a proof of the secret over process 0's challenge."""

    number: int
    processes: int
    pid: int
    host: str
    nonce: str  # random text of this process, for process 0's proof

    @staticmethod
    def of(config: DistributedConfig, nonce: str) -> "JoinRequest":
        """Return the request of this process."""
        return JoinRequest(config.process, config.processes, os.getpid(), socket.gethostname(), nonce)

    def line(self, token: bytes, challenge: str) -> str:
        fields = " ".join(map(str, self))
        return f"join {fields} {sign(token, challenge.encode(), fields.encode())}"

    @staticmethod
    def parse(line: str, token: bytes, challenge: str) -> "tuple[JoinRequest, bool] | None":
        """Return the request and whether its proof is valid; None if the line is no join line."""
        words = line.split()
        # Python rejects numbers of thousands of digits.
        numbers = [word for word in words[1:4] if word.isdecimal() and len(word) <= MAX_DIGITS]
        if len(words) != 7 or words[0] != "join" or len(numbers) != 3:
            return None
        request = JoinRequest(int(words[1]), int(words[2]), int(words[3]), words[4], words[5])
        if request.number >= request.processes:
            return None
        return request, is_signed(token, words[6], challenge.encode(), " ".join(words[1:6]).encode())

    @property
    def name(self) -> str:
        return f"process {self.number} ({self.host}, pid {self.pid})"

    def answer(self, token: bytes, name: str) -> str:
        """Return process 0's proof and name, the reply to this request."""
        return f"{sign(token, self.nonce.encode(), name.encode())} {name}"

    def proved(self, token: bytes, answer: str) -> str | None:
        """Return process 0's name from its reply; None if its proof is wrong."""
        proof, _, name = answer.partition(" ")
        return name if is_signed(token, proof, self.nonce.encode(), name.encode()) else None
