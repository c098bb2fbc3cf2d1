"""A run that takes seconds: a small text, a small model, and ways to start it and to look at what it left."""

import copy
import json
import os
import random
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import chdir, contextmanager
from pathlib import Path
from threading import current_thread
from types import MappingProxyType
from typing import Any

import haliax as hax
import jax
import numpy as np
import yaml

from gregale.checkpoint.manifest import committed_steps, folder_name, root_of
from gregale.checkpoint.store import Checkpoints
from gregale.cli import main
from gregale.storage import StoragePath
from tests.forked import Popen

WORDS = ["a", "the", "wind", "sea", "north", "east", "gale", "island", "replica", "shard", "step", "loss", "mesh"]

CONFIG: dict[str, Any] = {
    "name": "tiny",
    "steps": 12,
    "mesh": {"replica": 2, "data": 2, "model": 2},
    "model": {"type": "llama", "layers": 1, "hidden": 32, "heads": 2, "kv_heads": 2, "mlp": 64},
    "compute": {"dtype": "float32", "remat": "none"},
    "data": {"sources": {"words": {"type": "text", "files": ["text/*.txt"]}}, "held_out": 0.2, "workers": 1},
    "batch": {"size": 8, "sequence_length": 32, "microbatches": 2},
    "optimizer": {"type": "adamw", "learning_rate": 0.01, "schedule": {"type": "cosine", "warmup": 3}},
    "checkpoint": {"every": 4},
}

FAST_TO_COMPILE = (
    "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true --xla_cpu_use_fusion_emitters=false"
    " --xla_cpu_parallel_codegen_split_count=1"
)
EVALUATE = ["--evaluation.every", "6"]

# Options that make the quickstart quick to compile, without its number of layers.
SMALL_QUICKSTART = [
    "--model.hidden=64",
    "--model.mlp=128",
    "--batch.sequence_length=32",
    "--batch.size=16",
    "--batch.microbatches=2",
    "--compute.unroll=1",
    "--compute.remat=full",
]


def write_inputs(folder: Path) -> Path:
    """A few text files and `tiny.yaml` in a folder; returns the folder."""
    source = random.Random(0)
    (folder / "text").mkdir(parents=True)
    for number in range(8):
        text = " ".join(source.choice(WORDS) for _ in range(200 + number))
        (folder / "text" / f"{number}.txt").write_text(text)
    write_config(folder)
    return folder


def write_config(folder: Path, name: str = "tiny.yaml", **changes: Any) -> Path:
    """Writes CONFIG with changes, given as `optimizer__learning_rate=1.0`."""
    config = copy.deepcopy(CONFIG)
    for key, value in changes.items():
        *path, last = key.split("__")
        node = config
        for part in path:
            node = node[part]
        node[last] = value
    (folder / name).write_text(yaml.safe_dump(config))
    return folder / name


def write_further(folder: Path, imported: Path) -> None:
    """`on.yaml`: two further steps of an imported model, on a mesh and in float32."""
    config = yaml.safe_load((imported / "config.yaml").read_text())
    changes = {"mesh": {"replica": 2, "data": 4}, "optimizer": {"type": "adamw", "learning_rate": 0.001}}
    changes |= {"model": config["model"], "data__tokenizer": config["data"]["tokenizer"], "batch__microbatches": 1}
    write_config(folder, "on.yaml", steps=2, **changes)


def start_train(folder: Path, *arguments: str) -> subprocess.Popen:
    """`python -m gregale train tiny.yaml ...` in a process of its own."""
    return start(folder, "train", "tiny.yaml", *arguments)


def start(
    folder: Path, *words: str, flags: str = FAST_TO_COMPILE, variables: Mapping[str, str] = MappingProxyType({})
) -> subprocess.Popen:
    """`python -m gregale WORDS` in a process of its own; `variables`: of its environment."""
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags, **variables}
    command = [sys.executable, "-m", "gregale", *words]
    return Popen(command, cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def finished(process: subprocess.Popen) -> tuple[int, str, str]:
    """Exit code, standard output and standard error of a process, when it has ended."""
    out, err = process.communicate(timeout=300)
    return process.returncode, out, err


def lines(run: StoragePath) -> list[dict[str, Any]]:
    """The whole lines of metrics.jsonl, if it is there."""
    path = run / "metrics.jsonl"
    text = path.read_text() if path.exists() else ""
    return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]


def losses(run: StoragePath) -> list[tuple[int, float]]:
    return [(line["step"], line["loss"]) for line in lines(run) if "loss" in line]


def trained(folder: Path, config: str, name: str, *arguments: str) -> Path:
    """The directory of a run that is trained in this process."""
    with chdir(folder):
        assert main(["train", config, "--name", name, *arguments]) == 0
    return folder / "runs" / name


@contextmanager
def compilations() -> Iterator[list[tuple[str, str]]]:
    """The programs that are compiled meanwhile, with the names of their threads."""
    found: list[tuple[str, str]] = []

    def listen(event: str, _: float, **about: str | int) -> None:
        if event.endswith("backend_compile_duration"):
            found.append((str(about["fun_name"]), current_thread().name))

    jax.monitoring.register_event_duration_secs_listener(listen)
    yield found
    jax.monitoring.unregister_event_duration_listener(listen)


def again(run: Path) -> list[str]:
    """The command of the undisturbed run once more, for a copy of it."""
    return ["train", "tiny.yaml", "--name", run.name, "--runs", str(run.parent), *EVALUATE]


def content(folder: Path) -> dict[Path, bytes]:
    """The files below a folder."""
    return {path.relative_to(folder): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def checkpoint_steps(run: StoragePath) -> list[int]:
    return committed_steps(run / "checkpoints")


def saved_state(run: StoragePath, step: int) -> dict[str, np.ndarray]:
    """Every array of a checkpoint by its name: parameters, optimizer state and counters."""
    with Checkpoints(run / "checkpoints") as checkpoints:
        return state_of(checkpoints, step)


def state_of(checkpoints: Checkpoints, step: int) -> dict[str, np.ndarray]:
    leaves = json.loads((root_of(checkpoints._directory / folder_name(step)) / "leaves.json").read_bytes())
    one_device = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    template = {}
    for name, leaf in leaves.items():
        struct = jax.ShapeDtypeStruct(tuple(leaf["shape"]), leaf["dtype"], sharding=one_device)
        template[name] = struct if leaf["axes"] is None else hax.NamedArray(struct, tuple(leaf["axes"]))
    tree = checkpoints.restore(step, template).tree
    return {name: np.asarray(getattr(leaf, "array", leaf)) for name, leaf in tree.items()}


def assert_same_state(run: StoragePath, other: StoragePath, step: int) -> None:
    """Two checkpoints agree in every bit."""
    found, expected = saved_state(run, step), saved_state(other, step)
    assert found.keys() == expected.keys()
    assert any("parameters" in name for name in found)
    assert any("sharded" in name for name in found), "the optimizer's state is compared too"
    for name, array in found.items():
        assert array.dtype == expected[name].dtype, name
        assert array.tobytes() == expected[name].tobytes(), name


def killed(run: Path, left: Path, step: int) -> Path:
    """What a kill after the checkpoint of a step leaves of a run, as a copy; later lines of its files stay."""
    shutil.copytree(run, left)
    for later in checkpoint_steps(left):
        if later > step:
            shutil.rmtree(left / "checkpoints" / folder_name(later))
    return left


def damage(run: Path, step: int, how: str) -> None:
    """Cuts the largest file of a checkpoint short, or turns over one of its bits."""
    files = [path for path in (run / "checkpoints" / folder_name(step)).rglob("*") if path.is_file()]
    largest = max(files, key=lambda path: path.stat().st_size)
    content = bytearray(largest.read_bytes())
    if how == "truncated":
        content = content[: len(content) // 2]
    else:
        content[len(content) // 2] ^= 1
    largest.write_bytes(content)
