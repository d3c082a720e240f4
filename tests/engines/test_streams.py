"""Clients stepped in turns: each does what it does alone, to the bit, whoever else steps and whatever goes wrong there."""

from copy import deepcopy
from itertools import islice

import pytest
import torch

from fedmutual.algorithms import FML
from fedmutual.engines.group import PhaseInput
from fedmutual.engines.stacked import step_in_turns
from fedmutual.stepping import with_client_settings, work
from toy import Count, Rows, at, client, difference, mlp, server

SIZES = {"0": 20, "1": 7, "2": 33}
"""Examples of each client: two epochs of it are 6, 2 and 8 steps."""


class Broken(Rows):
    """Rows that cannot be read after the second batch."""

    def rows(self, plan, rng=None):
        yield from islice(super().rows(plan, rng), 2)
        raise OSError("the disk is gone")


def parts(kind=FML):
    """Clients that differ in their number of steps and, where there is one, in alpha."""
    algorithm = kind(local_epochs=2, batch_size=8).algorithm()
    (phase,) = algorithm.phases
    inbox = server() if "global" in algorithm.scores else {}
    made = []
    for id, n in SIZES.items():
        one = client(id, algorithm, n=n, personal=lambda seed: mlp(seed, norm=True), settings={"alpha": 0.2 + 0.3 * int(id)})
        made.append(PhaseInput(one, with_client_settings(phase, one), inbox, phase.leaves(inbox), at()))
    return made


def alone(asked):
    """What the plain engine does, on copies -> (client, reply, losses) by id."""
    done = {}
    for part in asked:
        copy = deepcopy(part.client)
        done[copy.id] = (copy, *work(part.phase, copy, part.inbox, part.at))
    return done


def same(part, reply, expected):
    copy, message, losses = expected
    sent = reply()
    assert difference(sent.message, message) == 0.0 if message else sent.message == {}
    assert sent.train == losses
    assert all(p.grad is None for net in part.client.nets.values() for p in net.parameters())
    for name, net in part.client.nets.items():
        assert difference(net.state_dict(), copy.nets[name].state_dict()) == 0.0
        states, others = part.client.optimizers[name].state, copy.optimizers[name].state
        assert len(states) == len(others) > 0
        for mine, other in zip(states.values(), others.values(), strict=True):
            assert torch.equal(mine["momentum_buffer"], other["momentum_buffer"])
    if part.client.memory or copy.memory:
        assert difference(part.client.memory, copy.memory) == 0.0


@pytest.mark.parametrize("kind", [FML, Count])
def test_clients_in_turns_are_to_the_bit_what_each_is_alone(kind):
    asked = parts(kind)
    expected = alone(asked)
    ended = list(step_in_turns(asked))
    assert [part.client.id for part, _ in ended] == ["1", "0", "2"], "as they end: by their number of steps"
    for part, reply in ended:
        same(part, reply, expected[part.client.id])


def test_a_step_of_each_comes_after_a_step_of_each():
    order = []

    class Watched(FML):
        def edit(self, grads, memory):
            order.append(self.alpha)
            return grads, memory

    list(step_in_turns(parts(Watched)))
    assert order[:6] == [0.2, 0.5, 0.8] * 2
    assert [order.count(alpha) for alpha in (0.2, 0.5, 0.8)] == [6, 2, 8]


def test_what_one_client_raises_is_its_own():
    requested = parts()
    rows = requested[0].client.data["private"]
    requested[0].client.data = {"private": Broken(rows.x, rows.y)}
    expected = alone(requested[1:])
    ((broken, fail), *completed) = step_in_turns(requested)
    assert broken is requested[0]
    with pytest.raises(OSError, match="the disk is gone"):
        fail()
    assert [part.client.id for part, _ in completed] == ["1", "2"]
    for part, reply in completed:
        same(part, reply, expected[part.client.id])
