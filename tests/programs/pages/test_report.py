"""`gregale report` and the page of a run that goes on: what stands there, and what a reader sees in a browser."""

import json
import re
import time
import warnings
from dataclasses import replace
from html import unescape
from urllib.parse import urlsplit

import numpy as np
import pytest

from gregale.cli import main
from gregale.programs.live_page import LivePage, served
from gregale.programs.report import end_loss, loss_before, report_page
from gregale.programs.report_charts import accumulated, report_runs
from gregale.runs.history import Column, Figures, History, RunPaths, read_history
from gregale.runs.run_lock import hold_run_lock
from gregale.web.document import Lines, Page, Series
from tests.programs.pages.browser import CONTRAST, PHONE, Browser, box, check_looks, drawn, figure_of, found, legend
from tests.programs.pages.made_up import STREAMING, figures, write_metrics, write_rounds, write_run
from tests.runs.runs import write_starts

HALF = '\ud800\r\0"<'  # what no file in UTF-8 takes, and HTML another way
EVIL = "<!--</script><script>document.title='bad'</script><img src=x onerror=alert(1)>"


NONE_HERE = "There is no Chromium on this machine: nobody looks at the pages. `apt-get install chromium` brings one."


@pytest.fixture(scope="module")  # not longer: Playwright's event loop keeps others from this thread
def browser():
    program = found()
    if program is None:
        warnings.warn(NONE_HERE, stacklevel=1)
        pytest.skip(NONE_HERE)
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright, playwright.chromium.launch(executable_path=program) as chromium:
        yield Browser(chromium)


def page_of(*folders, **more) -> str:
    return report_page([read_history(RunPaths(folder)) for folder in folders], **more)


def data_of(page: str) -> dict:
    return json.loads(re.search(r'id="data">(.*?)</script>', page, re.DOTALL)[1])


def text_of(page: str) -> str:
    return re.sub(r"<[^>]+>", " ", page.partition("</style>")[2])


@pytest.fixture(scope="module")
def one(tmp_path_factory):
    """The page of one run, with a schedule."""
    folder = tmp_path_factory.mktemp("one")
    write_run(folder / "small", sync=STREAMING)
    (folder / "small.html").write_text(page_of(folder / "small"), encoding="utf-8")
    return folder / "small.html"


def test_a_page_of_one_run_is_seen_on_a_desk_and_on_a_phone(browser, one):
    charts = check_looks(browser, one)
    assert len(charts) >= 8
    assert all(type(pixels) is int and pixels > 30 for pixels in charts.values()), charts


def test_a_reader_hovers_zooms_and_chooses(browser, one):
    chart = "figures-loss"
    with browser.open(one) as tab:
        left, top, width, height = box(tab, chart)
        last = {name: f"{value:.5g}" for line in figures(400, 0)[-2:] for name, value in line.items()}
        steps, _, loss, held_out = legend(tab, chart)
        assert (steps, held_out) == ("Stepslast", f"eval_loss{last['eval_loss']}")
        assert loss.endswith(f"raw {last['loss']}")
        tab.hover(left + width / 2, top + height / 2)
        steps, _, loss, _ = (re.search(r"[\d.]+", row) for row in legend(tab, chart))
        assert abs(float(steps[0]) - 200) < 8
        assert 2 < float(loss[0]) < 3
        range_ = f"(() => {{ const u = gregale.drawn({figure_of(chart)});"
        range_ += "return [u.scales.x.min, u.scales.x.max, u.scales.y.distr, u.series.length]; })()"
        tab.drag(left + width * 0.25, left + width * 0.5, top + height / 2)
        low, high, _, _ = tab.value(range_)
        assert 80 < low < 120 < 190 < high < 220
        tab.value("document.getElementById('reset').click()")
        assert tab.value(range_)[1] >= 399
        tab.choose("x", "tokens")
        assert tab.value(range_)[1] == pytest.approx(400 * 2048, rel=0.01)
        tab.choose("logy", True)
        assert tab.value(range_)[2] == 3
        assert tab.value(range_)[3] == 4  # step, the loss as it is and smoothed, the evaluations
        text = f"{figure_of(chart)}.textContent"
        assert "exponential mean over 2 % of the x axis" in tab.value(text)
        shown = f"gregale.drawn({figure_of(chart)}).data.slice(1, 3).map(ys => ys[0])"
        raw, mean = tab.value(shown)
        assert mean == pytest.approx(raw), "the mean of a steep line begins at its first point"
        norm = f"gregale.drawn({figure_of('figures-grad_norm')}).series.length"
        for smoothing, of_loss, of_norm in (("10", 4, 3), ("0", 3, 2)):
            tab.choose("smooth", smoothing)
            assert (tab.value(range_)[3], tab.value(norm)) == (of_loss, of_norm)
        assert "exponential mean" not in tab.value(text)
        assert "smooth=0" in tab.value("location.hash")
        assert "x=tokens" in tab.value("location.hash")
        assert all(drawn(tab).values())


def test_stages_have_lines_with_their_numbers(browser, one, tmp_path):
    """A killed run repeats a start; the boundaries are on every axis."""
    assert "stages" not in data_of(one.read_text(encoding="utf-8"))["runs"][0]
    folder, stages = write_run(tmp_path / "staged"), [(0, 1), (100, 2), (300, 3), (100, 2), (200, 2), (300, 3)]
    write_starts(folder, *({"step": step, "stage": number, "stages": 3} for step, number in stages))
    page = tmp_path / "staged.html"
    page.write_text(page_of(folder), encoding="utf-8")
    assert data_of(page_of(folder))["runs"][0]["stages"] == [[100, 2], [300, 3]]
    with browser.open(page) as tab:
        tab.value(
            "(window.texts = [], CanvasRenderingContext2D.prototype.fillText = (text, x) => texts.push([text, x]), 1)"
        )
        for axis, share in (("steps", 0.5), ("tokens", 0.5)):
            tab.value("texts.length = 0")
            tab.choose("x", axis)
            found = tab.value(
                f"(() => {{ const u = gregale.drawn({figure_of('figures-loss')});"
                "return [texts.filter(each => each[0].startsWith('stage')).slice(0, 2), u.bbox.width]; })()"
            )
            ((first, left), (second, right)), width = found
            assert (first, second) == ("stage 2", "stage 3")
            assert abs(right - left) == pytest.approx(share * width, rel=0.02)


def test_a_finger_zooms(browser, one):
    with browser.open(one, PHONE) as tab:
        left, top, width, height = box(tab, "figures-loss")
        tab.swipe(left + width * 0.25, left + width * 0.5, top + height / 2)
        low, high = tab.value(f"(({{x}}) => [x.min, x.max])(gregale.drawn({figure_of('figures-loss')}).scales)")
        assert 80 < low < 120 < 180 < high < 230


def test_what_was_chosen_comes_back_when_the_page_is_loaded_again(browser, one):
    """Controls, the zoom and hidden lines; a line's name is a button for the keyboard too."""
    chart = "figures-loss"
    state = f"(() => {{ const u = gregale.drawn({figure_of(chart)});"
    state += "return [u.scales.x.min, u.scales.x.max, u.series.map(each => each.show)]; })()"
    with browser.open(one) as tab:
        left, top, width, height = box(tab, chart)
        tab.drag(left + width * 0.25, left + width * 0.5, top + height / 2)
        name = f"{figure_of(chart)}.querySelectorAll('.u-legend th')[3]"
        tab.value(f"{name}.focus()")
        assert tab.value(f"[document.activeElement === {name}, {name}.role]") == [True, "button"]
        for key, shown in (("Enter", False), (" ", True), ("Enter", False)):
            tab.page.keyboard.press(key)
            tab.settle()
            assert tab.value(f"{name}.getAttribute('aria-pressed')") == str(shown).lower()
            assert tab.value(state)[2] == [True, True, True, shown]
        zoomed = tab.value(state)
        assert 80 < zoomed[0] < 120 < 190 < zoomed[1] < 220
        tab.choose("theme", "dark")
        fragment = tab.value("location.hash")
        tab.choose("smooth", "0")
        low, high, shown = tab.value(state)
        assert [low, high, shown] == [*zoomed[:2], [True, True, False]], "another control changes neither"
    with browser.open(one, fragment=fragment) as tab:
        assert tab.value(state) == zoomed
        assert tab.value("document.documentElement.dataset.theme") == "dark"
        other = f"gregale.drawn({figure_of('figures-grad_norm')}).scales.x"
        assert tab.value(f"[{other}.min, {other}.max]") == zoomed[:2], "all charts over the same axis follow"
        tab.value("document.getElementById('reset').click()")
        tab.settle()
        assert tab.value(state)[1] >= 399
        assert "zoom" not in tab.value("location.hash")
    with browser.open(one, fragment="#x=seconds&zoom=[1&hide=7&zoom=[%22Steps%22,9,2]&hide=%22") as tab:
        assert tab.value("document.getElementById('x').value") == "seconds"
        assert tab.value(state)[0] < 1, "a damaged address is none"


def test_several_runs_are_compared(browser, tmp_path):
    write_run(tmp_path / "plain", steps=400)
    write_run(tmp_path / "wide", steps=300, seed=1, model={"type": "llama", "layers": 4, "hidden": 128})
    page = page_of(tmp_path / "plain", tmp_path / "wide")
    (tmp_path / "both.html").write_text(page, encoding="utf-8")
    charts = check_looks(browser, tmp_path / "both.html")
    assert "figures-eval_loss" in charts
    text = text_of(page)
    assert "model.hidden" in text
    assert "model.layers" not in text.partition("Different settings")[2].partition("Loss")[0]
    assert len(re.findall('class="best"', page)) >= 4
    assert "loss at 300 steps" in text
    assert "healing_seconds" in text.partition("Always 0:")[2]


def test_a_title_names_the_first_of_many_runs():
    run = History("a", "a", {}, Figures({}), (), (), (), (), False, ())
    for count, title in ((1, "0"), (4, "4 runs: 0, 1, 2 and 3"), (200, "200 runs: 0, 1, 2, 3, 4 and 195 more")):
        page = report_page([replace(run, name=str(number)) for number in range(count)])
        assert f"<title>{title}</title>" in page


def test_runs_are_sorted_by_a_heading_and_filtered_by_name(browser, tmp_path):
    losses = {"wide-2": [9.0, 1.0], "wide-10": [9.0], "deep-1": [9.0, 1.0, 0.5], "deep-3": []}
    for name, values in losses.items():
        lines = [{"step": step, "loss": value} for step, value in enumerate(values, 1)]
        write_metrics(write_run(tmp_path / name, steps=0), lines)
    path = tmp_path / "several.html"
    path.write_text(page_of(*(tmp_path / name for name in losses)), encoding="utf-8")
    rows = "[...document.querySelectorAll('table.runs')[0].tBodies[0].rows].filter(row => row.checkVisibility())"
    names = f"{rows}.map(row => row.cells[0].textContent)"
    heading = "[...document.querySelectorAll('table.runs th button')].find(each => each.textContent === '{}')"
    state = "document.querySelector('table.runs th:has(button)[aria-sort$=ending]')?.ariaSort"
    with browser.open(path) as tab:
        assert tab.value(names) == list(losses)
        tab.value(f"{heading.format('run')}.click()")
        assert tab.value(names) == ["deep-1", "deep-3", "wide-2", "wide-10"], "a number in a name is a number"
        tab.value(f"{heading.format('loss at the end')}.focus()")
        tab.page.keyboard.press("Enter")
        assert tab.value(names) == ["deep-1", "wide-2", "wide-10", "deep-3"]
        assert tab.value(state) == "ascending"
        tab.page.keyboard.press("Enter")
        assert tab.value(names) == ["wide-10", "wide-2", "deep-1", "deep-3"], "a run without the value stays last"
        assert tab.value(state) == "descending"
        tab.choose("filter", "WIDE 2")
        assert tab.value(names) == ["wide-2"]
        assert [row[:6] for row in legend(tab, "figures-loss")] == ["Stepsl", "wide-2", "wide-2"]
        fragment = tab.value("location.hash")
    with browser.open(path, fragment=fragment) as tab:
        assert tab.value(names) == ["wide-2"]
        tab.choose("filter", "")
        assert tab.value(names) == ["wide-10", "wide-2", "deep-1", "deep-3"]
        assert tab.value(CONTRAST) == []


def test_islands_show_their_rounds(browser, tmp_path):
    names = ["a", "b"]
    for place, name in enumerate(names):
        write_run(tmp_path / name, sync=STREAMING)
        write_rounds(tmp_path / name, names, late=0.3 * place)
    (tmp_path / "fleet.html").write_text(page_of(tmp_path / "a", tmp_path / "b"), encoding="utf-8")
    with browser.open(tmp_path / "fleet.html") as tab:
        assert drawn(tab)["rounds"] > 300
        left, top, width, height = box(tab, "rounds")
        told = "document.querySelector('figure[data-chart=rounds] output').textContent"
        tab.hover(left + 2, top + height * 0.25)
        assert tab.value(told).startswith("a: healing. Round 1:")
        tab.hover(left + width * 0.5, top + 1)
        assert tab.value(told) == ""


def test_rounds_are_drawn_though_a_clock_was_put_back_and_lines_are_odd(browser, tmp_path):
    folder = write_run(tmp_path / "a", steps=20)
    write_rounds(folder, ["a"], late=0.0)
    *before, last = (folder / "rounds.jsonl").read_text().splitlines()
    last = json.dumps(json.loads(last) | {"began": json.loads(before[0])["began"] + 1, "ended": 1_795_353_652.0})
    odd = ['{"round": 41, "began": NaN, "ended": 1e999, "waiting_seconds": 1}', before[0].replace("43588", '"x"')]
    (folder / "rounds.jsonl").write_text("".join(f"{line}\n" for line in [*before, last, *odd]))
    (tmp_path / "back.html").write_text(page_of(folder), encoding="utf-8")
    with browser.open(tmp_path / "back.html") as tab:
        assert all(type(pixels) is int and pixels > 30 for pixels in drawn(tab).values())


def test_texts_of_users_stay_texts(browser, tmp_path):
    folder = write_run(tmp_path / "run", steps=20, name=EVIL, note=EVIL)
    lines = [*figures(20, 0), {"step": 20, EVIL: 1.0, HALF: 1.0}, {"step": 20, "loss": 1.0, f"eval_loss.{EVIL}": 2.0}]
    write_metrics(folder, lines)
    (folder / "samples.txt").write_text(f"--- step 5\n{EVIL}\x00\x1b[31m\n", encoding="utf-8")
    path = tmp_path / "evil.html"
    path.write_text(page_of(folder, notes=[EVIL]), encoding="utf-8")
    assert path.read_text(encoding="utf-8").count("<script") == 3
    with browser.open(path) as tab:
        assert tab.value("document.title") == "run"
        assert tab.value("document.querySelectorAll('img').length") == 0
        assert EVIL in tab.value("document.body.textContent")
        assert all(drawn(tab).values())
        assert tab.requests == []


def test_a_time_of_any_length_has_ticks_on_a_phone(browser, tmp_path):
    page, axis = Page("ticks"), ("Steps", "")
    for power in range(-8, 7, 2):
        for first in (1.1, 2.3, 5.5, 9.5):
            name = f"{first}e{power}"
            line = Series("time", np.arange(2), np.array([0.0, float(name)]))
            page.add(page.chart(Lines(name, name, [line], "seconds", axis)))
    (tmp_path / "ticks.html").write_text(page.html(), encoding="utf-8")
    ticks = "[...document.querySelectorAll('figure')].map(it => [it.dataset.chart, gregale.drawn(it).axes[1]._values])"
    with browser.open(tmp_path / "ticks.html", PHONE) as tab:
        for name, texts in tab.value(ticks):
            assert len(texts) == len(set(texts)) >= 2, (name, texts)


def test_a_step_that_compiles_is_outside_of_the_range_and_a_chart_of_two_points_is_small(browser, tmp_path):
    folder = write_run(tmp_path / "run", steps=0)
    lines = [{"step": step, "step_seconds": 0.1 + step / 1000, "mfu": 0.5} for step in range(1, 21)]
    lines[0]["step_seconds"], lines[11]["step_seconds"] = 42.0, 5.0
    write_metrics(folder, [*lines, {"step": 10, "eval_loss": 3.0}, {"step": 20, "eval_loss": 2.5}])
    (tmp_path / "run.html").write_text(page_of(folder), encoding="utf-8")
    figure = figure_of("figures-step_seconds")
    top, text = f"gregale.drawn({figure}).scales.y.max", f"{figure}.textContent"
    with browser.open(tmp_path / "run.html") as tab:
        assert 0.12 < tab.value(top) < 0.2
        assert "2 values are above the range; the largest is 42 s (steps: 1)" in tab.value(text)
        tab.value(f"gregale.drawn({figure}).setScale('x', {{min: 10, max: 20}})")
        tab.settle()
        assert "1 value is above the range; the largest is 5 s (steps: 12)" in tab.value(text)
        tab.choose("logy", True)
        assert tab.value(top) > 42
        assert "above the range" not in tab.value(text)
        heights = [tab.value(f"gregale.drawn({figure_of(f'figures-{name}')}).height") for name in ("eval_loss", "mfu")]
        assert 1.5 * heights[0] < heights[1]


def test_an_injected_script_would_not_run(browser, one, tmp_path):
    """The policy of the page holds even where the escaping would have failed."""
    path = tmp_path / "injected.html"
    path.write_text(one.read_text(encoding="utf-8").replace("</main>", "<script>document.title='bad'</script></main>"))
    with browser.open(path) as tab:
        assert tab.value("document.title") == "small"
        assert "Content Security Policy" in tab.errors.pop(0)
        tab.errors.clear()


def test_damage_gaps_and_a_run_without_a_step_are_told(tmp_path):
    folder = write_run(tmp_path / "odd", steps=100)
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('nonsense\n{"step": 101, "loss": null}\n{"step": 102, "loss": NaN}\n{"step": 103, "lo')
    (folder / "changes.jsonl").write_text('{"step": 50, "changes": {"steps": [100, 200]}}\n[]\n')
    (folder / "config.yaml").write_text("steps: [")
    page = page_of(folder, write_run(tmp_path / "young", steps=0))
    text = text_of(page)
    assert "lines are damaged, the first is line 109" in text
    assert "changes.jsonl: 1 of 2 lines are damaged" in text
    assert "not readable as YAML" in text
    assert "young has no metrics yet" in text
    assert "odd: `loss` is no number at 2 of its 102 steps, first at step 101." in text


def test_figures_have_charts_with_their_names_units_and_meaning(tmp_path):
    folder = write_run(tmp_path / "deep", steps=3)
    line = {"step": 3, "grad_norm/layer.0": 1.0, "grad_norm/layer.1": 2.0, "learning_rate": 0.1}
    line |= {"acc.a": 0.5, "acc_stderr.a": 0.1, "acc.b": 1.0, "acc_norm.b": 0.5, "perplexity.c": 7.0}
    write_metrics(folder, [line])
    page = page_of(folder)
    charts = data_of(page)["charts"]
    for chart, labels in {"grad_norm/layer.0": ["layer.0", "layer.1"], "acc.a": ["acc.a", "acc.b"]}.items():
        assert [each["label"] for each in charts[f"figures-{chart}"]["series"]] == labels
    units = {"acc.a": "share", "acc_stderr.a": "share", "perplexity.c": ""}
    assert {name: charts[f"figures-{name}"]["unit"] for name in units} == units
    assert "Of the step's update." in unescape(text_of(page))
    assert "<h2>More</h2>" not in page
    write_metrics(folder, [{"step": 3, "nobody.knows": 7}])
    page = page_of(folder)
    assert "<h2>More</h2>" in page
    assert [each["label"] for each in data_of(page)["charts"]["figures-nobody.knows"]["series"]] == ["nobody.knows"]
    write_metrics(folder, [line])
    several = data_of(page_of(folder, write_run(tmp_path / "other", steps=3)))["charts"]
    assert "figures-grad_norm/layer.0" not in several


def test_a_run_that_goes_on_is_told(tmp_path):
    folder = write_run(tmp_path / "going", steps=20)
    with hold_run_lock(folder, print):
        assert "going is still training; the report is a snapshot." in text_of(page_of(folder))
    assert "is still training" not in text_of(page_of(folder))


def test_logarithms_of_what_is_not_positive_are_told(browser, tmp_path):
    folder = write_run(tmp_path / "flat", steps=30)
    write_metrics(folder, [{"step": s, "loss": -s} for s in range(1, 30)])
    (tmp_path / "flat.html").write_text(page_of(folder), encoding="utf-8")
    with browser.open(tmp_path / "flat.html", fragment="#logy=1&logx=1") as tab:
        assert "No values above 0" in drawn(tab)["figures-loss"]


def test_a_printed_page_is_light_and_unfolded(browser, one):
    with browser.open(one, dark=True) as tab:
        tab.value("dispatchEvent(new Event('beforeprint'))")
        assert tab.value(
            "[document.documentElement.dataset.theme, document.querySelectorAll('details:not([open])').length]"
        ) == ["light", 0]
        tab.value("dispatchEvent(new Event('afterprint'))")
        assert tab.value("document.documentElement.dataset.theme === undefined")


def test_a_long_run_and_ten_runs_stay_small(tmp_path):
    columns = {name: value for name, value in figures(1, 0)[0].items() if name != "step"}
    drawn_at_random = np.random.default_rng(7).random((997, len(columns))).tolist()
    texts = [json.dumps(dict(zip(columns, row, strict=True)))[1:] for row in drawn_at_random]
    lines = [f'{{"step": {step}, {texts[step % len(texts)]}\n' for step in range(1, 100_001)]
    lines[54_320] = json.dumps({"step": 54_321, **columns, "loss": 40.0}) + "\n"
    folders = [tmp_path / f"run-{number}" for number in range(11)]
    for number, folder in enumerate(folders):
        folder.mkdir()
        (folder / "config.yaml").write_text("steps: 100000")
        (folder / "metrics.jsonl").write_text("".join(lines[:10_000] if number else lines))
    begin = time.process_time()
    long = page_of(folders[0])
    assert len(long) < 3_000_000
    assert time.process_time() - begin < 10
    loss = data_of(long)["charts"]["figures-loss"]["series"][0]
    assert np.cumsum(loss["dx"])[loss["y"].index(40)] == 54_321
    assert len(page_of(*folders[1:])) < 2_000_000


def test_the_command_writes_the_page_and_says_where(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    write_run(tmp_path / "runs" / "small", steps=5)
    write_run(tmp_path / "old" / "small", steps=5)
    assert main(["report", "small", "old/small", "runs/small", "--output", "page.html"]) == 0
    said = capsys.readouterr().out
    assert "The report of the 2 runs is in page.html" in said
    assert (tmp_path / "page.html").as_uri() in said
    text = text_of((tmp_path / "page.html").read_text(encoding="utf-8"))
    assert "2 of the runs have the name small; they are told apart by their paths." in text
    assert "runs/small was given twice" in text
    assert "old/small" in text
    monkeypatch.chdir(tmp_path / "old" / "small")
    assert main(["report", "."]) == 0
    assert "<h1>small</h1>" in (tmp_path / "old" / "small" / "report.html").read_text(encoding="utf-8")


def test_mistakes_are_told(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    write_run(tmp_path / "small", steps=2)
    for arguments, said in {
        (): "RUNS is missing",
        ("nowhere",): "nowhere is not a run directory",
        ("small", "--output", "page.pdf"): "its name has to end with .html",
        ("small", "--output", "no/page.html"): "there is no folder 'no'",
        ("small", "--plan", "none.json"): "there is no file none.json",
        ("small", "--plan", "small/config.yaml"): "is not the output of `gregale plan CONFIG --json`",
    }.items():
        assert main(["report", *arguments]) == 2
        assert said in capsys.readouterr().err


def test_a_plan_stands_beside_what_was_measured(tmp_path):
    folder = write_run(tmp_path / "small")
    plan = {"name": "small", "roofline": {"step_seconds_one_after_another": 0.455, "utilisation": 0.5}}
    plan |= {"tokens_per_step": 2048, "memory": {"peak": 1_800_000_000}, "devices": 8, "chip": "H100"}
    plan |= {"methods": {"psdp": {"configured": True, "bytes_per_step": {"average": 50_000}}}}
    text = " ".join(text_of(page_of(folder, plans=[plan])).split())
    assert "time of a step 0.455 s 0.228 s 0.50" in text
    assert "sent over the slow link in a step 50.0 kB 50.0 kB 1.00" in text
    assert "Plan and run" not in text_of(page_of(folder))


def test_the_head_has_the_notes_and_the_facts_of_the_first_start(tmp_path):
    folder = write_run(tmp_path / "run", steps=5, notes="a wider model")
    first = {"gregale": "1.2.3", "host": "box", "commit": "ab12-dirty", "command": "gregale train a.yaml"}
    write_starts(folder, first, {"step": 3, "gregale": "9", "time": "2026-12-01T00:00:00+00:00"})
    head = " ".join(text_of(page_of(folder)).partition("Loss")[0].split())
    assert "notes a wider model began 2026-11-22 10:00:00 UTC devices 8 cpu version gregale 1.2.3" in head
    assert head.endswith("host box commit ab12-dirty command gregale train a.yaml")
    assert "gregale 9" in text_of(page_of(folder)).partition("Machine")[2]


def test_counts_of_several_starts_go_on():
    column = Column(np.arange(1, 6), np.array([1.0, 3.0, 0.5, 2.0, 1.0]))
    assert accumulated(column).values.tolist() == [1.0, 3.0, 3.5, 5.0, 6.0]


def test_a_start_counts_though_its_first_line_comes_late(tmp_path):
    """Where it took longer to the first line than the start before had lasted, the count does not fall."""
    folder = write_run(tmp_path / "run", steps=0)
    lines = [(1, 1.0, 5), (2, 2.0, 10), (3, 8.0, 20), (4, 9.0, 30)]
    keys = ("step", "elapsed_seconds", "network_bytes_sent")
    write_metrics(folder, [dict(zip(keys, line, strict=True)) for line in lines])
    (folder / "starts.jsonl").write_text("".join(f'{{"step": {step}}}\n' for step in (0, 3, 2, 2, "a", 9)))
    (run,) = report_runs([read_history(RunPaths(folder))])
    assert run.starts == [0, 2, 9]
    assert run.axes["seconds"].values.tolist() == [1.0, 2.0, 10.0, 11.0]
    assert run.axes["bytes"].values.tolist() == [5.0, 10.0, 30.0, 40.0]


def test_the_loss_at_the_end_is_one_figure_on_the_whole_page(tmp_path):
    folder = write_run(tmp_path / "run", steps=0)
    write_metrics(folder, [{"step": 100, "loss": 2.5}, {"step": 150, "eval_loss": 3.0}])
    assert end_loss(report_runs([read_history(RunPaths(folder))])[0]) == 2.5, "of the last line that has one"
    for name, last in (("short", 200), ("long", 400)):
        folder = write_run(tmp_path / name, steps=0)
        lines = [{"step": s, "loss": 9 - s / 50, "tokens": s**2, "step_seconds": 1 + s / 9} for s in range(1, last + 1)]
        write_metrics(folder, lines)
    short, _ = report_runs([read_history(RunPaths(tmp_path / name)) for name in ("short", "long")])
    end = end_loss(short)
    ends = {axis: loss_before(short, axis, float(each.values[-1])) for axis, each in short.axes.items()}
    assert len(ends) > 1
    assert ends == dict.fromkeys(ends, end)
    text = text_of(page_of(tmp_path / "short", tmp_path / "long"))
    at = text.partition("At the same point")[2].partition("Loss")[0]
    assert at.count(f"{end:.4f}") >= 2


def test_runs_that_log_rarely_are_compared_where_one_ends_and_what_is_not_there_is_not_the_best(tmp_path):
    lines = {
        "begun": [{"step": step, "loss": 6 - step / 10} for step in range(1, 13)],
        "rare": [{"step": 8, "loss": 5.0}, {"step": 16, "loss": 4.0}, {"step": 16, "eval_loss": 4.5}],
    }
    for name, entries in lines.items():
        write_metrics(write_run(tmp_path / name, steps=0), entries)
    page = page_of(*(tmp_path / name for name in lines))
    side_by_side, at = page.partition("Side by side")[2].split("At the same point")
    assert re.findall(r'class="best"[^>]*>([^<]*)', side_by_side) == ["4.0000"]
    assert re.findall(r">(\d\.\d{4})<", at.partition("</section>")[0]) == ["4.8000", "4.5000"]


def test_what_is_sent_in_a_step_stands_over_the_steps_in_which_it_was(tmp_path):
    folder = write_run(tmp_path / "run", steps=0)
    lines = [{"step": step, "replica_bytes": sent} for step, sent in ((10, 0), (20, 500), (30, 500))]
    write_metrics(folder, lines)
    (series,) = data_of(page_of(folder))["charts"]["traffic"]["series"]
    assert series["stairs"], "each goes on from its point"
    assert (series["dx"], series["y"]) == ([10, 10, 10], [50, 0, 0])


@pytest.fixture
def going(tmp_path):
    return write_run(tmp_path / "going", steps=100)


def grow(folder, steps: int) -> None:
    write_metrics(folder, figures(steps, 0))


def test_a_page_follows_its_run_and_keeps_what_its_reader_chose(browser, going):
    page = LivePage([RunPaths(going)], live_seconds=0.2)
    with served(page.now, "127.0.0.1", 0) as address, browser.open(address) as tab:
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
        grow(going, 150)
        tab.wait(f"{norm}.data[0].at(-1) > 100")
        assert tab.value(zoomed) == chosen
        assert tab.value(scales) == chosen[1], "all charts over the same axis follow"
        tab.value("document.getElementById('reset').click()")
        tab.settle()
        assert tab.value(scales) == 150
        assert tab.value(f"{norm}.series[1].show") is False
        assert tab.value(folds) == before
        assert tab.value("document.getElementById('logy').checked")
        assert set(tab.requests) <= {address}


def test_a_page_that_was_opened_before_the_first_step_becomes_that_of_the_run(browser, tmp_path):
    folder = write_run(tmp_path / "new", steps=0)
    (folder / "samples.txt").unlink()
    page = LivePage([RunPaths(folder)], live_seconds=0.1)
    controls = "[...document.querySelectorAll('#x option, #controls input')].map(each => each.id || each.value)"
    opened = "[...document.querySelectorAll('details[open] summary')].map(each => each.textContent)"
    with served(page.now, "127.0.0.1", 0) as address, browser.open(address) as tab:
        with hold_run_lock(folder, print):
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


def test_a_page_tells_that_nobody_serves_it_and_comes_back(browser, going):
    page = LivePage([RunPaths(going)], live_seconds=0.1)
    told = "document.querySelector('header p').textContent.includes('not watched any more')"
    alone = "127.83.71.1"  # where no other test takes the port meanwhile
    with served(page.now, alone, 0) as address:
        tab = browser.open(address)
    with tab:
        tab.wait(told)
        with served(page.now, alone, urlsplit(address).port or 0):
            tab.wait(f"!{told}")
        tab.page.close()
        tab.errors.clear()  # of requests that nobody answered


def test_a_page_is_made_again_only_when_its_run_has_written(going):
    page = LivePage([RunPaths(going)])
    first = page.now()
    page._not_before = 0.0
    assert page.now() is first
    grow(going, 120)
    assert page.now() is not first
    grow(going, 130)
    assert page.now() is page.now(), "it rests for a while after one was made"
