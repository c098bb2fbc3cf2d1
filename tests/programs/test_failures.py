"""`gregale simulate --failures` as called from Python."""

import dataclasses
import json
from pathlib import Path

import pytest

from gregale.errors import UserError
from gregale.programs.failures import FleetConfig
from gregale.programs.simulate import SimulateConfig, main

SMALL = {"sites": 8, "failures": 2.0, "model": "100b", "bandwidth": [100.0]}


def test_json_has_all_runs(capsys):
    config = SimulateConfig(json=True, codec="int4", fleet=FleetConfig(rounds=10, fragments=2), **SMALL)
    assert main(config) == 0
    first = capsys.readouterr().out
    found = json.loads(first)
    assert list(found["runs"]) == ["islands, 100 Gbit/s", "elastic data-parallel", "plain data-parallel"]
    runs = list(found["runs"].values())
    assert len({run["deaths"] for run in runs}) == 1
    assert runs[0]["deaths"] > 0
    assert runs[0]["goodput"] > max(run["goodput"] for run in runs[1:])
    assert main(config) == 0
    assert capsys.readouterr().out == first


def test_the_bytes_are_the_codecs(capsys):
    fields = {**SMALL, "failures": 1e9}
    assert main(SimulateConfig(json=True, codec="int4", fleet=FleetConfig(rounds=6, fragments=2), **fields)) == 0
    run = json.loads(capsys.readouterr().out)["runs"]["islands, 100 Gbit/s"]
    assert run["bytes_per_round"] == pytest.approx(2 * 7 / 8 * 0.53125 * 100e9 / 2)
    assert run["goodput"] == pytest.approx(1.0)


@pytest.mark.parametrize("as_json", [True, False])
def test_the_plot_is_goodput_by_hours_between_failures(capsys, tmp_path, as_json):
    path = tmp_path / "failures.svg"
    fields = {**SMALL, "codec": "int4", "plot": path, "json": as_json}
    assert main(SimulateConfig(fleet=FleetConfig(rounds=6), **fields)) == 0
    out = capsys.readouterr().out
    assert [each.name for each in tmp_path.iterdir()] == [path.name]
    if not as_json:
        assert "Goodput, by the hours between two failures" in out
        assert "0.431" in out
        return
    found = json.loads(out)
    hours, curves = found["plot_mtbf_hours"], found["plot_goodput"]
    assert (hours[0], hours[3], hours[-1]) == (pytest.approx(0.2), 2.0, pytest.approx(20.0))
    assert {name: curve[3] for name, curve in curves.items()} == {
        name: run["goodput"] for name, run in found["runs"].items()
    }
    assert all(curve[0] < curve[-1] for curve in curves.values())
    assert all(len(curve) == 7 for curve in curves.values())


def test_the_tables_and_a_link_too_slow_for_joiners(capsys):
    fields = {**SMALL, "bandwidth": [1.0, 100.0]}
    assert main(SimulateConfig(fleet=FleetConfig(rounds=4), **fields)) == 0
    out = capsys.readouterr().out
    for expected in ("8 islands, each fails every 2 hours", "islands, 1 Gbit/s", "elastic", "plain", "goodput"):
        assert expected in out
    assert out.count("hardly comes back") == 1


def test_every_field_has_its_help():
    assert all(field.metadata["help"].endswith(".") for field in dataclasses.fields(FleetConfig))


@pytest.mark.parametrize(
    ("fields", "fleet", "message"),
    [
        ({"failures": 0.0}, {}, "failures is 0; it has to be above 0"),
        ({"sites": 10_000}, {}, "fleet.rounds 40 x sites 10000 x 1 bandwidths are more than 300,000"),
        ({"plot": Path("a.svg"), "sites": 1100}, {}, "1 bandwidths x 7 times between failures, for the plot, are more"),
        ({"overlap_steps": 100}, {}, "overlap_steps: 100 must be below period_steps = 100"),
        ({}, {"fragments": 110}, "fleet.fragments: 110 are too many for 108 layers .* at most 100"),
        ({"drop_out": ["1:50"]}, {}, "drop_out: it does not go with failures"),
        (
            {"failures": 1e-5},
            {"restart_seconds": 0.01},
            "failures: 8 islands, each failing every 1e-05 hours, are about",
        ),
    ],
)
def test_a_mistake_is_one_clear_line(fields, fleet, message):
    with pytest.raises(UserError, match=message):
        main(SimulateConfig(**{**SMALL, **fields}, fleet=FleetConfig(**fleet)))
