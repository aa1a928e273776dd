import math

import pytest

from vitrel.train.optim import Schedule


def at(schedule, updates, *args, **kwargs):
    factor = schedule.factor(100, 10, *args, **kwargs)
    return [factor(update) for update in updates]


def test_cosine_rises_and_falls_per_update():
    values = at(Schedule(), (0, 4, 9, 10, 55, 100, 1000), warmup_epochs=1, final=0.1)
    middle = 0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi / 2))
    assert values == pytest.approx([0.1, 0.5, 1.0, 1.0, middle, 0.1, 0.1])


def test_the_warm_up_may_begin_above_zero():
    assert at(Schedule(warmup_lr=0.5), (0, 4, 9), 1) == pytest.approx([0.55, 0.75, 1.0])


def test_cool_down_stays_at_the_final_rate():
    values = at(Schedule(cooldown_epochs=2), (79, 80, 90, 99), 1, final=0.05)
    assert values[1:] == pytest.approx([0.05] * 3) and 0.05 < values[0] < 0.06


def test_linear_poly_and_constant():
    assert at(Schedule("linear"), (10, 55, 100), 1, final=0.2) == pytest.approx([1, 0.6, 0.2])
    assert at(Schedule("poly", power=2.0), (0, 50, 100)) == pytest.approx([1, 0.25, 0])
    assert at(Schedule("constant"), (0, 10, 99), 1) == pytest.approx([0.1, 1, 1])


def test_steps():
    assert at(Schedule("step", decay_epochs=4, decay_rate=0.5), (0, 39, 40, 80), 0) == pytest.approx([1, 1, 0.5, 0.25])
    milestones = Schedule("multistep", decay_milestones=(3, 7.5), decay_rate=0.1)
    assert at(milestones, (29, 30, 74, 75, 99)) == pytest.approx([1, 0.1, 0.1, 0.01, 0.01])


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"warmup_lr": 2.0}, "model.optim.schedule.warmup_lr must be a share of model.optim.lr, within 0..1, not 2.0"),
        ({"cooldown_epochs": 1.0, "sched": "step"}, "0 with sched step"),
        ({"decay_rate": 0.0}, r"decay_rate \(0.0\) .* must be positive"),
        ({"decay_milestones": (2.0, 1.0)}, "decay_milestones must be in increasing order"),
    ],
)
def test_settings_are_checked(settings, text):
    with pytest.raises(ValueError, match=text):
        Schedule(**settings)


def test_a_warm_up_as_long_as_the_run_is_refused():
    with pytest.raises(ValueError, match=r"warm-up of 10 updates in a run of 10: lower model.optim.warmup_epochs"):
        Schedule().factor(10, 10, 1)
    with pytest.raises(ValueError, match=r"warm-up of 10 updates and cool-down of 10 in a run of 20"):
        Schedule(cooldown_epochs=1).factor(20, 10, 1)
