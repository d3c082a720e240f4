"""The rounds: who takes part, what a start is, what stops a run, what BatchNorm and frozen parts do."""

import weakref
from dataclasses import replace

import pytest
import torch
from torch import nn

from fedmutual.aggregation import Aggregation
from fedmutual.algorithms import FML, FedAvg, Independent
from fedmutual.core import Algorithm, Diverged
from fedmutual.engines import base
from fedmutual.engines.base import participate
from fedmutual.engines.loop import draw_participants
from fedmutual.events import Failed, Finished, PhaseDone, RoundDone, Started
from fedmutual.federation.evaluation import score
from fedmutual.losses import Classification
from toy import ENGINES, Absent, Count, Rows, Spare, at, client, difference, federation, mlp, server, weights

E = {"local_epochs": 1, "batch_size": 8}


@pytest.fixture(params=ENGINES)
def engine(request):
    return request.param


def test_a_fraction_of_the_clients_takes_part_and_the_others_stay_as_they_are(engine):
    algorithm = FML(**E).algorithm()
    clients = [client(str(i), algorithm) for i in range(5)]
    before = {c.id: weights(c.nets["personal"]) for c in clients}
    events = []
    federation(algorithm, clients, rounds=1, participation=0.4, events=events, engine=engine)
    (done,) = [e for e in events if isinstance(e, PhaseDone)]
    assert len(done.up) == 2
    for c in clients:
        moved = difference(before[c.id], weights(c.nets["personal"]))
        assert moved > 0 if c.id in done.up else moved == 0


TINY = 1e-40  # below the smallest normal number


def test_what_fades_becomes_zero(engine):
    """A dead unit's weights shrink by weight decay alone; as denormal numbers they would never reach zero, and cost time."""
    if not torch.set_flush_denormal(False):
        pytest.skip("this processor cannot take denormal numbers as zero")
    assert torch.get_num_threads() == 1
    algorithm = FML(**E).algorithm()
    clients = [client(str(i), algorithm) for i in range(3)]
    for faded_client in clients:
        first = faded_client.nets["personal"][0]
        with torch.no_grad():
            first.weight[0], first.bias[0] = TINY, -9.0  # whatever comes in: ReLU lets nothing through
    federation(algorithm, clients, rounds=1, engine=engine)
    for faded_client in clients:
        faded = faded_client.nets["personal"][0].weight
        assert not faded[0].any()
        assert faded[1:].all()


def test_participants_are_drawn_in_each_round_and_at_least_one():
    ids = [str(i) for i in range(10)]
    drawn = {draw_participants(ids, 0.3, at(t)) for t in range(20)}
    assert len(drawn) > 5
    assert {len(d) for d in drawn} == {3}
    assert len(draw_participants(ids, 0.01, at())) == 1
    assert draw_participants(ids, 1.0, at()) == tuple(ids)
    assert draw_participants(ids, 0.3, at()) == draw_participants(ids, 0.3, replace(at(), phase=2)), (
        "the same in all phases of a round"
    )


def test_batchnorm_statistics_are_averaged_and_counters_take_the_maximum(engine):
    def net(seed):
        return mlp(seed, norm=True)

    algorithm = FedAvg(weighting="uniform", **E).algorithm()
    clients = [client("0", algorithm, n=16, shared=net), client("1", algorithm, n=40, shared=net)]
    shared_state = federation(algorithm, clients, start=server(net), rounds=1, engine=engine)
    states = [weights(c.nets["meme"]) for c in clients]
    assert [s["1.num_batches_tracked"].item() for s in states] == [2, 5]
    assert shared_state["1.num_batches_tracked"].item() == 5
    for name in ("1.running_mean", "1.running_var"):
        assert torch.allclose(shared_state[name], (states[0][name] + states[1][name]) / 2, rtol=0, atol=1e-7)
        assert not torch.equal(states[0][name], states[1][name])


def test_a_last_batch_of_one_trains_with_batchnorm(engine):
    algorithm = FML(**E).algorithm()
    one = client("0", algorithm, n=17, personal=lambda s: mlp(s, norm=True))
    federation(algorithm, [one], rounds=1, engine=engine)


def test_frozen_and_unused_parameters_are_left_as_they_are(engine):
    algorithm = FML(**E).algorithm()
    one = client("0", algorithm, personal=lambda s: Spare())
    before = weights(one.nets["personal"])
    federation(algorithm, [one], engine=engine)
    after = weights(one.nets["personal"])
    moved = {k for k in after if not torch.equal(before[k], after[k])}
    assert moved == {"net.2.weight", "net.2.bias"}


def test_a_client_smaller_than_a_batch_trains_as_one_smaller_batch(engine):
    algorithm = Independent(local_epochs=1, batch_size=128).algorithm()
    one = client("0", algorithm, n=5)
    before = weights(one.nets["personal"])
    federation(algorithm, [one], rounds=1, engine=engine)
    assert difference(before, weights(one.nets["personal"])) > 0


@pytest.mark.parametrize("kind", [FML, FedAvg, Independent])
def test_a_diverging_client_is_named_with_round_and_batch(kind, engine):
    algorithm = kind(**E).algorithm()
    clients = [client(i, algorithm, n=24) for i in ("0", "1")]
    clients[1].rate = 1e30
    events = []
    with pytest.raises(Diverged, match=r"client '1' diverged in round 1 at batch [23]: its \w+ loss is (nan|inf)"):
        federation(algorithm, clients, events=events, engine=engine)
    assert isinstance(events[-1], Failed)
    assert not [e for e in events if isinstance(e, RoundDone)], "a round with a diverged client is not saved"


def test_weights_that_overflow_in_the_last_batch_are_seen():
    algorithm = Independent(local_epochs=1, batch_size=128).algorithm()
    one = client("0", algorithm, n=12)
    one.rate = 3e38
    one.data = {"private": Rows(one.data["private"].x * 1e3, one.data["private"].y)}
    with pytest.raises(Diverged, match=r"round 1 at batch 1: its weight personal\.\S+ is no longer finite"):
        federation(algorithm, [one])


def test_labels_that_are_nan_features_are_named_at_the_batch_that_holds_them():
    algorithm = Independent(local_epochs=1, batch_size=4).algorithm()
    one = client("0", algorithm, n=12)
    one.data["private"].x[5] = float("nan")
    with pytest.raises(Diverged, match=r"client '0' diverged in round 1 at batch [123]: its personal loss is nan"):
        federation(algorithm, [one])


def test_the_start_runs_once_before_the_rounds_and_memory_is_carried(engine):
    phase = Count(**E)
    algorithm = Algorithm("count", (phase,), start=(phase,))
    one = client("0", algorithm, n=16)
    events = []
    federation(algorithm, [one], rounds=3, events=events, engine=engine)
    assert one.memory["steps"].item() == (1 + 3) * 2
    assert [type(e) for e in events if isinstance(e, Started | RoundDone | Finished)] == [
        Started,
        RoundDone,
        RoundDone,
        RoundDone,
        RoundDone,
        Finished,
    ]
    assert [e.round for e in events if isinstance(e, PhaseDone)] == [0, 1, 2, 3]


def test_a_client_that_answers_nothing_is_left_out_of_the_mean(engine):
    absent, complete = Absent(**E).algorithm(), FML(**E).algorithm()
    with_absent = federation(absent, [client(i, absent) for i in ("0", "1", "2")], rounds=1, engine=engine)
    of_two = federation(complete, [client(i, complete) for i in ("0", "2")], rounds=1, engine=engine)
    assert difference(with_absent, of_two) == 0.0


def test_statistics_that_overflow_are_seen():
    algorithm = Independent(local_epochs=1, batch_size=8).algorithm()
    one = client("0", algorithm, n=16, personal=lambda s: mlp(s, norm=True))
    with torch.no_grad():
        one.nets["personal"][1].running_var.fill_(float("inf"))
    with pytest.raises(Diverged, match="running_var is no longer finite"):
        federation(algorithm, [one])


@pytest.mark.parametrize(
    ("shape", "parts"), [((3, 32, 32), [512, 8]), ((3, 96, 96), [151, 151, 151, 59, 8]), ((2**23,), [1] * 3)]
)
def test_large_examples_are_scored_a_few_at_a_time(shape, parts):
    """At most 2^22 numbers at once: 1,365 images of 32 x 32, 151 of 96 x 96, and one example at least."""
    batch_sizes = []

    class Sees(nn.Module):
        def forward(self, x):
            batch_sizes.append(len(x))
            return torch.stack([x.flatten(1)[:, 0], -x.flatten(1)[:, 0]], 1)

    n = sum(parts)
    first = torch.arange(n) % 3 - 1.0  # below 0 for a third: class 1
    x = first.view(-1, *(1,) * len(shape)).expand(-1, *shape)
    scores = score(Sees(), Rows(x, (first < 0).long()), Classification(), "0", pytest.fail)
    assert batch_sizes == parts
    assert (scores["examples"], scores["accuracy"]) == (n, 1.0)


@pytest.mark.parametrize(("rule", "kept"), [("mean", 3), ("median", 12)])  # the first, the one before, and the new one
def test_a_round_keeps_no_reply_of_a_mean(rule, kept, monkeypatch):
    """In the order in which the engine sends messages, which is the mean's: "10" before "2"."""
    replies, most = [], [0]

    def watch(*args):
        reply = participate(*args)
        replies.append(weakref.ref(reply.message["0.weight"]))
        most[0] = max(most[0], sum(one() is not None for one in replies))
        return reply

    monkeypatch.setattr(base, "participate", watch)
    algorithm = FML(aggregate=Aggregation(rule=rule), **E).algorithm()
    federation(algorithm, [client(str(i), algorithm) for i in range(12)], rounds=1)
    assert most[0] == kept
