"""Import and export of a model of a billion parameters, beside a plain copy of its file: time and memory.

    .venv/bin/python benchmarks/hub_files.py FOLDER             # 2.5 GB in FOLDER three times over; some minutes
    .venv/bin/python benchmarks/hub_files.py FOLDER --layers 2  # small, to try it

The file has the shape of Llama 3.2 1B in bfloat16, with random values. Each program is a process of its own; `memory`
is what it had of its own at the most (RssAnon, asked for twenty times a second), `with files` also counts the pages of
the files that it had mapped. Every row has a `cp` of the same file just before it, for a machine that others use too;
so `processors` are the seconds that it had of them.
"""

import argparse
import json
import os
import resource
import shutil
import subprocess
import sys
import time
from pathlib import Path

import ml_dtypes
import numpy as np

from gregale.data.tokenizers import BytesTokenizer
from gregale.huggingface.families import LAYER, NORMS_BEFORE, PROJECTIONS
from gregale.huggingface.safetensors import plan_file
from gregale.huggingface.tokenizer import write_tokenizer

SHAPE = {
    "model_type": "llama",
    "hidden_size": 2048,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "intermediate_size": 8192,
    "vocab_size": 128256,
    "tie_word_embeddings": True,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 4096,
    "eos_token_id": 256,
    "dtype": "bfloat16",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--layers", type=int, default=16)
    options = parser.parse_args()
    hub = options.folder / "hub"
    make(hub, options.layers)
    size = (hub / "model.safetensors").stat().st_size
    print(f"{size / 1e9:.2f} GB, {os.cpu_count()} cores", flush=True)
    gregale = [sys.executable, "-m", "gregale"]
    rows = {
        "import": [*gregale, "import", str(hub), str(options.folder / "mine")],
        "export on 1 device": [*gregale, "export", str(options.folder / "mine"), str(options.folder / "out1")],
        "export on 8 devices": [
            *[*gregale, "export", str(options.folder / "mine"), str(options.folder / "out8"), "--devices", "8"],
        ],
    }
    for name, command in rows.items():
        for label, each in (
            ("cp", ["cp", str(hub / "model.safetensors"), str(options.folder / "copy")]),
            (name, command),
        ):
            seconds, processors, anonymous, most = measured(each)
            memory = f"memory {anonymous / 1e9:.2f} GB, with files {most / 1e9:.2f} GB"
            print(f"{label}: {seconds:.1f} s, processors {processors:.1f} s, {memory}", flush=True)
        (options.folder / "copy").unlink()
    for name in ("out1", "out8"):
        same = subprocess.run(
            ["cmp", hub / "model.safetensors", options.folder / name / "model.safetensors"]
        ).returncode
        print(f"{name} is {'the same file' if same == 0 else 'another file'}")
    for name in ("hub", "mine", "out1", "out8"):
        shutil.rmtree(options.folder / name)


def make(folder: Path, layers: int) -> None:
    """A folder as the hub has it, with random values."""
    folder.mkdir(parents=True)
    config = SHAPE | {"num_hidden_layers": layers}
    (folder / "config.json").write_text(json.dumps(config))
    write_tokenizer(BytesTokenizer(), folder, config["max_position_embeddings"])
    heads, kv_heads = (config[f"num_{name}_heads"] * config["head_dim"] for name in ("attention", "key_value"))
    sizes = {
        "vocab": config["vocab_size"],
        "embed": config["hidden_size"],
        "mlp": config["intermediate_size"],
        "heads head_size": heads,
        "kv_heads head_size": kv_heads,
    }
    layer = {name: axes for name, (_, axes) in {**PROJECTIONS, **NORMS_BEFORE}.items() if not name.endswith("bias")}
    names = {"model.embed_tokens.weight": "vocab, embed"}
    for number in range(layers):
        names |= {LAYER.format(layer=number) + name: axes for name, axes in layer.items()}
    names["model.norm.weight"] = "embed"
    shapes = {name: tuple(sizes[axis] for axis in axes.split(", ")) for name, axes in names.items()}
    plan = plan_file(folder / "model.safetensors", shapes, dict.fromkeys(shapes, np.dtype(ml_dtypes.bfloat16)))
    plan.make()
    generator = np.random.default_rng(0)
    for tensor in plan.tensors.values():
        tensor.mapped(writable=True)[...] = generator.standard_normal(tensor.shape, np.float32)


def measured(command: list[str]) -> tuple[float, float, int, int]:
    """Seconds by the clock and of processors, the most bytes of its own memory, and the most with files."""
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": "--xla_force_host_platform_device_count=8"}
    os.sync()
    began, before = time.monotonic(), resource.getrusage(resource.RUSAGE_CHILDREN)
    process = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL)
    anonymous = most = 0
    while process.poll() is None:
        found = status(process.pid)
        anonymous = max(anonymous, found.get("RssAnon", 0))
        most = max(most, found.get("VmHWM", 0))
        time.sleep(0.05)
    if process.returncode:
        raise SystemExit(f"{command} ended with {process.returncode}")
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    processors = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return time.monotonic() - began, processors, anonymous, most


def status(pid: int) -> dict[str, int]:
    """The sizes in /proc/PID/status, in bytes; none of a process that is over."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return {}
    return {line.split()[0].rstrip(":"): int(line.split()[1]) * 1024 for line in lines if line.endswith(" kB")}


if __name__ == "__main__":
    main()
