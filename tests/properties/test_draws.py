"""Random streams, the batches that are drawn from them, and settings that move over the rounds."""

import math
from itertools import combinations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fedmutual.batches import epochs
from fedmutual.core import At, Schedule, within

words = st.lists(st.text(max_size=4), max_size=3).map(tuple)


def numbers(at: At, *who: str) -> list[float]:
    return torch.rand(4, generator=at.rng(*who)).tolist()


@given(st.integers(0, 2**63), st.integers(-1, 100), words)
def test_the_same_words_give_the_same_stream(seed: int, round: int, stream_words: tuple[str, ...]) -> None:
    assert numbers(At(seed, round, 200), *stream_words) == numbers(At(seed, round, 200), *stream_words)
    torch.rand(1)
    at = At(seed, round, 200)
    at.rng("another", "stream")
    assert numbers(at, *stream_words) == numbers(
        At(seed, round, 300), *stream_words
    )  # more rounds leave the rounds so far what they were


@given(words, words)
def test_other_words_give_another_stream(one: tuple[str, ...], other: tuple[str, ...]) -> None:
    at = At(0, 0, 1)
    assert (numbers(at, *one) == numbers(at, *other)) == (one == other)


def test_seed_round_phase_and_words_all_count() -> None:
    streams = [
        numbers(At(0, 0, 9), "0", "batches"),
        numbers(At(1, 0, 9), "0", "batches"),
        numbers(At(0, 1, 9), "0", "batches"),
        numbers(At(0, -1, 9), "0", "batches"),
        numbers(At(0, 0, 9, phase=1), "0", "batches"),
        numbers(At(0, 0, 9), "1", "batches"),
        numbers(At(0, 0, 9), "0", "augment"),
        numbers(At(0, 0, 9), "0"),
        numbers(At(0, 0, 9), "0batches"),
        numbers(At(0, 0, 9), "0b", "atches"),
    ]
    assert all(a != b for a, b in combinations(streams, 2))


def test_a_stream_is_new_at_each_call_and_apart_from_the_global_one() -> None:
    at = At(0, 0, 1)
    before = torch.get_rng_state()
    assert at.rng("a").initial_seed() == at.rng("a").initial_seed()
    assert numbers(at, "a") == numbers(at, "a")
    assert torch.equal(torch.get_rng_state(), before)


def plan(examples: int, passes: int, size: int, seed: int = 0) -> list[list[int]]:
    return [batch.tolist() for batch in epochs(examples, passes, size, torch.Generator().manual_seed(seed))]


def sizes(examples: int, size: int) -> list[int]:
    return [len(batch) for batch in plan(examples, 1, size)]


def test_sizes_by_hand() -> None:
    assert sizes(10, 4) == [4, 4, 2]
    assert sizes(8, 4) == [4, 4]
    assert sizes(3, 128) == [3]  # fewer examples than a batch: one smaller batch, nobody is dropped
    assert sizes(1, 128) == [1]


def test_a_last_batch_of_one_joins_the_one_before() -> None:
    assert sizes(9, 4) == [4, 5]
    assert sizes(5, 4) == [5]
    assert sizes(3, 2) == [3]


def test_batches_of_one_are_left_where_they_are_asked_for() -> None:
    assert sizes(3, 1) == [1, 1, 1]


@given(st.integers(1, 60), st.integers(1, 4), st.integers(1, 20), st.integers(0, 3))
def test_every_row_exactly_once_an_epoch(examples: int, passes: int, size: int, seed: int) -> None:
    batches = plan(examples, passes, size, seed)
    rows = [row for batch in batches for row in batch]
    for n in range(passes):
        assert sorted(rows[n * examples : (n + 1) * examples]) == list(range(examples))
    assert len(batches) % passes == 0
    assert all(1 <= len(batch) <= size + 1 for batch in batches)
    assert size == 1 or examples == 1 or all(len(batch) > 1 for batch in batches)


def test_the_stream_alone_decides() -> None:
    torch.manual_seed(5)
    first = plan(50, 2, 8)
    torch.manual_seed(6)
    assert plan(50, 2, 8) == first
    assert plan(50, 2, 8, seed=1) != first
    rows = [row for batch in first for row in batch]
    assert rows[:50] != rows[50:]  # a new order each time


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


def test_a_warm_up_and_one_cycle() -> None:
    assert values(Schedule(0.8, 0.2, warmup=0.4), 5) == pytest.approx([0.8 / 3, 1.6 / 3, 0.8, 0.5, 0.2])
    assert values(Schedule(0.8, 0.2, "one-cycle"), 5) == pytest.approx([0.032, 0.416, 0.8, 0.5, 0.2])
    assert Schedule(0.8, 0.2, warmup=0.4)(-1, 5) == pytest.approx(0.8 / 3), "the start, before the first round"


def test_a_number_stays() -> None:
    at = At(seed=0, round=3, rounds=9)
    assert at.number(0.25) == 0.25
    assert at.value(Schedule(0.0, 1.0)).item() == 0.375
    assert at.value(0.25).shape == ()
    assert at.value(1).dtype == torch.get_default_dtype()


def test_an_unknown_shape_of_a_schedule_is_refused() -> None:
    with pytest.raises(ValueError, match="shape is 'linear', 'cosine', 'step' or 'one-cycle', not 'cubic'"):
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
