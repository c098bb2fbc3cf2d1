"""Training runs whose losses, norms and last states two commits must have in common, to the bit.

    python -m benchmarks.golden record before.json            # in a checkout of one commit
    python -m benchmarks.golden record after.json             # in a checkout of the other, on the same machine
    python -m benchmarks.golden compare before.json after.json

`programs` in place of `record` compiles the steps of the same runs for CPUs and for a TPU topology, and records each
computation without its names and places in the source.

Each run is a process of its own on simulated devices. A digest is of the names and bytes of all arrays of the last
checkpoint. Processors of different kinds need not agree, so no figures are kept here.
"""

import argparse
import hashlib
import json
import random
import re
import sys
import tempfile
from pathlib import Path
from typing import Any

import yaml

from tests.programs.tiny import FAST_TO_COMPILE, finished, lines, saved_state, start, write_config, write_inputs

STEPS = 200
CONFIG = "golden.yaml"
WARMUP = 10  # steps of a run that another starts from, if only programs are compiled
TPUS = 8
TOPOLOGY = ("--topology", "v5e:2x2", "--slices", "2")
MOST_DIFFERENCES = 10
SMALL = {"model__layers": 4, "checkpoint__every": STEPS, "batch__microbatches": 1}
DILOCO = {"type": "diloco", "period": 10, "warmup_steps": 20}
STREAMING = {"type": "streaming_diloco", "period": 12, "fragments": 3, "delay": 2, "alpha": 0.5}
INT4 = {"codec": "int4", "gather_codec": "int4", "feedback": {"beta": 0.9}}
EXPERTS = {"type": "llama", "layers": 2, "hidden": 32, "heads": 2, "kv_heads": 2, "mlp": 64}
EXPERTS["experts"] = {"count": 4, "active": 2, "width": 32}
EXCHANGED = {"compute": {"experts": "data"}}
MUON = {"type": "muon", "learning_rate": 0.01, "groups": [{"match": "*norm*", "weight_decay": 0.0}]}
STAGES = [
    {"from": 60, "sync": DILOCO | {"warmup_steps": 0}},
    {"from": 120, "batch": {"sequence_length": 16}, "mesh": {"replica": 2, "data": 4, "model": 1}},
]
PIPELINE = {"mesh": {"stage": 3, "replica": 2}, "cpu_devices": 6, "pipeline": {}, "batch__size": 12}
PIPELINE |= {"model__layers": 6, "model__hidden": 36}
RUNS: dict[str, dict[str, Any]] = {
    "psdp": {"batch__microbatches": 2},
    "diloco": {"sync": DILOCO, "mesh": {"replica": 4, "data": 2}},
    "streaming": {"sync": STREAMING, "mesh": {"replica": 2, "data": 4}},
    "int4": {"sync": STREAMING, "reduce": INT4, "mesh": {"replica": 4, "data": 2}},
    "pipeline": PIPELINE,
    "context": {"mesh": {"context": 2, "replica": 2, "data": 2}},
    "experts gathered": {"model": EXPERTS, "mesh": {"replica": 2, "data": 4}},
    "experts exchanged": {"model": EXPERTS, "mesh": {"replica": 2, "data": 4}, "mapping": EXCHANGED},
    "adapters": {"adapter": {"rank": 4}, "start_from": "psdp", "mesh": {"replica": 2, "data": 4}},
    "preferences": {"objective": {"type": "dpo"}, "start_from": "psdp", "batch__sequence_length": 80},
    "stages": {"stages": STAGES},
    "muon": {"optimizer": MUON, "batch__microbatches": 2},
}  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    commands = parser.add_subparsers(dest="command", required=True)
    for command in ("record", "programs"):
        record = commands.add_parser(command)
        record.add_argument("file", type=Path)
        record.add_argument("--runs", nargs="+", default=list(RUNS), choices=RUNS)
        record.add_argument("--steps", type=int, default=STEPS)
    compare = commands.add_parser("compare")
    compare.add_argument("files", type=Path, nargs=2)
    options = parser.parse_args()
    if options.command != "compare":
        of = recorded if options.command == "record" else compiled
        with tempfile.TemporaryDirectory() as folder:
            write_inputs(Path(folder))
            write_pairs(Path(folder))
            found = {name: of(Path(folder), name, options.steps) for name in options.runs}
        options.file.write_text(json.dumps(found, indent=1))
        return 0
    before, after = (json.loads(each.read_text()) for each in options.files)
    differences = list(compared(before, after))
    print("\n".join(differences[:MOST_DIFFERENCES]) or f"{len(before)} runs are equal to the bit")
    return 1 if differences else 0


def write_pairs(folder: Path) -> None:
    words, source = ["wind", "sea", "gale", "island", "step"], random.Random(1)
    rows = [
        {each: " ".join(source.choices(words, k=4)) for each in ("prompt", "chosen", "rejected")} for _ in range(64)
    ]
    (folder / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def recorded(folder: Path, name: str, steps: int) -> dict[str, Any]:
    """Return the losses, the norms and the digest of the last state of one run."""
    config = write_run(folder, name, steps)
    called(folder, name, "train")
    run = folder / "runs" / config["name"]
    keys = ("loss", "grad_norm", "update_norm")
    found = [{key: each[key].hex() for key in keys if key in each} for each in lines(run) if "loss" in each]
    print(f"{name}: {len(found)} steps", file=sys.stderr, flush=True)
    return {"steps": found, "state": digest_of(saved_state(run, steps))}


def compiled(folder: Path, name: str, steps: int) -> dict[str, Any]:
    """Return the instructions of the compiled step of one run, for CPUs and for TPUs if the mesh has 8 devices."""
    if "start_from" in RUNS[name] and not (folder / "runs" / RUNS[name]["start_from"]).exists():
        recorded(folder, RUNS[name]["start_from"], WARMUP)
    config = write_run(folder, name, steps)
    targets = {"cpu": ()} | ({"tpu": TOPOLOGY} if config["cpu_devices"] == TPUS else {})
    found = {}
    for target, arguments in targets.items():
        called(folder, name, "plan", "--hlo", "step.txt", *arguments)
        found[target] = instructions((folder / "step.txt").read_text())
        print(f"{name}, {target}: {len(found[target])} instructions", file=sys.stderr, flush=True)
    return {"steps": [], **found}


def instructions(text: str) -> list[str]:
    """Return the lines of a compiled program, sorted, without names of values and places in the source."""
    found = (re.sub(r", metadata=\{[^}]*\}|, backend_config=.*$", "", line).strip() for line in text.splitlines())
    return sorted(re.sub(r"%[\w.-]+", "%", line) for line in found if " = " in line)


def write_run(folder: Path, name: str, steps: int) -> dict[str, Any]:
    changes = {"steps": steps, "cpu_devices": TPUS} | SMALL | RUNS[name]
    changes["checkpoint__every"] = steps
    if "objective" in changes:
        pairs = {"type": "chat", "files": ["pairs.jsonl"], "form": "pairs", "packing": "pad"}
        changes["data__sources"] = {"pairs": pairs}
    path = folder / CONFIG
    write_config(folder, path.name, **changes)
    config = yaml.safe_load(path.read_text()) | {"name": name.replace(" ", "-")}
    if "start_from" in config:
        del config["model"]
    path.write_text(yaml.safe_dump(config))
    return config


def called(folder: Path, name: str, command: str, *arguments: str) -> None:
    code, out, error = finished(start(folder, command, CONFIG, *arguments, flags=FAST_TO_COMPILE))
    if code:
        raise SystemExit(f"{name}: {error or out}")


def digest_of(arrays: dict[str, Any]) -> str:
    found = hashlib.sha256()
    for name, array in sorted(arrays.items()):
        found.update(f"{name} {array.dtype} {array.shape} ".encode() + array.tobytes())
    return found.hexdigest()


def compared(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    """Return a line for each difference, the first of each run first."""
    found = [f"{name} is in one file alone" for name in before.keys() ^ after.keys()]
    for name in before.keys() & after.keys():
        pairs = zip(before[name]["steps"], after[name]["steps"], strict=False)
        steps = [number for number, (one, other) in enumerate(pairs, 1) if one != other]
        if steps:
            found.append(f"{name}: {len(steps)} steps differ, the first is {steps[0]}")
        found += [
            f"{name}: {key} differs"
            for key in sorted(before[name].keys() | after[name].keys())
            if not steps and before[name].get(key) != after[name].get(key)
        ]
    return found


if __name__ == "__main__":
    sys.exit(main())
