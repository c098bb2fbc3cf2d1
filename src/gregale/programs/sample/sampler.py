"""Provides samples of a model, and the devices that compute them."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import repeat
from time import perf_counter

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

from gregale.axes.layout import BATCH, POSITION, Layout, MeshConfig, make_mesh, named_arrays
from gregale.axes.mapping import standard_layout
from gregale.data.tokenizers import Tokenizer
from gregale.inference.generate import BLOCK, Generator, Prompt, Sampling, sampling_form
from gregale.model.execution import execution
from gregale.programs.runtime.setup import Setup
from gregale.programs.sample.prompts import batches_of
from gregale.programs.sample.text_format import Continuation, TextFormat

MAX_DELAY_S = 0.1  # longest time between two outputs, unless a token takes longer
MAX_BATCH = 8  # texts of a training run in a batch, whose caches share memory with the training state


@dataclass(frozen=True)
class SamplerPlacement:
    """The devices that sample a model."""

    layout: Layout  # layout of parameters and activations, which may split the batch
    whole: bool  # each device keeps the gathered weights of its index on `model`; else it gathers layer by layer

    @property
    def rows(self) -> int:
        """Return the number that has to divide the rows of a batch."""
        inside = self.layout.inside_replica()
        return inside.devices((BATCH,), inside.compute)


def beside_training(setup: Setup) -> SamplerPlacement:
    """Return the placement of a training run's samples, without a split of the batch.

    On a CPU it is one device: simulated devices share the cores, and would wait for one another in each layer of each
    token. Other platforms use the mesh. There a device keeps gathered weights if training gathers them too (no split
    over `data`, or `compute.gather` is per_step).
    """
    layout = setup.layout
    first = layout.mesh.local_devices[0]
    if first.platform == "cpu":
        layout = standard_layout(make_mesh(MeshConfig(data=1), [first]))
    weights = (leaf.axes for leaf in named_arrays(setup.model))
    whole = setup.config.compute.gather == "per_step" or not any(map(layout.gathers, weights))
    return SamplerPlacement(unsplit(layout, BATCH), whole)


class Sampler:
    """Continues texts with models of one shape; compiles once. Raises `UserError` for a model without logits."""

    def __init__(self, setup: Setup, form: TextFormat, placement: SamplerPlacement):
        config = setup.config
        self._formed = partial(sampling_form, kind=config.model.get_choice_name(type(config.model)))
        if self._formed(setup.model) is not setup.model:  # it has no cache to split
            placement = replace(placement, layout=unsplit(placement.layout, POSITION))
        self._trained_on, self._placement, self._form = setup.layout.mesh, placement, form
        compute = replace(config.compute, matmul="dtype")  # a token's products are bound by memory
        self._execution = execution(compute, placement.layout, config.model)
        run = replace(self._execution, weights_ready=placement.whole)
        options = setup.compiler_options
        self._generator = Generator(run, form.tokenizer.vocabulary_size, form.ends, options)
        self._prepare = jax.jit(self._gathered, compiler_options=options)

    def prepared(self, model):
        """Return the model for the other methods: on the sampling devices, gathered and cast once for all tokens."""
        mesh = self._placement.layout.mesh
        model = model if mesh == self._trained_on else on_one_device(model, self._trained_on, mesh.devices.flat[0])
        return self._prepare(model) if self._placement.whole else self._formed(model)

    def texts(
        self,
        model,
        prompts: Sequence[str | list[int]],
        count: int,
        sampling: Sampling,
        stops: Sequence[str] = (),
        at_block: Callable[[], None] = lambda: None,
    ) -> list[str]:
        """Return the continuations of texts or tokens, with one seed. All processes of a run make this call.

        - `at_block`: called for each batch of prompts, and in a run of one process for each block of tokens
        """
        tokens = [self._form.ids(prompt) if isinstance(prompt, str) else prompt for prompt in prompts]
        encoded = [Prompt(each, sampling.seed) for each in tokens]
        texts, rows = [Continuation(self._form, count, stops) for _ in encoded], min(len(encoded), MAX_BATCH)
        for numbers in batches_of([len(prompt.tokens) for prompt in encoded], rows):
            at_block()
            batch, chosen = [encoded[number] for number in numbers], [texts[number] for number in numbers]
            for _ in self.pieces(model, self.filled_up(batch, rows), chosen, sampling, repeat(BLOCK)):
                if jax.process_count() == 1:  # processes that do not share devices may end texts at other blocks
                    at_block()
        return [text.text for text in texts]

    def filled_up(self, prompts: Sequence[Prompt], rows: int) -> list[Prompt]:
        """Return the prompts, padded with empty ones to a batch of `rows`."""
        return [*prompts, *[Prompt(self._form.ids(""))] * (rows - len(prompts))]

    def pieces(
        self, model, prompts: Sequence[Prompt], texts: Sequence[Continuation], sampling: Sampling, sizes: Iterator[int]
    ) -> Iterator[list[str]]:
        """Yield the new text of each continuation after each block, until all have ended.

        - `prompts`: one for each row; prompts beyond the number of texts are padding
        - `texts`: the continuations of the first prompts, which this method extends
        - `sizes`: see `Generator.blocks`; with several processes it must not depend on a clock
        """

        def is_over(row: int) -> bool:
            return row >= len(texts) or texts[row].ended is not None

        count = max(text.count for text in texts)
        for block in self._generator.blocks(model, prompts, count, sampling, sizes, is_over):
            yield [text.push(block[row].tolist()) for row, text in enumerate(texts)]

    def _gathered(self, model):
        run = self._execution
        return run.layout.constrain(self._formed(run.gathered(model)).unstacked(), run.layout.compute)


def training_sampler(setup: Setup, tokenizer: Tokenizer) -> Sampler:
    return Sampler(setup, TextFormat(tokenizer), beside_training(setup))


def unsplit(layout: Layout, name: str) -> Layout:
    """Return the layout without a split of an axis of activations; the parameters keep their layout."""
    return replace(layout, compute={other: axes for other, axes in layout.compute.items() if other != name})


def on_one_device(tree, mesh: Mesh, device):
    """Return complete arrays on one device of this process; processes exchange their shards."""
    if not all(leaf.is_fully_addressable for leaf in jax.tree.leaves(tree)):
        everywhere = NamedSharding(mesh, PartitionSpec())
        tree = jax.tree.map(
            lambda leaf: leaf.addressable_data(0), jax.jit(lambda tree: tree, out_shardings=everywhere)(tree)
        )
    return jax.device_put(tree, SingleDeviceSharding(device))


def steady(max_delay_s: float) -> Iterator[int]:
    """Yield block sizes: one token, then twice as many while a block takes less than half of `max_delay_s`."""
    size = 1
    while True:
        began = perf_counter()
        yield size
        took_s = perf_counter() - began
        size = min(2 * size, BLOCK) if took_s < max_delay_s / 2 else max(size // 2, 1) if took_s > max_delay_s else size
