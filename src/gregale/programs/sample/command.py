"""`gregale sample`: continues a prompt, or those of a file, with a trained model."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import chain, repeat
from typing import Any

from gregale.axes.mesh import MeshConfig
from gregale.data.special import taken_as_text
from gregale.data.tokenizers import load_tokenizer
from gregale.errors import UserError
from gregale.huggingface.folder import CONFIG, read_json
from gregale.inference.generate import BLOCK, Prompt, multiple_of
from gregale.inference.token_sampling import Sampling
from gregale.programs.command import Command
from gregale.programs.runtime.trained_model import find_run, open_trained
from gregale.programs.sample.output import Results, Screen, Status, ThroughputMeter, results_to, say
from gregale.programs.sample.prompts import PromptRequest, batches_of, read_prompts
from gregale.programs.sample.sampler import PATIENCE_S, Sampler, SamplerPlacement, beside_training, steady, unbatched
from gregale.programs.sample.text_format import INTERRUPTED, Continuation, TextFormat, form_of
from gregale.runs.run_directory import RunDirectory
from gregale.settings import shown, whole

ONE_DEVICE = MeshConfig(data=1)


@dataclass(frozen=True)
class SampleOptions(Sampling):
    """Options of the command."""

    run: str = field(default="", metadata={"help": "the run: its directory or URL, or its name under runs/"})
    prompt: str = field(default="", metadata={"help": "the text to continue"})
    prompts: str | None = field(
        default=None,
        metadata={"help": "a file of prompts, one a line: text, or JSON lines (.jsonl) with prompt, seed, id"},
    )
    out: str | None = field(
        default=None, metadata={"help": "of prompts: the file for the results, JSON lines; null: standard output"}
    )
    tokens: int = field(
        default=256, metadata={"help": "tokens to add", "range": whole(1), "aliases": ("max_new_tokens", "length")}
    )
    parse_special: bool = field(
        default=False, metadata={"help": "names of special tokens in prompts are the tokens, and no text"}
    )
    stop: list[str] = field(
        default_factory=list,
        metadata={"help": "strings before which a text ends", "aliases": ("stop_strings", "until")},
    )
    batch: int = field(
        default=8,
        metadata={"help": "prompts that are continued at a time", "range": whole(1), "aliases": ("batch_size",)},
    )
    mesh: MeshConfig = field(
        default=ONE_DEVICE, metadata={"help": "devices: prompts are split over data, the model over model"}
    )
    step: int | None = field(
        default=None, metadata={"help": "the checkpoint's step; null: the newest", "range": whole(0)}
    )

    def __post_init__(self):
        super().__post_init__()
        if not self.run:
            raise UserError('run is missing. Usage: gregale sample RUN ["PROMPT"]')
        if self.prompt and self.prompts is not None:
            raise UserError(f"a prompt and prompts {shown(self.prompts)} are both given; leave one out.")
        if self.out is not None and self.prompts is None:
            raise UserError(f"out is {shown(self.out)}, which is for results of `prompts`; a single text is printed.")
        if "" in self.stop:
            raise UserError("stop has an empty string, which would end every text before it begins.")
        others = [axis for axis in ("island", "replica", "stage") if getattr(self.mesh, axis) != 1]
        if others:
            raise UserError(f"mesh.{others[0]} is for training; a model is sampled on mesh.data x mesh.model devices.")

    @property
    def sampling(self) -> Sampling:
        return Sampling(self.temperature, self.top_k, self.top_p, self.seed)


def main(options: SampleOptions) -> int:
    """Prints the prompt and its continuation, as it is drawn; or continues the prompts of a file."""
    run = find_run(options.run)
    tokenizer = load_tokenizer(run.path)
    form = form_of(run, tokenizer.parsing_special() if options.parse_special else tokenizer)
    if options.prompts is None:
        asked = [PromptRequest(options.prompt, options.seed, "the prompt", {})]
    else:
        asked = read_prompts(options.prompts, options.seed)
    prompts = [Prompt(form.ids(each.prompt), each.seed) for each in asked]
    context = context_of(run)
    check_lengths(asked, prompts, context)
    if said := taken_as_text([each.prompt for each in asked], form.tokenizer, "prompts"):
        say(said)
    if options.prompts is None:
        counts = [show(options, form, prompts[0])]
    else:
        with results_to(options.out) as results:
            counts = continue_all(options, form, asked, prompts, results)
    lengths = [len(prompt.tokens) + count for prompt, count in zip(prompts, counts, strict=True)]
    tell_lengths(lengths, context)
    return 0


def context_of(run: RunDirectory) -> int:
    """The longest text, in tokens, that the model was made for: by what it was imported with, or by its training."""
    path = run.huggingface / CONFIG
    length = read_json(path).get("max_position_embeddings") if path.is_file() else None
    return length if isinstance(length, int) else run.read_config().batch.sequence_length


def check_lengths(asked: Sequence[PromptRequest], prompts: Sequence[Prompt], context: int) -> None:
    """Raises `UserError` for a prompt that is longer than the context."""
    for each, prompt in zip(asked, prompts, strict=True):
        if len(prompt.tokens) > context:
            raise UserError(
                f"{each.place} has {len(prompt.tokens):,} tokens, and the model's context is {context:,}: it never "
                "saw a longer text. Shorten it."
            )


def tell_lengths(lengths: Sequence[int], context: int) -> None:
    """Says how many texts, whose lengths in tokens these are, have become longer than the context."""
    if longer := sum(length > context for length in lengths):
        say(
            f"{longer:,} text{'s' * (longer != 1)} became longer than the model's context of {context:,} tokens. It "
            "never saw a longer one: what stands behind may be poor."
        )


def opened(options: SampleOptions, form: TextFormat) -> tuple[Sampler, object, int]:
    """The sampler of a run, its model, and the rows of a batch.

    Of the parameters in the checkpoint's precision nothing is kept.
    """
    trained = open_trained(options.run, options.step, options.mesh)
    setup = trained.setup
    if setup.config.sync.evaluates_replicas:
        where = beside_training(setup)  # the mesh is the run's own
    else:
        where = SamplerPlacement(setup.layout if options.prompts else unbatched(setup.layout), whole=True)
    sampler = Sampler(setup, form, where)
    return sampler, sampler.prepared(trained.model), multiple_of(where.rows, options.batch)


def show(options: SampleOptions, form: TextFormat, prompt: Prompt) -> int:
    """Prints the prompt and its continuation, as it is drawn; when it is interrupted, what is there.

    Returns how many tokens were drawn.
    """
    sampler, model, _ = opened(options, form)
    screen, pace = Screen(sys.stdout), ThroughputMeter()
    text = Continuation(form, options.tokens, options.stop)
    screen.write(options.prompt)
    try:
        for (piece,) in sampler.pieces(model, [prompt], [text], options.sampling, steady(PATIENCE_S)):
            screen.write(piece)
            pace.at(text.tokens)
    except KeyboardInterrupt:
        screen.write(text.finish(INTERRUPTED) + "\n")
        raise
    screen.write("\n")
    say(str(pace))
    return text.tokens


def continue_all(
    options: SampleOptions,
    form: TextFormat,
    asked: Sequence[PromptRequest],
    prompts: Sequence[Prompt],
    results: Results,
) -> list[int]:
    """Continues the prompts of a file, batch by batch; returns how many tokens were drawn for each."""
    sampler, model, rows = opened(options, form)
    counts = [0] * len(prompts)
    pace, done, before = ThroughputMeter(), 0, 0
    with Status() as status:
        for numbers in batches_of([len(prompt.tokens) for prompt in prompts], rows):
            batch = sampler.filled_up([prompts[number] for number in numbers], rows)
            texts = [Continuation(form, options.tokens, options.stop) for _ in numbers]
            for _ in sampler.pieces(model, batch, texts, options.sampling, chain([1], repeat(BLOCK))):
                pace.at(before + sum(text.tokens for text in texts))
                status.show(f"{done:,} of {len(prompts):,} prompts, {pace.tokens:,} tokens")
            done, before = done + len(numbers), pace.tokens
            for number, text in zip(numbers, texts, strict=True):
                results.add(number, result_of(asked[number], text))
                counts[number] = text.tokens
    say(f"{len(prompts):,} prompt{'s' * (len(prompts) != 1)}, {pace}")
    return counts


def result_of(asked: PromptRequest, text: Continuation) -> dict[str, Any]:
    """A line of the results."""
    drawn = {"text": text.text, "tokens": text.tokens, "ended": text.ended}
    return {**asked.named, "prompt": asked.prompt, **drawn, "seed": asked.seed}


COMMAND = Command(main=main, options=SampleOptions, positional=("run", "prompt"))
