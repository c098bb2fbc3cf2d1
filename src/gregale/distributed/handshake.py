"""What a process says of itself when it comes to process 0, and how both prove that they have the run's secret."""

from __future__ import annotations

import os
import socket
from typing import NamedTuple

from gregale.distributed.config import DistributedConfig
from gregale.distributed.signing import is_signed, sign

MOST_DIGITS = 10  # of a number of processes, or a pid


class JoinRequest(NamedTuple):
    """`join`, these words, and the proof of the secret, with a word that process 0 has drawn for this connection.

    - `word`: drawn by this process, for process 0's proof
    """

    number: int
    processes: int
    pid: int
    host: str
    nonce: str

    @staticmethod
    def of(config: DistributedConfig, word: str) -> JoinRequest:
        """This process's."""
        return JoinRequest(config.process, config.processes, os.getpid(), socket.gethostname(), word)

    def line(self, token: bytes, challenge: str) -> str:
        """What is said."""
        words = " ".join(map(str, self))
        return f"join {words} {sign(token, challenge.encode(), words.encode())}"

    @staticmethod
    def parse(line: str, token: bytes, challenge: str) -> tuple[JoinRequest, bool] | None:
        """What was said, and whether its proof is right; None if it is no greeting."""
        words = line.split()
        if len(words) != 7 or words[0] != "join" or not all(map(_is_number, words[1:4])):
            return None
        greeting = JoinRequest(int(words[1]), int(words[2]), int(words[3]), words[4], words[5])
        if greeting.number >= greeting.processes:
            return None
        return greeting, is_signed(token, words[6], challenge.encode(), " ".join(words[1:6]).encode())

    @property
    def name(self) -> str:
        return f"process {self.number} ({self.host}, pid {self.pid})"

    def answer(self, token: bytes, name: str) -> str:
        """Process 0's proof and name, for who has said this."""
        return f"{sign(token, self.nonce.encode(), name.encode())} {name}"

    def proved(self, token: bytes, answer: str) -> str | None:
        """Process 0's name; None if its proof is wrong."""
        proof, _, name = answer.partition(" ")
        return name if is_signed(token, proof, self.nonce.encode(), name.encode()) else None


def _is_number(word: str) -> bool:
    return word.isdecimal() and len(word) <= MOST_DIGITS  # Python refuses to read thousands of them
