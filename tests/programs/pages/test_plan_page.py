"""`gregale plan --html`: the plan of a small pipelined run, as a page."""

import copy
import json
from pathlib import Path

import pytest

from gregale.cli import main
from gregale.programs.plan.page import island_chart, plan_page
from gregale.services.page import Bars, Page
from tests.programs.pages.browser import PHONE
from tests.programs.pages.looking import box, check_looks, legend
from tests.programs.tiny import SMALL_QUICKSTART

QUICKSTART = Path(__file__).parents[3] / "config" / "quickstart.yaml"
PIPELINED = ["--model.layers=4", "--mesh.stage=2", "--mesh.model=1", "--batch.size=32", "--pipeline.repeats=2"]


@pytest.fixture(scope="module")
def planned(tmp_path_factory):
    """The page that the command wrote, and what it printed as JSON."""
    path = tmp_path_factory.mktemp("plan") / "plan.html"
    with pytest.MonkeyPatch.context() as patch:
        said = []
        patch.setattr("builtins.print", lambda text, **_: said.append(text))
        more = [*SMALL_QUICKSTART, *PIPELINED, "--until", "memory", "--json"]
        assert main(["plan", str(QUICKSTART), *more, "--html", str(path)]) == 0
    report, line = said
    assert path.as_uri() in line
    return path, json.loads(report)


@pytest.fixture(scope="module")
def streaming(planned):
    """The page of the same plan, were Streaming DiLoCo its method: it has a schedule too."""
    report = copy.deepcopy(planned[1])
    for name, each in report["methods"].items():
        each["configured"] = name == "streaming_overlap"
    path = planned[0].with_name("streaming.html")
    path.write_text(plan_page(report), encoding="utf-8")
    return path


def test_a_plan_is_seen_on_a_desk_and_on_a_phone(browser, streaming, tmp_path):
    charts = check_looks(browser, streaming, tmp_path)
    assert charts.keys() == {"memory", "bytes", "time", "pipeline", "outer", "methods"}
    assert all(type(pixels) is int and pixels > 100 for pixels in charts.values()), charts


def test_bars_and_stages_tell_what_they_are(browser, planned):
    with browser.open(planned[0]) as tab:
        left, top, _, height = box(tab, "memory")
        tab.hover(left + 4, top + 8)
        rows = legend(tab, "memory")
        assert rows[0] == "ofmemory of the chip"
        assert "memory of the chip (H100)80 GiB" in rows
        left, top, _, height = box(tab, "pipeline")
        tab.hover(left + 3, top + height * 0.25)
        told = tab.value("document.querySelector('figure[data-chart=pipeline] output').textContent")
        assert told == "stage 0: even repeats. Iteration 0: microbatch 0, repeat 0"
        assert tab.errors == []


def test_a_time_of_any_length_has_ticks_on_a_phone(browser, tmp_path):
    page = Page("ticks")
    for power in range(-8, 7):
        for first in (1.1, 2.3, 5.5, 9.5):
            name = f"{first}e{power}"
            page.add(page.chart(Bars(name, name, ["a"], [("time", [float(name)])], "seconds")))
    (tmp_path / "ticks.html").write_text(page.html(), encoding="utf-8")
    ticks = "[...document.querySelectorAll('figure')].map(it => [it.dataset.chart, gregale.drawn(it).axes[1]._values])"
    with browser.open(tmp_path / "ticks.html", PHONE) as tab:
        for name, texts in tab.value(ticks):
            assert len(texts) == len(set(texts)) >= 2, (name, texts)


def test_the_curve_of_a_method_ends_at_what_it_needs(planned):
    for each in planned[1]["methods"].values():
        curve = dict(zip(each["curve"]["gbit_per_second"], each["curve"]["utilisation"], strict=True))
        needed = each["needed_gbit_per_second"]
        reached = [gbit for gbit, utilisation in curve.items() if utilisation >= 0.9]
        assert (min(reached) == pytest.approx(needed, rel=1e-3)) if needed else not reached


def test_what_does_not_fit_is_told_with_its_remedies(planned):
    report = copy.deepcopy(planned[1])
    report["memory"]["chip"] = report["memory"]["peak"] // 2
    report |= {"fits": False, "remedies": [{"change": "<b>", "peak_bytes": 1, "fits": True, "step_time": 1.5}]}
    page = plan_page(report)
    assert "It does not fit" in page
    assert "&lt;b&gt;" in page


def test_an_island_has_a_curve_over_its_link():
    island = {"members": 2, "period": 20, "bytes_per_period": 2048}
    island["links"] = {"10": {"utilisation": 0.9}, "0.05": {"utilisation": 0.1}}
    chart = island_chart(island)
    assert chart.series[0].x.tolist() == [0.05, 10.0]
    assert "With 2 islands; 2.00 KiB are sent in 20 steps." in chart.help


def test_a_search_has_no_page(capsys, tmp_path):
    arguments = ["plan", str(QUICKSTART), "--search", "--html", str(tmp_path / "plan.html")]
    assert main(arguments) == 2
    assert "search and html are both given" in capsys.readouterr().err
