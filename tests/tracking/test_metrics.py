"""What a metric's name is of."""

import pytest

from gregale.tracking.metrics import METRICS, metric_of


def test_every_metric_is_found_by_a_name_of_it():
    for metric in METRICS:
        name = metric.name.replace("<replica>", "3").replace("<part>", "layer.7.mlp").replace("<source>", "news")
        name = name.replace("<task>", "sums").replace("<figure>", "acc_norm")
        assert metric_of(name) is metric


@pytest.mark.parametrize("name", ["los", "loss_", "loss_x", "grad_norm/", "eval_loss.", "tokensX"])
def test_what_no_run_logs_is_none(name):
    assert metric_of(name) is None
