"""Which of a source's tokens are held out: whole documents or, where there are too few of them, its end."""

from typing import NamedTuple

import numpy as np

from gregale.data.examples import window_count
from gregale.data.store import TokenStore
from gregale.data.stream import DocumentStream, held_out_documents
from gregale.data.tokenizers import Tokenizer

END_WINDOWS = 2  # the fewest that an end has, if the source is long enough


class End(NamedTuple):
    """A held-out end in terms of the text, which no tokenizer changes.

    - `document`: the number of the first document that it reaches into
    - `size_bytes`: the bytes of UTF-8 that it has of that document
    """

    document: int
    size_bytes: int


class Split(NamedTuple):
    """A source's tokens to train on, and those that are held out; no token is in both."""

    train: DocumentStream
    held_out: DocumentStream


def split_at(store: TokenStore, fraction: float, cut: int | None) -> Split:
    """The documents that are held out by the hash of their numbers; or, with a cut, all tokens from there on."""
    count = len(store.offsets) - 1
    if cut is None:
        out = held_out_documents(count, fraction)
        return Split(DocumentStream(store, ~out), DocumentStream(store, out))
    everything = np.ones(count, bool)
    return Split(DocumentStream(store, everything, stop=cut), DocumentStream(store, everything, start=cut))


def end_cut(store: TokenStore, fraction: float, sequence_length: int) -> int | None:
    """Where the held-out end of a source begins, or None if whole documents are held out.

    Whole documents are, if they make up a window of L + 1 tokens and leave one to train on. Otherwise, with N tokens,
    the last k L + 1 are held out, for k = max(2, round(fraction N / L)), or fewer so that a window is left to train on:
    k windows at a stride of L, none of whose tokens is ever trained on. A source too short for k = 1 has no end.

    Args:
        store: the source's tokens.
        fraction: how much to hold out; 0 is nothing.
        sequence_length: L.
    """
    documents = split_at(store, fraction, None)
    if fraction == 0 or all(window_count(stream, sequence_length) for stream in documents):
        return None
    tokens = int(store.offsets[-1])
    most = (tokens - 2) // sequence_length - 1
    windows = min(max(END_WINDOWS, round(fraction * tokens / sequence_length)), most)
    return tokens - windows * sequence_length - 1 if windows > 0 else None


def end_of(store: TokenStore, cut: int, tokenizer: Tokenizer) -> End:
    """The end from a cut on, in terms of the text."""
    document = int(np.searchsorted(store.offsets, cut, side="right")) - 1
    return End(document, int(tokenizer.token_bytes[store.tokens[cut : store.offsets[document + 1]]].sum()))


def cut_of(store: TokenStore, end: End, tokenizer: Tokenizer) -> int:
    """Where an end begins in a store of the same text by another tokenizer: at the first token that it has whole."""
    start, stop = store.offsets[end.document], store.offsets[end.document + 1]
    start = max(start, stop - end.size_bytes - 1)  # a token has a byte at least, but for the end of the document
    behind = tokenizer.token_bytes[store.tokens[start:stop][::-1]].cumsum()
    return int(stop - np.searchsorted(behind, end.size_bytes, side="right"))
