"""`gregale sample`: continues a prompt with a trained model."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from time import perf_counter

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

from gregale.axes.layout import BATCH, Layout, standard_layout
from gregale.axes.mesh import MeshConfig, make_mesh
from gregale.data.tokenizers import Tokenizer, load_tokenizer
from gregale.errors import UserError
from gregale.model.execution import execution
from gregale.model.generate import BLOCK, Generator, Sampling
from gregale.programs.run.setup import Setup
from gregale.programs.run.trained import open_trained
from gregale.services.command import Command
from gregale.settings import whole

PATIENCE_S = 0.1  # text is shown at least as often, if a token takes no longer


class Sampler:
    """Continues texts with models of one shape; compiles once for all of them.

    On a CPU this happens on one device: simulated devices share the cores, and in every layer of every token they would
    wait for one another. Elsewhere it happens on the mesh. There a device keeps whole weights if it has them anyway
    (nothing is split over `data`, or `compute.gather` is per_step); else layers are gathered when it is their turn.
    """

    def __init__(self, setup: Setup, tokenizer: Tokenizer):
        config, layout = setup.config, setup.layout
        devices = layout.mesh.local_devices
        self._device = devices[0] if devices[0].platform == "cpu" else None
        if self._device is not None:
            layout = standard_layout(make_mesh(MeshConfig(data=1), [self._device]))
        self._mesh, self._tokenizer = setup.layout.mesh, tokenizer
        self._execution = execution(config.compute, unbatched(layout), config.model)
        self._whole = config.compute.gather == "per_step" or layout.mesh.shape["data"] * layout.mesh.shape["stage"] == 1
        run = replace(self._execution, weights_ready=self._whole)
        options = setup.compiler_options
        self._generator = Generator(run, tokenizer.vocabulary_size, tokenizer.end_of_document, options)
        self._prepare = jax.jit(self._gathered, compiler_options=options)

    def prepared(self, model):
        """The model as the other methods take it: on the devices that sample, gathered and cast once for all tokens."""
        model = model if self._device is None else on_one_device(model, self._mesh, self._device)
        return self._prepare(model) if self._whole else model

    def stream(self, model, prompt: str, count: int, sampling: Sampling) -> Iterator[str]:
        """The continuation, piece by piece, in whole characters; for one process, because its pace is a clock's."""
        ids = self._ids(prompt)
        decoder = self._tokenizer.stream()
        for tokens in self._generator.blocks(model, ids, count, sampling, steady(PATIENCE_S)):
            yield "".join([decoder.push(token) for token in tokens])
        yield decoder.finish()

    def text(self, model, prompt: str, count: int, sampling: Sampling) -> str:
        """The continuation. Every process of a run has to ask for it."""
        decoder = self._tokenizer.stream()
        pieces = [decoder.push(token) for token in self._generator.tokens(model, self._ids(prompt), count, sampling)]
        return "".join(pieces) + decoder.finish()

    def _ids(self, prompt: str) -> list[int]:
        return self._tokenizer.encode(prompt).tolist() or [self._tokenizer.end_of_document]

    def _gathered(self, model):
        run = self._execution
        return run.layout.constrain(run.gathered(model).unstacked(), run.layout.compute)


def unbatched(layout: Layout) -> Layout:
    """The layout of a computation on a single row: parameters lie as ever, no mesh axis splits the batch."""
    return replace(layout, compute={name: axes for name, axes in layout.compute.items() if name != BATCH})


def on_one_device(tree, mesh: Mesh, device):
    """Whole arrays on one device of this process. If processes have shards of them, they send them to one another."""
    if not all(leaf.is_fully_addressable for leaf in jax.tree.leaves(tree)):
        everywhere = NamedSharding(mesh, PartitionSpec())
        tree = jax.tree.map(
            lambda leaf: leaf.addressable_data(0), jax.jit(lambda tree: tree, out_shardings=everywhere)(tree)
        )
    return jax.device_put(tree, SingleDeviceSharding(device))


def steady(patience_s: float) -> Iterator[int]:
    """Sizes of blocks: one token, then twice as many each time while a block takes less than half the patience."""
    size = 1
    while True:
        began = perf_counter()
        yield size
        took_s = perf_counter() - began
        size = min(2 * size, BLOCK) if took_s < patience_s / 2 else max(size // 2, 1) if took_s > patience_s else size


@dataclass(frozen=True)
class SampleOptions(Sampling):
    """Options of the command."""

    run: str = field(default="", metadata={"help": "the run: its directory or URL, or its name under runs/"})
    prompt: str = field(default="", metadata={"help": "the text to continue"})
    tokens: int = field(
        default=256, metadata={"help": "tokens to add", "range": whole(1), "aliases": ("max_new_tokens", "length")}
    )
    step: int | None = field(
        default=None, metadata={"help": "the checkpoint's step; null: the newest", "range": whole(0)}
    )

    def __post_init__(self):
        super().__post_init__()
        if not self.run:
            raise UserError('run is missing. Usage: gregale sample RUN ["PROMPT"]')


def main(options: SampleOptions) -> int:
    """Prints the prompt and its continuation, as it is drawn."""
    sampler, model = opened(options)
    sampling = Sampling(options.temperature, options.top_k, options.top_p, options.seed)
    sys.stdout.write(options.prompt)
    for piece in sampler.stream(model, options.prompt, options.tokens, sampling):
        sys.stdout.write(piece)
        sys.stdout.flush()
    sys.stdout.write("\n")
    return 0


def opened(options: SampleOptions) -> tuple[Sampler, object]:
    """The sampler of a run and its model; of the parameters in the checkpoint's precision nothing is kept."""
    trained = open_trained(options.run, options.step, devices=1)
    sampler = Sampler(trained.setup, load_tokenizer(trained.run.path))
    return sampler, sampler.prepared(trained.model)


COMMAND = Command(main=main, options=SampleOptions, positional=("run", "prompt"))
