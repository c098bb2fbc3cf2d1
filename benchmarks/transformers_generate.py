"""transformers' Llama for `benchmarks/generate.py`, in a process of its own.

    python benchmarks/transformers_generate.py FOLDER

FOLDER has `config.json`, the shape, and `data.npz`, the weights, a prompt and batches. A line on standard input names a
way, `eager` or `compile` (a static cache, the forward pass by `torch.compile`), torch's threads, and what is wanted:
`tokens N` that continue the prompt; the `loss` of all batches; or `time` with the number of tokens or `loss`, answered
with the seconds on the wall and of processors.
"""

from __future__ import annotations

import json
import resource
import sys
import time
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
import transformers


class Side:
    def __init__(self, shape: dict, data: dict[str, np.ndarray], compiled: bool):
        config = transformers.LlamaConfig(**shape, tie_word_embeddings=False, attn_implementation="sdpa")
        self.model = transformers.LlamaForCausalLM(config).eval()
        self.model.load_state_dict(weights(data))
        self.options = {"cache_implementation": "static"} if compiled else {}
        if compiled:
            self.model.forward = torch.compile(self.model.forward)
        self.prompt = torch.tensor(data["prompt"])[None]
        pairs = zip(data["tokens"], data["targets"], strict=True)
        self.batches = [tuple(torch.tensor(array).long() for array in pair) for pair in pairs]

    @torch.inference_mode()
    def tokens(self, count: int) -> list[int]:
        found = self.model.generate(
            self.prompt,
            attention_mask=torch.ones_like(self.prompt),
            max_new_tokens=count,
            min_new_tokens=count,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
            **self.options,
        )
        return found[0, self.prompt.shape[1] :].tolist()

    @torch.inference_mode()
    def loss(self) -> float:
        total, count = 0.0, 0
        for tokens, targets in self.batches:
            logits = self.model(tokens, use_cache=False).logits
            total += F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum").item()
            count += targets.numel()
        return total / count

    def answer(self, what: str, argument: str) -> str:
        if what == "tokens":
            return " ".join(map(str, self.tokens(int(argument))))
        if what == "loss":
            return repr(self.loss())
        wall, cpu = time.perf_counter(), cpu_seconds()
        self.loss() if argument == "loss" else self.tokens(int(argument))
        return f"{time.perf_counter() - wall} {cpu_seconds() - cpu}"


def weights(data: dict[str, np.ndarray]) -> dict[str, torch.Tensor]:
    """By transformers' names, matrices [out, in]."""
    hidden = data["embedding"].shape[1]
    found = {"model.embed_tokens.weight": data["embedding"], "model.norm.weight": data["norm"]}
    found["lm_head.weight"] = data["head"].T
    for number in range(len(data["query"])):
        layer = f"model.layers.{number}"
        for name in ("query", "key", "value"):
            found[f"{layer}.self_attn.{name[0]}_proj.weight"] = data[name][number].reshape(hidden, -1).T
        found[f"{layer}.self_attn.o_proj.weight"] = data["out"][number].reshape(-1, hidden).T
        for name in ("gate", "up", "down"):
            found[f"{layer}.mlp.{name}_proj.weight"] = data[name][number].T
        found[f"{layer}.input_layernorm.weight"] = data["attention_norm"][number]
        found[f"{layer}.post_attention_layernorm.weight"] = data["mlp_norm"][number]
    return {name: torch.tensor(np.ascontiguousarray(array)) for name, array in found.items()}


def cpu_seconds() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def main() -> None:
    transformers.logging.set_verbosity_error()
    folder = Path(sys.argv[1])
    shape, data = json.loads((folder / "config.json").read_text()), dict(np.load(folder / "data.npz"))
    sides = {"eager": Side(shape, data, compiled=False), "compile": Side(shape, data, compiled=True)}
    print(f"torch {torch.__version__}, transformers {transformers.__version__}", flush=True)
    for line in sys.stdin:
        way, threads, what, *argument = line.split()
        torch.set_num_threads(int(threads))
        print(sides[way].answer(what, *argument or [""]), flush=True)


if __name__ == "__main__":
    main()
