"""The page of a run that goes on, over the loopback interface."""

from urllib.parse import urlsplit

import pytest

from gregale.programs.report.serving import LivePage
from gregale.programs.watch.web import Server
from gregale.runs.run_lock import training
from gregale.runs.run_paths import RunPaths
from tests.programs.pages.browser import box, figure_of
from tests.programs.pages.made_up import figures, write_metrics, write_run


@pytest.fixture
def folder(tmp_path):
    return write_run(tmp_path / "going", steps=100)


def grow(folder, steps: int) -> None:
    write_metrics(folder, figures(steps, 0))


def test_a_page_follows_its_run_and_keeps_what_its_reader_chose(browser, folder):
    page = LivePage([RunPaths(folder)], live_seconds=0.2)
    with Server(page.now, "127.0.0.1", 0) as server, browser.open(server.address) as tab:
        scales = f"gregale.drawn({figure_of('figures-loss')}).scales.x.max"
        assert tab.value(scales) == 100
        tab.value("document.querySelectorAll('details').forEach(each => each.open = !each.open)")
        folds = "[...document.querySelectorAll('details')].map(each => each.open)"
        before = tab.value(folds)
        tab.choose("logy", True)
        left, top, width, height = box(tab, "figures-grad_norm")
        tab.drag(left + width * 0.25, left + width * 0.5, top + height / 2)
        norm = f"gregale.drawn({figure_of('figures-grad_norm')})"
        zoomed = f"[{norm}.scales.x.min, {norm}.scales.x.max]"
        chosen = tab.value(zoomed)
        assert 20 < chosen[0] < 30 < chosen[1] < 60
        tab.value(f"{norm}.setSeries(1, {{show: false}})")
        grow(folder, 150)
        tab.wait(f"{norm}.data[0].at(-1) > 100")
        assert tab.value(zoomed) == chosen
        assert tab.value(scales) == chosen[1], "all charts over the same axis follow"
        tab.value("document.getElementById('reset').click()")
        tab.settle()
        assert tab.value(scales) == 150
        assert tab.value(f"{norm}.series[1].show") is False
        assert tab.value(folds) == before
        assert tab.value("document.getElementById('logy').checked")
        assert set(tab.requests) <= {server.address}


def test_a_page_that_was_opened_before_the_first_step_becomes_that_of_the_run(browser, tmp_path):
    folder = write_run(tmp_path / "new", steps=0)
    (folder / "samples.txt").unlink()
    page = LivePage([RunPaths(folder)], live_seconds=0.1)
    controls = "[...document.querySelectorAll('#x option, #controls input')].map(each => each.id || each.value)"
    opened = "[...document.querySelectorAll('details[open] summary')].map(each => each.textContent)"
    with Server(page.now, "127.0.0.1", 0) as server, browser.open(server.address) as tab:
        with training(folder, print):
            tab.wait("document.body.textContent.includes('is still training')")
            assert "tokens" not in tab.value(controls)
            (folder / "samples.txt").write_text("--- step 25\nearly\n")
            grow(folder, 50)
            tab.wait("document.querySelector('option[value=bytes]')")
            assert tab.value(controls)[:6] == ["steps", "tokens", "seconds", "bytes", "logx", "logy"]
            assert tab.value(opened) == ["Step 25"]
        tab.wait("!document.body.textContent.includes('is still training')")
        (folder / "samples.txt").write_text("--- step 25\nearly\n--- step 50\nlate\n")
        tab.wait("document.querySelector('summary').textContent === 'Step 50'")
        assert tab.value(opened) == ["Step 50"], "an older sample is folded as it was"
        tab.choose("x", "tokens")
        scale = f"gregale.drawn({figure_of('figures-loss')}).scales.x"
        tab.value(f"gregale.drawn({figure_of('figures-loss')}).setScale('x', {{min: 10, max: 20}})")
        tab.value("document.getElementById('reset').click()")
        assert tab.value(f"{scale}.max") == 50 * 2048


def test_a_page_tells_that_nobody_serves_it_and_comes_back(browser, folder):
    page = LivePage([RunPaths(folder)], live_seconds=0.1)
    told = "document.querySelector('header p').textContent.includes('not watched any more')"
    alone = "127.83.71.1"  # where no other test takes the port meanwhile
    with Server(page.now, alone, 0) as server:
        port = urlsplit(server.address).port or 0
        tab = browser.open(server.address)
    with tab:
        tab.wait(told)
        with Server(page.now, alone, port):
            tab.wait(f"!{told}")
        tab.page.close()
        tab.errors.clear()  # of requests that nobody answered


def test_a_page_is_made_again_only_when_its_run_has_written(folder):
    page = LivePage([RunPaths(folder)])
    first = page.now()
    page._not_before = 0.0
    assert page.now() is first
    grow(folder, 120)
    assert page.now() is not first
    grow(folder, 130)
    assert page.now() is page.now(), "it rests for a while after one was made"
