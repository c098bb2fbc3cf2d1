"""The pages' pictures fit light and dark pages."""

import pytest

from tests.docs.pages import ROOT


@pytest.mark.parametrize("path", sorted((ROOT / "docs" / "figures").glob("*.svg")), ids=lambda path: path.stem)
def test_a_picture_has_no_white_background_and_no_black(path):
    svg = path.read_text()
    assert 'style="fill: #ffffff"' not in svg
    assert "#000000" not in svg
