"""The optimisers of a client's networks as one."""

import copy
from functools import partial

import pytest
import torch
from torch import nn

from fedmutual.optimizers import reset_state
from fedmutual.stepping import merge_optimizers

SGD = partial(torch.optim.SGD, lr=0.1, momentum=0.9, weight_decay=0.01, fused=True)
KINDS = {
    "sgd": SGD,
    "without momentum": partial(SGD, momentum=0.0),
    "adam": partial(torch.optim.Adam, lr=0.1, amsgrad=True, fused=True),
    "adamw": partial(torch.optim.AdamW, lr=0.1, weight_decay=0.01),
}


def give_gradients(nets):
    torch.manual_seed(1)
    for net in nets:
        for p in net.parameters():
            p.grad = torch.randn_like(p)


def step(nets, optimizers, count):
    for _ in range(count):
        give_gradients(nets)
        for optimizer in optimizers:
            optimizer.step()


@pytest.mark.parametrize("make", KINDS.values(), ids=KINDS)
def test_one_optimiser_has_the_bits_and_the_states_of_two(make):
    nets = [nn.Linear(5, 3), nn.Linear(5, 3)]
    ours, plain = copy.deepcopy(nets), copy.deepcopy(nets)
    owners, others = ([make(net.parameters()) for net in pair] for pair in (ours, plain))
    for _ in range(2):  # with states that are new, and with states of earlier steps
        merged = merge_optimizers(owners)
        assert len(merged) == 1
        step(ours, merged, 3)
        step(plain, others, 3)
    for a, b in zip(owners, others, strict=True):
        torch.testing.assert_close(a.state_dict(), b.state_dict(), rtol=0, atol=0)
    for a, b in zip(ours, plain, strict=True):
        torch.testing.assert_close(a.state_dict(), b.state_dict(), rtol=0, atol=0)


@pytest.mark.parametrize(
    "second", [partial(SGD, lr=0.2), partial(SGD, weight_decay=0.0), partial(torch.optim.Adam, lr=0.1)], ids=str
)
def test_optimisers_with_other_settings_stay_apart(second):
    optimizers = [SGD(nn.Linear(2, 2).parameters()), second(nn.Linear(2, 2).parameters())]
    assert merge_optimizers(optimizers) == optimizers


def test_a_network_that_begins_stays_apart_from_one_that_goes_on():
    """As after a resume: the personal network has a momentum, the new meme has none."""
    nets = [nn.Linear(2, 2), nn.Linear(2, 2)]
    optimizers = [SGD(net.parameters()) for net in nets]
    step(nets[:1], optimizers[:1], 1)
    assert merge_optimizers(optimizers) == optimizers
    step(nets, optimizers, 1)
    assert len(merge_optimizers(optimizers)) == 1


@pytest.mark.parametrize("kind", [*KINDS.values(), partial(SGD, dampening=0.5), partial(torch.optim.NAdam, lr=0.1)])
def test_an_optimiser_that_is_reset_steps_as_a_new_one(kind):
    """A resumed run has a new optimiser in each round's first step, and an undisturbed run one that was reset."""
    used, new = nn.Linear(3, 2), nn.Linear(3, 2)
    optimizer = kind(used.parameters())
    step([used], [optimizer], 2)
    reset_state(optimizer)
    new.load_state_dict(used.state_dict())
    step([used], [optimizer], 2)
    step([new], [kind(new.parameters())], 2)
    assert all(torch.equal(a, b) for a, b in zip(used.parameters(), new.parameters(), strict=True))
