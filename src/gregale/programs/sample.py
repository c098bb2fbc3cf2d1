"""`gregale sample`: continues a prompt with a trained model."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from gregale.axes.layout import BATCH, Layout
from gregale.data.tokenizers import Tokenizer, load_tokenizer
from gregale.errors import UserError
from gregale.model.execution import execution
from gregale.model.generate import Generator, Sampling
from gregale.programs.run.setup import Setup
from gregale.programs.run.trained import open_trained
from gregale.services.command import Command
from gregale.settings import whole


def unbatched(layout: Layout) -> Layout:
    """The layout of a computation on a single row: parameters lie as ever, no mesh axis splits the batch."""
    return replace(layout, compute={name: axes for name, axes in layout.compute.items() if name != BATCH})


class Sampler:
    """Continues texts with a model."""

    def __init__(self, setup: Setup, model, tokenizer: Tokenizer):
        run = execution(setup.config.compute, unbatched(setup.layout))
        self._generator = Generator(model, run, tokenizer.vocabulary_size, tokenizer.end_of_document)
        self._tokenizer = tokenizer

    def stream(self, prompt: str, count: int, sampling: Sampling) -> Iterator[str]:
        """The continuation, piece by piece, in whole characters."""
        ids = self._tokenizer.encode(prompt).tolist() or [self._tokenizer.end_of_document]
        decoder = self._tokenizer.stream()
        for token in self._generator.tokens(ids, count, sampling):
            yield decoder.push(token)
        yield decoder.finish()

    def text(self, prompt: str, count: int, sampling: Sampling) -> str:
        return "".join(self.stream(prompt, count, sampling))


@dataclass(frozen=True)
class SampleOptions(Sampling):
    """Options of the command."""

    run: str = field(default="", metadata={"help": "the run: its directory, or its name under runs/"})
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
    trained = open_trained(options.run, options.step, devices=1)
    tokenizer = load_tokenizer(trained.run.path)
    sampler = Sampler(trained.setup, trained.model, tokenizer)
    sampling = Sampling(options.temperature, options.top_k, options.top_p, options.seed)
    sys.stdout.write(options.prompt)
    for piece in sampler.stream(options.prompt, options.tokens, sampling):
        sys.stdout.write(piece)
        sys.stdout.flush()
    sys.stdout.write("\n")
    return 0


COMMAND = Command(main=main, options=SampleOptions, positional=("run", "prompt"))
