"""What methods say of a run before it begins."""

from dataclasses import replace

import pytest

from gregale.methods.config import OUTER, DilocoConfig, PsdpConfig, StreamingDilocoConfig, SyncConfig
from tests.mesh.support import layout_of

PLAIN_AVERAGE = replace(OUTER, learning_rate=1.0, momentum=0.0, nesterov=False)


def test_a_run_of_few_rounds_with_the_default_outer_optimizer_is_told_of_the_plain_average():
    said = DilocoConfig(period=30, warmup_steps=90).remark_on_rounds(690)
    assert said is not None
    assert said.startswith("This run has 20 rounds, ")
    assert "sync.outer.learning_rate 1, sync.outer.momentum 0 and sync.outer.nesterov false" in said


def test_a_single_replica_is_allowed_and_said():
    assert DilocoConfig(period=4).config_warning(layout_of(data=8), 12) == (
        "sync.type is diloco, but mesh.replica is 1: there is no other replica to be joined with, so the outer "
        "optimizer moves this one by itself, every 4 steps."
    )


@pytest.mark.parametrize(
    "sync",
    [DilocoConfig(period=6), StreamingDilocoConfig(period=30, outer=PLAIN_AVERAGE), PsdpConfig()],
    ids=["many rounds", "chosen", "psdp"],
)
def test_others_are_not(sync: SyncConfig):
    assert sync.remark_on_rounds(600) is None
