import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gregale.data.sources import TokensSource
from gregale.errors import UserError
from tests.data.conftest import cut, read

TOKENS = [5, 6, 0, 7, 0, 0, 8, 9]


@pytest.mark.parametrize("dtype", ["uint16", "uint32", "int32"])
def test_raw_files_and_npy_files_read_alike(tmp_path, contents, dtype):
    array = np.array(TOKENS, dtype)
    array.tofile(tmp_path / "raw.bin")
    np.save(tmp_path / "array.npy", array)
    for name in ("raw.bin", "array.npy"):
        source = TokensSource(files=(str(tmp_path / name),), dtype=dtype, end_of_document=0)
        assert contents(source) == [[5, 6], [7], [], [8, 9]]
        assert contents(TokensSource(files=(str(tmp_path / name),), dtype=dtype)) == [TOKENS]


@settings(deadline=None)
@given(st.lists(st.integers(0, 2), min_size=1, max_size=40), st.lists(st.integers(1, 39)))
def test_any_cut_into_parts_gives_every_document_once(tmp_path_factory, tokens, cuts):
    path = tmp_path_factory.mktemp("cut") / "a.bin"
    np.array(tokens, np.uint16).tofile(path)
    source = TokensSource(files=(str(path),), end_of_document=0)
    found = [token for one in read(source, cut(path, len(tokens), cuts))[0] for token in [*one.tolist(), 0]]
    assert found == (tokens if tokens[-1] == 0 else [*tokens, 0])


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.bin", b"", r"a\.bin: empty \(0 bytes\)"),
        ("a.bin", b"123", r"a\.bin: 3 bytes is no whole number of uint16 tokens \(2 bytes each\)"),
        ("a.npy", b"not an array", r"a\.npy: not a \.npy array, or a damaged one"),
        ("a.npy", np.zeros(3), r"a\.npy: float64 of shape \(3,\); expected integers in one dimension"),
        ("a.npy", np.zeros((2, 2), int), r"a\.npy: int64 of shape \(2, 2\)"),
        ("a.npy", np.array([{}], object), r"a\.npy: not a \.npy array"),  # would have to be unpickled
    ],
)
def test_what_is_no_token_file_is_refused(tmp_path, name, content, message):
    if isinstance(content, bytes):
        (tmp_path / name).write_bytes(content)
    else:
        np.save(tmp_path / name, content, allow_pickle=True)
    with pytest.raises(UserError, match=message):
        TokensSource(files=(str(tmp_path / name),)).parts()


def test_a_file_of_no_tokens_is_skipped_whole(tmp_path):
    np.array([5, 6], np.uint16).tofile(tmp_path / "a.bin")
    (tmp_path / "b.bin").write_bytes(b"123")
    (tmp_path / "c.npy").write_bytes(b"not an array")
    source = TokensSource(files=(f"{tmp_path}/?.*",), on_bad_document="skip")
    found, skipped = read(source)
    assert ([each.tolist() for each in found], skipped.count) == ([[5, 6]], 2)
    with pytest.raises(UserError, match=r"dtype is 'float32'\. .*Valid choices: uint16, uint32, int32"):
        TokensSource(dtype="float32")
