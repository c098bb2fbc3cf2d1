"""Losses by learning rate at several widths, with `model.parametrisation` and without.

    python benchmarks/rate_transfer.py losses.json --widths 64 128        # a process for some widths, added to the file
    python benchmarks/rate_transfer.py losses.json --figure transfer.svg  # draws with matplotlib what the file has

A Llama of two layers with heads of 32 channels learns the bytes of the interpreter's own Python library, 512 tokens a
step. Model, loss and AdamW are those of `gregale train` with the quickstart's other settings, in float32 on one device.
A loss is the mean of the last 20 steps. The updates are proportional to the peak rate, so it is an argument of one
compiled step.
"""

from __future__ import annotations

import argparse
import json
import sysconfig
from collections.abc import Callable
from functools import partial
from pathlib import Path

import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
from haliax import Axis

from gregale.model.losses import losses_of
from gregale.programs.runtime.build import set_up
from gregale.runs.config import TrainConfig
from gregale.runs.parsing import load

CONFIG = Path(__file__).parent.parent / "config" / "quickstart.yaml"
BASE, STEPS, LAST, ROWS, LENGTH = 64, 150, 20, 16, 32
KINDS = ("standard", "complete_p")


def configured(kind: str, width: int) -> TrainConfig:
    model = f"layers=2 hidden={width} heads={width // 32} kv_heads={width // 32} mlp={2 * width} init_scale=0.06"
    options = [f"--model.{each}" for each in model.split()]
    options += ["--cpu_devices=1", *(f"--mesh.{axis}=1" for axis in ("replica", "data", "model"))]
    options += [f"--batch.size={ROWS}", f"--batch.sequence_length={LENGTH}", "--batch.microbatches=1"]
    options += [f"--steps={STEPS}", "--optimizer.learning_rate=1"]
    own = [f"--model.parametrisation.base_hidden={BASE}"] if kind == "complete_p" else []
    return load(TrainConfig, CONFIG, [*options, *own])


def text() -> np.ndarray:
    """Return bytes of Python source, from files in the order of their names."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    return np.frombuffer(b"".join(path.read_bytes() for path in files)[:4_000_000], np.uint8)


def batches(data: np.ndarray, seed: int) -> list[dict[str, hax.NamedArray]]:
    axes = Axis("batch", ROWS), Axis("position", LENGTH)
    starts = np.random.default_rng(seed).integers(0, len(data) - LENGTH - 1, (STEPS, ROWS))
    windows = data[starts[..., None] + np.arange(LENGTH + 1)].astype(np.int32)
    positions = np.broadcast_to(np.arange(LENGTH), (ROWS, LENGTH))
    mask = np.ones((ROWS, LENGTH), np.float32)

    def one(rows: np.ndarray) -> dict[str, hax.NamedArray]:
        arrays = {"tokens": rows[:, :-1], "targets": rows[:, 1:], "loss_mask": mask, "positions": positions}
        return {name: hax.named(jnp.asarray(array), axes) for name, array in arrays.items()}

    return [one(rows) for rows in windows]


def trainer(kind: str, width: int) -> Callable[[int, float, list[dict[str, hax.NamedArray]]], float]:
    """Return a function of a seed, a peak rate and batches: the final loss. One program for all rates and seeds."""
    config = configured(kind, width)
    setup = set_up(config, 256)
    optimizer = config.build_optimizer(setup.model, setup.layout).whole()

    @partial(jax.jit, donate_argnums=(0, 1))
    def step(model, state, batch, rate):
        def mean(model):
            losses = losses_of(setup.psdp.loss(model, batch))
            return losses.loss / losses.weight

        loss, gradient = jax.value_and_grad(mean)(model)
        updates, state = optimizer.update(gradient, state, model)
        return jax.tree.map(lambda weight, update: weight + rate * update, model, updates), state, loss

    begin, init = jax.jit(setup.init_model), jax.jit(optimizer.init)

    def final(seed: int, rate: float, of_steps: list[dict[str, hax.NamedArray]]) -> float:
        model = begin(jax.random.key(seed))
        state, losses = init(model), []
        for batch in of_steps:
            model, state, loss = step(model, state, batch, jnp.float32(rate))
            losses.append(loss)
        return float(np.mean(losses[-LAST:]))

    return final


def measured(file: Path, widths: list[int], rates: list[float], seeds: list[int]) -> None:
    data = text()
    found = json.loads(file.read_text()) if file.is_file() else {}
    for width in widths:
        for kind in KINDS if width != BASE else KINDS[:1]:  # the base model is the same in both
            train = trainer(kind, width)
            for rate in rates:
                for seed in seeds:
                    key = f"{kind} {width} {rate:g} {seed}"
                    if key not in found:
                        found[key] = train(seed, rate, batches(data, seed))
                        file.write_text(json.dumps(found, indent=1))
                        print(key, f"{found[key]:.4f}", flush=True)


def by_rate(file: Path) -> dict[str, dict[int, dict[float, list[float]]]]:
    """Return the losses of all seeds by kind, width and rate."""
    found: dict[str, dict[int, dict[float, list[float]]]] = {kind: {} for kind in KINDS}
    for key, loss in json.loads(file.read_text()).items():
        kind, width, rate, _ = key.split()
        for each in KINDS if int(width) == BASE else (kind,):
            found[each].setdefault(int(width), {}).setdefault(float(rate), []).append(loss)
    return found


def table(file: Path) -> None:
    for kind, of_widths in by_rate(file).items():
        for width, losses in sorted(of_widths.items()):
            means = {rate: np.mean(each) for rate, each in sorted(losses.items())}
            best = min(means, key=lambda rate: means[rate])
            print(f"| {kind} | {width} | {best:g} | {' | '.join(f'{each:.3f}' for each in means.values())} |")


def draw(file: Path, path: Path) -> None:
    """Draw the mean losses of all seeds by rate, with their range, and mark the best rate of each width."""
    import matplotlib.pyplot as plt  # late, because only the figure needs it

    grey = ("text.color", "axes.edgecolor", "axes.labelcolor", "axes.titlecolor", "xtick.color", "ytick.color")
    plt.rcParams.update(dict.fromkeys(grey, "#808080"))
    plt.rcParams["svg.fonttype"] = "none"  # text stays text
    figure, all_axes = plt.subplots(1, 2, figsize=(7, 3), sharey=True, layout="constrained")
    for axes, (kind, of_widths) in zip(all_axes, by_rate(file).items(), strict=True):
        for number, (width, losses) in enumerate(sorted(of_widths.items())):
            rates = sorted(losses)
            means = [np.mean(losses[rate]) for rate in rates]
            low, high = ([reduce(losses[rate]) for rate in rates] for reduce in (min, max))
            axes.plot(rates, means, f"C{number}", label=str(width))
            axes.fill_between(rates, low, high, color=f"C{number}", alpha=0.2, linewidth=0)
            best = int(np.argmin(means))
            axes.plot(rates[best], means[best], f"C{number}o")
        axes.set(xscale="log", xlabel="peak learning rate", title=kind.replace("_", "-"))
        axes.grid(alpha=0.3)
    all_axes[0].set(ylabel="training loss, nats")
    all_axes[1].legend(frameon=False, title="width")
    figure.savefig(path, transparent=True, metadata={"Date": None})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path, help="JSON file of the losses")
    parser.add_argument("--widths", type=int, nargs="*", default=[])
    parser.add_argument("--rates", type=float, nargs="+", default=[2.0**-power for power in range(11, 5, -1)])
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--figure", type=Path, help="an SVG of the losses")
    options = parser.parse_args()
    measured(options.file, options.widths, options.rates, options.seeds)
    table(options.file)
    if options.figure:
        draw(options.file, options.figure)


if __name__ == "__main__":
    main()
