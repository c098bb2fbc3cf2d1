"""The pictures: written whole, reproducible, and refused with a clear line."""

import sys
from pathlib import Path

import numpy as np
import pytest

from gregale.errors import UserError
from gregale.timeline.fleet import Fleet
from gregale.timeline.methods import Cadence
from gregale.timeline.model import PRESETS
from gregale.timeline.plot import INK, check_picture_path, on_any_page, plot_timeline, plot_utilisation, window
from gregale.timeline.table import run_method

BANDWIDTHS = np.array([1.0, 10.0, 100.0])


@pytest.fixture(scope="module")
def runs():
    return {
        name: run_method(name, PRESETS["1b"], Fleet.uniform(2), Cadence(steps=104), BANDWIDTHS)
        for name in ("diloco", "streaming_overlap")
    }


def draw(path, runs):
    plot_utilisation(path, BANDWIDTHS, {name: run.utilisation for name, run in runs.items()}, "two sites")


@pytest.mark.parametrize(("suffix", "begin"), [(".svg", b"<?xml"), (".png", b"\x89PNG")])
def test_the_suffix_chooses_the_format(tmp_path, runs, suffix, begin):
    path = tmp_path / f"picture{suffix}"
    draw(path, runs)
    assert path.read_bytes().startswith(begin)
    assert list(tmp_path.iterdir()) == [path]


def test_a_picture_has_the_same_bytes_each_time(tmp_path, runs):
    for name in ("one.svg", "two.svg"):
        plot_timeline(tmp_path / name, {n: run.intervals for n, run in runs.items()}, 4, "1 Gbit/s")
    assert (tmp_path / "one.svg").read_bytes() == (tmp_path / "two.svg").read_bytes()


@pytest.mark.parametrize(
    "path", sorted((Path(__file__).parents[2] / "docs" / "figures").glob("*.svg")), ids=lambda p: p.stem
)
def test_the_pages_pictures_have_no_white_background_and_no_black(path):
    svg = path.read_text()
    assert 'style="fill: #ffffff"' not in svg
    assert "#000000" not in svg
    assert on_any_page(svg) == svg


def test_an_svg_has_no_background_of_its_own(tmp_path, runs):
    draw(tmp_path / "picture.svg", runs)
    svg = (tmp_path / "picture.svg").read_text()
    assert 'style="fill: #ffffff"' not in svg
    assert "#000000" not in svg
    assert f"svg{{fill: {INK}}}" in svg


def test_the_window_begins_before_the_first_transfer(runs):
    shown = window(runs["diloco"].intervals, 4)
    assert {work.step for work in shown} == {99, 100, 101, 102}
    assert min(work.start for work in shown) == 0.0
    assert {work.step for work in shown if work.kind == "transfer"} == {100}


def test_another_suffix_is_refused(tmp_path, runs):
    with pytest.raises(UserError, match=r"picture: .*a\.pdf has the suffix '\.pdf'; a picture is \.svg or"):
        draw(tmp_path / "a.pdf", runs)


def test_a_missing_folder_is_refused(tmp_path):
    with pytest.raises(UserError, match=r"plot: the folder .*nowhere does not exist"):
        check_picture_path(tmp_path / "nowhere" / "a.svg", "plot")


def test_a_missing_extra_is_named(tmp_path, runs, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(UserError, match=r"needs matplotlib, which is not installed\. Run `.* '\.\[plot\]'`"):
        draw(tmp_path / "a.svg", runs)
    assert not list(tmp_path.iterdir())
