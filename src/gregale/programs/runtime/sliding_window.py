"""Provides perplexity and bits per byte of documents by sliding windows that score each token once."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from gregale.data.examples import DocumentStream
from gregale.data.tokenizers import Tokenizer
from gregale.errors import UserError
from gregale.evaluation.tasks import Continuation
from gregale.programs.runtime.scoring import Scorer
from gregale.programs.runtime.setup import Setup

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
        loss, loss_error = ratio(self.losses, self.tokens)
        bits, bits_error = ratio(self.losses / math.log(2), self.sizes)
        perplexity = float(np.exp(loss))
        return {
            "eval_loss": loss,
            "eval_loss_stderr": loss_error,
            "perplexity": perplexity,
            "perplexity_stderr": perplexity * loss_error,  # by the derivative of exp
            "bits_per_byte": bits,
            "bits_per_byte_stderr": bits_error,
        }


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


def ratio(above: np.ndarray, below: np.ndarray) -> tuple[float, float]:
    """Return sum a / sum b over n documents, and its standard error to first order.

        sqrt(n / (n - 1) * sum (a - r b)^2) / sum b,  r = sum a / sum b

    The documents are the sample, so that tokens of one document need not be independent. Empty documents do not count.
    Without documents both are NaN; for one document the error is NaN.
    """
    above, below = above[below > 0], below[below > 0]
    if not (count := len(below)):
        return math.nan, math.nan
    value = above.sum() / below.sum()
    if count == 1:
        return float(value), math.nan
    spread = ((above - value * below) ** 2).sum() * count / (count - 1)
    return float(value), float(math.sqrt(spread) / below.sum())


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
