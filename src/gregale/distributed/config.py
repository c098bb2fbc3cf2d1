"""The configuration of the rendezvous, the heartbeats and the hang detection of a run on several hosts."""

import re
from dataclasses import dataclass

from gregale.errors import KeyedError
from gregale.settings import Settings, between, check_path, setting, shown, whole

AUTO = "auto"
_TIMEOUT = between(1, 86_400)


@dataclass(frozen=True)
class DistributedConfig(Settings):
    """The rendezvous and the timeouts of the processes of a run."""

    coordinator: str | None = setting(
        None, "HOST:PORT of process 0; auto: ask the cluster", aliases=("coordinator_address", "master_addr")
    )
    processes: int = setting(1, "number of processes", range=whole(1), aliases=("num_processes", "world_size"))
    process: int = setting(0, "this process's number, from 0", range=whole(0), aliases=("process_id", "rank"))
    join_seconds: float = setting(300.0, "maximum wait for all processes to join", range=_TIMEOUT)
    timeout_seconds: float = setting(60.0, "silence after which a process is lost", range=_TIMEOUT)
    hang_seconds: float | None = setting(600.0, "longest step; null: no limit", range=_TIMEOUT)
    token_file: str | None = setting(None, "file with the processes' secret; null: none")

    def __post_init__(self):
        super().__post_init__()
        if self.token_file is not None:
            check_path("token_file", self.token_file)
        if self.process >= self.processes:
            raise KeyedError(
                "process",
                f"is {self.process}",
                f"; the {self.processes} processes have the numbers 0 to {self.processes - 1}.",
            )
        if self.coordinator not in (None, AUTO) and not re.fullmatch(".+:[0-9]+", self.coordinator):
            raise KeyedError(
                "coordinator",
                f"is {shown(self.coordinator)}",
                f"; it has to be HOST:PORT, for example 10.0.0.2:8476, or {AUTO} where the cluster knows it.",
            )
