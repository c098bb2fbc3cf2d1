"""Gregale's training step beside a plain JAX one (`yardstick.py`): time, FLOPs and memory, on simulated CPU devices.

    python benchmarks/step.py [--devices 1 8] [--unroll 1 2 4] [--rounds 15] [--torch PYTHON] [--json FILE]

Every number of devices has a process of its own. There all steps are first shown to compute the same loss and
gradients; then all programs are compiled; then each round runs every program once, so that what else the machine does
meets all of them alike. The times are medians over rounds. With `--torch`, a Python that has PyTorch (`pip install
'.[bench]'`, or an environment of its own), the rounds on one device have two more rows: the step in plain PyTorch
(`torch_step.py`), eager and by `torch.compile`.

In the processes of JAX memory is kept between steps and XLA has the flags of `gregale train`, for Gregale and for the
yardstick.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
import optax
from haliax import Axis
from yardstick import Yardstick

from gregale.axes.layout import Layout, MeshConfig, make_mesh, standard_layout
from gregale.communication.reduce import ExactReducer, accumulate
from gregale.cost.hlo import parse, walk
from gregale.distributed.devices import THREADS_A_DEVICE, keep_memory, with_flags
from gregale.methods.psdp import Psdp
from gregale.model.config import ComputeConfig
from gregale.model.execution import Execution, execution
from gregale.model.llama import Llama, LlamaConfig
from gregale.optim import AdamWConfig, ConstantSchedule

MESHES = {1: MeshConfig(replica=1, data=1, model=1), 8: MeshConfig(replica=2, data=2, model=2)}
MODEL = LlamaConfig(layers=4, hidden=256, heads=4, mlp=1024, vocabulary=1024)
CLIP_NORM = 1.0
OPTIMIZER = AdamWConfig(learning_rate=1e-3, schedule=ConstantSchedule(), decay="all", clip_norm=CLIP_NORM)
Vocab, Batch, Position = Axis("vocab", 1024), Axis("batch", 16), Axis("position", 256)
WARM_UP_ROUNDS = 2
TOLERANCE = 1e-5


@dataclass
class Timed:
    """A step and how long each of its runs took."""

    name: str
    unroll: int | None
    wall_s: list[float] = field(default_factory=list, init=False)
    cpu_s: list[float] = field(default_factory=list, init=False)

    def row(self) -> dict[str, Any]:
        wall_s = self.wall_s[WARM_UP_ROUNDS:]
        first, _, third = statistics.quantiles(wall_s, n=4)
        return {
            "step": self.name,
            "unroll": self.unroll,
            "median_s": statistics.median(wall_s),
            "quartiles_s": [first, third],
            "median_cpu_s": statistics.median(self.cpu_s[WARM_UP_ROUNDS:]),
        }


@dataclass
class TorchSide(Timed):
    """A step of `torch_step.py`, which runs when it gets a line."""

    process: subprocess.Popen

    def run(self) -> None:
        assert self.process.stdin is not None
        print(self.name.removeprefix("torch "), file=self.process.stdin, flush=True)
        wall_s, cpu_s = said(self.process).split()
        self.wall_s.append(float(wall_s))
        self.cpu_s.append(float(cpu_s))


def said(process: subprocess.Popen) -> str:
    """The next line of a process's output; its own error message is on standard error."""
    assert process.stdout is not None
    line = process.stdout.readline()
    if not line:
        raise SystemExit(f"benchmarks/torch_step.py ended early, with exit code {process.wait()}.")
    return line.strip()


@dataclass
class Side(Timed):
    """A compiled step, `(state, *batch) -> (state, metrics)`, and what it works on."""

    compiled: Any
    state: Any
    batch: tuple

    def run(self) -> None:
        wall, cpu = time.perf_counter(), cpu_seconds()
        self.state, metrics = self.compiled(self.state, *self.batch)
        jax.block_until_ready((self.state, metrics))
        self.wall_s.append(time.perf_counter() - wall)
        self.cpu_s.append(cpu_seconds() - cpu)

    def row(self) -> dict[str, Any]:
        memory = self.compiled.memory_analysis()
        kept = memory.argument_size_in_bytes + memory.output_size_in_bytes - memory.alias_size_in_bytes
        return {
            **super().row(),
            "matmul_flops": matmul_flops(self.compiled.as_text()),
            "cost_analysis_flops": self.compiled.cost_analysis()["flops"],
            "peak_bytes": kept + memory.temp_size_in_bytes,
        }


def cpu_seconds() -> float:
    """Processor time of all threads of this process; unlike wall time it does not count waiting for a processor."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def matmul_flops(program: str) -> int:
    """FLOPs of all matrix products that one device runs, every turn of every loop counted.

    `cost_analysis()` counts the body of a loop once, so it cannot compare programs that are unrolled differently.
    """
    total = 0
    for site in walk(parse(program), {}):
        if site.instruction.opcode == "dot":
            left = site.frame.computation.operand_shapes(site.instruction)[0]
            contracted = re.findall(r"\d+", site.instruction.attribute(r"lhs_contracting_dims=\{([\d,]*)\}") or "")
            turns = math.prod(loop.times or 1 for loop in site.context.loops)
            products = math.prod(site.instruction.shapes[0].sizes) * math.prod(left.sizes[int(d)] for d in contracted)
            total += 2 * products * turns
    return total


def gregale_batch(layout: Layout) -> dict[str, hax.NamedArray]:
    ids = np.random.default_rng(0).integers(0, Vocab.size, (Batch.size, Position.size + 1), dtype=np.int32)
    arrays = {
        "tokens": ids[:, :-1],
        "targets": ids[:, 1:],
        "loss_mask": np.ones(ids[:, 1:].shape, np.float32),
        "positions": np.broadcast_to(np.arange(Position.size, dtype=np.int32), ids[:, 1:].shape),
    }
    batch = {name: hax.named(jnp.asarray(array), (Batch, Position)) for name, array in arrays.items()}
    return jax.device_put(batch, layout.shardings(batch, layout.compute))


def gregale_model() -> Llama:
    return Llama.init(MODEL, Vocab, jax.random.key(0))


def gregale_execution(layout: Layout, unroll: int) -> Execution:
    return execution(ComputeConfig(dtype="float32", remat="none", unroll=unroll), layout, MODEL)


def gregale_step(layout: Layout, unroll: int) -> Psdp:
    model, how = gregale_model(), gregale_execution(layout, unroll)
    optimizer = OPTIMIZER.build(eqx.filter(model, eqx.is_inexact_array), steps=1000)
    return Psdp(model, lambda model, batch: model.loss(batch, how), optimizer, layout)


def yardstick_step(layout: Layout, unroll: int) -> Yardstick:
    c = OPTIMIZER
    adamw = optax.adamw(c.learning_rate, *c.betas, eps=c.epsilon, weight_decay=c.weight_decay)
    return Yardstick(layout.mesh, optax.chain(optax.clip_by_global_norm(CLIP_NORM), adamw), unroll)


def plain(model: Llama) -> dict[str, jax.Array]:
    """Gregale's parameters as the dictionary that the yardstick works on."""
    attention, mlp = model.blocks.attention, model.blocks.mlp
    named = {
        "embedding": model.embedding,
        "attention_norm": model.blocks.attention_norm.weight,
        "query": attention.query.weight,
        "key": attention.key.weight,
        "value": attention.value.weight,
        "out": attention.out.weight,
        "mlp_norm": model.blocks.mlp_norm.weight,
        "gate": mlp.gate.weight,
        "up": mlp.up.weight,
        "down": mlp.down.weight,
        "norm": model.norm.weight,
        "head": model.head,
    }
    return {name: leaf.array for name, leaf in named.items()}


def gregale_side(layout: Layout, unroll: int) -> Side:
    psdp, batch = gregale_step(layout, unroll), gregale_batch(layout)
    state = jax.jit(psdp.init)()
    compiled = jax.jit(psdp.step, donate_argnums=0).lower(state, batch).compile()
    return Side("gregale", unroll, compiled, state, (batch,))


def yardstick_side(layout: Layout, unroll: int) -> Side:
    yardstick, batch = yardstick_step(layout, unroll), gregale_batch(layout)
    state = jax.jit(yardstick.init)(plain(gregale_model()))
    tokens = batch["tokens"].array, batch["targets"].array
    compiled = jax.jit(yardstick.step, donate_argnums=0).lower(state, *tokens).compile()
    return Side("yardstick", unroll, compiled, state, tokens)


def check_agreement(layout: Layout) -> dict[str, np.ndarray]:
    """Both steps have the same loss and gradients from the same parameters; else their times say nothing.

    Each gradient may differ by `TOLERANCE` of its largest value. Returns what another process needs to compare with.
    """
    how, yardstick, batch = gregale_execution(layout, 1), yardstick_step(layout, 1), gregale_batch(layout)

    @jax.jit
    def gregale(model, batch):
        sums = accumulate(lambda model, batch: model.loss(batch, how), model, batch, layout, 1, lambda model: model)
        reducer = ExactReducer(layout)
        weight, loss = reducer.totals(sums.weight, sums.loss)
        return reducer.reduce(sums.gradients, weight, None)[0], loss / weight

    model = gregale_model()
    ours, our_loss = gregale(layout.constrain(model, layout.params), batch)
    parameters, _ = jax.jit(yardstick.init)(plain(model))
    tokens = batch["tokens"].array, batch["targets"].array
    loss, gradients = jax.jit(jax.value_and_grad(yardstick.loss))(parameters, *tokens)
    np.testing.assert_allclose(our_loss, loss, rtol=TOLERANCE)
    for name, gradient in plain(ours).items():
        scale = np.abs(gradients[name]).max()
        np.testing.assert_allclose(gradient, gradients[name], rtol=0, atol=TOLERANCE * scale, err_msg=name)
    c = OPTIMIZER
    facts = {
        "settings": [c.learning_rate, *c.betas, c.epsilon, c.weight_decay, CLIP_NORM],
        "tokens": tokens[0],
        "targets": tokens[1],
        "loss": loss,
        **parameters,
        **{f"gradient_{name}": gradient for name, gradient in gradients.items()},
    }
    return {name: np.asarray(fact) for name, fact in facts.items()}


@contextmanager
def torch_sides(python: str, facts: dict[str, np.ndarray]) -> Iterator[list[Timed]]:
    """The steps in PyTorch, in a process of their own, found to agree and ready to run."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "facts.npz")
        np.savez(path, **facts)
        command = [python, str(Path(__file__).with_name("torch_step.py")), str(path)]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
            print(f"torch {said(process)}", file=sys.stderr)
            yield [TorchSide(f"torch {way}", None, process) for way in ("eager", "compile")]
            assert process.stdin is not None
            process.stdin.close()


def measure(devices: int, unrolls: list[int], rounds: int, torch: str | None) -> list[dict[str, Any]]:
    """A row for each step and unrolling, on as many devices as this process has; PyTorch's on one."""
    layout = standard_layout(make_mesh(MESHES[devices]))
    facts = check_agreement(layout)
    sides: list[Timed] = [make(layout, unroll) for unroll in unrolls for make in (gregale_side, yardstick_side)]
    with torch_sides(torch, facts) if torch and devices == 1 else nullcontext([]) as others:
        sides += others
        for _ in range(WARM_UP_ROUNDS + rounds):
            for side in sides:
                side.run()
    return [{"devices": devices, **side.row()} for side in sides]


def measure_in_process(devices: int, arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """`measure` in a new process: the number of simulated devices is fixed when JAX starts."""
    flags = with_flags(f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={devices}", devices)
    threads = {"PJRT_NPROC": str(THREADS_A_DEVICE * devices)} if devices > 1 else {}
    environment = {**threads, **os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags}
    command = [sys.executable, __file__, "--worker", "--devices", str(devices), "--rounds", str(arguments.rounds)]
    command += ["--unroll", *(str(unroll) for unroll in arguments.unroll)]
    command += ["--torch", arguments.torch] if arguments.torch else []
    finished = subprocess.run(command, env=environment, stdout=subprocess.PIPE, check=True, text=True)
    return json.loads(finished.stdout)


def table(rows: list[dict[str, Any]]) -> str:
    """The rows as text; `ratio`: to the yardstick of the same devices and unrolling, of PyTorch to the last one."""
    head = (
        "devices",
        "unroll",
        "step",
        "median s",
        "quartiles s",
        "ratio",
        "cpu s",
        "ratio",
        "matmul GFLOP",
        "peak MB",
    )
    lines = ["{:>7} {:>6} {:>13} {:>9} {:>15} {:>6} {:>7} {:>6} {:>13} {:>8}".format(*head)]
    yardsticks = {}
    for row in rows:
        if row["step"] == "yardstick":
            yardsticks[row["devices"], row["unroll"]] = yardsticks[row["devices"], None] = row
    for row in rows:
        yardstick = yardsticks[row["devices"], row["unroll"]]
        compiled = "matmul_flops" in row
        flops = f"{row['matmul_flops'] / 1e9:.3f}" if compiled else "-"
        peak = f"{row['peak_bytes'] / 1e6:.1f}" if compiled else "-"
        quartiles = " - ".join(f"{s:.3f}" for s in row["quartiles_s"])
        lines.append(
            f"{row['devices']:>7} {row['unroll'] or '-':>6} {row['step']:>13} {row['median_s']:>9.3f} {quartiles:>15} "
            f"{row['median_s'] / yardstick['median_s']:>6.3f} {row['median_cpu_s']:>7.3f} "
            f"{row['median_cpu_s'] / yardstick['median_cpu_s']:>6.3f} {flops:>13} {peak:>8}"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--devices", type=int, nargs="+", default=[1, 8], choices=MESHES, help="simulated CPU devices")
    parser.add_argument("--unroll", type=int, nargs="+", default=[1, 2, 4], help="layers unrolled in the layer scan")
    parser.add_argument("--rounds", type=int, default=15, help="timed runs of every program")
    parser.add_argument("--torch", metavar="PYTHON", help="a Python with PyTorch: also time the step written in it")
    parser.add_argument("--json", help="also write the rows to this file")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        keep_memory()
        print(json.dumps(measure(arguments.devices[0], arguments.unroll, arguments.rounds, arguments.torch)))
        return
    rows = [row for devices in arguments.devices for row in measure_in_process(devices, arguments)]
    print(table(rows))
    if arguments.json:
        with open(arguments.json, "w") as file:
            json.dump(rows, file, indent=1)


if __name__ == "__main__":
    main()
