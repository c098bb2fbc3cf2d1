"""Pictures: written whole, reproducible, and refused with a clear line."""

import sys
from pathlib import Path

import pytest

from gregale.errors import UserError
from gregale.timeline.plot import INK, check_picture_path, new_figure, on_any_page, save_figure


def draw(path):
    figure = new_figure(path, (3.0, 2.0))
    figure.subplots().plot([1, 2], [0, 1])
    save_figure(figure, path)


@pytest.mark.parametrize(("suffix", "begin"), [(".svg", b"<?xml"), (".png", b"\x89PNG")])
def test_the_suffix_chooses_the_format(tmp_path, suffix, begin):
    path = tmp_path / f"picture{suffix}"
    draw(path)
    assert path.read_bytes().startswith(begin)
    assert list(tmp_path.iterdir()) == [path]


def test_a_picture_has_the_same_bytes_each_time(tmp_path):
    for name in ("one.svg", "two.svg"):
        draw(tmp_path / name)
    assert (tmp_path / "one.svg").read_bytes() == (tmp_path / "two.svg").read_bytes()


@pytest.mark.parametrize(
    "path", sorted((Path(__file__).parents[2] / "docs" / "figures").glob("*.svg")), ids=lambda p: p.stem
)
def test_the_pages_pictures_have_no_white_background_and_no_black(path):
    svg = path.read_text()
    assert 'style="fill: #ffffff"' not in svg
    assert "#000000" not in svg
    assert on_any_page(svg) == svg


def test_an_svg_has_no_background_of_its_own(tmp_path):
    draw(tmp_path / "picture.svg")
    svg = (tmp_path / "picture.svg").read_text()
    assert 'style="fill: #ffffff"' not in svg
    assert "#000000" not in svg
    assert f"svg{{fill: {INK}}}" in svg


def test_another_suffix_is_refused(tmp_path):
    with pytest.raises(UserError, match=r"picture: .*a\.pdf has the suffix '\.pdf'; a picture is \.svg or"):
        draw(tmp_path / "a.pdf")


def test_a_missing_folder_is_refused(tmp_path):
    with pytest.raises(UserError, match=r"plot: the folder .*nowhere does not exist"):
        check_picture_path(tmp_path / "nowhere" / "a.svg", "plot")


def test_a_missing_extra_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(UserError, match=r"needs matplotlib, which is not installed\. Run `.* '\.\[plot\]'`"):
        draw(tmp_path / "a.svg")
    assert not list(tmp_path.iterdir())
