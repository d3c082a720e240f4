"""FedH2L by hand: one round of two nodes, who speaks to whom, what crosses, what is never read, what is not believed."""

import copy
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from torch import nn

from fedmutual.algorithms import ALGORITHMS, FedH2L, Independent
from fedmutual.algorithms.fedh2l import Local, Mutual
from fedmutual.algorithms.peers import choose_partners, get_members, make_agreed_state
from fedmutual.boundary import release
from fedmutual.core import At, Disagreed
from fedmutual.events import Noted, PhaseDone
from linear_clients import softmax
from peers import LR, node, nodes, noise, run, seeds
from toy import Rows, difference, federation, mlp, weights

# --- one round by hand -----------------------------------------------------------------------------------------------


def pull(w, x, target, weight=1.0):
    """The gradient of the mean over rows of weight * CE(target, softmax(x w^T)), which KL(target || .) has too."""
    return np.einsum("n,nc,nf->cf", np.broadcast_to(weight, len(x)) / len(x), softmax(x @ w.T) - target, x)


@pytest.mark.parametrize("projection", ["qp", "none", "pcgrad"])
@pytest.mark.parametrize("confidence", [True, False])
@pytest.mark.parametrize("kl", [True, False])
def test_a_round_of_two_linear_nodes(projection, confidence, kl):
    """Nodes whose labels contradict each other, so that at one of them peers pull the other way."""
    torch.set_default_dtype(torch.float64)
    try:
        rng = np.random.default_rng(2)
        x = {i: rng.normal(size=(4, 2)) for i in "01"}
        y = {"0": np.array([0, 1, 0, 1]), "1": np.array([1, 0, 0, 0])}
        w = {i: rng.normal(size=(2, 2)) for i in "01"}
        personal_weights = {i: rng.normal(size=(5, 2)) for i in "01"}
        own_y = {"0": np.array([0, 0, 1, 0, 1]), "1": np.array([1, 1, 0, 1, 1])}
        public = Rows(torch.tensor(np.vstack([x["0"], x["1"]])), torch.tensor(np.hstack([y["0"], y["1"]])))
        owners, clients = {"0": range(4), "1": range(4, 8)}, []
        for i in "01":
            net = nn.Linear(2, 2, bias=False)
            net.weight.data = torch.tensor(w[i].copy())
            mine = Rows(torch.tensor(personal_weights[i]), torch.tensor(own_y[i]))
            clients.append(node(i, owners, public, mine, net, trains_on=mine))
            clients[-1].seeds = seeds(public, owners, classes=2)
        algorithm = FedH2L(batch_size=100, public_batch=4, projection=projection, confidence=confidence, kl=kl).algorithm()
        federation(algorithm, clients, rounds=1, start=make_agreed_state(owners, 2))

        eye, g_loc, p, acc, met = np.eye(2), {}, {}, {}, 0
        for i in "01":
            g_loc[i] = pull(w[i], personal_weights[i], eye[own_y[i]])
            w[i] = w[i] - LR * g_loc[i]
            z = x[i] @ w[i].T
            p[i], acc[i] = softmax(z).astype(np.float32), (z.argmax(1) == y[i]).mean()
        for i, j in ("01", "10"):
            g = pull(w[i], x[j], eye[y[j]])
            if kl:
                g = g + pull(w[i], x[j], p[j], acc[j] if confidence else 1.0)
            dot = (g * g_loc[i]).sum()
            met += dot < 0
            if dot < 0 and projection != "none":
                back = g_loc[i] - dot / (g**2).sum() * g if projection == "pcgrad" else 0
                g = g - dot / (g_loc[i] ** 2).sum() * g_loc[i] + back
            elif projection == "pcgrad":
                g = g + g_loc[i]
            w[i] = w[i] - LR * g
        assert 0 < met < 2  # both cases of eq. 8 are in this test
        for client in clients:
            assert np.abs(client.nets["personal"].weight.detach().numpy() - w[client.id]).max() < 1e-7  # p is float32
    finally:
        torch.set_default_dtype(torch.float32)


# --- settings --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("count", "settings"), [(1, {}), (2, {"eta": 0.0})])
def test_one_node_and_mutual_steps_of_rate_zero_are_independent_training(count, settings):
    ours, alone = nodes(count), nodes(count)
    run(FedH2L(batch_size=8, public_batch=4, **settings).algorithm(), ours, rounds=4)
    federation(Independent(local_steps=1, batch_size=8).algorithm(), alone, rounds=4)
    for one, other in zip(ours, alone, strict=True):
        assert difference(weights(one.nets["personal"]), weights(other.nets["personal"])) == 0.0


def test_five_local_steps_are_one_exchange_and_g_loc_is_their_sum():
    """g_loc, as the mutual step finds it, is what five SGD steps took off the weights, over the learning rate."""

    @dataclass(frozen=True, kw_only=True)
    class Observed(Mutual):
        def begin(self, client, inbox, at):
            states.append(({k: v.clone() for k, v in client.memory.items()}, weights(client.nets["personal"])))
            return super().begin(client, inbox, at)

    states, clients = [], nodes(2)
    before = weights(clients[0].nets["personal"])
    settings = {"local_steps": 5, "batch_size": 8, "public_batch": 4}
    algorithm = FedH2L(**settings).algorithm()
    run(replace(algorithm, phases=(algorithm.phases[0], Observed(**settings))), clients, rounds=1)
    memory, after = states[0]
    for name, w in before.items():
        assert torch.allclose(memory[f"g_loc.personal.{name}"], (w - after[name]) / LR, atol=1e-5)
    assert all((v == 0).all() for k, v in clients[0].memory.items() if k.startswith("g_loc."))  # and begins anew


@pytest.mark.parametrize(
    ("kind", "settings_of_kind"),
    [(torch.optim.SGD, {"momentum": 0.9}), (torch.optim.SGD, {"momentum": 0.9, "dampening": 0.5}), (torch.optim.NAdam, {})],
)
def test_a_second_optimiser_never_sees_the_steps_of_the_first(kind, settings_of_kind):
    """Two with a state, against two torch optimisers that are each stepped by hand."""

    def sgd(params):
        return kind(params, lr=0.0, **settings_of_kind)

    with_one, with_two = nodes(2, optimizer=sgd), nodes(2, optimizer=sgd)
    settings = {"batch_size": 8, "public_batch": 4, "projection": "none"}
    run(FedH2L(**settings, optimizers=1).algorithm(), with_one, rounds=3)
    run(FedH2L(**settings, optimizers=2).algorithm(), with_two, rounds=3)
    ours = nodes(2, optimizer=sgd)
    second = {c.id: sgd(c.nets["personal"].parameters()) for c in ours}
    first = {c.id: c.optimizers["personal"] for c in ours}

    @dataclass(frozen=True, kw_only=True)
    class Other(Mutual):
        def begin(self, client, inbox, at):
            client.optimizers = {"personal": second[client.id]}
            for group in second[client.id].param_groups:
                group["lr"] = LR
            return {}

        def end(self, client, at):
            client.optimizers = {"personal": first[client.id]}
            return {}

    algorithm = FedH2L(**settings).algorithm()
    run(replace(algorithm, phases=(algorithm.phases[0], Other(**settings))), ours, rounds=3)
    for a, b, c in zip(with_one, with_two, ours, strict=True):
        assert difference(weights(c.nets["personal"]), weights(b.nets["personal"])) == 0.0
        assert not torch.equal(a.nets["personal"][0].weight, b.nets["personal"][0].weight)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"labels": False, "local_data": "private+all-public"}, "labels"),
        ({"labels": False, "kl": False}, "kl"),
        ({"pairs": 0.6}, "pairs"),
        ({"public_batch": 0}, "public_batch"),
        ({"eta": -1.0}, "eta"),
    ],
)
def test_settings_that_make_no_sense_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        FedH2L(**settings)


# --- pairs -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("count", "pairs", "expected"), [(4, 0.25, 1), (4, 0.5, 2), (5, 0.25, 2), (5, 0.5, 2), (2, 0.25, 1)]
)
def test_pairs_do_not_overlap_and_all_agree_on_them(count, pairs, expected):
    ids, met = [str(i) for i in range(count)], set()
    for round in range(40):
        pairs_of_round = choose_partners(ids, pairs, At(0, round, 40, 0))
        spoke = [i for i in ids if pairs_of_round[i]]
        assert len(spoke) == 2 * expected
        assert all(pairs_of_round[pairs_of_round[i][0]] == (i,) for i in spoke)
        assert (
            choose_partners(reversed(ids), pairs, At(0, round, 40, 1)) == pairs_of_round
        )  # as the relay has it, a phase later
        met |= {frozenset((i, *pairs_of_round[i])) for i in spoke}
    assert len(met) == count * (count - 1) // 2  # everybody met everybody


def test_a_client_without_a_partner_sends_nothing_and_steps_alone():
    events, clients = [], nodes(4)
    run(FedH2L(batch_size=8, public_batch=4, peers="pairs").algorithm(), clients, rounds=5, events=events)
    for event in events:
        if isinstance(event, PhaseDone) and event.phase in ("local", "mutual") and event.round > 0:
            crossed = event.up if event.phase == "local" else event.down
            assert sorted(v > 0 for v in crossed.values()) == [False, False, True, True]


# --- what crosses ----------------------------------------------------------------------------------------------------


def captured(algorithm, clients, monkeypatch, rounds=3):
    """Every message that leaves a node."""
    messages = []

    def watch(reply, declared, client, inbox, warn):
        message = release(reply, declared, client, inbox, warn)
        messages.append((client.id, {k: v.clone() for k, v in message.items()}))
        return message

    monkeypatch.setattr("fedmutual.engines.base.release", watch)
    events = []
    run(algorithm, clients, rounds=rounds, events=events)
    return messages, events


def test_indices_posteriors_and_an_accuracy_cross_and_their_bytes_are_counted(monkeypatch):
    n, b, c = 4, 5, 3
    clients = nodes(n)
    sent, events = captured(FedH2L(batch_size=8, public_batch=b).algorithm(), clients, monkeypatch)
    messages = [m for _, m in sent if m and "digest" not in m]
    assert len(messages) == 3 * n
    for message in messages:
        assert {k: (v.dtype, tuple(v.shape)) for k, v in message.items()} == {
            "index": (torch.int32, (b,)),
            "posterior": (torch.float32, (b, c)),
            "accuracy": (torch.float32, ()),
        }
        assert torch.allclose(message["posterior"].sum(-1), torch.ones(b))
    for id, message in sent:
        if "index" in message:  # of its own public data
            assert all(int(i) in clients[int(id)].seeds.owners[id] for i in message["index"])
    phase_events = {(e.round, e.phase): e for e in events if isinstance(e, PhaseDone)}
    message_bytes = 4 * b * c + 4 * b + 4
    for round in (1, 2, 3):
        assert sum(phase_events[round, "local"].up.values()) == n * message_bytes
        assert sum(phase_events[round, "mutual"].down.values()) == (n - 1) * n * message_bytes
        assert sum(phase_events[round, "mutual"].up.values()) == sum(phase_events[round, "local"].down.values()) == 0


def test_the_paper_s_exchange_is_1412_bytes():
    declared = Local(public_batch=32).leaves(make_agreed_state({}, 10))
    assert sum(t.itemsize * int(np.prod(shape)) for t, shape in declared.values()) == 1412


def test_the_relay_forwards_and_keeps_nothing():
    clients = nodes(3)
    last = run(FedH2L(batch_size=8, public_batch=4).algorithm(), clients, rounds=2)
    assert get_members(last) == {"0": 8, "1": 8, "2": 8}
    assert last.keys() == {"classes", "rows of 0", "rows of 1", "rows of 2"}


# --- what is never read ----------------------------------------------------------------------------------------------


def poison(clients, keeps_own):
    """-1 is no class: whoever reads a poisoned label fails, or is seen in the loss."""
    for client in clients:
        public, own = client.data["public"], torch.zeros(len(client.data["public"]), dtype=torch.bool)
        client.seeds = seeds(public, client.seeds.owners, labelled=False)
        own[list(client.seeds.owners[client.id])] = keeps_own
        mine = noise(int(client.id), 20)
        private = Rows(torch.cat([mine.x, public.x[own]]), torch.cat([mine.y, public.y[own]]))
        client.data = {"private": private, "public": Rows(public.x, torch.where(own, public.y, -1))}
    return clients


def test_unlabelled_a_node_reads_no_label_of_another(monkeypatch):
    algorithm = FedH2L(batch_size=8, public_batch=4, labels=False).algorithm()
    _, events = captured(algorithm, poison(nodes(3), keeps_own=True), monkeypatch)
    losses = [e.train["0"] for e in events if isinstance(e, PhaseDone) and e.phase == "mutual"]
    assert all(t.keys() == {"kl", "projected"} and t["kl"] >= 0 for t in losses)


def test_the_strict_variant_reads_no_public_label_at_all(monkeypatch):
    algorithm = FedH2L(batch_size=8, public_batch=4, labels=False, confidence=False, local_data="private").algorithm()
    assert algorithm.trains_on == ("private",)
    sent, _ = captured(algorithm, poison(nodes(3), keeps_own=False), monkeypatch)
    assert {m["accuracy"].item() for _, m in sent if "accuracy" in m} == {1.0}  # told without looking


# --- what is not believed --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("accuracy", torch.tensor(1.5), "its accuracy is not between 0 and 1"),
        ("accuracy", torch.tensor(float("nan")), "its accuracy is not between 0 and 1"),
        ("posterior", torch.full((4, 3), 0.4), "its posteriors are not"),
        ("posterior", torch.full((4, 3), float("nan")), "its posteriors are not"),
        ("posterior", torch.tensor([[1.5, -0.5, 0.0]] * 4), "its posteriors are not"),
        ("index", torch.tensor([8, 9, 10, 99], dtype=torch.int32), "an index that is not of one of its own"),
        ("index", torch.tensor([8, 9, 10, -1], dtype=torch.int32), "an index that is not of one of its own"),
        ("index", torch.tensor([8, 9, 10, 7], dtype=torch.int32), "an index that is not of one of its own"),
        ("index", torch.tensor([8, 9, 10, 16], dtype=torch.int32), "an index that is not of one of its own"),
        ("index", torch.tensor([8, 9, 10, 8], dtype=torch.int32), "it contains an index twice"),
        ("", None, ""),  # a site that never answers
    ],
)
def test_a_message_of_no_sense_is_left_out_and_its_sender_named(name, value, message):
    @dataclass(frozen=True, kw_only=True)
    class Liar(Local):
        def end(self, client, at):
            reply = super().end(client, at)
            return (reply | {name: value} if name else {}) if client.id == "1" else reply

    settings = {"batch_size": 8, "public_batch": 4}
    algorithm = FedH2L(**settings).algorithm()
    events, clients = [], nodes(3)
    run(replace(algorithm, phases=(Liar(**settings), algorithm.phases[1])), clients, rounds=2, events=events)
    notes = [e.text for e in events if isinstance(e, Noted)]
    assert len(notes) == (2 if name else 0)
    assert all("client '1'" in note and message in note for note in notes)
    down = [e.down for e in events if isinstance(e, PhaseDone) and e.phase == "mutual"]
    each = 4 * 4 * 3 + 4 * 4 + 4
    assert down == [{"0": each, "1": 2 * each, "2": each}] * 2  # the others go on; it is still taught


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"digest": torch.ones(32, dtype=torch.uint8)},
            "not the same ones in the same order (digest 010101010101, theirs 0000",
        ),
        ({"counts": torch.tensor([24, 0, 0])}, "24 examples of class number 0, and theirs has "),
        ({"rows": torch.tensor(23)}, "23 rows, and theirs has 24"),
    ],
)
@pytest.mark.parametrize("name", ["fedh2l", "fedmd", "aggregate"])
def test_a_site_with_another_public_set_is_refused_with_the_difference(name, change, message):
    clients = nodes(3)
    clients[1].seeds = replace(clients[1].seeds, about=clients[1].seeds.about | change)
    with pytest.raises(Disagreed, match="client '1' has a public seed set that differs") as caught:
        run(ALGORITHMS[name](batch_size=8).algorithm(), clients)
    assert message in str(caught.value)


def test_in_pairs_a_message_left_out_costs_its_partner_alone():
    """Nobody hears a stranger: who was to hear it goes on alone, all others as drawn."""

    @dataclass(frozen=True, kw_only=True)
    class Liar(Local):
        def end(self, client, at):
            reply = super().end(client, at)
            return reply | {"accuracy": torch.tensor(2.0)} if client.id == "1" and reply else reply

    heard = []

    @dataclass(frozen=True, kw_only=True)
    class Heard(Mutual):
        def begin(self, client, inbox, at):
            heard.append((at.round, client.id, tuple(dict.fromkeys(k.partition("/")[0] for k in inbox))))
            return super().begin(client, inbox, at)

    settings = {"batch_size": 8, "public_batch": 4, "peers": "pairs", "pairs": 0.5}
    algorithm, clients = FedH2L(**settings).algorithm(), nodes(4)
    run(replace(algorithm, phases=(Liar(**settings), Heard(**settings))), clients, rounds=12)
    assert len(heard) == 48
    for round, id, whom in heard:
        drawn = choose_partners([c.id for c in clients], 0.5, At(7, round, 12))[id]
        assert whom == (() if drawn == ("1",) else drawn)


def test_a_node_announces_predictions_in_eval_mode():
    """For a net with BatchNorm and dropout: after the local step, with running statistics and without dropout."""

    @dataclass(frozen=True, kw_only=True)
    class Seen(Local):
        def end(self, client, at):
            reply, net = super().end(client, at), copy.deepcopy(client.nets["personal"]).eval()
            z = net(client.data["public"].x[reply["index"].long()])
            assert torch.equal(reply["posterior"], z.softmax(-1))
            assert client.nets["personal"].training
            seen.append(client.id)
            return reply

    def net(seed):
        made = mlp(seed, norm=True)
        return nn.Sequential(*made[:2], nn.Dropout(0.5), *made[2:])

    seen, settings = [], {"batch_size": 8, "public_batch": 4}
    algorithm = FedH2L(**settings).algorithm()
    run(replace(algorithm, phases=(Seen(**settings), algorithm.phases[1])), nodes(3, net=net), rounds=2)
    assert len(seen) == 6


def test_a_frozen_node_with_two_optimisers_has_none_to_change():
    clients = nodes(3)
    clients[1].optimizers = {}
    clients[1].nets["personal"].requires_grad_(False)
    run(FedH2L(batch_size=8, public_batch=4, optimizers=2).algorithm(), clients, rounds=2)


def test_a_node_that_skips_an_exchange_reports_its_share_of_projections_too():
    events, clients = [], nodes(4)
    run(FedH2L(batch_size=8, public_batch=4, peers="pairs").algorithm(), clients, rounds=20, events=events)
    last = [e.train for e in events if isinstance(e, PhaseDone) and e.phase == "local"][-1]
    assert all(t.keys() == {"local", "projected"} for t in last.values())
    for client in clients:
        share = client.memory["conflicts"] / client.memory["exchanges"]
        assert client.memory["projected"] == share
