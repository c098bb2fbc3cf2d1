"""Generation and evaluation on a CPU beside Hugging Face's transformers with PyTorch: tokens a second, one device.

    python benchmarks/generate.py [--peer PYTHON] [--threads 1 2] [--models quickstart 25m] [--rounds 9] [--json FILE]

With `--peer`, a Python that has torch and transformers (in an environment of its own), `transformers_generate.py` runs
in it on the same weights: `generate` with its cache, greedy and from the same prompt, and the loss of forward passes,
all with each number of threads. Before anything is timed, all sides have to continue the prompt by the same tokens and
to find the same loss. Then each round runs every side once, so that what else the machine does meets all of them alike;
figures are medians over rounds. What decoding takes is what a whole text takes less what its first token takes, in the
same round.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from itertools import repeat
from pathlib import Path
from typing import Any

os.environ["JAX_PLATFORMS"] = "cpu"

import grain
import jax
import numpy as np
from step import cpu_seconds, plain

from gregale.axes.layout import BATCH, make_mesh
from gregale.axes.parameters import parameter_count
from gregale.data.examples import Examples, make_example
from gregale.distributed.devices import keep_memory
from gregale.inference.generate import BLOCK, Generator, Prompt, Sampling
from gregale.model.execution import execution
from gregale.model.llama import Llama
from gregale.programs.runtime.build import set_up
from gregale.programs.runtime.evaluation import EvaluationText, Evaluator
from gregale.programs.runtime.sampler import unsplit
from gregale.programs.runtime.setup import Setup
from gregale.runs.config import TrainConfig
from gregale.runs.parsing import load

QUICKSTART = Path(__file__).parents[1] / "config" / "quickstart.yaml"
ONE_DEVICE = ["--mesh.replica=1", "--mesh.data=1", "--mesh.model=1", "--cpu_devices=1"]
MODELS = {
    "quickstart": ["--model.vocabulary=320"],
    "25m": [
        *["--model.vocabulary=4096", "--model.layers=8", "--model.hidden=512", "--model.heads=8"],
        *["--model.kv_heads=4", "--model.mlp=1408", "--batch.size=8"],
    ],
}
PROMPT, TOKENS, BATCHES = 128, 129, 4
WARM_UP_ROUNDS = 2
TOLERANCE = 1e-5  # of the loss


@dataclass(frozen=True)
class Case:
    """What all sides work on: a model, a prompt, and batches of text as arrays [batch, row, position] and examples."""

    setup: Setup
    model: Llama
    prompt: list[int]
    batches: dict[str, np.ndarray]
    examples: Examples


def case(name: str) -> Case:
    config = load(TrainConfig, QUICKSTART, [*ONE_DEVICE, *MODELS[name]])
    setup = set_up(config, config.model.vocabulary, make_mesh(config.mesh, jax.devices()[:1]))
    rows, length, vocabulary = config.batch.size, config.batch.sequence_length, setup.Vocab.size
    prompt = np.random.default_rng(1).integers(0, vocabulary, PROMPT).tolist()
    ids = np.random.default_rng(0).integers(0, vocabulary, (BATCHES * rows, length + 1), dtype=np.int32)
    source = grain.MapDataset.source([make_example(row, np.zeros(length + 1, int)) for row in ids])
    shape = BATCHES, rows, length
    batches = {"tokens": ids[:, :-1].reshape(shape), "targets": ids[:, 1:].reshape(shape)}
    return Case(setup, jax.jit(setup.init_model)(jax.random.key(0)), prompt, batches, Examples(source, length))


class Ours:
    """Gregale's side: what `gregale sample` and an evaluation run."""

    name = "gregale"

    def __init__(self, case: Case):
        run = execution(case.setup.config.compute, unsplit(case.setup.layout, BATCH), case.setup.config.model)
        vocabulary = case.setup.Vocab.size
        self._generator = Generator(replace(run, weights_ready=True), vocabulary, [vocabulary])  # no token ends a text
        self._apart = jax.jit(lambda model: run.gathered(model).unstacked())(case.model)
        self._model, self._prompt = case.model, case.prompt
        self._evaluate = Evaluator(case.setup, EvaluationText(case.examples), np.ones(vocabulary))

    def tokens(self, count: int) -> list[int]:
        prompts, greedy = [Prompt(self._prompt)], Sampling(temperature=0)
        blocks = self._generator.blocks(self._apart, prompts, count, greedy, repeat(BLOCK))
        return np.concatenate(list(blocks), axis=1)[0].tolist()

    def loss(self) -> float:
        return self._evaluate(self._model, None)["eval_loss"]

    def run(self, what: str) -> tuple[float, float]:
        """Seconds on the wall and of processors for the first token, for the text, or for the evaluation."""
        wall, cpu = time.perf_counter(), cpu_seconds()
        if what == "evaluate":
            self.loss()
        else:
            self.tokens(1 if what == "first" else TOKENS)
        return time.perf_counter() - wall, cpu_seconds() - cpu


class Peer:
    """`transformers_generate.py` in a process of its own, which answers every line with one."""

    def __init__(self, name: str, process: subprocess.Popen):
        self.name, self._process = name, process

    def ask(self, what: str) -> list[float]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(self.name.removeprefix("transformers "), what, file=self._process.stdin, flush=True)
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(f"benchmarks/transformers_generate.py ended early, exit code {self._process.wait()}.")
        return [float(word) for word in line.split()]

    def tokens(self, count: int) -> list[int]:
        return [int(token) for token in self.ask(f"tokens {count}")]

    def loss(self) -> float:
        return self.ask("loss")[0]

    def run(self, what: str) -> tuple[float, float]:
        wall_s, cpu_s = self.ask({"first": "time 1", "text": f"time {TOKENS}", "evaluate": "time loss"}[what])
        return wall_s, cpu_s


@contextmanager
def peers(python: str, threads: list[int], case: Case) -> Iterator[list[Peer]]:
    """The sides in transformers, one process for all."""
    c = case.setup.config.model
    shape = {
        "vocab_size": case.setup.Vocab.size,
        "hidden_size": c.hidden,
        "intermediate_size": c.mlp,
        "num_hidden_layers": c.layers,
        "num_attention_heads": c.heads,
        "num_key_value_heads": c.KvHeads.size,
        "head_dim": c.HeadSize.size,
        "rms_norm_eps": c.norm_epsilon,
        "rope_parameters": {"rope_type": "default", "rope_theta": c.rotary_base},
    }
    with tempfile.TemporaryDirectory() as folder:
        np.savez(Path(folder) / "data.npz", prompt=case.prompt, **case.batches, **plain(case.model))
        (Path(folder) / "config.json").write_text(json.dumps(shape))
        command = [python, str(Path(__file__).with_name("transformers_generate.py")), folder]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            print(process.stdout.readline().strip(), file=sys.stderr)
            ways = [f"transformers {way} {count}" for way in ("eager", "compile") for count in threads]
            yield [Peer(way, process) for way in ways]
            process.stdin.close()  # pyright: ignore


def check_agreement(sides: list) -> None:
    """All continue the prompt by the same tokens and find the same loss; else their times say nothing."""
    ours, *others = sides
    for other in others:
        np.testing.assert_array_equal(other.tokens(TOKENS), ours.tokens(TOKENS), err_msg=other.name)
        np.testing.assert_allclose(other.loss(), ours.loss(), rtol=TOLERANCE, err_msg=other.name)


def measure(name: str, rounds: int, peer: str | None, threads: list[int]) -> list[dict[str, Any]]:
    """A row for every side and phase of one model."""
    on = case(name)
    found: dict[str, dict[str, list]] = {}
    with peers(peer, threads, on) if peer else nullcontext([]) as others:
        sides = [Ours(on), *others]
        check_agreement(sides)
        for _ in range(WARM_UP_ROUNDS + rounds):
            for what in ("first", "text", "evaluate"):
                for side in sides:
                    found.setdefault(side.name, {}).setdefault(what, []).append(side.run(what))
    tokens = {"prefill": PROMPT, "decode": TOKENS - 1, "evaluate": on.batches["tokens"].size}
    rows = []
    for side, times in found.items():
        first, whole, evaluate = (np.asarray(times[what][WARM_UP_ROUNDS:]) for what in ("first", "text", "evaluate"))
        for phase, seconds in (("prefill", first), ("decode", whole - first), ("evaluate", evaluate)):
            wall_s, cpu_s = seconds.T
            rate = tokens[phase] / wall_s
            rows.append(
                {
                    "model": name,
                    "parameters": parameter_count(on.model),
                    "phase": phase,
                    "side": side,
                    "tokens_per_s": statistics.median(rate),
                    "quartiles": statistics.quantiles(rate, n=4)[::2],
                    "cpu_ms_per_token": statistics.median(cpu_s) / tokens[phase] * 1e3,
                }
            )
    return rows


def table(rows: list[dict[str, Any]]) -> str:
    """The rows as a table of Markdown; `ratio`: time to Gregale's of the same model and phase."""
    lines = [
        "| model | phase | side | tokens/s (quartiles) | ratio | CPU ms a token | ratio |",
        "|---|---|---|---|---|---|---|",
    ]
    ours = {(row["model"], row["phase"]): row for row in rows if row["side"] == Ours.name}
    for row in sorted(rows, key=lambda row: list(ours).index((row["model"], row["phase"]))):
        own = ours[row["model"], row["phase"]]
        low, high = row["quartiles"]
        slower = own["tokens_per_s"] / row["tokens_per_s"]
        dearer = row["cpu_ms_per_token"] / own["cpu_ms_per_token"]
        ratios = ["", ""] if row is own else [f"{slower:.2f}", f"{dearer:.2f}"]
        rate = f"{row['tokens_per_s']:,.0f} ({low:,.0f} - {high:,.0f})"
        cells = [*(row[key] for key in ("model", "phase", "side")), rate, ratios[0]]
        lines.append(f"| {' | '.join([*cells, format(row['cpu_ms_per_token'], '.4f'), ratios[1]])} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peer", metavar="PYTHON", help="a Python with torch and transformers")
    parser.add_argument("--threads", type=int, nargs="+", default=[1, os.cpu_count() or 1], help="of torch")
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=MODELS)
    parser.add_argument("--rounds", type=int, default=9, help="timed runs of every side")
    parser.add_argument("--json", help="also write the rows to this file")
    arguments = parser.parse_args()
    keep_memory()  # as `gregale sample` and `gregale eval` do
    rows = [
        row for name in arguments.models for row in measure(name, arguments.rounds, arguments.peer, arguments.threads)
    ]
    print(table(rows))
    if arguments.json:
        Path(arguments.json).write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
