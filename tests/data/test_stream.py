import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from gregale.data.examples import DocumentStream, held_out_documents
from tests.data.conftest import in_memory

DOCUMENTS = st.lists(st.tuples(st.lists(st.integers(0, 8), max_size=5), st.booleans()), min_size=1, max_size=8)


@given(documents=DOCUMENTS, data=st.data())
def test_a_stream_is_its_documents_in_a_row(documents, data):
    store = in_memory([[*tokens, 9] for tokens, _ in documents])
    stream = DocumentStream(store, np.array([chosen for _, chosen in documents]))
    kept = [tokens for tokens, chosen in documents if chosen]
    expected = [(token, number) for number, tokens in enumerate(kept) for token in [*tokens, 9]]
    assert len(stream) == len(expected)
    start = data.draw(st.integers(0, len(expected)))
    stop = data.draw(st.integers(start, len(expected)))
    if start < stop:
        tokens, numbers = stream.read(start, stop)
        assert list(zip(tokens.tolist(), numbers.tolist(), strict=True)) == expected[start:stop]
        assert tokens.dtype == np.int32


def splitmix64(number):
    """The published generator's output for a counter, in plain integers."""
    mask = (1 << 64) - 1
    mixed = (number * 0x9E3779B97F4A7C15) & mask
    mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) & mask
    mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & mask
    return mixed ^ (mixed >> 31)


def test_the_hash_is_splitmix64_and_more_documents_change_none_before_them():
    assert splitmix64(1) == 0xE220A8397B1DCDAF  # the first output of the published generator for seed 0
    expected = [splitmix64(number + 1) < 0.3 * 2**64 for number in range(1000)]
    assert held_out_documents(1000, 0.3).tolist() == expected
    out = held_out_documents(100_000, 0.02)
    assert abs(out.mean() - 0.02) < 0.002
    np.testing.assert_array_equal(held_out_documents(1000, 0.02), out[:1000])
    assert not (out & ~held_out_documents(100_000, 0.05)).any()  # a larger fraction holds out more of the same
