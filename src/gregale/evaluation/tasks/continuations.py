"""Continuations: tokens to score, given the tokens before them.

Text becomes tokens as in lm-evaluation-harness, so that the results are equal:

- white space at the end of a context belongs to the continuation: tokens begin with a space and do not end with one
- the continuation's tokens are those of context + continuation after the number of the context's own tokens
- a continuation without a context follows the token that ends a document
- a text that is too long for a window is cut from the left
"""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np

from gregale.data.examples import ExampleBatch, stacked
from gregale.data.tokenizers import Tokenizer
from gregale.evaluation.tasks.kinds import Pair


class Continuation(NamedTuple):
    """Tokens to score."""

    tokens: np.ndarray  # int32 [token]
    scored: int  # the number of last tokens to score, each given all tokens before it


class Continuations(Protocol):
    """Continuations by index.

    - `lengths`: input tokens of each, one less than all its tokens, int64 [continuation].
    """

    @property
    def lengths(self) -> np.ndarray: ...

    def __getitem__(self, index: int, /) -> Continuation: ...


class InMemory(list[Continuation]):
    """Continuations in a list."""

    @property
    def lengths(self) -> np.ndarray:
        return np.array([len(each.tokens) - 1 for each in self], np.int64)


def encoded(pairs: Sequence[Pair], tokenizer: Tokenizer, start: Sequence[int]) -> InMemory:
    """Return the tokens of each pair; a continuation has none if the context's last token contains all its characters.

    - `start`: tokens before every context.
    """
    pairs = [with_space_moved(pair) for pair in pairs]
    texts = list(dict.fromkeys(text for pair in pairs for text in (pair.context, pair.context + pair.continuation)))
    ids = dict(zip(texts, tokenizer.encode_all(texts), strict=True))
    nothing = np.zeros(0, np.int32)
    found = InMemory()
    for pair in pairs:
        given = ids[pair.context] if pair.context else nothing
        scored = ids[pair.context + pair.continuation][len(given) :]
        first = start if len(start) or pair.context else [tokenizer.end_of_document]
        found.append(Continuation(np.concatenate([np.array(first, np.int32), given, scored]), len(scored)))
    return found


def with_space_moved(pair: Pair) -> Pair:
    """Move white space at the context's end to the continuation."""
    context = pair.context.rstrip()
    return Pair(context, pair.context[len(context) :] + pair.continuation)


def filled(continuations: Sequence[Continuation], length: int) -> ExampleBatch:
    """Return continuations as rows of a batch, arrays [row, length], see `gregale.data.examples.make_example`.

    Each is cut from the left to `length` input tokens; a shorter one is padded; padding is not scored.
    """
    return stacked([_row(each, length) for each in continuations])


NOTHING = Continuation(np.zeros(1, np.int32), 0)  # a row that pads a batch


def _row(continuation: Continuation, length: int) -> ExampleBatch:
    tokens = continuation.tokens[-(length + 1) :]
    inputs = len(tokens) - 1
    places = np.arange(length)
    missing = (0, length - inputs)
    return {
        "tokens": np.pad(tokens[:-1], missing),
        "targets": np.pad(tokens[1:], missing),
        "loss_mask": ((places >= inputs - continuation.scored) & (places < inputs)).astype(np.float32),
        "positions": places.astype(np.int32),
    }
