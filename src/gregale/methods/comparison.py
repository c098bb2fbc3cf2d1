"""The methods to compare with a configuration's own, each with its settings or their defaults."""

from dataclasses import dataclass, replace

from gregale.axes.parameters import trainable
from gregale.methods.config import DilocoConfig, MethodContext, StreamingDilocoConfig, SyncConfig
from gregale.methods.schedule import Schedule
from gregale.methods.traffic import Traffic


@dataclass(frozen=True)
class Compared:
    """A method in a comparison."""

    sync: DilocoConfig | None  # its settings; None for PSDP
    configured: bool  # whether they are the configuration's own

    def schedule(self, layers: int) -> Schedule:
        """Return H, P and tau; PSDP joins everything in every step."""
        return Schedule(period=1, layers=layers) if self.sync is None else self.sync.schedule(layers)

    def traffic(self, parts: MethodContext) -> Traffic:
        """Return the traffic over the slow axis; for PSDP too, that is the axis that DiLoCo would join."""
        method = (self.sync or DilocoConfig()).diloco(parts)
        if self.sync is None:
            return Traffic.of_every_step(method.outer_store.reducer, trainable(method.inner.model))
        return method.traffic()


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
