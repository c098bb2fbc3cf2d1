"""With the extra `hf` installed the source is tested against the library; without it, that the extra is asked for."""

import importlib.util
import sys
from unittest.mock import Mock

import pytest

from gregale.data.sources import HuggingFaceSource
from gregale.errors import UserError

INSTALLED = importlib.util.find_spec("datasets") is not None


def check_saved_data_set(tmp_path, contents):
    import datasets

    texts = [f"text {number}" for number in range(10)]
    rows = datasets.Dataset.from_dict({"text": texts, "n": list(range(10))})
    rows.save_to_disk(str(tmp_path / "rows"))
    datasets.DatasetDict({"validation": rows}).save_to_disk(str(tmp_path / "splits"))
    source = HuggingFaceSource(path=str(tmp_path / "rows"))
    assert contents(source) == texts
    assert source.identity() == HuggingFaceSource(path=str(tmp_path / "rows"), weight=2.0).identity()
    assert contents(HuggingFaceSource(path=str(tmp_path / "splits"), split="validation")) == texts
    with pytest.raises(UserError, match="no split `train`; the splits are: validation"):
        HuggingFaceSource(path=str(tmp_path / "splits")).parts()
    with pytest.raises(UserError, match="no column `body`; the columns are: text, n"):
        contents(HuggingFaceSource(path=str(tmp_path / "rows"), column="body"))
    with pytest.raises(UserError, match="row 0: column `n` is int, expected text"):
        contents(HuggingFaceSource(path=str(tmp_path / "rows"), column="n"))
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match="empty: the data set could not be loaded"):
        HuggingFaceSource(path=str(tmp_path / "empty")).parts()


def test_a_saved_data_set_or_the_missing_extra(tmp_path, contents):
    if INSTALLED:
        check_saved_data_set(tmp_path, contents)
    else:
        with pytest.raises(UserError, match=r"books: Hugging Face data sets need the extra `hf`\. Run `"):
            HuggingFaceSource(path="books").parts()


def test_a_path_is_needed():
    with pytest.raises(UserError, match="path is empty"):
        HuggingFaceSource()


def test_whatever_the_library_raises_is_a_message(monkeypatch):
    """The library's own errors are no OSErrors; where it is not installed, something has to raise one."""
    failing = Mock(side_effect=Exception("An error occurred while generating the dataset"))
    monkeypatch.setitem(sys.modules, "datasets", Mock(load_dataset=failing))
    with pytest.raises(UserError, match=r"broken: the data set could not be loaded \(An error occurred"):
        HuggingFaceSource(path="broken").parts()
