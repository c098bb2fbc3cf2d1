"""The configuration of islands: the coordinator, the network and the timeouts."""

import re
import socket
from dataclasses import dataclass

from gregale.errors import KeyedError
from gregale.settings import Range, Settings, at_least, check_path, setting, shown, whole
from gregale.settings.rules import Rule

NETWORKS = ("lan", "wan")
SECONDS = Range(0, 86_400, above=True)
MAX_NAME = 64
LOCKSTEP = "all islands save after the same round, not by time. Give a number of steps."
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*")
_ADDRESS = re.compile(".+:[0-9]+")
_BIND = re.compile(r"[^\s:/]+(?::([0-9]{1,5}))?")


@dataclass(frozen=True)
class IslandsConfig(Settings):
    """The settings of an island, a training run at one site; DiLoCo (`sync`) joins islands over a network."""

    incompatible = (Rule("checkpoint.every & islands.lockstep", LOCKSTEP, "checkpoint.seconds"),)

    name: str | None = setting(None, "this island's unique name; null: the name of its host")
    lighthouse: str | list[str] | None = setting(
        None, "HOST:PORT of the coordinator (`gregale lighthouse`), or a list of several", aliases=("coordinator",)
    )
    token_file: str | None = setting(
        None, "file with the fleet's token, or with the key of this island's name; readable only by you"
    )
    bind: str = setting("127.0.0.1", "HOST or HOST:PORT to listen at; no port: any free port")
    address: str | None = setting(
        None,
        "HOST:PORT at which other islands reach this host, if another (behind NAT); outwards: they do not reach it; "
        "null: islands.bind",
    )
    min_members: int = setting(1, "islands that a round takes; with fewer all train on, apart", range=whole(1))
    min_members_to_start: int = setting(
        1, "islands that have to be there for a fleet to begin, anew or from checkpoints", range=whole(1)
    )
    lockstep: bool = setting(
        False, "wait for all islands in each round, so that all make the same steps: bit-identical runs"
    )
    outlier_factor: float = setting(
        10.0,
        "maximum ratio of a message's norm to the expected norm; a larger message contributes nothing",
        range=Range(1, 1e9, above=True),
    )
    network: str = setting("lan", "network that sets the default timeouts", choices=NETWORKS)
    heartbeat_seconds: float | None = setting(
        None, "time without a heartbeat before an island is removed; null: 2 on a lan, 10 on a wan", range=SECONDS
    )
    grace_seconds: float | None = setting(
        None,
        "maximum wait of a round for an island that is inside a step; null: estimated from the steps",
        range=at_least(0),
    )
    reduce_seconds: float | None = setting(
        None, "timeout of a round's transfer; null: 5 on a lan, 60 on a wan", range=SECONDS
    )
    heal_seconds: float | None = setting(
        None, "timeout of a joiner's transfer; null: 120 on a lan, 1800 on a wan", range=SECONDS
    )
    lease_steps: int | None = setting(
        None, "maximum number of steps without contact to the fleet; null: 4 sync.period", range=whole(1)
    )

    def __post_init__(self):
        super().__post_init__()
        if self.name is not None and (not _NAME.fullmatch(self.name) or len(self.name) > MAX_NAME):
            raise KeyedError(
                "name",
                f"is {shown(self.name)}",
                f"; it has at most {MAX_NAME} letters, digits, '.', '-' and '_', and begins with a letter or digit.",
            )
        addresses = self.coordinators
        is_wrong = not addresses or len(set(addresses)) < len(addresses)
        if self.lighthouse is not None and (is_wrong or not all(map(_ADDRESS.fullmatch, addresses))):
            raise KeyedError(
                "lighthouse",
                f"is {shown(self.lighthouse if isinstance(self.lighthouse, str) else ', '.join(addresses))}",
                "; it has to be HOST:PORT, for example 10.0.0.2:29510, or a list of different ones.",
            )
        is_unknown = self.bind.startswith("0.0.0.0") and self.address is None
        if not (bind := _BIND.fullmatch(self.bind)) or int(bind[1] or 0) >= 2**16 or is_unknown:
            raise KeyedError(
                "bind",
                f"is {shown(self.bind)}",
                "; it has to be HOST or HOST:PORT, an address at which the other islands reach this host, "
                "for example 10.8.0.2:29511. If they reach it elsewhere, set islands.address too.",
            )
        if self.address not in (None, "outwards") and not ((found := _BIND.fullmatch(self.address)) and found[1]):
            raise KeyedError(
                "address",
                f"is {shown(self.address)}",
                "; it has to be HOST:PORT, for example oslo.example.org:29511, or outwards if others do not reach it.",
            )
        if self.token_file is not None:
            check_path("token_file", self.token_file)

    @property
    def coordinators(self) -> tuple[str, ...]:
        """The addresses in `lighthouse`; on the command line a text with commas."""
        given = self.lighthouse or []
        addresses = given.strip("[]").split(",") if isinstance(given, str) else given
        return tuple(each.strip() for each in addresses)

    @property
    def own_name(self) -> str:
        return self.name or socket.gethostname()[:MAX_NAME]
