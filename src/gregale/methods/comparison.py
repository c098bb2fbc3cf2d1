"""The methods to compare with a configuration's own, each with its settings or their defaults."""

from dataclasses import dataclass, replace

from gregale.cost.estimate import ParameterShape
from gregale.methods.config import DilocoConfig, MethodContext, StreamingDilocoConfig, SyncConfig
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
    own = sync.compared()
    period = next((each.period for each in own.values() if each is not None), DilocoConfig().period)
    default = StreamingDilocoConfig()
    fragments, delay = min(default.fragments, layers + (not only_layers), period), min(default.delay, period - 1)
    streaming = StreamingDilocoConfig(period=period, fragments=fragments, delay=delay)
    found: dict[str, DilocoConfig | None] = {
        "psdp": None,
        "diloco": DilocoConfig(period=period),
        "streaming": replace(streaming, delay=0),
        "streaming_overlap": streaming,
    }
    return {
        name: Compared(each, name in own and (each is None or each is sync)) for name, each in (found | own).items()
    }
