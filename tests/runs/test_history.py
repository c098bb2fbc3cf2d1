"""A run's files are read while they grow, and whatever stands in them."""

import json
import math
import os

import numpy as np
import pytest

from gregale.errors import UserError
from gregale.runs.history import FiguresReader, read_history, samples_in, spikes_kept
from gregale.runs.run_directory import RunDirectory


def lines(*entries: dict) -> bytes:
    return b"".join(json.dumps(entry).encode() + b"\n" for entry in entries)


@pytest.fixture
def metrics(tmp_path):
    return tmp_path / "metrics.jsonl"


def test_figures_come_by_name_with_their_steps(metrics):
    metrics.write_bytes(
        lines({"step": 1, "loss": 2.5, "tokens": 8}, {"step": 1, "eval_loss": None}, {"step": 2, "loss": 2})
    )
    figures = FiguresReader(metrics).read()
    assert list(figures) == ["loss", "tokens", "eval_loss"]
    assert figures["loss"].steps.tolist() == [1, 2]
    assert figures["loss"].values.tolist() == [2.5, 2.0]
    assert math.isnan(figures["eval_loss"].values[0])
    with metrics.open("ab") as file:
        file.write(b'{"step": 3, "loss": NaN}\n{"step": 4, "loss": -Infinity}\n{"step": 5, "loss": 1e999}\n')
    assert np.isnan(FiguresReader(metrics).read()["loss"].values[2:]).all()
    assert (figures.lines, figures.last_step, figures.problems) == (3, 2, ())


def test_what_is_added_is_read_and_a_torn_line_is_read_when_it_is_whole(metrics):
    reader = FiguresReader(metrics)
    assert dict(reader.read()) == {}
    metrics.write_bytes(lines({"step": 1, "loss": 2.0}) + b'{"step": 2, "lo')
    assert reader.read()["loss"].steps.tolist() == [1]
    with metrics.open("ab") as file:
        file.write(b'ss": 1.0}\n')
    figures = reader.read()
    assert (figures["loss"].values.tolist(), figures.problems) == ([2.0, 1.0], ())


def test_a_file_that_a_resumed_run_wrote_anew_is_read_anew(metrics):
    reader = FiguresReader(metrics)
    metrics.write_bytes(lines(*({"step": step, "loss": 1.0} for step in range(1, 5))))
    assert reader.read().last_step == 4
    other = metrics.with_name("other")
    other.write_bytes(lines({"step": 1, "loss": 1.0}, {"step": 2, "loss": 3.0}) + b" " * 200)
    os.replace(other, metrics)
    assert reader.read()["loss"].values.tolist() == [1.0, 3.0]


@pytest.mark.parametrize(
    "damage",
    [b"\0" * 40, b"{", b"[]", b'{"loss": 1}', b'{"step": "2"}', b'{"step": -1}', b'{"step": true}', b"\xff\xfe{}",
     b"[" * 9999, b'{"step": 1e3}', b'{"step": 99999999999999999999}',
     b'{"step": 3, "loss": "x"}', b'{"step": 3, "loss": [1]}'],
)  # fmt: skip
def test_damaged_lines_are_left_out_and_told(metrics, damage):
    metrics.write_bytes(lines({"step": 1, "loss": 2.0}) + damage + b"\n" + lines({"step": 4, "loss": 1.0}))
    figures = FiguresReader(metrics).read()
    assert figures["loss"].values.tolist() == [2.0, 1.0]
    (problem,) = figures.problems
    assert "metrics.jsonl: 1 of 3 lines are damaged, the first is line 2" in problem


def test_steps_that_go_back_are_put_in_order_and_told(metrics):
    metrics.write_bytes(lines({"step": 2, "loss": 2.0}, {"step": 3, "loss": 3.0}, {"step": 2, "loss": 9.0}))
    figures = FiguresReader(metrics).read()
    assert figures["loss"].steps.tolist() == [2, 3]
    assert figures["loss"].values.tolist() == [9.0, 3.0]
    assert "do not ascend" in figures.problems[0]


def test_samples_stand_by_step():
    samples = samples_in("--- step 5\none\n\ntwo\n--- step 5\nthree\n--- step 10\n</script>\n")
    assert [(each.step, each.texts) for each in samples] == [(5, ("one\n\ntwo", "three")), (10, ("</script>",))]
    text = f"--- step {'9' * 5000}"  # what a model may write
    assert samples_in(f"--- step 5\n{text}\n")[0].texts == (text,)


def test_spikes_and_gaps_are_kept():
    values = np.sin(np.arange(100_000) / 1000)
    values[[12_345, 54_321]] = 40.0, -40.0
    values[70_000:70_010] = np.nan
    kept = spikes_kept(values, 500)
    assert len(kept) <= 3 * 500 + 2
    assert {0, 12_345, 54_321, 70_000, 99_999} <= set(kept.tolist())
    assert (np.diff(kept) > 0).all()
    for values in ([], [1.0], [np.nan] * 1000, [np.inf] * 10 + [1.0] * 1000):
        kept = spikes_kept(np.array(values, float), 10)
        assert len(kept) <= 32
        assert not values or kept[-1] == len(values) - 1


def test_a_history_has_all_of_a_run_and_tells_what_it_lacks(tmp_path):
    run = RunDirectory(tmp_path / "small")
    with pytest.raises(UserError, match="not a run directory"):
        read_history(run)
    run.path.mkdir()
    run.metrics.write_bytes(lines({"step": 1, "loss": 2.0}))
    run.samples.write_text("--- step 1\nhello\n", encoding="utf-8")
    run.record_start(0, {"device_kind": "cpu"})
    history = read_history(run)
    assert history.name == "small"
    assert history.starts[0]["device_kind"] == "cpu"
    assert history.samples[0].texts == ("hello",)
    assert history.problems == (f"{run.config}: there is no such configuration file.",)
    run.config.write_text("steps: 3\nmodel: {layers: 2, a: {}}\n", encoding="utf-8")
    assert read_history(run).config == {"steps": 3, "model.layers": 2, "model.a": {}}
