"""Provides sampling with the model of a run: prompts of a file, texts with their begin and end, and conversations.

A text begins with tokens around its prompt; end tokens and stop strings end it.
"""

import codecs
import json
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from datetime import date
from difflib import get_close_matches
from functools import partial
from itertools import repeat
from time import perf_counter
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

from gregale.axes.layout import BATCH, POSITION, Layout, MeshConfig, make_mesh, named_arrays, standard_layout
from gregale.data.chat.conversation import ALL, Conversation
from gregale.data.chat.renderer import ChatEncoder, NotRendered
from gregale.data.sources.base import expand, read_bytes
from gregale.data.sources.chat import ChatRows
from gregale.data.tokenizers import Tokenizer
from gregale.errors import UserError
from gregale.huggingface.folder import GENERATION, read_json
from gregale.inference.generate import BLOCK, Generator, Prompt, Sampling, sampling_form, width_of
from gregale.model.execution import execution
from gregale.programs.runtime.setup import Setup
from gregale.runs.run_directory import RunDirectory
from gregale.settings import LARGEST_WHOLE, did_you_mean, shortened
from gregale.streams import say_beside

END, STOP, COUNT, INTERRUPTED = "end", "stop", "tokens", "interrupted"  # reasons why a text ended


@dataclass(frozen=True)
class TextFormat:
    """Begin and end of a model's texts."""

    tokenizer: Tokenizer
    beginning: tuple[int, ...] = ()  # tokens before each prompt
    others: tuple[int, ...] = ()  # tokens that end a text, besides the tokenizer's own

    @property
    def ends(self) -> tuple[int, ...]:
        return (self.tokenizer.end_of_document, *self.others)

    def ids(self, prompt: str) -> list[int]:
        """Return the tokens of a prompt; for an empty one, the token that ends the previous text."""
        return [*self.beginning, *self.tokenizer.encode(prompt).tolist()] or [self.tokenizer.end_of_document]


def text_format_of(run: RunDirectory, tokenizer: Tokenizer) -> TextFormat:
    """Return the format of the texts that the model was trained on.

    The texts of a run end with its end of document. An imported model without further training has the format of
    transformers: the tokens that its tokenizer puts before a text, and all end tokens of its generation config.
    """
    if not run.is_imported:
        return TextFormat(tokenizer)
    path = run.huggingface / GENERATION
    saved: Any = read_json(path).get("eos_token_id") if path.is_file() else None
    ends = saved if isinstance(saved, list) else [saved]
    known = (end for end in ends if isinstance(end, int) and 0 <= end != tokenizer.end_of_document)
    return TextFormat(tokenizer, tokenizer.start, tuple(known))


class StopStrings:
    """Ends a text, which arrives in pieces, before the first stop string that is complete.

    Of two strings that end with the same character, the longer one counts. The class holds back text that may become a
    stop string, so that the result does not depend on the pieces.
    """

    def __init__(self, strings: Sequence[str]):
        self._strings, self._held = strings, ""
        self.found: str | None = None

    def push(self, piece: str) -> str:
        """Return the new text that is certainly no stop string; after a match, the text before the match."""
        self._held += piece
        complete = [(at + len(each), -len(each), each) for each in self._strings if (at := self._held.find(each)) >= 0]
        if complete:
            end, _, self.found = min(complete)
            return self._released(end - len(self.found))
        longest = min(len(self._held), max(map(len, self._strings), default=0))
        ends = ((size, self._held[-size:]) for size in range(longest, 0, -1))
        kept = (size for size, end in ends if any(each.startswith(end) for each in self._strings))
        return self._released(len(self._held) - next(kept, 0))

    def finish(self) -> str:
        """Return the text that was held back, if no stop string was found."""
        return "" if self.found is not None else self._released(len(self._held))

    def _released(self, size: int) -> str:
        piece, self._held = self._held[:size], self._held[size:]
        return piece


class Continuation:
    """A text as it comes, token by token, until a token or a stop string ends it or it has `count` tokens.

    - `text`: what is certain of it; neither the token nor the string that ended it is part of it.
    - `tokens`: how many were drawn for it, but for the one that ended it.
    - `ended`: by what (`END`, `STOP`, `COUNT`, `INTERRUPTED`); None while it goes on.
    """

    def __init__(self, form: TextFormat, count: int, stops: Sequence[str] = ()):
        self.text, self.tokens, self.count = "", 0, count
        self.ended: str | None = None
        self._ends, self._stops = form.ends, StopStrings(stops)
        self._pieces = form.tokenizer.vocabulary_bytes
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, tokens: Iterable[int]) -> str:
        """Add tokens; return the text that they certainly add, in complete characters."""
        before = len(self.text)
        for token in tokens:
            if self.ended is not None:
                break
            if token in self._ends:
                self.finish(END)
                break
            self.tokens += 1
            self.text += self._stops.push(self._decoder.decode(self._pieces[token]))
            if self._stops.found is not None:
                self.ended = STOP
            elif self.tokens == self.count:
                self.finish(COUNT)
        return self.text[before:]

    def finish(self, ended: str) -> str:
        """End the text; return the text that was held back."""
        if self.ended is not None:
            return ""
        rest = self._stops.push(self._decoder.decode(b"", final=True))
        self.ended = ended if self._stops.found is None else STOP
        rest += self._stops.finish()
        self.text += rest
        return rest


JSON_LINES = (".jsonl", ".ndjson")
PROMPT_KEYS = ("prompt", "seed", "id")
MESSAGES_KEYS = ("messages", "tools", "documents", "seed", "id")


@dataclass(frozen=True)
class PromptRequest:
    """A text of the user to continue, or a conversation to answer."""

    given: dict[str, Any]  # `prompt`, or `messages` and what its template gets besides; the result repeats them
    seed: int
    source: str  # file and line of the prompt, for messages
    named: dict[str, Any]  # further keys that the result repeats: `id`, if the prompt has one

    @property
    def prompt(self) -> str:
        return self.given["prompt"]


def read_prompts(path: str, seed: int) -> list[PromptRequest]:
    """Return the prompts of a file, one per line: JSON (`.jsonl`), or text.

    `seed`: seed of prompts without one Raises `UserError` for a missing or empty file, and for a line that is no
    prompt.
    """
    path = expand(path, "prompts")
    if path.endswith(".json"):
        raise UserError(f"prompts: {path} is read line by line: JSON lines are .jsonl, and all other names are text.")
    read = _of_json if path.endswith(JSON_LINES) else _of_text
    return [read(line, source, seed) for line, source in _lines(path, "a prompt")]


def read_messages(path: str, seed: int) -> list[PromptRequest]:
    """Return the conversations of a file, a JSON object a line, see `read_prompts`."""
    lines = _lines(expand(path, "messages"), "a conversation")
    example = '{"messages": [{"role": "user", "content": "..."}]}'
    return [_request(*each, seed, MESSAGES_KEYS, example) for each in lines]


def _lines(path: str, what: str) -> list[tuple[str, str]]:
    """Return the lines of a file, each with its place for messages."""
    try:
        text = read_bytes(path).decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: byte {error.start} is not UTF-8.") from None
    lines = [line.removesuffix("\r") for line in text.removesuffix("\n").split("\n")] if text else []
    if not lines:
        raise UserError(f"{path}: the file is empty; it has to have {what} a line.")
    return [(line, f"{path}, line {number}") for number, line in enumerate(lines, 1)]


def _of_text(line: str, source: str, seed: int) -> PromptRequest:
    if not line.strip():
        raise UserError(
            f"{source}: the prompt is empty. Take the line out; `gregale sample RUN` without a prompt begins a text."
        )
    return PromptRequest({"prompt": line}, seed, source, {})


def _of_json(line: str, source: str, seed: int) -> PromptRequest:
    found = _request(line, source, seed, PROMPT_KEYS, '{"prompt": "..."}')
    prompt = found.given.get("prompt")
    if not isinstance(prompt, str) or not prompt:
        what = "is missing" if not found.given else "is empty" if prompt == "" else f"is {shortened(str(prompt))}"
        raise UserError(f"{source}: `prompt` {what}; it has to be a text to continue.")
    if any("\ud800" <= character <= "\udfff" for character in prompt):
        raise UserError(f"{source}: `prompt` has half of a surrogate pair, which is no character.")
    return found


def _request(line: str, source: str, seed: int, keys: Sequence[str], example: str) -> PromptRequest:
    try:
        found = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{source}: not JSON ({error}).") from None
    if not isinstance(found, dict):
        raise UserError(f"{source}: found {type(found).__name__}, expected an object: {example}.")
    for key in found:
        if key not in keys:
            near = did_you_mean(get_close_matches(key, keys))
            raise UserError(f"{source}: `{shortened(key)}` is not a valid key.{near} Valid keys: {', '.join(keys)}.")
    own, named = found.pop("seed", seed), {"id": found.pop("id")} if "id" in found else {}
    if not isinstance(own, int) or isinstance(own, bool) or not 0 <= own <= LARGEST_WHOLE:
        raise UserError(
            f"{source}: `seed` is {shortened(str(own))}; it has to be a whole number from 0 to {LARGEST_WHOLE:,}."
        )
    return PromptRequest(found, own, source, named)


def batches_of(lengths: Sequence[int], rows: int) -> Iterator[list[int]]:
    """Yield the indices of the prompts of each batch: at most `rows`, all padded to the same length.

    The shapes of a prompt's computation thus do not depend on the other prompts. `lengths`: in tokens
    """
    of_width: dict[int, list[int]] = {}
    for number, length in enumerate(lengths):
        of_width.setdefault(width_of(length), []).append(number)
    batches = [same[start : start + rows] for same in of_width.values() for start in range(0, len(same), rows)]
    yield from sorted(batches)


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


Answerer = Callable[[str], tuple[Continuation, Iterator[str]]]
FIRST_ROOM = 256  # tokens; prompts of a conversation are padded to powers of two, so that few lengths are compiled


class ChatPrompts:
    """Makes prompts of conversations.

    - `form`: its `ends` end an answer
    - `rows`: how a conversation is read
    """

    def __init__(self, encoder: ChatEncoder, form: TextFormat, rows: ChatRows):
        self.form, self._encoder, self._rows = form, encoder, rows

    def ids(self, given: Mapping[str, Any], source: str) -> list[int]:
        """Return the tokens up to the begin of the assistant's next message.

        - `given`: `messages`, and `tools` and `documents` if there are any
        - `source`: of the conversation, for errors

        Raises `UserError` for what is no conversation, `NotRendered` for one that the template rejects.
        """
        conversation = self._rows.conversation(given, source)
        assert isinstance(conversation, Conversation)
        if json.loads(conversation.text)["messages"][-1]["role"] == "assistant":
            raise UserError(f"{source}: the last message is the assistant's; take it out to sample another one.")
        return self._encoder.prompt(conversation).tolist()


@contextmanager
def chat_prompts(run: RunDirectory, tokenizer: Tokenizer) -> Iterator[ChatPrompts]:
    """Yield the prompts by a run's chat template; an answer ends as the template and the run's texts do.

    A template's date is that of the run's sources. Raises `UserError` for a run without a template, and for a
    conversation that the template rejects.
    """
    if tokenizer.chat_template is None:
        raise UserError(
            f"{run.path} has no chat template, because it was not trained on conversations. `gregale sample RUN PROMPT`"
            " continues a text; a run with a source of type chat, or with data.chat_template, has a template."
        )
    sources = (each for each in run.config_at().data.sources.values() if isinstance(each, ChatRows))
    day = next((each.date for each in sources), date.today().isoformat())
    with ChatEncoder(tokenizer) as encoder:
        try:
            form, end = text_format_of(run, tokenizer), encoder.end_of_turn()
            others = form.others if end in form.ends else (*form.others, end)
            yield ChatPrompts(encoder, TextFormat(tokenizer, others=others), ChatRows(loss_on=ALL, date=day))
        except NotRendered as error:
            raise UserError(str(error)) from None


class Dialogue:
    """The messages of a conversation; the oldest ones leave it when it outgrows the context.

    - `limit`: the longest prompt in tokens
    """

    def __init__(self, prompts: ChatPrompts, system: str, limit: int):
        self._prompts, self._limit = prompts, limit
        self._system = [{"role": "system", "content": system}] if system else []
        self.messages: list[dict[str, str]] = []  # without the system's; the user's and the assistant's take turns

    def ask(self, text: str, seed: int) -> Prompt:
        """Add the user's message; return the prompt for the answer.

        Raises `UserError`, and keeps the conversation, if the message alone exceeds the limit.
        """
        asked = [*self.messages, {"role": "user", "content": text}]
        size = 0
        for first in range(0, len(asked), 2):
            tokens = self._prompts.ids({"messages": [*self._system, *asked[first:]]}, "the conversation")
            if (size := len(tokens)) <= self._limit:
                if first:
                    say_beside(f"The oldest {first} messages leave the conversation, which exceeds the context.")
                self.messages = asked[first:]
                return Prompt(tokens, seed, max(FIRST_ROOM, 1 << (size - 1).bit_length()))
        raise UserError(
            f"The message makes a prompt of {size:,} tokens, and the model's context has room for {self._limit:,} "
            "beside an answer. It is left out; shorten it."
        )


def converse(
    dialogue: Dialogue, lines: Iterable[str], answer_to: Answerer, write: Callable[[str], None], is_terminal: bool
) -> None:
    """Answer the user's lines until they end.

    - `answer_to`: asks a message; returns the text of the answer, and its pieces as they are drawn
    - `is_terminal`: an interrupt ends the answer only, and a message that is refused is left out
    """
    for line in lines:
        try:
            text, pieces = answer_to(line)
        except (UserError, NotRendered) as error:
            if not is_terminal:
                raise
            say_beside(str(error))
            continue
        try:
            for piece in pieces:
                write(piece)
        except KeyboardInterrupt:
            write(text.finish(INTERRUPTED))
            if not is_terminal:
                raise
        finally:
            write("\n")
        dialogue.messages.append({"role": "assistant", "content": text.text})
        if text.ended == COUNT:
            say_beside(f"The answer has {text.tokens:,} tokens, the limit (--tokens).")


def lines_of_user(is_terminal: bool) -> Iterator[str]:
    """Yield the lines of standard input that are not empty, until its end; Ctrl-C discards the line in a terminal."""
    if is_terminal:
        with suppress(ImportError):
            import readline  # noqa: F401 -- `input` then has the keys of a shell
    while True:
        try:
            line = input("> " if is_terminal and sys.stdout.isatty() else "")
        except EOFError:
            if is_terminal:
                say_beside("")
            return
        except UnicodeDecodeError as error:
            raise UserError(f"standard input: byte {error.start} of a line is not UTF-8.") from None
        except KeyboardInterrupt:
            if not is_terminal:
                raise
            say_beside("")  # after ^C
            say_beside("Ctrl-D ends the conversation.")
            continue
        if line.strip():
            yield line.encode("utf-8", "surrogateescape").decode("utf-8", "replace")
