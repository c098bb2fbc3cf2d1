"""The yardstick's model and step in plain PyTorch, in a process of its own that `benchmarks/step.py` talks to.

    python benchmarks/torch_step.py PARAMETERS.npz

PARAMETERS.npz has what `yardstick.py` starts from, its batch, and its loss and gradients, with which those here are
compared before anything is timed. Then a line on standard input names a step, `eager` or `compile`; it is run once, and
a line on standard output says its wall time and its processor time, in seconds.
"""

from __future__ import annotations

import resource
import sys
import time

import numpy as np
import torch
import torch.nn.functional as F

EPSILON = 1e-5
ROTARY_BASE = 10000.0
LAYER = ("attention_norm", "query", "key", "value", "out", "mlp_norm", "gate", "up", "down")
TOLERANCE = 1e-5  # of a gradient's largest value


class Model(torch.nn.Module):
    """Weights as the matrices [out, in] that torch has, a list of layers; copies of `arrays`.

    Where these have no head, it is the embedding.
    """

    def __init__(self, arrays: dict[str, np.ndarray] | dict[str, torch.Tensor], epsilon: float = EPSILON):
        super().__init__()
        self.heads, self.epsilon = arrays["query"].shape[2], epsilon

        def own(array) -> torch.nn.Parameter:
            return torch.nn.Parameter(torch.as_tensor(array).clone())

        def matrix(array, inputs: int) -> torch.nn.Parameter:
            return torch.nn.Parameter(own(array).detach().reshape(inputs, -1).T.contiguous())

        hidden, mlp = arrays["gate"].shape[1:]
        self.embedding = own(arrays["embedding"])
        self.norm = own(arrays["norm"])
        self.head = matrix(arrays["head"], hidden) if "head" in arrays else self.embedding
        self.layers = torch.nn.ModuleList()
        for number in range(len(arrays["query"])):
            layer = {name: arrays[name][number] for name in LAYER}
            weights = {
                name: own(array) if array.ndim == 1 else matrix(array, mlp if name == "down" else hidden)
                for name, array in layer.items()
            }
            self.layers.append(torch.nn.ParameterDict(weights))

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor):
        """The mean next-token loss of tokens and targets, both [batch, position]."""
        batch, length = tokens.shape
        x = F.embedding(tokens, self.embedding)
        for w in self.layers:
            h = F.rms_norm(x, x.shape[-1:], w["attention_norm"], self.epsilon)
            q, k, v = (F.linear(h, w[name]).view(batch, length, self.heads, -1) for name in ("query", "key", "value"))
            q, k, v = (a.transpose(1, 2) for a in (rotate(q, cos, sin), rotate(k, cos, sin), v))
            attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
            x = x + F.linear(attended.transpose(1, 2).reshape(batch, length, -1), w["out"])
            h = F.rms_norm(x, x.shape[-1:], w["mlp_norm"], self.epsilon)
            x = x + F.linear(F.silu(F.linear(h, w["gate"])) * F.linear(h, w["up"]), w["down"])
        logits = F.linear(F.rms_norm(x, x.shape[-1:], self.norm, self.epsilon), self.head)
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())

    def gradients(self) -> dict[str, np.ndarray]:
        """The gradients in the shapes of the yardstick's parameters, but with heads and head sizes flattened."""
        of_layers = {
            name: np.stack([_plain(layer[name].grad) for layer in self.layers])  # pyright: ignore
            for name in LAYER
        }
        outside = {"embedding": self.embedding.grad.numpy(), "norm": self.norm.grad.numpy()}
        return {**of_layers, **outside, "head": _plain(self.head.grad)}


def _plain(gradient: torch.Tensor) -> np.ndarray:
    return (gradient.T if gradient.ndim == 2 else gradient).numpy()


def angles(length: int, head_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    half = head_size // 2
    frequency = ROTARY_BASE ** (-torch.arange(half) / half)
    angle = torch.arange(length)[:, None, None] * frequency
    return angle.cos(), angle.sin()


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotary embedding of [batch, position, heads, head_size]."""
    low, high = x.chunk(2, dim=-1)
    return torch.cat([low * cos - high * sin, high * cos + low * sin], dim=-1)


class Step:
    """AdamW after clipping, `settings` as in `benchmarks/step.py`; `compiled`: the loss by `torch.compile`."""

    def __init__(self, data: dict[str, np.ndarray], compiled: bool):
        self.model = Model(data)
        self.loss = torch.compile(self.model) if compiled else self.model
        learning_rate, b1, b2, epsilon, decay, self.clip = (float(each) for each in data["settings"])
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=learning_rate, betas=(b1, b2), eps=epsilon, weight_decay=decay, fused=True
        )
        tokens, targets = (torch.tensor(data[name]).long() for name in ("tokens", "targets"))
        self.batch = tokens, targets, *angles(tokens.shape[1], data["query"].shape[3])

    def backward(self) -> float:
        self.optimizer.zero_grad(set_to_none=True)
        loss = self.loss(*self.batch)
        loss.backward()
        return loss.item()

    def run(self) -> None:
        self.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.clip)
        self.optimizer.step()

    def check(self, data: dict[str, np.ndarray]) -> None:
        np.testing.assert_allclose(self.backward(), data["loss"], rtol=TOLERANCE)
        for name, found in self.model.gradients().items():
            expected = data[f"gradient_{name}"]
            scale = np.abs(expected).max()
            np.testing.assert_allclose(
                found.reshape(expected.shape), expected, rtol=0, atol=TOLERANCE * scale, err_msg=name
            )


def cpu_seconds() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def main() -> None:
    data = dict(np.load(sys.argv[1]))
    steps = {"eager": Step(data, compiled=False), "compile": Step(data, compiled=True)}
    for step in steps.values():
        step.check(data)
    print(torch.__version__, flush=True)
    for line in sys.stdin:
        wall, cpu = time.perf_counter(), cpu_seconds()
        steps[line.strip()].run()
        print(time.perf_counter() - wall, cpu_seconds() - cpu, flush=True)


if __name__ == "__main__":
    main()
