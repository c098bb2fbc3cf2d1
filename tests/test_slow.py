"""The list of slow tests has no name that nothing has any more."""

import pytest

from tests.conftest import SLOW, TESTS


@pytest.mark.parametrize("path", SLOW)
def test_it_is_there(path):
    assert (TESTS / path).exists()
