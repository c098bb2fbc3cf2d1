"""Provides `gregale sample`, which continues a prompt, or the prompts of a file, with a trained model."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain, repeat
from typing import TextIO, cast

from gregale.axes.layout import BATCH
from gregale.axes.mesh import MeshConfig
from gregale.data.special import counter_of_names, taken_as_text
from gregale.data.tokenizers import load_tokenizer
from gregale.errors import UserError
from gregale.huggingface.folder import CONFIG, read_json
from gregale.inference.generate import BLOCK, Prompt, multiple_of
from gregale.inference.token_sampling import Sampling
from gregale.programs.command import Command
from gregale.programs.runtime.trained_model import find_run, open_trained
from gregale.programs.sample.output import Results, Screen, ThroughputMeter, results_to
from gregale.programs.sample.prompts import PromptRequest, batches_of, read_prompts
from gregale.programs.sample.sampler import MAX_DELAY_S, Sampler, SamplerPlacement, beside_training, steady, unsplit
from gregale.programs.sample.text_format import INTERRUPTED, Continuation, TextFormat, text_format_of
from gregale.runs.run_directory import RunDirectory
from gregale.settings import setting, shown, whole
from gregale.streams import ResilientStream, say_beside
from gregale.terminal import Console

ONE_DEVICE = MeshConfig(data=1)


@dataclass(frozen=True)
class SampleOptions(Sampling):
    run: str = setting("", "the run: its directory or URL, or its name under runs/")
    prompt: str = setting("", "the text to continue")
    prompts: str | None = setting(
        None, "a file of prompts, one per line: text, or JSON lines (.jsonl) with prompt, seed, id"
    )
    out: str | None = setting(None, "with prompts: the file for the results, JSON lines; null: standard output")
    tokens: int = setting(256, "number of tokens to add", range=whole(1), aliases=("max_new_tokens", "length"))
    parse_special: bool = setting(False, "encode names of special tokens in prompts as special tokens, not as text")
    stop: list[str] = setting(list, "strings that end a text, which excludes them", aliases=("stop_strings", "until"))
    batch: int = setting(8, "the number of prompts in a batch", range=whole(1), aliases=("batch_size",))
    mesh: MeshConfig = setting(
        ONE_DEVICE, "devices: mesh.data splits prompts, mesh.model the model, mesh.context texts"
    )
    step: int | None = setting(None, "the checkpoint's step; null: the newest checkpoint", range=whole(0))

    def __post_init__(self):
        super().__post_init__()
        if not self.run:
            raise UserError('RUN is missing. Usage: gregale sample RUN ["PROMPT"]')
        if self.prompt and self.prompts is not None:
            raise UserError(f"a prompt and prompts {shown(self.prompts)} are both given; leave one out.")
        if self.out is not None and self.prompts is None:
            raise UserError(f"out is {shown(self.out)}, which is for results of `prompts`; a single text is printed.")
        if "" in self.stop:
            raise UserError("stop has an empty string, which would end every text before it begins.")
        others = [axis for axis in ("island", "replica", "stage") if getattr(self.mesh, axis) != 1]
        if others:
            raise UserError(f"mesh.{others[0]} is for training; sampling has mesh.context, mesh.data and mesh.model.")

    @property
    def sampling(self) -> Sampling:
        return Sampling(self.temperature, self.top_k, self.top_p, self.seed)


def main(options: SampleOptions) -> int:
    """Print the prompt and its continuation during sampling, or continue the prompts of a file."""
    run = find_run(options.run)
    tokenizer = load_tokenizer(run.path)
    form = text_format_of(run, tokenizer.parsing_special() if options.parse_special else tokenizer)
    if options.prompts is None:
        requests = [PromptRequest(options.prompt, options.seed, "the prompt", {})]
    else:
        requests = read_prompts(options.prompts, options.seed)
    prompts = [Prompt(form.ids(each.prompt), each.seed) for each in requests]
    context = context_of(run)
    for each, prompt in zip(requests, prompts, strict=True):
        check_length(each.source, len(prompt.tokens), context)
    found = counter_of_names(form.tokenizer)(each.prompt for each in requests)
    if note := taken_as_text(found, "the prompts", "parse_special"):
        say_beside(note)
    if options.prompts is None:
        counts = [show(options, form, prompts[0])]
    else:
        with results_to(options.out) as results:
            counts = continue_all(options, form, requests, prompts, results)
    lengths = [len(prompt.tokens) + count for prompt, count in zip(prompts, counts, strict=True)]
    if longer := sum(length > context for length in lengths):
        say_beside(
            f"{longer:,} text{'s' * (longer != 1)} became longer than the model's context of {context:,} tokens. It "
            "never saw a longer one: what stands behind may be poor."
        )
    return 0


def check_length(source: str, tokens: int, context: int) -> None:
    """Raise `UserError` for a prompt that is longer than the model's context."""
    if tokens > context:
        raise UserError(
            f"{source} has {tokens:,} tokens, and the model's context is {context:,}: it never saw a longer text. "
            "Shorten it."
        )


def context_of(run: RunDirectory) -> int:
    """Return the longest text in tokens that the model was trained on, by this run or before its import."""
    path, own = run.huggingface / CONFIG, run.read_config().batch.sequence_length
    before = read_json(path).get("max_position_embeddings") if path.is_file() else None
    return max(own, before) if isinstance(before, int) else own


def opened(options: SampleOptions, form: TextFormat) -> tuple[Sampler, object, int]:
    """Return the sampler of a run, its model, and a batch's number of rows; the checkpoint's parameters are freed."""
    trained = open_trained(options.run, options.step, options.mesh)
    setup = trained.setup
    if setup.config.sync.evaluates_replicas:
        placement = beside_training(setup)  # the run's own mesh
    else:
        placement = SamplerPlacement(setup.layout if options.prompts else unsplit(setup.layout, BATCH), whole=True)
    sampler = Sampler(setup, form, placement)
    return sampler, sampler.prepared(trained.model), multiple_of(placement.rows, options.batch)


def show(options: SampleOptions, form: TextFormat, prompt: Prompt) -> int:
    """Print prompt and continuation during sampling; an interrupt ends the text. Returns the number of tokens."""
    sampler, model, _ = opened(options, form)
    screen, meter = Screen(sys.stdout), ThroughputMeter()
    text = Continuation(form, options.tokens, options.stop)
    screen.write(options.prompt)
    try:
        for (piece,) in sampler.pieces(model, [prompt], [text], options.sampling, steady(MAX_DELAY_S)):
            screen.write(piece)
            meter.at(text.tokens)
    except KeyboardInterrupt:
        screen.write(text.finish(INTERRUPTED) + "\n")
        raise
    screen.write("\n")
    say_beside(str(meter))
    return text.tokens


def continue_all(
    options: SampleOptions,
    form: TextFormat,
    requests: Sequence[PromptRequest],
    prompts: Sequence[Prompt],
    results: Results,
) -> list[int]:
    """Continue the prompts of a file in batches; return the number of sampled tokens for each."""
    sampler, model, rows = opened(options, form)
    counts = [0] * len(prompts)
    meter, done, before = ThroughputMeter(), 0, 0
    with Console(file=cast(TextIO, ResilientStream(sys.stderr))).status("", spinner="line") as status:
        for numbers in batches_of([len(prompt.tokens) for prompt in prompts], rows):
            batch = sampler.filled_up([prompts[number] for number in numbers], rows)
            texts = [Continuation(form, options.tokens, options.stop) for _ in numbers]
            for _ in sampler.pieces(model, batch, texts, options.sampling, chain([1], repeat(BLOCK))):
                meter.at(before + sum(text.tokens for text in texts))
                status.update(f"{done:,} of {len(prompts):,} prompts, {meter.tokens:,} tokens")
            done, before = done + len(numbers), meter.tokens
            for number, text in zip(numbers, texts, strict=True):
                request = requests[number]
                drawn = {"text": text.text, "tokens": text.tokens, "ended": text.ended, "seed": request.seed}
                results.add(number, {**request.named, "prompt": request.prompt, **drawn})
                counts[number] = text.tokens
    say_beside(f"{len(prompts):,} prompt{'s' * (len(prompts) != 1)}, {meter}")
    return counts


COMMAND = Command(main=main, options=SampleOptions, plugins=True, positional=("run", "prompt"))
