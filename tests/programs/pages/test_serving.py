"""The page of a run that goes on, over the loopback interface."""

import json
import urllib.error
import urllib.request

import pytest

from gregale.errors import UserError
from gregale.programs.report.serving import LivePage, served
from gregale.services.run_directory import RunDirectory
from tests.programs.pages.browser import Tab
from tests.programs.pages.looking import figure_of
from tests.programs.pages.made_up import figures, write_run


@pytest.fixture
def folder(tmp_path):
    return write_run(tmp_path / "going", steps=100)


def grow(folder, steps: int) -> None:
    lines = figures(steps, 0)
    (folder / "metrics.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))


def test_a_page_follows_its_run_and_keeps_what_its_reader_chose(browser, folder):
    with served([RunDirectory(folder)], live_seconds=0.2) as address, Tab(browser, address, (1280, 900), False) as tab:
        scales = f"gregale.drawn({figure_of('figures-loss')}).scales.x.max"
        assert tab.value(scales) == 100
        tab.value("document.querySelectorAll('details').forEach(each => each.open = !each.open)")
        folds = "[...document.querySelectorAll('details')].map(each => each.open)"
        before = tab.value(folds)
        tab.choose("logy", True)
        tab.value(f"gregale.drawn({figure_of('figures-grad_norm')}).setScale('x', {{min: 10, max: 20}})")
        grow(folder, 150)
        wait = f"new Promise(done => {{ const look = () => {scales} > 100 ? done(1) : setTimeout(look, 50); look(); }})"
        tab.value(wait)
        assert tab.value(scales) == 150
        assert tab.value(f"gregale.drawn({figure_of('figures-grad_norm')}).scales.x.max") == 20
        assert tab.value(folds) == before
        assert tab.value("document.getElementById('logy').checked")
        assert tab.errors == []
        assert set(tab.requests) <= {address}


def test_only_the_page_is_answered_and_only_here(folder):
    with served([RunDirectory(folder)]) as address:
        with urllib.request.urlopen(address) as answer:
            assert b"going" in answer.read()
        for path, host, code in (("config.yaml", None, 404), ("", "gregale.example:80", 403)):
            request = urllib.request.Request(address + path, headers={"Host": host} if host else {})
            with pytest.raises(urllib.error.HTTPError) as refused:
                urllib.request.urlopen(request)
            assert refused.value.code == code
        with pytest.raises(UserError, match="cannot be listened on"):
            served([], int(address.rpartition(":")[2].strip("/"))).__enter__()


def test_a_page_is_made_again_only_when_its_run_has_written(folder):
    page = LivePage([RunDirectory(folder)])
    first = page.now()
    page._not_before = 0.0
    assert page.now() is first
    grow(folder, 120)
    assert page.now() is not first
    grow(folder, 130)
    assert page.now() is page.now(), "it rests for a while after one was made"
