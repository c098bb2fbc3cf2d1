"""The held-out tokens of a source: whole documents or, if there are too few of them, the end of the source."""

from typing import NamedTuple

import numpy as np

from gregale.data.examples import window_count
from gregale.data.sources.base import CONCAT
from gregale.data.store import TokenStore
from gregale.data.stream import DocumentStream, held_out_documents
from gregale.data.tokenizers import Tokenizer

END_WINDOWS = 2  # the minimum of an end, if the source is long enough


class End(NamedTuple):
    """A held-out end, described by the text, so that it is the same for every tokenizer."""

    document: int  # the index of the first document that the end reaches into
    size_bytes: int  # the UTF-8 bytes of that document that belong to the end


class Split(NamedTuple):
    """A source's training tokens and held-out tokens; no token is in both."""

    train: DocumentStream
    held_out: DocumentStream


def split_at(store: TokenStore, fraction: float, cut: int | None, together: int = 1) -> Split:
    """Return a split by the hash of the documents' numbers; or, with a cut, hold out all tokens from the cut on.

    - `together`: adjacent documents that stay together: 2 for pairs, which the hash counts
    """
    count = len(store.offsets) - 1
    if cut is None:
        out = np.repeat(held_out_documents(count // together, fraction), together)
        return Split(DocumentStream(store, ~out), DocumentStream(store, out))
    everything = np.ones(count, bool)
    return Split(DocumentStream(store, everything, stop=cut), DocumentStream(store, everything, start=cut))


def end_cut(
    store: TokenStore, fraction: float, sequence_length: int, packing: str = CONCAT, together: int = 1
) -> int | None:
    """Return the index at which the held-out end of a source begins, or None if whole documents are held out.

    Whole documents are held out if they fill a window of L + 1 tokens and leave one to train on. Otherwise, with N
    tokens, the last k L + 1 are held out, for k = max(2, round(fraction N / L)), or fewer so that a training window
    remains: k windows at a stride of L, none of whose tokens is ever trained on. A source too short for k = 1 has no
    end. L is `sequence_length`; a fraction of 0 holds out nothing.

    A packing that does not cut documents needs one to train on and one that is held out. Otherwise the last
    max(1, round(fraction D)) of D documents are held out; of a single document nothing is. D counts pairs, if documents
    stay `together`.
    """
    documents = split_at(store, fraction, None, together)
    if packing != CONCAT:
        count = (len(store.offsets) - 1) // together
        if fraction == 0 or count < 2 or all(len(stream.numbers) for stream in documents):
            return None
        return int(store.offsets[-1 - together * min(count - 1, max(1, round(fraction * count)))])
    if fraction == 0 or all(window_count(stream, sequence_length) for stream in documents):
        return None
    tokens = int(store.offsets[-1])
    most = (tokens - 2) // sequence_length - 1
    windows = min(max(END_WINDOWS, round(fraction * tokens / sequence_length)), most)
    return tokens - windows * sequence_length - 1 if windows > 0 else None


def end_of(store: TokenStore, cut: int, tokenizer: Tokenizer) -> End:
    """Return the end from a cut on, described by the text."""
    document = int(np.searchsorted(store.offsets, cut, side="right")) - 1
    return End(document, int(tokenizer.token_bytes[store.tokens[cut : store.offsets[document + 1]]].sum()))


def cut_of(store: TokenStore, end: End, tokenizer: Tokenizer) -> int:
    """Return the index of an end in a store of the same text by another tokenizer: its first whole token."""
    start, stop = store.offsets[end.document], store.offsets[end.document + 1]
    start = max(start, stop - end.size_bytes - 1)  # every token except the end of the document has at least one byte
    behind = tokenizer.token_bytes[store.tokens[start:stop][::-1]].cumsum()
    return int(stop - np.searchsorted(behind, end.size_bytes, side="right"))
