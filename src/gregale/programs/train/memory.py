"""How much memory is in use."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any


def memory_in_use(devices: Sequence[Any]) -> dict[str, int]:
    """`host_memory_bytes`, and of the device that has most `device_memory_bytes` and `device_memory_peak_bytes`.

    Devices that count nothing (CPU) have none. Nothing is waited for.

    - `devices`: of this process
    """
    counted = [stats for device in devices if (stats := device.memory_stats())]
    figures = {"device_memory_bytes": "bytes_in_use", "device_memory_peak_bytes": "peak_bytes_in_use"}
    most = {name: max(stats.get(key, 0) for stats in counted) for name, key in figures.items() if counted}
    return {"host_memory_bytes": _resident(), **most}


def _resident() -> int:
    """Bytes of this process that are in memory."""
    return int(Path("/proc/self/statm").read_bytes().split()[1]) * os.sysconf("SC_PAGE_SIZE")
