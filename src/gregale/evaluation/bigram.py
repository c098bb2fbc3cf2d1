"""The bigram model, a baseline that a language model must beat."""

from collections.abc import Iterable

import numpy as np

from gregale.data.examples import DocumentStream

READ_TOKENS = 1 << 22


def bigram_bits_per_byte(
    training: Iterable[DocumentStream],
    held_out: Iterable[DocumentStream],
    token_bytes: np.ndarray,
    cross_documents: bool = False,
) -> float:
    """Return the held-out bits per byte of a bigram model counted on the training tokens.

    With N training targets, c(a, b) counts of pairs, c(a) = sum_b c(a, b), c(b) counts of targets and V tokens,

        p(b | a) = (c(a, b) + k p(b)) / (c(a) + k),    p(b) = (c(b) + 1) / (N + V),

    that is, a Dirichlet prior around the smoothed unigram model; k is the power of two with the best result on the
    held-out text itself, which favours the bigram model. Pairs are those that an example scores: both tokens in one
    document, unless examples cross documents, and the loss is on the second.

    - `training`: streams to count on.
    - `held_out`: streams to score.
    - `token_bytes`: of each token [vocabulary], see `Tokenizer.token_bytes`.
    - `cross_documents`: as in `DataConfig`.

    The result is sum of -log2 p(b | a) over held-out pairs / sum of the bytes of text of b.
    """
    vocabulary, held_out = len(token_bytes), list(held_out)
    scored, times = unique_pairs(held_out, vocabulary, cross_documents)
    pairs = np.zeros(len(scored))
    before, after = np.zeros(vocabulary), np.zeros(vocabulary)
    for stream in training:
        for first, second in read_pairs(stream, cross_documents):
            before += np.bincount(first, minlength=vocabulary)
            after += np.bincount(second, minlength=vocabulary)
            codes = first * vocabulary + second
            places = np.searchsorted(scored, codes).clip(max=len(scored) - 1)
            pairs += np.bincount(places[scored[places] == codes], minlength=len(scored))
    context, target = before[scored // vocabulary], scored % vocabulary
    unigram = (after[target] + 1) / (after.sum() + vocabulary)
    bits = [
        -(times * np.log2((pairs + strength * unigram) / (context + strength))).sum()
        for strength in 2.0 ** np.arange(-4, 17)
    ]
    more_bytes = sum(more_bytes_of(stream, cross_documents) for stream in held_out)
    return float(min(bits) / ((times * token_bytes[target]).sum() + more_bytes))


def unique_pairs(streams: Iterable[DocumentStream], vocabulary: int, cross: bool) -> tuple[np.ndarray, np.ndarray]:
    """Return the pairs of some streams, coded as first * vocabulary + second and sorted, and each count."""
    codes, counts = [], []
    for stream in streams:
        for first, second in read_pairs(stream, cross):
            found, times = np.unique(first * vocabulary + second, return_counts=True)
            codes.append(found)
            counts.append(times)
    scored, places = np.unique(np.concatenate(codes), return_inverse=True)
    return scored, np.bincount(places, np.concatenate(counts))


def read_pairs(stream: DocumentStream, cross: bool) -> Iterable[tuple[np.ndarray, np.ndarray]]:
    """Yield blocks of neighbouring tokens (first, second), int64 [pair] each."""
    for tokens, kept, _ in read_blocks(stream, cross):
        yield tokens[:-1][kept].astype(np.int64), tokens[1:][kept].astype(np.int64)


def more_bytes_of(stream: DocumentStream, cross: bool) -> int:
    """Return the bytes of text of the second tokens of all pairs, beyond their vocabulary entries."""
    blocks = ((kept, start + 1) for _, kept, start in read_blocks(stream, cross))
    return sum(int(stream.more_bytes(first, first + len(kept))[kept].sum()) for kept, first in blocks)


def read_blocks(stream: DocumentStream, cross: bool) -> Iterable[tuple[np.ndarray, np.ndarray, int]]:
    """Yield tokens [pair + 1], whether each of their pairs is scored [pair], and their index in the stream."""
    for start in range(0, len(stream) - 1, READ_TOKENS):
        stop = min(start + READ_TOKENS + 1, len(stream))
        tokens, documents = stream.read(start, stop)
        yield tokens, stream.supervised(start, stop)[1:] & (cross | (documents[1:] == documents[:-1])), start
