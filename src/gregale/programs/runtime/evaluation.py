"""Provides the loss of a model on held-out and validation text, in nats per token and bits per byte."""

import math
from collections.abc import Callable, Mapping
from itertools import islice
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from gregale.data.examples import MORE_BYTES, Examples
from gregale.data.preparation import Corpus
from gregale.programs.runtime.batches import GlobalBatches
from gregale.programs.runtime.setup import Setup


class EvaluationText(NamedTuple):
    """Text of an evaluation, which scores each example once."""

    held_out: Examples | None  # examples held out of the training sources, or None
    validation: Mapping[str, Examples] = {}  # examples of the validation sources, by name

    @property
    def first(self) -> Examples | None:
        """Return the held-out text, or else the first validation source; None if there is neither."""
        return self.held_out if self.held_out is not None else next(iter(self.validation.values()), None)


def evaluation_text(corpus: Corpus) -> EvaluationText:
    return EvaluationText(corpus.held_out, corpus.validation)


class Evaluator:
    """Computes the loss on text; compiled once.

    - `text`: at least one text
    - `token_bytes`: bytes of each token's text, [tokens]; an example may have `more_bytes` of its targets
    """

    def __init__(self, setup: Setup, text: EvaluationText, token_bytes: np.ndarray):
        self._setup, self._text = setup, text
        execution = setup.evaluation_execution()
        sizes = np.zeros(setup.Vocab.size, np.float32)
        sizes[: len(token_bytes)] = token_bytes

        def sums(model, batch):
            more_bytes = batch[MORE_BYTES].array if MORE_BYTES in batch else 0
            loss, weight = model.loss({key: batch[key] for key in batch if key != MORE_BYTES}, execution)
            scored = (jnp.asarray(sizes)[batch["targets"].array] + more_bytes) * batch["loss_mask"].array
            return loss, weight, scored.sum()

        self._sums: Callable = jax.jit(
            sums, out_shardings=setup.layout.sharding((), {}), compiler_options=setup.compiler_options
        )

    def __call__(self, model, batches: int | None, at_batch: Callable[[], None] = lambda: None) -> dict[str, float]:
        """Return the metrics over the first `batches` batches of each text, or over all; call `at_batch` for each.

        `eval_loss` (nats per token) and `bits_per_byte` are over the held-out text or, without held-out text, over
        the tokens of all validation sources. `eval_loss.NAME` and `bits_per_byte.NAME` are over one source.
        """
        validation = {name: self._total(model, text, batches, at_batch) for name, text in self._text.validation.items()}
        if self._text.held_out is None:
            metrics = metrics_of(np.sum(list(validation.values()), axis=0))
        else:
            metrics = metrics_of(self._total(model, self._text.held_out, batches, at_batch))
        for name, total in validation.items():
            metrics |= {f"{metric}.{name}": value for metric, value in metrics_of(total).items()}
        return metrics

    def _total(self, model, text: Examples, batches: int | None, at_batch: Callable[[], None]) -> np.ndarray:
        """Return sums over a text: loss in nats, targets, bytes of the targets' text, float64 [3]."""
        totals = (0.0, 0.0, 0.0)
        axes = self._setup.batch_axes
        with GlobalBatches(text, axes, self._setup.layout) as read:
            for batch in islice(read, batches):
                at_batch()
                totals = jax.tree.map(jnp.add, totals, self._sums(model, batch))
        return np.array([float(total) for total in totals])


def format_losses(metrics: Mapping[str, float], held_out: bool, bits_digits: int) -> str:
    """Return the losses in a line; `held_out`: whether the metrics without a name are of held-out text."""
    sentences = []
    for key, loss in metrics.items():
        metric, _, name = key.partition(".")
        if metric == "eval_loss":
            bits = metrics[key.replace(metric, "bits_per_byte", 1)]
            label = f"{name}: " if name else "held-out loss " if held_out else "validation loss "
            sentences.append(f"{label}{loss:.4f} nats a token, {bits:.{bits_digits}f} bits per byte")
    return "; ".join(sentences)


def metrics_of(total: np.ndarray) -> dict[str, float]:
    """Return the metrics of sums [loss, targets, bytes]; NaN if nothing was scored."""
    loss, weight, scored = total.tolist()
    return {
        "eval_loss": loss / weight if weight else math.nan,
        "bits_per_byte": loss / math.log(2) / scored if scored else math.nan,
    }
