"""What is written: to a terminal and elsewhere, results in their order, figures."""

import io
import json
from pathlib import Path

import pytest

from gregale.errors import UserError
from gregale.programs import sample
from gregale.programs.sample import Results, Screen, ThroughputMeter, results_to
from tests.test_terminal import Terminal


def test_a_terminal_gets_nothing_that_it_would_act_upon():
    text = "a\tb\n\x1b[2J\r\x00\x7f\x9bü🌬"
    shown = {stream: Screen(stream) for stream in (Terminal(), io.StringIO())}
    for screen in shown.values():
        screen.write(text)
    assert [stream.getvalue() for stream in shown] == ["a\tb\n␛[2J␍␀␡\ufffdü🌬", text]


@pytest.mark.parametrize(("encoding", "written"), [("utf-8", "ü"), ("ascii", "\\u00fc")])
def test_results_come_in_the_order_of_the_prompts(encoding, written):
    raw = io.BytesIO()
    results = Results(io.TextIOWrapper(raw, encoding=encoding))

    def lines() -> list[int]:
        return [json.loads(line)["n"] for line in raw.getvalue().splitlines()]

    results.add(1, {"n": 1})
    assert lines() == []
    results.add(0, {"n": 0, "text": "ü"})
    assert lines() == [0, 1]
    results.add(4, {"n": 4})
    results.add(3, {"n": 3})
    results.finish()
    assert lines() == [0, 1, 3, 4]
    assert written.encode(encoding) in raw.getvalue()


def test_a_file_gets_its_name_when_it_is_complete_or_interrupted(tmp_path):
    out = tmp_path / "out.jsonl"
    with results_to(str(out)) as results:
        results.add(0, {"n": 0})
        assert not out.exists()
        assert [path.read_text() for path in tmp_path.iterdir()] == ['{"n": 0}\n'], "killed now, it would be there"
    assert [path.name for path in tmp_path.iterdir()] == ["out.jsonl"]
    with pytest.raises(UserError, match=r"exists already"), results_to(str(out)):
        pass
    for name, given in (("cut.jsonl", [1]), ("none.jsonl", [])):
        with pytest.raises(KeyboardInterrupt):
            interrupted(str(tmp_path / name), given)
    assert (tmp_path / "cut.jsonl").read_text() == '{"n": 1}\n'
    assert sorted(path.name for path in tmp_path.iterdir()) == ["cut.jsonl", "out.jsonl"], "no empty file is left"
    with pytest.raises(UserError, match=r"the results are in .*two\.jsonl\.partial"):
        made_twice(tmp_path / "two.jsonl")
    assert (tmp_path / "two.jsonl").read_text() == "theirs"
    for wrong in (str(tmp_path / "nowhere" / "out.jsonl"), "s3://bucket/out.jsonl"):
        with pytest.raises(UserError, match=r"^out"), results_to(wrong):
            pass


def made_twice(out: Path) -> None:
    with results_to(str(out)) as results:
        out.write_text("theirs")
        results.add(0, {"n": 0})


def interrupted(out: str, numbers: list[int]) -> None:
    with results_to(out) as results:
        for number in numbers:
            results.add(number, {"n": number})
        raise KeyboardInterrupt


def test_the_pace_leaves_out_what_was_compiled(monkeypatch):
    times = iter([0.0, 2.0, 3.5, 4.0, 5.5, 10.0, 11.25])
    monkeypatch.setattr(sample, "perf_counter", lambda: next(times))
    pace = ThroughputMeter()
    for tokens in (1, 2, 12, 62):
        pace.at(tokens)
    assert str(pace) == "62 tokens: the first after 3.50 s, then 30 tokens/s"
    alone = ThroughputMeter()
    alone.at(1)
    assert str(alone) == "1 token: the first after 1.25 s"
