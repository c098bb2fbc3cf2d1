"""The table of metrics: on its page, and what a name is of."""

from __future__ import annotations

from pathlib import Path

import pytest

from gregale.services.tracking.metrics import METRICS, metric_of, table

PAGE = Path(__file__).parents[2] / "docs" / "metrics.md"


def test_the_page_has_the_table_of_the_code():
    begin, end = "<!-- metrics: begin -->", "<!-- metrics: end -->"
    assert PAGE.read_text().partition(begin)[2].partition(end)[0].strip() == table().strip()


def test_every_metric_is_found_by_a_name_of_it():
    for metric in METRICS:
        name = metric.name.replace("<replica>", "3").replace("<part>", "layer.7.mlp").replace("<source>", "news")
        name = name.replace("<task>", "sums").replace("<figure>", "acc_norm")
        assert metric_of(name) is metric


@pytest.mark.parametrize("name", ["los", "loss_", "loss_x", "grad_norm/", "eval_loss.", "tokensX"])
def test_what_no_run_logs_is_none(name):
    assert metric_of(name) is None
