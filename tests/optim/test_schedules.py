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
    "wsd, 1 - sqrt": (
        WarmupStableDecaySchedule(decay=4, shape="sqrt", final=0.2),
        [PEAK] * 17 + [PEAK * (1 - 0.8 * (t / 4) ** 0.5) for t in (1, 2, 3)],
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
    plain = [PEAK * config.fraction(t, STEPS) for t in range(STEPS)]
    np.testing.assert_allclose(plain, expected, rtol=1e-12, atol=1e-7)


def test_a_schedule_of_a_stage_counts_from_its_beginning_and_rises_from_a_rate():
    """As many steps before it as were not skipped: the rate before is that of its first step."""
    config = LinearSchedule(warmup=0.25, begin=8, end=16, initial=0.4, final=0.5)  # 2 steps of warmup
    rise = [PEAK * (0.4 + 0.6 * t / 3) for t in (1, 2)]
    expected = [*[rise[0]] * 8, *rise, *(PEAK * (1 - t / 6 / 2) for t in range(6)), *[PEAK / 2] * 4]
    schedule = config.build(PEAK, STEPS)
    np.testing.assert_allclose([schedule(t) for t in range(STEPS)], expected, rtol=1e-6)
    np.testing.assert_allclose([PEAK * config.fraction(t, STEPS) for t in range(STEPS)], expected, rtol=1e-12)


@settings(max_examples=20)
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
        (lambda: LinearSchedule(begin=7, end=7).build(PEAK, STEPS), "begin is 7, but the schedule ends at step 7"),
        (lambda: WarmupStableDecaySchedule(warmup=15, decay=0.3).build(PEAK, STEPS), r"0.3 = 6 steps, .*20 - 15 = 5"),
    ],
)
def test_what_does_not_fit_is_refused_with_the_arithmetic(make, message):
    with pytest.raises(UserError, match=message):
        make()
