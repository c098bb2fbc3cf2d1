"""Texts of a model on the devices that sample it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import repeat
from math import prod
from time import perf_counter

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

from gregale.axes.layout import BATCH, Layout, standard_layout
from gregale.axes.mesh import MeshConfig, make_mesh
from gregale.data.tokenizers import Tokenizer
from gregale.inference.generate import BLOCK, Generator, Prompt
from gregale.inference.token_sampling import Sampling
from gregale.model.execution import execution
from gregale.programs.runtime.setup import Setup
from gregale.programs.sample.prompts import batches_of
from gregale.programs.sample.text_format import Continuation, TextFormat

PATIENCE_S = 0.1  # text is shown at least as often, if a token takes no longer
TOGETHER = 8  # texts that a run makes at a time, at most: their caches lie beside the state that it trains


@dataclass(frozen=True)
class SamplerPlacement:
    """On which devices a model is sampled.

    - `layout`: of parameters and activations; its batch may be split
    - `whole`: a device keeps all weights of its place on the axis `model`; else layers are gathered in their turn
    """

    layout: Layout
    whole: bool

    @property
    def rows(self) -> int:
        """What divides the rows of a batch."""
        inside = self.layout.inside_replica()
        axes = inside.mesh_axes((BATCH,), inside.compute)
        return prod(self.layout.mesh.shape[axis] for axis in axes)


def beside_training(setup: Setup) -> SamplerPlacement:
    """Where a run samples, with no batch split.

    On a CPU that is one device: simulated devices share the cores, and in every layer of every token they would wait
    for one another. Elsewhere it is the mesh. There a device keeps whole weights if it has them anyway (nothing is
    split over `data`, or `compute.gather` is per_step).
    """
    layout = setup.layout
    first = layout.mesh.local_devices[0]
    if first.platform == "cpu":
        layout = standard_layout(make_mesh(MeshConfig(data=1), [first]))
    mesh = layout.mesh.shape
    return SamplerPlacement(
        unbatched(layout), setup.config.compute.gather == "per_step" or mesh["data"] * mesh["stage"] == 1
    )


class Sampler:
    """Continues texts with models of one shape; compiles once for all of them."""

    def __init__(self, setup: Setup, form: TextFormat, where: SamplerPlacement):
        config = setup.config
        self._trained_on, self._where, self._form = setup.layout.mesh, where, form
        self._execution = execution(config.compute, where.layout, config.model)
        run = replace(self._execution, weights_ready=where.whole)
        options = setup.compiler_options
        self._generator = Generator(run, form.tokenizer.vocabulary_size, form.ends, options)
        self._prepare = jax.jit(self._gathered, compiler_options=options)

    def prepared(self, model):
        """The model as the other methods take it: on the devices that sample, gathered and cast once for all tokens."""
        mesh = self._where.layout.mesh
        model = model if mesh == self._trained_on else on_one_device(model, self._trained_on, mesh.devices.flat[0])
        return self._prepare(model) if self._where.whole else model

    def texts(self, model, prompts: Sequence[str], count: int, sampling: Sampling) -> list[str]:
        """The continuations of prompts, each with the same seed. Every process of a run has to ask for them."""
        asked = [Prompt(self._form.ids(prompt), sampling.seed) for prompt in prompts]
        texts, rows = [Continuation(self._form, count) for _ in asked], min(len(asked), TOGETHER)
        for numbers in batches_of([len(prompt.tokens) for prompt in asked], rows):
            batch, chosen = [asked[number] for number in numbers], [texts[number] for number in numbers]
            for _ in self.pieces(model, self.filled_up(batch, rows), chosen, sampling, repeat(BLOCK)):
                pass
        return [text.text for text in texts]

    def filled_up(self, prompts: Sequence[Prompt], rows: int) -> list[Prompt]:
        """The prompts, and what fills a batch up to so many rows."""
        return [*prompts, *[Prompt(self._form.ids(""))] * (rows - len(prompts))]

    def pieces(
        self,
        model,
        prompts: Sequence[Prompt],
        texts: Sequence[Continuation],
        sampling: Sampling,
        sizes: Iterator[int],
    ) -> Iterator[list[str]]:
        """What comes to the texts, a piece for each, block by block until all have ended.

        Arguments:
        - `prompts`: a row each; those beyond the texts are filling
        - `texts`: the continuations of the first of them, which grow
        - `sizes`: see `Generator.blocks`; for several processes it may not depend on a clock
        """

        def is_over(row: int) -> bool:
            return row >= len(texts) or texts[row].ended is not None

        count = max(text.count for text in texts)
        for block in self._generator.blocks(model, prompts, count, sampling, sizes, is_over):
            yield [text.push(block[row].tolist()) for row, text in enumerate(texts)]

    def _gathered(self, model):
        run = self._execution
        return run.layout.constrain(run.gathered(model).unstacked(), run.layout.compute)


def training_sampler(setup: Setup, tokenizer: Tokenizer) -> Sampler:
    """That of a run while it trains."""
    return Sampler(setup, TextFormat(tokenizer), beside_training(setup))


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
