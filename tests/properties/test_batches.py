"""Which rows make which step."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from fedmutual.batches import epochs


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
