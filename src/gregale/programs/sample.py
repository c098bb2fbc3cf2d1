"""Provides `gregale sample`, which continues prompts with a trained model, and converses with it."""

import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain, repeat
from pathlib import Path
from time import perf_counter
from typing import Any, TextIO, cast

from gregale.axes.layout import BATCH, MeshConfig
from gregale.data.sources.base import expand
from gregale.data.tokenizers import counter_of_names, load_tokenizer, taken_as_text
from gregale.distributed.signals import stop_on_signals
from gregale.errors import UserError
from gregale.huggingface.folder import CONFIG, read_json
from gregale.inference.generate import BLOCK, Prompt, Sampling, multiple_of
from gregale.programs.command import Command
from gregale.programs.runtime.sampler import (
    INTERRUPTED,
    MAX_DELAY_S,
    ChatPrompts,
    Continuation,
    Dialogue,
    PromptRequest,
    Sampler,
    SamplerPlacement,
    TextFormat,
    batches_of,
    beside_training,
    chat_prompts,
    converse,
    lines_of_user,
    read_messages,
    read_prompts,
    steady,
    text_format_of,
    unsplit,
)
from gregale.programs.runtime.trained_model import AVERAGE, find_run, open_trained
from gregale.runs.run_directory import RunDirectory
from gregale.settings import setting, shown, whole
from gregale.storage import is_url
from gregale.streams import ResilientStream, say_beside
from gregale.terminal import Console

ONE_DEVICE = MeshConfig(data=1)


# Control characters that a terminal would execute, with their visible symbols; tabs and line ends stay.
PICTURES = {code: 0x2400 + code for code in range(0x20) if chr(code) not in "\t\n"}
COMPILED_BLOCKS = 2  # each runs a program for the first time
PICTURES |= {0x7F: 0x2421} | dict.fromkeys(range(0x80, 0xA0), 0xFFFD)


class Screen:
    """Unbuffered standard output, which shows control characters as symbols on a terminal."""

    def __init__(self, stream: TextIO):
        self._stream, self._shown = stream, PICTURES if stream.isatty() else {}

    def write(self, text: str) -> None:
        self._stream.write(text.translate(self._shown) if self._shown else text)
        self._stream.flush()


class Results:
    """Writer of results as JSON lines in the order of the prompts; a result waits for all earlier ones."""

    def __init__(self, stream: TextIO):
        self._stream, self._next = stream, 0
        self._waiting: dict[int, dict[str, Any]] = {}
        self._ascii = (stream.encoding or "").lower().replace("-", "") != "utf8"  # UTF-8 encodes every character

    def add(self, number: int, result: dict[str, Any]) -> None:
        """Add the result of a prompt, and write all results whose predecessors are complete."""
        self._waiting[number] = result
        while self._next in self._waiting:
            self._write(self._waiting.pop(self._next))
            self._next += 1
        self._stream.flush()

    def finish(self) -> None:
        """Write the held results, whose predecessors will not complete."""
        for number in sorted(self._waiting):
            self._write(self._waiting.pop(number))
        self._stream.flush()

    def _write(self, result: dict[str, Any]) -> None:
        self._stream.write(json.dumps(result, ensure_ascii=self._ascii) + "\n")


@contextmanager
def results_to(out: str | None) -> Iterator[Results]:
    """Yield a writer of results to a file or to standard output; an interrupt keeps the complete results.

    Before the end the file has a temporary name (`.partial-` and a number at its end). It keeps that name if the
    command fails or the process is killed. Raises `UserError` if the file exists, or cannot be made.
    """
    if out is None:
        results = Results(sys.stdout)
        try:
            yield results
        finally:
            results.finish()
        return
    if is_url(out):
        raise UserError(f"out: {out} is a URL; results go to a file of this machine, or to standard output.")
    path = Path(expand(out, "out"))
    if path.exists():
        raise UserError(f"out: {path} exists already, and would be overwritten. Give another name, or remove it.")
    partial = path.with_name(f"{path.name}.partial-{os.getpid()}")
    try:
        file = open(partial, "w", encoding="utf-8")  # noqa: SIM115
    except OSError as error:
        raise UserError(f"out: {path} cannot be written: {error.strerror}.") from None
    is_valid = False
    try:
        with file:
            results = Results(file)
            try:
                yield results
            finally:
                results.finish()
        is_valid = True
    except KeyboardInterrupt:
        is_valid = True
        raise
    finally:
        if not partial.stat().st_size:
            partial.unlink()
        elif is_valid and path.exists():
            raise UserError(f"out: {path} was made by another meanwhile; the results are in {partial}.")
        elif is_valid:
            os.replace(partial, path)


class ThroughputMeter:
    """Measures throughput: the time until the first tokens, which includes compilation, and the rate after them.

    - `tokens`: the number of tokens so far.
    """

    def __init__(self):
        self._began, self._first_s, self._first_tokens = perf_counter(), 0.0, 0
        self._blocks, self.tokens, self._s = 0, 0, 0.0

    def at(self, tokens: int) -> None:
        """Record a new block; `tokens` is the total number so far."""
        self.tokens, self._s, self._blocks = tokens, perf_counter() - self._began, self._blocks + 1
        if self._blocks <= COMPILED_BLOCKS:
            self._first_s, self._first_tokens = self._s, tokens

    def __str__(self) -> str:
        """Return `120 tokens: the first after 2.13 s, then 312 tokens/s`."""
        later, later_s = self.tokens - self._first_tokens, self._s - self._first_s
        rate = f", then {later / later_s:,.4g} tokens/s" if later > 0 and later_s > 0 else ""
        return f"{self.tokens:,} token{'s' * (self.tokens != 1)}: the first after {self._first_s:.2f} s{rate}"


@dataclass(frozen=True)
class SampleOptions(Sampling):
    run: str = setting("", "the run: its directory or URL, or its name under runs/")
    prompt: str = setting("", "the text to continue")
    prompts: str | None = setting(
        None, "a file of prompts, one per line: text, or JSON lines (.jsonl) with prompt, seed, id"
    )
    chat: bool = setting(False, "answer the lines of standard input, in a conversation by the run's chat template")
    messages: str | None = setting(None, "a file of conversations to answer, JSON lines with messages, tools, seed, id")
    system: str = setting("", "with chat: the system's message")
    out: str | None = setting(
        None, "file for results of prompts or messages, JSON lines; null: standard output", aliases=("output", "o")
    )
    tokens: int = setting(256, "number of tokens to add", range=whole(1), aliases=("max_new_tokens", "length"))
    parse_special: bool = setting(False, "encode names of special tokens in prompts as special tokens, not as text")
    stop: list[str] = setting(list, "strings that end a text, which excludes them", aliases=("stop_strings", "until"))
    batch: int = setting(8, "the number of prompts in a batch", range=whole(1), aliases=("batch_size",))
    mesh: MeshConfig = setting(
        ONE_DEVICE, "devices: mesh.data splits prompts, mesh.model the model, mesh.context texts"
    )
    step: int | None = setting(None, "the checkpoint's step; null: the newest checkpoint", range=whole(0))
    average: bool = setting(False, AVERAGE)

    def __post_init__(self):
        super().__post_init__()
        if not self.run:
            raise UserError('RUN is missing. Usage: gregale sample RUN ["PROMPT"]')
        if self.prompt and self.prompts is not None:
            raise UserError(f"a prompt and prompts {shown(self.prompts)} are both given; leave one out.")
        if self.has_conversations and (self.prompt or self.prompts is not None or self.parse_special):
            found = "parse_special" if self.parse_special else "prompts" if self.prompts is not None else "a prompt"
            raise UserError(f"{found} is for a text to continue; leave it out with chat and messages.")
        if self.system and (not self.chat or self.messages is not None):
            raise UserError("system is for --chat; conversations of a file have their own message with role system.")
        if self.out is not None and not self.has_file:
            raise UserError(
                f"out is {shown(self.out)}, which is for results of `prompts` or `messages`; a single text is printed."
            )
        if "" in self.stop:
            raise UserError("stop has an empty string, which would end every text before it begins.")
        others = [axis for axis in ("island", "replica", "stage") if getattr(self.mesh, axis) != 1]
        if others:
            raise UserError(f"mesh.{others[0]} is for training; sampling has mesh.context, mesh.data and mesh.model.")

    @property
    def has_file(self) -> bool:
        return self.prompts is not None or self.messages is not None

    @property
    def has_conversations(self) -> bool:
        return self.chat or self.messages is not None

    @property
    def sampling(self) -> Sampling:
        return Sampling(self.temperature, self.top_k, self.top_p, self.seed)


def main(options: SampleOptions) -> int:
    """Print a text during sampling, continue the prompts or conversations of a file, or answer standard input."""
    run = find_run(options.run)
    tokenizer, context = load_tokenizer(run.path), context_of(run)
    if not options.has_conversations:
        form = text_format_of(run, tokenizer.parsing_special() if options.parse_special else tokenizer)
        requests = [PromptRequest({"prompt": options.prompt}, options.seed, "the prompt", {})]
        if options.prompts is not None:
            requests = read_prompts(options.prompts, options.seed)
        found = counter_of_names(form.tokenizer)(each.prompt for each in requests)
        if note := taken_as_text(found, "the prompts", "parse_special"):
            say_beside(note)
        return sample_requests(options, form, requests, lambda each: form.ids(each.prompt), context)
    with chat_prompts(run, tokenizer) as chat:
        if options.messages is None:
            return converse_with(options, chat, context)
        requests = read_messages(options.messages, options.seed)
        return sample_requests(options, chat.form, requests, lambda each: chat.ids(each.given, each.source), context)


@stop_on_signals()
def sample_requests(
    options: SampleOptions,
    form: TextFormat,
    requests: Sequence[PromptRequest],
    ids: Callable[[PromptRequest], list[int]],
    context: int,
) -> int:
    """Continue the tokens `ids` of each request, which have to be within the context; return the exit code."""
    prompts = [Prompt(ids(each), each.seed) for each in requests]
    for each, prompt in zip(requests, prompts, strict=True):
        check_length(each.source, len(prompt.tokens), context)
    if not options.has_file:
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


def converse_with(options: SampleOptions, chat: ChatPrompts, context: int) -> int:
    """Answer the lines of standard input, each as a message of one conversation."""
    sampler, model, _ = opened(options, chat.form)
    dialogue = Dialogue(chat, options.system, context - min(options.tokens, context // 4))

    def answer_to(message: str) -> tuple[Continuation, Iterator[str]]:
        prompt, text = dialogue.ask(message, options.seed), Continuation(chat.form, options.tokens, options.stop)
        pieces = sampler.pieces(model, [prompt], [text], options.sampling, steady(MAX_DELAY_S))
        return text, (piece for (piece,) in pieces)

    is_terminal = sys.stdin.isatty()
    converse(dialogue, lines_of_user(is_terminal), answer_to, Screen(sys.stdout).write, is_terminal)
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
    path, own = run.huggingface / CONFIG, run.config_at().batch.sequence_length
    before = read_json(path).get("max_position_embeddings") if path.is_file() else None
    return max(own, before) if isinstance(before, int) else own


def opened(options: SampleOptions, form: TextFormat) -> tuple[Sampler, object, int]:
    """Return the sampler of a run, its model, and a batch's number of rows; the checkpoint's parameters are freed."""
    trained = open_trained(options.run, options.step, options.mesh, options.average)
    setup = trained.setup
    if setup.config.sync.evaluates_replicas:
        placement = beside_training(setup)  # the run's own mesh
    else:
        placement = SamplerPlacement(setup.layout if options.has_file else unsplit(setup.layout, BATCH), whole=True)
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
                results.add(number, {**request.named, **request.given, **drawn})
                counts[number] = text.tokens
    say_beside(f"{len(prompts):,} prompt{'s' * (len(prompts) != 1)}, {meter}")
    return counts


COMMAND = Command(main=main, options=SampleOptions, plugins=True, positional=("run", "prompt"))
