"""`gregale simulate` as called from Python."""

import json

import numpy as np
import pytest

from gregale.errors import UserError
from gregale.programs.simulate import SimulateConfig, main
from gregale.timeline import GRID_GBIT_PER_SECOND, PAPER_METHODS


def printed(capsys, **fields):
    assert main(SimulateConfig(json=True, **fields)) == 0
    return json.loads(capsys.readouterr().out)


def test_json_and_table_have_five_values_for_each_method(capsys):
    needed = printed(capsys)["bandwidth_gbit_per_second"]
    assert list(needed) == list(PAPER_METHODS)
    for values in needed.values():
        assert len(values) == 5
        assert values == sorted(values)
        assert np.isin(values, GRID_GBIT_PER_SECOND).all()
    assert main(SimulateConfig(model="10b", bandwidth=[1.0, 10.0])) == 0
    out = capsys.readouterr().out
    for expected in ("data-parallel", "Streaming DiLoCo, overlap, 4 bits", "126.5", "99%"):
        assert expected in out


def test_a_goal_out_of_reach(capsys):
    fields = {"parameters": 1e14, "methods": ["data_parallel"]}
    assert printed(capsys, **fields)["bandwidth_gbit_per_second"]["data_parallel"] == [None] * 5
    main(SimulateConfig(**fields))
    assert "> 1000" in capsys.readouterr().out


def test_tokens_per_second_of_all_sites(capsys):
    fields = {"parameters": 5e6, "layers": 4, "step_seconds": 0.5, "methods": ["psdp", "islands_4bit"], "tokens": 2048}
    assert set(printed(capsys, bandwidth=[5.0], **fields)["model"].items()) > set(list(fields.items())[:3])
    found = printed(capsys, bandwidth=[0.05, 1000.0], period_steps=30, fragment_layers=2, steps=300, **fields)
    compute = 0.5 * 11 / 12  # layer 1 has one node fewer
    speeds = found["asked_tokens_per_second"]
    assert speeds["islands_4bit"] == pytest.approx([2 * 2048 / compute] * 2, rel=1e-3)
    for name, row in speeds.items():
        assert row == pytest.approx([2 * 2048 / compute * each for each in found["asked_utilisation"][name]], rel=1e-6)
    assert main(SimulateConfig(bandwidth=[0.05], **fields)) == 0
    assert "Tokens per second of all sites" in capsys.readouterr().out


def test_codec_and_sites_decide_the_bytes(capsys):
    fields = {"methods": ["diloco", "psdp", "loco"], "sites": 8, "steps": 100}
    assert printed(capsys, **fields)["sent_bytes_per_site"] == pytest.approx(
        {"diloco": 2 * 1.75e9, "psdp": 400 * 1.75e9, "loco": 100 * (0.53125 + 4) / 2 * 1.75e9}
    )
    found = printed(capsys, codec="int8", **fields)["sent_bytes_per_site"]
    assert found["psdp"] == found["loco"] == pytest.approx(100 * (1.03125 + 4) / 2 * 1.75e9)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"bandwidth": [1.0, 0.0]}, r"bandwidth\.1 is 0; it has to be above 0"),
        ({"codec": "int3"}, "codec is 'int3'. .* Valid choices: float32, bfloat16"),
        ({"steps": 10**6, "microbatches": 10**6}, "= 120,000,000,000,000 events"),
        ({"layers": 400, "methods": ["streaming"]}, "period_steps: 100 steps are too few for 134 fragments"),
    ],
)
def test_a_mistake_is_one_clear_line(fields, message):
    with pytest.raises(UserError, match=message):
        main(SimulateConfig(**fields))
