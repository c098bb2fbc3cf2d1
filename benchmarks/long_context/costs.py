"""Processor time of a step with `mesh.context: 4` beside `mesh.data: 4`, at equal tokens, on four simulated devices.

    python benchmarks/long_context/costs.py [--lengths 2048 8192] [--rounds 7]

Each round runs both steps once. The times are medians over rounds.
"""

import argparse
import resource
from statistics import median

import haliax as hax
import jax
import numpy as np

from gregale.axes.layout import MeshConfig, make_mesh
from gregale.axes.parameters import position_order
from gregale.distributed.config import DistributedConfig
from gregale.distributed.devices import start_devices
from gregale.model.config import ComputeConfig
from gregale.model.llama import LlamaConfig
from gregale.optim import AdamWConfig, ConstantSchedule
from gregale.programs.runtime.build import set_up
from gregale.runs.config import BatchConfig, TrainConfig

DEVICES, VOCABULARY, WARM_UP_ROUNDS = 4, 1024, 1
MESHES = {"data": MeshConfig(data=DEVICES), "context": MeshConfig(context=DEVICES, data=1)}


class Side:
    """A step on a mesh, with its state and its batch."""

    def __init__(self, mesh: MeshConfig, length: int):
        config = TrainConfig(
            name="costs",
            steps=100,
            mesh=mesh,
            model=LlamaConfig(layers=4, hidden=256, heads=4, kv_heads=2, mlp=768),
            compute=ComputeConfig(dtype="float32", remat="none"),
            batch=BatchConfig(size=DEVICES, sequence_length=length),
            optimizer=AdamWConfig(learning_rate=1e-3, schedule=ConstantSchedule()),
        )
        setup = set_up(config, VOCABULARY, make_mesh(mesh))
        self._state, self._stepper, self._steps = setup.initial_state(), setup.stepper(), 0
        ids = np.random.default_rng(0).integers(0, VOCABULARY, (DEVICES, length + 1), dtype=np.int32)
        place = np.broadcast_to(np.arange(length, dtype=np.int32), (DEVICES, length))
        arrays = {
            "tokens": ids[:, :-1],
            "targets": ids[:, 1:],
            "loss_mask": np.ones((DEVICES, length), np.float32),
            "positions": place,
            "segment_ids": np.zeros_like(place),
        }
        order = position_order(length, setup.layout.context)
        batch = {name: hax.named(array[:, order], setup.batch_axes) for name, array in arrays.items()}
        self._batch = jax.device_put(batch, setup.layout.shardings(batch, setup.layout.compute))

    def cpu_s(self) -> float:
        """Run a step; return the processor time of all threads of this process, in seconds."""
        began, self._steps = cpu_seconds(), self._steps + 1
        self._state, report = self._stepper(self._state, self._batch, self._steps)
        jax.block_until_ready((self._state, report.metrics))
        return cpu_seconds() - began


def cpu_seconds() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", type=int, nargs="+", default=[2048, 4096, 8192])
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    start_devices(DEVICES, DistributedConfig())
    print(f"{'tokens of a sequence':>20} {'data s':>8} {'context s':>10} {'ratio':>6}")
    for length in options.lengths:
        sides = {name: Side(mesh, length) for name, mesh in MESHES.items()}
        rounds = [{name: side.cpu_s() for name, side in sides.items()} for _ in range(WARM_UP_ROUNDS + options.rounds)]
        data, context = (median(each[name] for each in rounds[WARM_UP_ROUNDS:]) for name in MESHES)
        print(f"{length:>20,} {data:>8.2f} {context:>10.2f} {context / data:>6.2f}", flush=True)


if __name__ == "__main__":
    main()
