"""Provides the evaluations of a model: losses on text, log likelihoods of texts, and tasks.

Losses are on held-out and validation text, in nats per token and bits per byte. Log likelihoods are computed in batches
by length on the mesh; texts longer than the context are scored in windows.
"""

import hashlib
import math
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from haliax import Axis, NamedArray

from gregale.axes.layout import BATCH, POSITION
from gregale.checkpoint.multihost import messages_of_all
from gregale.data.config import SOURCES, VALIDATION
from gregale.data.examples import MORE_BYTES, DocumentStream, Examples, held_out_examples
from gregale.data.preparation import Corpus, source_rows
from gregale.data.tokenizer_training import naming
from gregale.data.tokenizers import Tokenizer, counter_of_names, taken_as_text
from gregale.errors import UserError
from gregale.evaluation.tasks import (
    NOTHING,
    Continuation,
    Continuations,
    Pair,
    Question,
    Score,
    Task,
    encoded,
    estimate,
    filled,
    perplexity,
    read_tasks,
)
from gregale.inference.generate import Sampling, check_scored, scores
from gregale.programs.runtime.batches import BatchSharding, GlobalBatches
from gregale.programs.runtime.sampler import MAX_BATCH, Sampler, TextFormat, beside_training, chat_prompts
from gregale.programs.runtime.setup import NEXT_TOKEN, Setup, checked_loss
from gregale.runs.config import TrainConfig
from gregale.runs.run_directory import RunDirectory
from gregale.tracking.metrics import POSITION_LOSS

MIN_LENGTH = 32  # tokens of a row; lengths are the context, its half, its quarter and so on
IN_FLIGHT = 2  # batches that the devices have before the host waits for the results of the first


class Scored(NamedTuple):
    """Scores of continuations."""

    log_likelihoods: np.ndarray  # sums over the tokens that are scored, nats, float64 [continuation]
    greedy: np.ndarray  # whether each of these tokens is the likeliest, bool [continuation]


class Shape(NamedTuple):
    """Continuations that one compiled program scores.

    - `rows`, `length`: shape of the program's batches
    - `chosen`: the indices of the continuations, int64
    """

    rows: int
    length: int
    chosen: np.ndarray


class Scorer:
    """Scores continuations with a run's model; compiles one program for each of a few lengths.

    Probabilities are over the tokenizer's tokens, or over all rows of an imported model's table. The rows that pad a
    table for the mesh have no probability. Raises `UserError` for a model that cannot score.
    """

    def __init__(self, setup: Setup, tokenizer: Tokenizer):
        self._setup, config = setup, setup.config
        check_scored(setup.model, config.model.get_choice_name(type(config.model)))
        execution = setup.evaluation_execution()
        vocabulary = config.model.vocabulary or tokenizer.vocabulary_size

        def sums(model, batch: dict[str, NamedArray]) -> tuple[jax.Array, jax.Array]:
            found, likeliest = scores(model, batch, vocabulary, execution)
            is_scored = batch["loss_mask"].array > 0
            total = jnp.sum(jnp.where(is_scored, found.array, 0), axis=1)
            return total, jnp.all(likeliest.array | ~is_scored, axis=1)

        self._sums: Callable = jax.jit(
            sums, out_shardings=setup.layout.sharding((), {}), compiler_options=setup.compiler_options
        )

    @property
    def context(self) -> int:
        """Return the maximum number of tokens in an input of the model."""
        return self._setup.config.batch.sequence_length

    def __call__(
        self, model, continuations: Continuations, at_batch: Callable[[int, int], None] = lambda done, total: None
    ) -> Scored:
        """Return the scores of all continuations; all processes of the run make this call and get the result.

        - `at_batch(done, total)`: called for each batch, with counts of continuations
        """
        lengths = continuations.lengths
        found = Scored(np.zeros(len(lengths)), np.zeros(len(lengths), bool))
        done, waiting = 0, deque()

        def take() -> None:
            chosen, results = waiting.popleft()
            for array, result in zip(found, results, strict=True):
                array[chosen] = np.asarray(result)[: len(chosen)]

        for shape in self.shapes(lengths):
            for chosen, batch in self._batches(continuations, shape):
                at_batch(done, len(lengths))
                waiting.append((chosen, self._sums(model, batch)))
                done += len(chosen)
                if len(waiting) > IN_FLIGHT:
                    take()
        while waiting:
            take()
        at_batch(done, len(lengths))
        return found

    def shapes(self, lengths: np.ndarray) -> list[Shape]:
        """Return the programs for these input lengths, the longest first so that a lack of memory shows at once."""
        layout, size = self._setup.layout, self._setup.config.batch.size
        parts = layout.devices((BATCH,), layout.compute)
        sizes = halves(self.context, 1 if layout.context == 1 else 2 * layout.context)
        smallest = len(sizes) - 1 - np.searchsorted(sizes[::-1], np.minimum(lengths, self.context))
        shapes = []
        for number, length in enumerate(sizes):
            chosen = np.flatnonzero(smallest == number)
            if len(chosen):
                rows = min(size * (self.context // length), -(-len(chosen) // parts) * parts)
                shapes.append(Shape(rows, length, chosen))
        return shapes

    def _batches(
        self, continuations: Continuations, shape: Shape
    ) -> Iterator[tuple[np.ndarray, dict[str, NamedArray]]]:
        """Yield the indices of each batch's continuations, and the batch with the rows of this process's devices."""
        placement = BatchSharding((Axis(BATCH, shape.rows), Axis(POSITION, shape.length)), self._setup.layout)
        for first in range(0, len(shape.chosen), shape.rows):
            chosen = shape.chosen[first : first + shape.rows]
            mine = [continuations[chosen[row]] if row < len(chosen) else NOTHING for row in placement.rows]
            yield chosen, placement.placed(placement.part(filled(mine, shape.length)))


def halves(length: int, multiple: int = 1) -> list[int]:
    """Return a length, its half and so on, rounded up to multiples, down to `MIN_LENGTH`."""
    found = [length]
    while MIN_LENGTH <= (half := -(-found[-1] // (2 * multiple)) * multiple) < found[-1]:
        found.append(half)
    return found


FIRST_POSITIONS = 64  # in the first range of positions whose losses are averaged


class EvaluationText(NamedTuple):
    """Text of an evaluation, which scores each example once."""

    held_out: Examples | None  # examples held out of the training sources, or None
    validation: Mapping[str, Examples] = {}  # examples of the validation sources, by name
    lengths: Mapping[int, Examples] = {}  # the same text as sequences of other lengths
    held_out_by: Mapping[str, Examples] = {}  # held-out examples of the training sources with tags, by name
    tags: Mapping[str, tuple[str, ...]] = {}  # of the sources in `validation` and `held_out_by`

    @property
    def first(self) -> Examples | None:
        """Return the held-out text, or else the first validation source; None if there is neither."""
        return self.held_out if self.held_out is not None else next(iter(self.validation.values()), None)


def evaluation_text(corpus: Corpus, config: TrainConfig) -> EvaluationText:
    """Return the evaluation text of a run's corpus; raise `UserError` if it is too short for one of the lengths."""
    held_out = corpus.held_out is not None
    streams, group = (corpus.held_out_streams, SOURCES) if held_out else (corpus.validation_streams, VALIDATION)
    lengths = {}
    for length in dict.fromkeys(config.evaluation.sequence_lengths if streams else []):
        with naming("evaluation.sequence_lengths"):
            lengths[length] = held_out_examples(source_rows(group, streams, length, config.data))
    tags = {name: each.tags for name, each in config.data.validation.items() if each.tags}
    own = {name: each.tags for name, each in config.data.sources.items() if each.tags} if held_out else {}
    if both := [name for name in own if name in tags]:
        raise UserError(
            f"data.validation.{both[0]}: a source has the same name, and both have tags. Rename one of them."
        )
    held_out_by = {}
    for name in own:
        with naming(f"data.{SOURCES}.{name}"):
            rows = {name: corpus.held_out_streams[name]}
            held_out_by[name] = held_out_examples(source_rows(SOURCES, rows, config.batch.sequence_length, config.data))
    return EvaluationText(corpus.held_out, corpus.validation, lengths, held_out_by, tags | own)


class Evaluator:
    """Computes the loss on text; compiled once.

    - `text`: at least one text
    - `token_bytes`: bytes of each token's text, [tokens]; an example may have `more_bytes` of its targets
    """

    def __init__(self, setup: Setup, text: EvaluationText, token_bytes: np.ndarray):
        self._setup, self.text = setup, text
        objective, first = setup.config.objective, text.first
        if first is not None and first.rows_together != objective.rows_together:
            objective = NEXT_TOKEN  # text beside the run's pairs
        self._in_bytes, self.objective = objective.is_models_own, objective
        self._named: list[str] = []  # the objective's metrics, whose sums follow; known once the program is traced
        execution = setup.evaluation_execution()
        config, by_position = setup.config.model, setup.config.evaluation.by_position
        if by_position:
            check_scored(setup.model, config.get_choice_name(type(config)))
        sizes = np.zeros(setup.Vocab.size, np.float32)
        sizes[: len(token_bytes)] = token_bytes

        def sums(models, batch):
            model, frozen = models
            more_bytes = batch[MORE_BYTES].array if MORE_BYTES in batch else 0
            batch = {key: batch[key] for key in batch if key != MORE_BYTES}
            mask = batch["loss_mask"].array
            scored = ((jnp.asarray(sizes)[batch["targets"].array] + more_bytes) * mask).sum()
            if not by_position:
                found = checked_loss(config, model, batch, execution, objective, frozen)
                self._named[:] = [] if self._in_bytes else found.metrics
                return jnp.stack([found.loss, found.weight, scored, *(found.metrics[name] for name in self._named)])
            found, _ = scores(model, batch, config.logit_rows or setup.Vocab.size, execution)
            losses = -found.rearrange((BATCH, POSITION)).array * mask
            length = mask.shape[1]
            bucket = jnp.searchsorted(jnp.asarray(bounds(length)), batch["positions"].array, side="right") - 1
            parts = [x.sum(where=bucket == each) for x in (losses, mask) for each in range(len(bounds(length)))]
            return jnp.stack([losses.sum(), mask.sum(), scored, *parts])

        self._sums: Callable = jax.jit(
            sums, out_shardings=setup.layout.sharding((), {}), compiler_options=setup.compiler_options
        )

    def __call__(
        self, model, batches: int | None, at_batch: Callable[[], None] = lambda: None, frozen: Any = None
    ) -> dict[str, float]:
        """Return the metrics over the first `batches` batches of each text, or over all; call `at_batch` for each.

        `eval_loss` (nats per token, or the run's objective) and `bits_per_byte` (of tokens alone) are over the held-out
        text or, without held-out text, over all validation sources. `eval_loss.NAME` and `bits_per_byte.NAME` are over
        one source, `eval_loss_length.N` over sequences of N tokens. `eval_loss_position.P` is over the targets of
        tokens from position P of their document on, up to the next P, in the longest sequences. `eval_METRIC` is a
        metric of the objective, such as `eval_reward_accuracy`, with `Passes.frozen`.
        """
        models, sources = (model, frozen), self.text.validation
        validation = {name: self._total(models, text, batches, at_batch) for name, text in sources.items()}
        if self.text.held_out is None:
            whole = np.sum(list(validation.values()), axis=0)
        else:
            whole = self._total(models, self.text.held_out, batches, at_batch)
        metrics = self._metrics(whole)
        lengths = {self._setup.config.batch.sequence_length: whole}
        for length, text in self.text.lengths.items():
            lengths[length] = self._total(models, text, batches, at_batch)
            metrics[f"eval_loss_length.{length}"] = metrics_of(lengths[length])["eval_loss"]
        longest = max(lengths)
        metrics |= losses_by_position(lengths[longest], longest) if self._in_bytes else {}
        for name, total in validation.items():
            metrics |= {f"{metric}.{name}": value for metric, value in self._metrics(total).items()}
        own = {name: self._total(models, text, batches, at_batch) for name, text in self.text.held_out_by.items()}
        return metrics | self._by_tag({**validation, **own})

    def compilations(self, model, frozen: Any = None) -> Iterator[Callable[[], Any]]:
        """Yield functions that compile the programs of a call with an abstract model, whose leaves have shardings."""
        text = self.text
        for each in (text.held_out, *text.validation.values(), *text.lengths.values(), *text.held_out_by.values()):
            if each is not None:
                with closing(self._batches(each)) as read:
                    lowered = self._sums.lower((model, frozen), next(read))
                yield lowered.compile

    def _by_tag(self, totals: Mapping[str, np.ndarray]) -> dict[str, float]:
        """Return the metrics of all text with each tag, `eval_loss_tag.TAG`, and of the tags together.

        `eval_loss_macro` is the mean of the tags' losses, `eval_loss_micro` the mean over the tokens of their texts.
        """
        tags, metrics, losses = self.text.tags, {}, []
        for tag in sorted({tag for own in tags.values() for tag in own}):
            found = self._metrics(np.sum([totals[name] for name, own in tags.items() if tag in own], axis=0))
            metrics |= {f"{metric}_tag.{tag}": value for metric, value in found.items()}
            losses.append(found["eval_loss"])
        if not tags:
            return {}
        micro = metrics_of(np.sum([totals[name] for name in tags], axis=0))["eval_loss"]
        return metrics | {"eval_loss_macro": float(np.mean(losses)), "eval_loss_micro": micro}

    def _metrics(self, total: np.ndarray) -> dict[str, float]:
        found = metrics_of(total)
        if self._in_bytes:
            return found
        figures = {f"eval_{name}": one / total[1] for name, one in zip(self._named, total[3:].tolist(), strict=True)}
        return {"eval_loss": found["eval_loss"], **(figures if total[1] else {})}

    def _total(self, models, text: Examples, batches: int | None, at_batch: Callable[[], None]) -> np.ndarray:
        """Return sums over a text: loss in nats, targets, bytes of the targets' text, float64 [3].

        By position, losses and targets of each range of `bounds` follow; for an objective, the sums of its metrics.
        """
        totals, begun = 0.0, deque()
        with closing(self._batches(text)) as read:
            for batch in islice(read, batches):
                at_batch()
                totals = totals + self._sums(models, batch)
                begun.append(totals)
                if len(begun) > IN_FLIGHT:
                    begun.popleft().block_until_ready()
        return np.asarray(totals, np.float64)

    def _batches(self, text: Examples) -> GlobalBatches:
        """Return the batches of a text, of about as many tokens as those of the run."""
        length, together = text.sequence_length, text.rows_together
        Batch, Position = self._setup.batch_axes
        layout = self._setup.layout
        parts = layout.devices((Batch,), layout.compute) * together
        rows = max(1, Batch.size * Position.size // (length * parts)) * parts
        own = length == Position.size
        axes = (Batch, Position) if own else (Axis(Batch.name, rows), Axis(Position.name, length))
        return GlobalBatches(text, axes, layout)


def bounds(length: int) -> list[int]:
    """Return the first positions of ranges, each as long as all before it: 0, 64, 128, 256 and so on."""
    return [0, *(FIRST_POSITIONS << power for power in range(length.bit_length()) if FIRST_POSITIONS << power < length)]


def losses_by_position(total: np.ndarray, length: int) -> dict[str, float]:
    """Return the mean losses by the position of a token; nothing for sums without positions or without targets."""
    if len(total) == 3:
        return {}
    parts = zip(bounds(length), *total[3:].reshape(2, -1).tolist(), strict=True)
    return {f"{POSITION_LOSS}{first}": loss / weight for first, loss, weight in parts if weight}


def format_losses(metrics: Mapping[str, float], held_out: bool, bits_digits: int) -> str:
    """Return the losses in a line; `held_out`: whether the metrics without a name are of held-out text."""
    sentences = []
    for key, loss in metrics.items():
        metric, _, name = key.partition(".")
        if metric == "eval_loss":
            bits = metrics.get(key.replace(metric, "bits_per_byte", 1))
            label = f"{name}: " if name else "held-out loss " if held_out else "validation loss "
            by_token = "" if bits is None else f" nats a token, {bits:.{bits_digits}f} bits per byte"
            sentences.append(f"{label}{loss:.4f}{by_token}")
        elif metric == "eval_loss_length":
            sentences.append(f"in sequences of {name} tokens {loss:.4f} nats a token")
    return "; ".join(sentences)


def metrics_of(total: np.ndarray) -> dict[str, float]:
    """Return the metrics of sums [loss, targets, bytes]; NaN if nothing was scored."""
    loss, weight, scored = total[:3].tolist()
    return {
        "eval_loss": loss / weight if weight else math.nan,
        "bits_per_byte": loss / math.log(2) / scored if scored else math.nan,
    }


METRICS = {"eval_loss": "nats a token", "perplexity": "perplexity", "bits_per_byte": "bits per byte"}


READ_TOKENS = 1 << 20


class SlidingWindows:
    """Documents as continuations: each token is scored once, with as many tokens before it as its window has.

    The first window of a document scores its first tokens. Each later window ends `stride` tokens further, or at the
    document's end, and scores the tokens that the earlier ones did not. Each has `length` input tokens, so from the
    second window on every scored token has at least length - stride + 1 tokens before it. A stride of `length` computes
    least; lm-evaluation-harness uses it. The token that ends a document is not scored.

    - `streams`: of documents.
    - `length`: L, input tokens of a window.
    - `stride`: tokens that a window scores, from 1 to L.
    - `start`: tokens before the first of every document; at least one, and not scored.
    - `end`: the token that ends a document in a stream.

    - `documents`: the index of each window's document, int64 [window].
    - `sizes`: scored tokens of each document, int64 [document].
    """

    def __init__(self, streams: Sequence[DocumentStream], length: int, stride: int, start: Sequence[int], end: int):
        self._streams = streams
        self._start = np.array(start, np.int32)
        self._length = length
        begins = [each.starts[:-1] for each in self._streams]
        sizes = [sizes_without_end(each, end) for each in self._streams]
        self._begins, self.sizes = np.concatenate(begins), np.concatenate(sizes)
        self._firsts = np.array([0, *map(len, begins)]).cumsum()  # the first document of each stream
        room = length - len(self._start) + 1  # tokens that the first window scores
        more = -(-np.maximum(self.sizes - room, 0) // stride)
        counts = np.where(self.sizes > 0, 1 + more, 0)
        self.documents = np.repeat(np.arange(len(counts)), counts)
        number = np.arange(len(self.documents)) - np.repeat(counts.cumsum() - counts, counts)
        sizes = self.sizes[self.documents]
        self._ends = np.minimum(room + number * stride, sizes)
        before = np.where(number > 0, np.minimum(room + (number - 1) * stride, sizes), 0)
        self._scored = self._ends - before

    def __len__(self) -> int:
        return len(self.documents)

    @property
    def lengths(self) -> np.ndarray:
        """Return the input tokens of each window, int64 [window]."""
        return np.minimum(self._ends + len(self._start) - 1, self._length)

    def __getitem__(self, index: int) -> Continuation:
        document, end = self.documents[index], int(self._ends[index])
        stream = int(np.searchsorted(self._firsts, document, side="right")) - 1
        first = end - self._length - 1  # of the window; below 0 if it includes tokens of the start
        begin = int(self._begins[document])
        tokens, _ = self._streams[stream].read(begin + max(first, 0), begin + end)
        before = self._start[max(len(self._start) + first, 0) :] if first < 0 else self._start[:0]
        return Continuation(np.concatenate([before, tokens]), int(self._scored[index]))

    def text_bytes(self, token_bytes: np.ndarray) -> np.ndarray:
        """Return the bytes of each document's text, [document]; `token_bytes`: see `Tokenizer.token_bytes`."""
        found = []
        for stream in self._streams:
            total = np.zeros(len(stream.starts) - 1)
            for first in range(0, len(stream), READ_TOKENS):
                stop = min(first + READ_TOKENS, len(stream))
                tokens, documents = stream.read(first, stop)
                total += np.bincount(documents, token_bytes[tokens] + stream.more_bytes(first, stop), len(total))
            found.append(total)
        return np.concatenate(found)


def sizes_without_end(stream: DocumentStream, end: int) -> np.ndarray:
    """Return each document's tokens without the end token, which only a truncated last document lacks."""
    sizes = np.diff(stream.starts) - 1
    if len(sizes) and stream.read(len(stream) - 1, len(stream))[0][0] != end:
        sizes[-1] += 1
    return sizes


class Documents(NamedTuple):
    """Sums over each document's scored tokens, [document]: losses in nats, tokens, bytes."""

    losses: np.ndarray
    tokens: np.ndarray
    sizes: np.ndarray

    @staticmethod
    def joined(parts: "Sequence[Documents]") -> "Documents":
        return Documents(*map(np.concatenate, zip(*parts, strict=True)))

    def metrics(self) -> dict[str, float]:
        """Return `eval_loss` (nats per token), `perplexity` and `bits_per_byte`, each with its standard error."""
        loss = estimate("eval_loss", self.losses, self.tokens)
        bits = estimate("bits_per_byte", self.losses / math.log(2), self.sizes)
        return loss | perplexity(loss["eval_loss"], loss["eval_loss_stderr"]) | bits


class SlidingEvaluation:
    """Scores documents by sliding windows.

    - `stride`: tokens that a window scores
    - `start`: tokens before each document; if empty, the token that ends a document

    Raises `UserError` for a stride that is longer than the context.
    """

    def __init__(self, setup: Setup, tokenizer: Tokenizer, stride: int, start: Sequence[int]):
        self._tokenizer, self._stride = tokenizer, stride
        self._start = start or (tokenizer.end_of_document,)
        self._scorer = Scorer(setup, tokenizer)
        if stride > self._scorer.context:
            raise UserError(
                f"stride is {stride:,}, and the model's context (batch.sequence_length) is {self._scorer.context:,}: "
                f"tokens between two windows would not be scored. A stride up to {self._scorer.context:,} works."
            )

    def __call__(
        self,
        model,
        texts: Mapping[str, Sequence[DocumentStream]],
        at_batch: Callable[[int, int], None] = lambda done, total: None,
    ) -> dict[str, Documents]:
        """Return the sums over each document of the texts, by name; one call scores all texts to compile few programs.

        - `at_batch(done, total)`: called for each batch, with counts of windows
        """
        end, streams = self._tokenizer.end_of_document, [each for its in texts.values() for each in its]
        if any(each.has_masks for each in streams):
            raise UserError(
                f"stride is {self._stride:,}, but a sliding window scores all tokens, and the loss of conversations is "
                "on the assistant's. Leave stride out."
            )
        windows = SlidingWindows(streams, self._scorer.context, self._stride, self._start, end)
        losses = -self._scorer(model, windows, at_batch).log_likelihoods
        by_document = np.bincount(windows.documents, losses, len(windows.sizes))
        found = (by_document, windows.sizes, windows.text_bytes(self._tokenizer.token_bytes))
        counts = [sum(len(each.starts) - 1 for each in its) for its in texts.values()]
        parts = zip(*(np.split(array, np.cumsum(counts)[:-1]) for array in found), strict=True)
        return {name: Documents(*part) for name, part in zip(texts, parts, strict=True)}


def format_metrics(metrics: Mapping[str, float]) -> str:
    sentences = []
    for name in dict.fromkeys(key.partition(".")[2] for key in metrics):
        its = {metric: f"{metric}.{name}" if name else metric for metric in METRICS}
        words = ", ".join(shown(metrics, key, metric) for metric, key in its.items())
        sentences.append(f"{name}: {words}" if name else words)
    return "; ".join(sentences)


def shown(metrics: Mapping[str, float], key: str, metric: str) -> str:
    error = metrics[key.replace(metric, f"{metric}_stderr", 1)]
    return f"{metrics[key]:.4f}{f' ± {error:.4f}' if math.isfinite(error) else ''} {METRICS[metric]}"


ERROR = "_stderr"
ANSWER = 256  # tokens of a generated answer at most


class Prompts(NamedTuple):
    """What a model is asked in a task: the tokens of each question's prompt, and the texts that end an answer."""

    task: Task
    prompts: list[list[int]]
    stops: list[str]


@dataclass(frozen=True)
class Asked:
    """The prompts of all tasks with generated answers.

    - `form`: its `ends` end an answer
    """

    form: TextFormat
    prompts: tuple[Prompts, ...] = ()


class TaskEvaluation:
    """Computes the metrics of tasks; encodes their text once and scores equal texts once.

    - `start`: tokens before each context
    - `asked`: of the tasks whose answers are generated

    Raises `UserError` for a question that cannot be scored, and if the files of the run's processes differ.
    """

    def __init__(self, setup: Setup, tasks: Sequence[Task], tokenizer: Tokenizer, start: Sequence[int], asked: "Asked"):
        self._tasks = [task for task in tasks if not task.generates]
        self._asked = asked
        if asked.prompts:
            self._sampler = Sampler(setup, asked.form, beside_training(setup))
        places: dict[Pair, str] = {}
        for question in (question for task in self._tasks for question in task.questions):
            for pair in question.pairs:
                places.setdefault(pair, question.place)
        self._numbers = {pair: number for number, pair in enumerate(places)}
        self._continuations = encoded(list(places), tokenizer, start)
        self._scorer = Scorer(setup, tokenizer)
        for place, continuation in zip(places.values(), self._continuations, strict=True):
            check_length(place, continuation.scored, self._scorer.context)
        tokens = hashlib.sha256(b"".join(each.tokens.tobytes() for each in self._continuations))
        tokens.update(repr([(each.task.questions, each.prompts) for each in asked.prompts]).encode())
        if len(set(messages_of_all(tokens.hexdigest()))) > 1:
            raise UserError("evaluation.tasks: the files are not the same on all hosts of the run. Copy them anew.")

    def __call__(self, model, at_batch: Callable[[int, int], None] = lambda done, total: None) -> dict[str, float]:
        """Return the metrics of all tasks, `acc.NAME` and so on, each with its standard error, `acc_stderr.NAME`.

        - `at_batch(done, total)`: called for each batch
        """
        found = self._scorer(model, self._continuations, at_batch)
        metrics = self._of_answers(model, at_batch)
        for task in self._tasks:
            numbers = [[self._numbers[pair] for pair in question.pairs] for question in task.questions]
            scores = [Score(found.log_likelihoods[its], found.greedy[its]) for its in numbers]
            metrics |= {f"{metric}.{task.name}": value for metric, value in task.metrics(scores).items()}
        return metrics

    def _of_answers(self, model, at_batch: Callable[[int, int], None]) -> dict[str, float]:
        """Return the metrics of the tasks whose answers a model generates, the likeliest token each time."""
        if not self._asked.prompts:
            return {}
        ready, metrics = self._sampler.prepared(model), {}
        total, done = sum(len(prompts) for _, prompts, _ in self._asked.prompts), 0
        for task, prompts, stops in self._asked.prompts:
            answers = []
            for first in range(0, len(prompts), MAX_BATCH):
                batch, at_block = prompts[first : first + MAX_BATCH], partial(at_batch, done + first, total)
                answers += self._sampler.texts(ready, batch, ANSWER, Sampling(temperature=0), stops, at_block)
            done += len(answers)
            metrics |= {f"{name}.{task.name}": value for name, value in task.metrics_of_answers(answers).items()}
        at_batch(total, total)
        return metrics

    @property
    def cut(self) -> dict[str, int]:
        """Return by task the number of questions that are longer than the model's context."""
        is_cut = self._continuations.lengths > self._scorer.context
        return {
            task.name: sum(any(is_cut[self._numbers[pair]] for pair in each.pairs) for each in task.questions)
            for task in self._tasks
        }


def check_length(place: str, scored: int, context: int) -> None:
    """Raise `UserError` for a continuation that is empty or longer than the context."""
    if not scored:
        raise UserError(
            f"{place}: nothing is left to score: a choice or answer is empty, or the tokenizer makes one token of it "
            "and the end of the context. A space between them helps (`delimiter`)."
        )
    if scored > context:
        raise UserError(
            f"{place}: a choice or answer has {scored:,} tokens, and the model's context (batch.sequence_length) "
            f"{context:,}. Shorten it, or leave it out."
        )


def asked_in(tasks: Sequence[Task], run: RunDirectory, form: TextFormat, chat: bool) -> Asked:
    """Return the prompts of the tasks whose answers are generated.

    - `chat`: a context is the message of a user. So it is in a file that has a conversation

    The end of the turn ends an answer in a conversation. Raises `UserError` for one that the template rejects.
    """
    generated = [task for task in tasks if task.generates]
    talking = {task.name for task in generated if chat or any(each.conversation for each in task.questions)}
    with chat_prompts(run, form.tokenizer) if talking else nullcontext() as chats:

        def prompts_of(task: Task) -> Prompts:
            if chats is None or task.name not in talking:
                return Prompts(task, [form.ids(each.prompt) for each in task.questions], [task.form.stop])
            return Prompts(task, [chats.ids(conversation_of(each), each.place) for each in task.questions], [])

        return Asked(form if chats is None else chats.form, tuple(map(prompts_of, generated)))


def conversation_of(question: Question) -> dict[str, Any]:
    return question.conversation or {"messages": [{"role": "user", "content": question.prompt}]}


def start_of(run: RunDirectory, tokenizer: Tokenizer) -> tuple[int, ...]:
    """Return the tokens before each text: those that an imported model's tokenizer adds, else none."""
    return tokenizer.start if run.huggingface.is_dir() else ()


def tasks_of(
    setup: Setup, tokenizer: Tokenizer, run: RunDirectory, report: Callable[[str], None]
) -> TaskEvaluation | None:
    """Return the evaluation of a run's configured tasks, None without tasks; report truncated questions."""
    found = read_tasks(setup.config.evaluation.tasks)
    if found and setup.config.evaluation.parse_special:
        tokenizer = tokenizer.parsing_special()
    return evaluation_on(found, setup, tokenizer, run, report, setup.config.evaluation.chat) if found else None


def evaluation_on(
    tasks: Sequence[Task],
    setup: Setup,
    tokenizer: Tokenizer,
    run: RunDirectory,
    report: Callable[[str], None],
    chat: bool,
) -> TaskEvaluation:
    """Return the evaluation on tasks; report the number of questions that are longer than the context.

    - `chat`: see `asked_in`

    Also report the names of special tokens that the tasks have as plain text.
    """
    questions = [question for task in tasks for question in task.questions]
    texts = ["".join(pair) for question in questions for pair in question.pairs]
    texts += [question.prompt for question in questions]
    if note := taken_as_text(counter_of_names(tokenizer)(texts), "the tasks", "parse_special"):
        report(note)
    start = start_of(run, tokenizer)
    asked = asked_in(tasks, run, TextFormat(tokenizer, start), chat)
    evaluation = TaskEvaluation(setup, tasks, tokenizer, start, asked)
    for task in tasks:
        if count := evaluation.cut.get(task.name):
            total = f"{count:,} of {len(task.questions):,}"
            report(f"{task.name}: questions longer than the model's context, which are cut on the left: {total}.")
    return evaluation


def format_tasks(metrics: Mapping[str, float | None]) -> str:
    """Return the metrics of tasks in a line; empty if there are none."""
    sentences = [
        f"{task} {', '.join(f'{metric} {words}' for metric, words in its.items())}"
        for task, its in task_metrics(metrics).items()
    ]
    return f"tasks: {'; '.join(sentences)}" if sentences else ""


def task_metrics(metrics: Mapping[str, float | None]) -> dict[str, dict[str, str]]:
    """Return the task metrics among all metrics, by task and metric, formatted: `0.312 ± 0.013`."""
    found: dict[str, dict[str, str]] = {}
    for key, value in metrics.items():
        metric, _, task = key.partition(".")
        if metric + ERROR + "." + task in metrics:
            error = metrics[f"{metric}{ERROR}.{task}"]
            found.setdefault(task, {})[metric] = f"{value:.4g}" + (f" ± {error:.2g}" if error == error else "")
    return found
