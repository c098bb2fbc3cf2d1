"""The methods that a configuration's own is compared with, each with its settings or their defaults."""

from __future__ import annotations

from dataclasses import dataclass, replace

from gregale.audit.step import StepShape
from gregale.methods.config import DilocoConfig, MethodContext, StreamingDilocoConfig, SyncConfig
from gregale.methods.schedule import Schedule


@dataclass(frozen=True)
class Compared:
    """A method as it is compared.

    - `sync`: its settings; None for PSDP
    - `configured`: whether they are the configuration's own
    """

    sync: DilocoConfig | None
    configured: bool

    def schedule(self, layers: int) -> Schedule:
        """H, P and tau; PSDP joins everything in every step."""
        return Schedule(period=1, layers=layers) if self.sync is None else self.sync.schedule(layers)

    def bytes_a_step(self, parts: MethodContext, step: StepShape) -> tuple[float, float]:
        """What a device sends over the slow axis for the parameters, on average and in a step at most.

        The axis is the one that DiLoCo would join, for PSDP too.
        """
        traffic = (self.sync or DilocoConfig()).diloco(parts).traffic(step)
        if self.sync is None:
            return traffic.bytes_if_every_step(), traffic.bytes_if_every_step()
        return traffic.bytes_a_step()


def compared(sync: SyncConfig, layers: int) -> dict[str, Compared]:
    """The methods by name. What the configuration does not name has its defaults, as far as they are possible.

    Its period, if it has one, is everybody's.
    """
    period = sync.period if isinstance(sync, DilocoConfig) else DilocoConfig().period
    default = StreamingDilocoConfig()
    fragments, delay = min(default.fragments, layers + 1, period), min(default.delay, period - 1)
    streaming = StreamingDilocoConfig(period=period, fragments=fragments, delay=delay)
    found = {
        "psdp": Compared(None, not isinstance(sync, DilocoConfig)),
        "diloco": Compared(DilocoConfig(period=period), False),
        "streaming": Compared(replace(streaming, delay=0), False),
        "streaming_overlap": Compared(streaming, False),
    }
    if isinstance(sync, StreamingDilocoConfig) and sync.delay:
        return found | {
            "streaming": Compared(replace(sync, delay=0), False),
            "streaming_overlap": Compared(sync, True),
        }
    if isinstance(sync, StreamingDilocoConfig):
        return found | {
            "streaming": Compared(sync, True),
            "streaming_overlap": Compared(replace(sync, delay=delay), False),
        }
    return found | {"diloco": Compared(sync, True)} if isinstance(sync, DilocoConfig) else found
