"""Settings that move over the rounds, by hand; and the ranges they must keep."""

import math

import pytest
import torch

from fedmutual.core import At, Schedule, within


def values(schedule: Schedule, rounds: int) -> list[float]:
    return [At(seed=0, round=r, rounds=rounds).number(schedule) for r in range(rounds)]


def test_linear() -> None:
    assert values(Schedule(0.9, 0.1), 5) == pytest.approx([0.9, 0.7, 0.5, 0.3, 0.1])


def test_cosine() -> None:
    # half a period: (1 - cos(pi k / 4)) / 2 of the way = 0, 0.146447, 1/2, 0.853553, 1
    assert values(Schedule(1.0, 0.0, "cosine"), 5) == pytest.approx([1.0, 0.853553, 0.5, 0.146447, 0.0], abs=1e-6)


@pytest.mark.parametrize(
    ("at", "rounds", "before"),
    [(0.5, 4, 2), (0.5, 5, 3), (0.25, 4, 1), (0.0, 3, 0), (1.0, 3, 3), (0.07, 100, 7), (0.3, 10, 3)],
)
def test_step(at: float, rounds: int, before: int) -> None:
    assert values(Schedule(0.1, 0.01, "step", at), rounds) == [0.1] * before + [0.01] * (rounds - before)


@pytest.mark.parametrize("shape", ["linear", "cosine", "step"])
def test_the_ends(shape: str) -> None:
    schedule = Schedule(0.2, 0.8, shape)
    assert values(schedule, 11)[0] == 0.2
    assert values(schedule, 11)[-1] == pytest.approx(0.8)
    assert values(schedule, 1) == [0.2]  # a single round is the first
    assert schedule(-1, 11) == 0.2  # the start, before the first


def test_a_number_stays() -> None:
    at = At(seed=0, round=3, rounds=9)
    assert at.number(0.25) == 0.25
    assert at.value(Schedule(0.0, 1.0)).item() == 0.375
    assert at.value(0.25).shape == ()
    assert at.value(1).dtype == torch.get_default_dtype()


def test_an_unknown_shape_of_a_schedule_is_refused() -> None:
    with pytest.raises(ValueError, match="shape is 'linear', 'cosine' or 'step', not 'cubic'"):
        Schedule(0.0, 1.0, "cubic")


@pytest.mark.parametrize("wrong", [-0.1, 1.1, math.nan, Schedule(0.5, 1.5), Schedule(-1.0, 0.5), Schedule(math.nan, 0.5)])
def test_out_of_range(wrong: float | Schedule) -> None:
    with pytest.raises(ValueError, match=r"^alpha must be between 0 and 1, not "):
        within("alpha", wrong, 0, 1)


def test_in_range() -> None:
    for right in (0, 1, 0.5, Schedule(0, 1)):
        within("alpha", right, 0, 1)
    within("mu", 1e9, 0, math.inf)
    with pytest.raises(ValueError, match=r"^mu must be at least 0, not -1$"):
        within("mu", -1, 0, math.inf)
