"""Numbers next to zero: taken as zero where clients train and are scored, and nowhere else."""

import pytest
import torch
from torch import nn

from fedmutual.denormals import flush_denormals
from fedmutual.federation.evaluation import score
from fedmutual.losses import Classification
from toy import CLASSES, rows

TINY = 1e-40


@pytest.fixture(autouse=True)
def flushes_denormals():
    if not torch.set_flush_denormal(False):
        pytest.skip("this processor cannot take denormal numbers as zero")
    yield
    torch.set_flush_denormal(False)


def flushes() -> bool:
    return not torch.full((1,), TINY).mul(1).numpy().view("int32").any()


@pytest.mark.parametrize("before", [False, True])
def test_the_caller_has_its_own_state_again(before):
    torch.set_flush_denormal(before)
    with flush_denormals():
        assert flushes()
        with flush_denormals():
            pass
        assert flushes(), "the inner one gives back the outer one's"
    assert flushes() == before
    with pytest.raises(KeyError), flush_denormals():
        raise KeyError
    assert flushes() == before


def test_a_function_that_calls_itself():
    @flush_denormals()
    def down(n: int) -> list[bool]:
        return [flushes(), *(down(n - 1) if n else []), flushes()]

    assert all(down(2))
    assert not flushes()


def test_with_several_threads_nothing_is_changed():
    """Threads that were there before would compute otherwise than this one: bits would hang on when they were started."""
    torch.set_num_threads(2)
    try:
        with flush_denormals():
            assert not flushes()
    finally:
        torch.set_num_threads(1)


def test_whatever_the_default_device_is():
    with torch.device("meta"), flush_denormals():
        assert not torch.full((1,), TINY, device="cpu").mul(1).numpy().view("int32").any()
    assert not flushes()


class Watch(nn.Module):
    """Notes whether numbers are flushed when it is asked."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[bool] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen.append(flushes())
        return torch.zeros(len(x), CLASSES)


def test_scoring():
    net = Watch()
    score(net, rows(0, 5), Classification(), "0", pytest.fail)
    assert net.seen == [True]
    assert not flushes()
