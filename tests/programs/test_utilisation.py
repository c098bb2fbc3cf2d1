"""Model FLOPs utilisation in the log, as if the simulated devices were a chip that is known."""

import pytest

from gregale.audit import chips
from gregale.audit.chips import CHIPS, OF_KIND, of_device
from gregale.programs.train.step_log import peak_tokens_per_second
from tests.audit.steps import small_setup
from tests.programs.tiny import lines


def test_every_kind_is_a_chip():
    assert set(OF_KIND.values()) == set(CHIPS)
    assert of_device("TPU v5 lite") is CHIPS["v5e"]
    assert of_device("cpu") is of_device("NVIDIA H100 PCIe") is None


def test_on_unknown_devices_there_is_none():
    """A run's lines have exactly the documented figures there (`test_train.py`)."""
    assert peak_tokens_per_second(small_setup((1, 1, 1))) is None


def test_it_is_in_the_log(gregale, inputs, monkeypatch, capsys):
    monkeypatch.setitem(chips.OF_KIND, "cpu", "v7x")
    assert gregale("train", "tiny.yaml", "--name", "known", "--steps", "4", "--data.held_out", "0") == 0
    weights = 4 * 32 * 32 + 3 * 32 * 64 + 2 * 32 + 32 + 32 * 320  # projections, feed-forward, norms, head
    flops = 6 * weights + 12 * 1 * 32 * 32
    for line in lines(inputs / "runs" / "known"):
        assert line["mfu"] == pytest.approx(line["tokens_per_second"] * flops / (8 * 2307e12 / 2))
    assert " MFU 0.0%" in capsys.readouterr().out
