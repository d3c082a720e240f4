"""Random streams: the same words, the same stream, whatever ran before; other words, another stream."""

from itertools import combinations

import torch
from hypothesis import given
from hypothesis import strategies as st

from fedmutual.core import At

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
