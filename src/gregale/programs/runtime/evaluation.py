"""Provides the loss of a model on held-out and validation text, in nats per token and bits per byte."""

import math
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from itertools import islice
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from haliax import Axis, NamedArray

from gregale.axes.layout import BATCH, POSITION
from gregale.data.config import SOURCES, VALIDATION
from gregale.data.examples import MORE_BYTES, Examples, held_out_examples
from gregale.data.preparation import Corpus, source_rows
from gregale.data.tokenizer_training import naming
from gregale.errors import UserError
from gregale.inference.generate import check_scored, scores
from gregale.model.execution import Execution
from gregale.programs.runtime.batches import GlobalBatches
from gregale.programs.runtime.checked_model import NEXT_TOKEN, checked_loss
from gregale.programs.runtime.scoring import IN_FLIGHT
from gregale.programs.runtime.setup import Setup
from gregale.runs.config import TrainConfig
from gregale.tracking.metrics import POSITION_LOSS

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
        by_token = token_losses(setup, execution) if setup.config.evaluation.by_position else None
        sizes = np.zeros(setup.Vocab.size, np.float32)
        sizes[: len(token_bytes)] = token_bytes

        def sums(models, batch):
            model, frozen = models
            more_bytes = batch[MORE_BYTES].array if MORE_BYTES in batch else 0
            batch = {key: batch[key] for key in batch if key != MORE_BYTES}
            mask = batch["loss_mask"].array
            scored = ((jnp.asarray(sizes)[batch["targets"].array] + more_bytes) * mask).sum()
            if by_token is None:
                found = checked_loss(setup.config.model, model, batch, execution, objective, frozen)
                self._named[:] = [] if self._in_bytes else found.metrics
                return jnp.stack([found.loss, found.weight, scored, *(found.metrics[name] for name in self._named)])
            losses = by_token(model, batch) * mask
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


def token_losses(setup: Setup, execution: Execution) -> Callable[[Any, dict[str, NamedArray]], jax.Array]:
    """Return the function (model, batch) -> losses of the targets, nats [batch, position]; raise `UserError`."""
    config = setup.config.model
    check_scored(setup.model, config.get_choice_name(type(config)))
    rows = config.logit_rows or setup.Vocab.size

    def losses(model, batch: dict[str, NamedArray]) -> jax.Array:
        found, _ = scores(model, batch, rows, execution)
        return -found.rearrange((BATCH, POSITION)).array

    return losses


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
