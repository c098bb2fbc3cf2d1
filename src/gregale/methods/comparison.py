"""The methods to compare with a configuration's own, each with its settings or their defaults."""

from dataclasses import dataclass, replace

from gregale.audit.estimate import ParameterShape
from gregale.methods.config import DilocoConfig, MethodContext, PsdpConfig, StreamingDilocoConfig, SyncConfig
from gregale.methods.schedule import Schedule


@dataclass(frozen=True)
class Compared:
    """A method in a comparison."""

    sync: DilocoConfig | None  # its settings; None for PSDP
    configured: bool  # whether they are the configuration's own

    def schedule(self, layers: int) -> Schedule:
        """Return H, P and tau; PSDP joins everything in every step."""
        return Schedule(period=1, layers=layers) if self.sync is None else self.sync.schedule(layers)

    def bytes_a_step(self, parts: MethodContext, step: ParameterShape) -> tuple[float, float]:
        """Return a device's bytes over the slow axis for the parameters: average and maximum of a step.

        For PSDP too, the axis is the one that DiLoCo would join.
        """
        traffic = (self.sync or DilocoConfig()).diloco(parts).traffic(step)
        if self.sync is None:
            return traffic.bytes_if_every_step(), traffic.bytes_if_every_step()
        return traffic.bytes_a_step()


def compared(sync: SyncConfig, layers: int, only_layers: bool = False) -> dict[str, Compared]:
    """Return the methods by name. Settings outside the configuration have their defaults, as far as these are valid.

    If the configuration has a period, all methods use it.

    - `only_layers`: all parameters are in layers
    """
    period = sync.period if isinstance(sync, DilocoConfig) else DilocoConfig().period
    default = StreamingDilocoConfig()
    fragments, delay = min(default.fragments, layers + (not only_layers), period), min(default.delay, period - 1)
    streaming = StreamingDilocoConfig(period=period, fragments=fragments, delay=delay)
    found = {
        "psdp": Compared(None, isinstance(sync, PsdpConfig)),
        "diloco": Compared(DilocoConfig(period=period), False),
        "streaming": Compared(replace(streaming, delay=0), False),
        "streaming_overlap": Compared(streaming, False),
    }
    if isinstance(sync, StreamingDilocoConfig):
        overlapping = sync if sync.delay else replace(sync, delay=delay)
        return found | {
            "streaming": Compared(replace(sync, delay=0), not sync.delay),
            "streaming_overlap": Compared(overlapping, bool(sync.delay)),
        }
    return found | {"diloco": Compared(sync, True)} if isinstance(sync, DilocoConfig) else found
