import numpy as np
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gregale.errors import UserError
from gregale.optim import ConstantSchedule, CosineSchedule, LinearSchedule, WarmupStableDecaySchedule

PEAK, STEPS = 0.3, 20


def warmed(body):
    """Five steps of warmup, then `body`."""
    return [PEAK * (t + 1) / 6 for t in range(5)] + [float(body(t)) for t in range(STEPS - 5)]


CASES = {
    "constant": (ConstantSchedule(), [PEAK] * STEPS),
    "constant, warmup": (ConstantSchedule(warmup=5), warmed(optax.constant_schedule(PEAK))),
    "linear": (LinearSchedule(), [PEAK * (1 - t / STEPS) for t in range(STEPS)]),
    "linear, warmup": (LinearSchedule(0.25, final=0.5), warmed(optax.linear_schedule(PEAK, PEAK / 2, STEPS - 5))),
    "cosine": (CosineSchedule(final=0.0), [PEAK * (1 + np.cos(np.pi * t / STEPS)) / 2 for t in range(STEPS)]),
    "cosine, warmup": (CosineSchedule(5, final=0.1), warmed(optax.cosine_decay_schedule(PEAK, STEPS - 5, alpha=0.1))),
    "wsd": (
        WarmupStableDecaySchedule(warmup=5, decay=4),
        [PEAK * (t + 1) / 6 for t in range(5)] + [PEAK] * 12 + [PEAK * 3 / 4, PEAK / 2, PEAK / 4],
    ),
    "wsd by fractions": (
        WarmupStableDecaySchedule(warmup=0.25, decay=0.2, final=0.2),
        [PEAK * (t + 1) / 6 for t in range(5)] + [PEAK] * 12 + [PEAK * 0.8, PEAK * 0.6, PEAK * 0.4],
    ),
}


@pytest.mark.parametrize(("config", "expected"), CASES.values(), ids=CASES.keys())
def test_every_step_has_the_rate_of_the_closed_form(config, expected):
    schedule = config.build(PEAK, STEPS)
    np.testing.assert_allclose([schedule(t) for t in range(STEPS)], expected, rtol=1e-6, atol=1e-8)


@settings(max_examples=20, deadline=None)
@given(
    kind=st.sampled_from([ConstantSchedule, LinearSchedule, CosineSchedule, WarmupStableDecaySchedule]),
    steps=st.integers(2, 200),
    warmup=st.floats(0, 0.7),
)
def test_rates_stay_between_zero_and_the_peak_and_only_rise_in_the_warmup(kind, steps, warmup):
    schedule = kind(warmup=warmup).build(PEAK, steps)
    rates = np.broadcast_to(schedule(np.arange(200)), 200)[:steps]  # one shape: compiled once
    top = round(warmup * steps)
    assert (rates[:-1] > 0).all()
    assert rates.max() <= PEAK * (1 + 1e-6)
    assert (np.diff(rates[: top + 1]) > 0).all()
    assert (np.diff(rates[top:]) <= 1e-7).all()
    np.testing.assert_allclose(rates[top], PEAK, rtol=1e-6)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: ConstantSchedule(warmup=-1), "warmup is -1"),
        (lambda: LinearSchedule(final=1.5), "final is 1.5"),
        (lambda: WarmupStableDecaySchedule(decay=0), "decay is 0"),
        (lambda: CosineSchedule(warmup=20).build(PEAK, STEPS), "warmup is 20 = 20 steps, .* only 20"),
        (lambda: WarmupStableDecaySchedule(warmup=15, decay=0.3).build(PEAK, STEPS), r"0.3 = 6 steps, .*20 - 15 = 5"),
    ],
)
def test_what_does_not_fit_is_refused_with_the_arithmetic(make, message):
    with pytest.raises(UserError, match=message):
        make()
