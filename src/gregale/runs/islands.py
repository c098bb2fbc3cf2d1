"""The configuration of islands: how sites that train apart find one another, and how long they wait for whom."""

from __future__ import annotations

import re
import socket
from dataclasses import dataclass, field
from typing import ClassVar

from gregale.errors import KeyedError
from gregale.settings import Range, RemovedKey, Settings, at_least, check_path, shown, whole

NETWORKS = ("lan", "wan")
SECONDS = Range(0, 86_400, above=True)
MOST_NAME = 64
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*")
_BIND = re.compile(r"[^\s:/]+(?::(\d{1,5}))?")


@dataclass(frozen=True)
class IslandsConfig(Settings):
    """Islands: runs that are joined by DiLoCo (`sync`) over a network, and may come, go and die while they train."""

    renamed_keys: ClassVar = {"minimum": "min_members", "start": "min_members_to_start"}

    name: str | None = field(
        default=None, metadata={"help": "this island's name, one of its own; null: the name of its host"}
    )
    lighthouse: str | None = field(
        default=None,
        metadata={"help": "HOST:PORT of the coordinator (`gregale lighthouse`)", "aliases": ("coordinator",)},
    )
    token_file: str | None = field(
        default=None, metadata={"help": "file with the fleet's secret, the same on all islands, readable by you alone"}
    )
    bind: str = field(
        default="127.0.0.1",
        metadata={"help": "HOST or HOST:PORT at which the other islands reach this host; no port: any that is free"},
    )
    min_members: int = field(
        default=1, metadata={"help": "islands that a round takes; with fewer all train on, apart", "range": whole(1)}
    )
    min_members_to_start: int = field(
        default=1,
        metadata={
            "help": "islands that have to be there for a fleet to begin, anew or from checkpoints",
            "range": whole(1),
        },
    )
    lockstep: bool = field(
        default=False,
        metadata={"help": "make exactly the same steps between rounds, and wait for all: the same to the last bit"},
    )
    outlier_factor: float = field(
        default=10.0,
        metadata={
            "help": "a message whose norm is more than so many times what is expected of it contributes nothing",
            "range": Range(1, 1e9, above=True),
        },
    )
    network: str = field(default="lan", metadata={"help": "what the seconds below are by default", "choices": NETWORKS})
    heartbeat_seconds: float | None = field(
        default=None,
        metadata={"help": "silence after which an island is out; null: 2 on a lan, 10 on a wan", "range": SECONDS},
    )
    grace_seconds: float | None = field(
        default=None,
        metadata={
            "help": "how long a round waits for an island in the middle of a step; null: learned from the steps",
            "range": at_least(0),
        },
    )
    reduce_seconds: float | None = field(
        default=None, metadata={"help": "for one round's transfers; null: 5 on a lan, 60 on a wan", "range": SECONDS}
    )
    heal_seconds: float | None = field(
        default=None,
        metadata={"help": "for a joiner's transfer; null: 120 on a lan, 1800 on a wan", "range": SECONDS},
    )
    lease_steps: int | None = field(
        default=None,
        metadata={
            "help": "steps that an island can make without hearing of the fleet; null: 4 sync.period",
            "range": whole(1),
        },
    )

    removed_keys: ClassVar = {
        "outer_memory": RemovedKey(
            "host", "outer parameters and their optimizer's state are always in this host's memory"
        )
    }

    def __post_init__(self):
        super().__post_init__()
        if self.name is not None and (not _NAME.fullmatch(self.name) or len(self.name) > MOST_NAME):
            raise KeyedError(
                "name",
                f"is {shown(self.name)}",
                f"; it has at most {MOST_NAME} letters, digits, '.', '-' and '_', and begins with a letter or digit.",
            )
        if self.lighthouse is not None and not self.lighthouse.rpartition(":")[2].isdecimal():
            raise KeyedError(
                "lighthouse", f"is {shown(self.lighthouse)}", "; it has to be HOST:PORT, for example 10.0.0.2:29510."
            )
        if not (bind := _BIND.fullmatch(self.bind)) or int(bind[1] or 0) >= 2**16 or self.bind.startswith("0.0.0.0"):
            raise KeyedError(
                "bind",
                f"is {shown(self.bind)}",
                "; it has to be HOST or HOST:PORT, an address at which the other islands reach this host, "
                "for example 10.8.0.2:29511.",
            )
        if self.token_file is not None:
            check_path("token_file", self.token_file)

    @property
    def own_name(self) -> str:
        """This island's name."""
        return self.name or socket.gethostname()[:MOST_NAME]
