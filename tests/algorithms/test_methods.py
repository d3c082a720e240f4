"""A round or two of each method on linear networks small enough to be followed by hand, in numpy, apart from torch."""

import numpy as np
import pytest
import torch

from fedmutual.aggregation import Aggregation
from fedmutual.algorithms import (
    APFL,
    FML,
    SCAFFOLD,
    Ditto,
    FedALA,
    FedAPEN,
    FedAvg,
    FedAvgFT,
    FedDF,
    FedOpt,
    FedProx,
    FedRep,
    PFedMe,
    ProxyFL,
)
from fedmutual.algorithms.fedprox import compute_proximal
from fedmutual.algorithms.ktpfl import KTpFL, move_coefficients
from fedmutual.algorithms.peers import make_agreed_state, make_proxy_state
from fedmutual.core import At, Bench, Net, Recipe, Schedule
from fedmutual.engines.base import participate
from fedmutual.stepping import group_batches
from linear_clients import (
    BODY,
    HEAD,
    LR,
    ONE,
    OWN,
    SHARED,
    X,
    Y,
    average,
    clients,
    gradient,
    halves,
    layer,
    softmax,
    start,
    weight,
)
from toy import Rows, federation

pytestmark = pytest.mark.usefixtures("in_float64")


@pytest.mark.parametrize("t", [1.0, 2.0])
def test_a_round_of_fml(t):
    alpha, beta = 0.3, 0.6
    algorithm = FML(alpha=alpha, beta=beta, temperature=t, **ONE).algorithm()
    ours = clients(algorithm)
    shared_state = federation(algorithm, ours, rounds=1, start=start())
    memes = [SHARED - LR * gradient(i, SHARED, OWN[i], beta, t) for i in X]
    assert np.abs(shared_state["weight"].numpy() - np.mean(memes, axis=0)).max() < 1e-12
    for one in ours:
        personal = OWN[one.id] - LR * gradient(one.id, OWN[one.id], SHARED, alpha, t)
        assert np.abs(weight(one.nets["personal"]) - personal).max() < 1e-12


def test_a_clients_own_alpha_and_a_schedule():
    """alpha runs 1 -> 0 over three rounds; client 1 keeps its own 1: independent training."""
    algorithm = FML(alpha=Schedule(1.0, 0.0), beta=1, **ONE).algorithm()
    ours = clients(algorithm)
    ours[1].settings = {"alpha": 1.0}
    federation(algorithm, ours, rounds=3, start=start())
    w, v = SHARED, dict(OWN)
    for a in (1.0, 0.5, 0.0):
        v = {i: v[i] - LR * gradient(i, v[i], w, 1.0 if i == "1" else a) for i in X}
        w = np.mean([w - LR * gradient(i, w) for i in X], axis=0)
    for one in ours:
        assert np.abs(weight(one.nets["personal"]) - v[one.id]).max() < 1e-12


def test_three_rounds_of_fedapen():
    """w takes two steps before rounds 2 and 3 on the row that trains nothing else; ensembles are of logits."""
    phase = FedAPEN(adapt_share=0.5, adapt_passes=2, adapt_rate=2.0, **ONE)
    ours = clients(phase.algorithm())
    state = federation(phase.algorithm(), ours, rounds=3, start=start())
    shared, v, w = SHARED, dict(OWN), dict.fromkeys(X, 0.5)
    for round in range(3):
        memes = {}
        for one in ours:
            i, (held, kept) = one.id, (rows.numpy() for rows in phase._split_rows(one, At(7, 0, 3)))
            for _ in range(2 if round else 0):
                zp, zm = X[i][held] @ v[i].T, X[i][held] @ shared.T
                dz = softmax(w[i] * zp + (1 - w[i]) * zm) - np.eye(2)[Y[i][held]]
                w[i] = np.clip(w[i] - 2.0 * (dz * (zp - zm)).sum(1).mean(), 0, 1)
            x, onehot = X[i][kept], np.eye(2)[Y[i][kept]]
            zp, zm = x @ v[i].T, x @ shared.T
            both, p, m = softmax(w[i] * zp + (1 - w[i]) * zm), softmax(zp), softmax(zm)
            dp, dm = (p - onehot) + (p - m) + w[i] * (both - onehot), (m - onehot) + (m - p) + (1 - w[i]) * (both - onehot)
            v[i], memes[i] = v[i] - LR * dp.T @ x / len(x), shared - LR * dm.T @ x / len(x)
        shared = np.mean(list(memes.values()), axis=0)
    assert np.abs(state["weight"].numpy() - shared).max() < 1e-12
    assert any(0 < share < 1 and share != 0.5 for share in w.values())
    for one in ours:
        assert float(one.memory["share of the personal logits"]) == pytest.approx(w[one.id], abs=1e-12)
        assert np.abs(weight(one.nets["personal"]) - v[one.id]).max() < 1e-12


def test_the_server_of_kt_pfl_mixes_for_each_client_that_replied():
    """Of three members "1" is absent: rows and columns of "0" and "2" move, and each of them gets its own mixture."""
    tell, match, _ = KTpFL(public_batch=2, kt_penalty=0.3).algorithm().phases
    z = np.array([[[0.9, 0.1], [0.4, 0.6]], [[0.2, 0.8], [0.5, 0.5]]])
    server = make_agreed_state({i: range(2) for i in "012"}, 2)
    replies = {i: {"posteriors": torch.tensor(posteriors)} for i, posteriors in zip("02", z, strict=True)}
    state, c = tell.receive(server, replies, At(0, 0, 1)), np.full((2, 2), 1 / 3)
    for i in range(2):
        off = z[i] - np.tensordot(c[i], z, 1)
        slope = np.array([-2 * (off * z[j]).mean() for j in range(2)]) + 0.3 * 2 * (c[i] - 1 / 2) / 2
        size, rate = np.abs(slope).sum() / 2, 1.0
        for _ in range(5):
            if size > 0.01:
                size, rate = size / 5, rate / 5
            if size < 0.01:
                size, rate = size * 5, rate * 5
        c[i] = softmax(5 * (c[i] - rate * slope)[None])[0]
        mixture = match.send(state, "02"[i], At(0, 0, 1))["teacher"].numpy()
        assert np.abs(mixture - np.tensordot(c[i], z, 1)).max() < 1e-6
    assert match.send(state, "1", At(0, 0, 1)) == {}
    assert torch.equal(state["knowledge coefficients"][1], torch.full((3,), 1 / 3))
    assert np.abs(state["knowledge coefficients"].numpy()[::2, ::2] - c).max() < 1e-6
    assert match.receive(state, {}, At(0, 0, 1)).keys() == server.keys() | {"knowledge coefficients"}


def test_equal_coefficients_of_kt_pfl_stay_equal_where_all_say_the_same():
    z = torch.tensor([[0.3, 0.7]]).expand(4, 5, 2)
    assert torch.allclose(move_coefficients(torch.full((4, 4), 0.25), z, 0.7), torch.full((4, 4), 0.25))


@pytest.mark.parametrize(
    ("settings", "is_weighted"),
    [
        ({"weighting": "samples"}, True),
        ({"weighting": "uniform"}, False),
        ({"weighting": "samples", "aggregate": Aggregation("trimmed-mean", 0.0)}, False),  # no other rule asks for n_k
    ],
)
def test_two_rounds_of_fedavg_with_a_learning_rate_that_falls(settings, is_weighted):
    algorithm = FedAvg(**settings, **ONE).algorithm()
    assert algorithm.phases[0].leaves(start()).keys() == {"weight"} | ({"n_k"} if is_weighted else set())
    ours = clients(algorithm)
    for one in ours:
        one.rate = Schedule(LR, LR / 2)
    got = federation(algorithm, ours, rounds=2, start=start())
    w = SHARED
    for rate in (LR, LR / 2):
        copies = {i: w - rate * gradient(i, w) for i in X}
        w = average(copies) if is_weighted else np.mean(list(copies.values()), axis=0)
    assert np.abs(got["weight"].numpy() - w).max() < 1e-12


@pytest.mark.parametrize(
    ("kind", "next_v"),
    [
        ("adam", lambda v, square: 0.6 * v + 0.4 * square),
        ("yogi", lambda v, square: v - 0.4 * square * np.sign(v - square)),
        ("adagrad", lambda v, square: v + square),
    ],
)
def test_two_rounds_of_fedopt(kind, next_v):
    phase = FedOpt(kind=kind, beta1=0.8, beta2=0.6, tau=0.05, server_rate=0.2, **ONE)
    got = federation(phase.algorithm(), clients(phase.algorithm()), rounds=2, start=start())
    w, m, v = SHARED, 0.0, 0.05**2
    for _ in range(2):
        step = average({i: w - LR * gradient(i, w) for i in X}) - w
        m, v = 0.8 * m + 0.2 * step, next_v(v, step**2)
        w = w + 0.2 * m / (np.sqrt(v) + 0.05)
    assert np.abs(got["weight"].numpy() - w).max() < 1e-12
    assert phase.send(got, "0", At(0, 2, 3)).keys() == {"weight"}


def test_fedopt_and_pfedme_average_what_is_no_weight():
    """An adaptive step could make a variance negative."""
    sent = {
        i: {"bn.running_var": torch.tensor(v), "bn.num_batches_tracked": torch.tensor(5)}
        for i, v in (("a", 1.0), ("b", 2.0))
    }
    for phase in (FedOpt(weighting="uniform"), PFedMe(weighting="uniform", server_step=3.0)):
        got = phase.receive(sent["a"], sent, At(0, 0, 1))
        assert got == {"bn.running_var": torch.tensor(1.5), "bn.num_batches_tracked": torch.tensor(5)}


def test_three_rounds_of_scaffold_by_option_ii():
    """Clients "0" and "1" take part, then "0" and "2", then all; two steps a round."""
    phase = SCAFFOLD(server_step=0.7, clients=3, **(ONE | {"local_epochs": 2}))
    ours = {one.id: one for one in clients(phase.algorithm())}
    state, x, c, own = start(), SHARED, 0.0, dict.fromkeys(X, 0.0)
    for round, ids in enumerate(("01", "02", "012")):
        at, declared = At(0, round, 3), phase.leaves(state)
        sent = {i: participate(ours[i], phase, phase.send(state, i, at), declared, at).message for i in ids}
        state = phase.receive(state, sent, at)
        y, new = {}, {}
        for i in ids:
            y[i] = x
            for _ in range(2):
                y[i] = y[i] - LR * (gradient(i, y[i]) - own[i] + c)
            new[i] = own[i] - c + (x - y[i]) / (2 * LR)
        x = x + 0.7 * (np.mean(list(y.values()), axis=0) - x)
        c, own = c + sum(new[i] - own[i] for i in ids) / 3, own | new
        assert np.abs(state["weight"].numpy() - x).max() < 1e-12
        assert np.abs(state["control weight"].numpy() - c).max() < 1e-12


def test_two_epochs_of_fedprox():
    """The pull mu (w - w_t) is zero in the first step and not in the second."""
    mu = 0.7
    algorithm = FedProx(mu=mu, **ONE | {"local_epochs": 2}).algorithm()
    shared_state = federation(algorithm, clients(algorithm), rounds=1, start=start())
    first = {i: SHARED - LR * gradient(i, SHARED) for i in X}
    copies = {i: w - LR * (gradient(i, w) + mu * (w - SHARED)) for i, w in first.items()}
    assert np.abs(shared_state["weight"].numpy() - average(copies)).max() < 1e-12


def test_the_proximal_term_is_on_the_device_of_the_weights():
    """A setting is a tensor [] on the CPU. The device "meta" refuses what a GPU refuses, on a machine without a GPU."""
    weights = {"a": torch.zeros(3, device="meta")}
    received = {"w.a": torch.ones(3, device="meta"), "mu": torch.tensor(0.5)}
    assert compute_proximal(Net(len, weights), received, "mu").device.type == "meta"


def test_two_rounds_of_ditto():
    """v <- v - lr (grad F(v) + lam (v - w_t)), w_t of the round; the copies are FedAvg's."""
    lam = 0.7
    algorithm = Ditto(lam=lam, **ONE | {"local_epochs": 2}).algorithm()
    ours = clients(algorithm)
    shared_state = federation(algorithm, ours, rounds=2, start=start())
    w, v = SHARED, dict(OWN)
    for _ in range(2):
        copies = dict.fromkeys(X, w)
        for _ in range(2):
            copies = {i: c - LR * gradient(i, c) for i, c in copies.items()}
            v = {i: p - LR * (gradient(i, p) + lam * (p - w)) for i, p in v.items()}
        w = average(copies)
    assert np.abs(shared_state["weight"].numpy() - w).max() < 1e-12
    for client in ours:
        assert np.abs(weight(client.nets["personal"]) - v[client.id]).max() < 1e-12


def test_two_rounds_of_fine_tuning():
    """Fine-tuned once in two rounds: after the second average, two steps from it."""
    algorithm = FedAvgFT(tune_epochs=2, tune_every=2, **ONE).algorithm()
    ours = clients(algorithm)
    got = federation(algorithm, ours, rounds=2, start=start())
    w = SHARED
    for _ in range(2):
        w = average({i: w - LR * gradient(i, w) for i in X})
    assert np.abs(got["weight"].numpy() - w).max() < 1e-12
    for one in ours:
        tuned = w - LR * gradient(one.id, w)
        tuned = tuned - LR * gradient(one.id, tuned)
        assert np.abs(weight(one.nets["personal"]) - tuned).max() < 1e-12


def test_fine_tuning_keeps_to_its_rounds():
    """Every third of five rounds, and the last."""
    algorithm = FedAvgFT(tune_every=3, **ONE).algorithm()
    tune = algorithm.phases[1]
    assert [bool(tune.send(start(), "0", At(0, r, 5))) for r in range(5)] == [False, False, True, False, True]


@pytest.mark.parametrize("adaptive", [False, True])
def test_two_rounds_of_apfl(adaptive):
    """v <- v - lr a grad F(a v + (1 - a) w), as d(a v)/dv = a; adaptive: a <- a - lr <v - w, grad F(a v + (1 - a) w)>."""
    algorithm = APFL(mix=0.4, adaptive=adaptive, **ONE).algorithm()
    ours = clients(algorithm)
    shared_state = federation(algorithm, ours, rounds=2, start=start())
    w, v, a = SHARED, dict(OWN), dict.fromkeys(X, 0.4)
    for _ in range(2):
        slopes = {i: ((v[i] - w) * gradient(i, a[i] * v[i] + (1 - a[i]) * w)).sum() for i in X}
        a = {i: np.clip(a[i] - LR * slopes[i], 0, 1) for i in X} if adaptive else a
        v = {i: v[i] - LR * a[i] * gradient(i, a[i] * v[i] + (1 - a[i]) * w) for i in X}
        copies = {i: w - LR * gradient(i, w) for i in X}
        w = average(copies)
    assert np.abs(shared_state["weight"].numpy() - w).max() < 1e-12
    for client in ours:
        assert float(client.memory["mix"]) == pytest.approx(a[client.id], abs=1e-12)
        mixture = a[client.id] * v[client.id] + (1 - a[client.id]) * copies[client.id]
        assert np.abs(weight(client.nets["personal"]) - mixture).max() < 1e-12
    assert not adaptive or len(set(a.values())) == len(X)


def test_a_round_of_fedrep():
    """Two steps of the head with the body as received, then one of the body with the new head; heads stay."""
    algorithm = FedRep(head_epochs=2, **ONE).algorithm()
    ours = clients(algorithm, shared=[BODY, HEAD], home=("1.weight",))
    shared_state = federation(algorithm, ours, rounds=1, start={"0.weight": torch.tensor(BODY)})
    bodies = {}
    for client in ours:
        head = HEAD
        for _ in range(2):
            head = head - LR * halves(client.id, BODY, head)[0]
        bodies[client.id] = BODY - LR * halves(client.id, BODY, head)[1]
        assert np.abs(weight(client.nets["meme"][1]) - head).max() < 1e-12
    assert np.abs(shared_state["0.weight"].numpy() - average(bodies)).max() < 1e-12


def test_three_rounds_of_fedala():
    """The heads begin at sent + W (received - sent); W takes 11 steps the first time, whose losses are steady, then one."""
    phase = FedALA(rows_share=1, share_rate=20.0, **ONE)
    ours = clients(phase.algorithm(), shared=[BODY, HEAD], personal_weights={i: [BODY, HEAD] for i in X})
    state = federation(
        phase.algorithm(), ours, rounds=3, start={"0.weight": torch.tensor(BODY), "1.weight": torch.tensor(HEAD)}
    )
    body, head, own, shares = BODY, HEAD, dict.fromkeys(X, (BODY, HEAD)), dict.fromkeys(X, np.ones_like(HEAD))
    for steps in (0, 11, 1):
        for i in X:
            change = head - own[i][1]
            for _ in range(steps):
                slope = halves(i, body, own[i][1] + change * shares[i])[0]
                shares[i] = np.clip(shares[i] - 20.0 * slope * change, 0, 1)
            begin = own[i][1] + change * shares[i]
            of_head, of_body = halves(i, body, begin)
            own[i] = body - LR * of_body, begin - LR * of_head
        body, head = (average({i: layers[k] for i, layers in own.items()}) for k in range(2))
    assert any(0 < share.min() < 1 for share in shares.values())
    for k, trained in enumerate((body, head)):
        assert np.abs(state[f"{k}.weight"].numpy() - trained).max() < 1e-12
        for one in ours:
            assert np.abs(weight(one.nets["personal"][k]) - own[one.id][k]).max() < 1e-12


@pytest.mark.parametrize(("accumulate", "marks"), [(1, "..o..o..o"), (2, "....oo....oo")])
def test_no_step_of_pfedme_is_of_both_models(accumulate, marks):
    phase = PFedMe(inner_steps=2, **ONE | {"batch_size": 1})
    (client,) = clients(phase.algorithm(), ids=("0",))
    client.recipe = Recipe(accumulate=accumulate)
    rows = len(client.data["private"])
    assert rows == 3
    assert "".join(".o"[len(batch) > 2] for batch in phase.batches(client, {}, At(0, 0, 1))) == marks


@pytest.mark.parametrize(("accumulate", "marks"), [(1, "h h h . . ."), (2, "hh h .. ."), (3, "hhh ...")])
def test_no_step_of_fedrep_is_of_head_and_features(accumulate, marks):
    phase = FedRep(head_epochs=1, **ONE | {"batch_size": 1})
    (client,) = clients(phase.algorithm(), ids=("0",), shared=[BODY, HEAD], home=("1.weight",))
    steps = group_batches(phase.batches(client, {}, At(0, 0, 1)), accumulate)
    assert " ".join("".join(".h"[len(batch) > 2] for batch in step) for step in steps) == marks


@pytest.mark.parametrize("method", [FedALA(rows_share=1, **ONE), FedAvgFT(tune_epochs=0, **ONE)])
def test_a_personal_model_has_the_trained_layers_that_stay_at_the_client(method):
    first_weights = {i: [BODY, HEAD] for i in X}
    ours = clients(method.algorithm(), shared=[BODY, HEAD], personal_weights=first_weights, home=("1.weight",))
    federation(method.algorithm(), ours, rounds=2, start={"0.weight": torch.tensor(BODY)})
    for one in ours:
        personal, copy = (weight(one.nets[net][1]) for net in ("personal", "meme"))
        assert np.abs(copy - HEAD).max() > 1e-3
        assert (personal == copy).all()


def test_two_rounds_of_pfedme():
    """For each of two batches K = 3 steps of theta, then one of w; both begin a round as received."""
    lam, eta, beta = 0.8, 0.2, 0.6
    phase = PFedMe(moreau_lam=lam, inner_steps=3, outer_rate=eta, server_step=beta, **ONE | {"local_epochs": 2})
    ours = clients(phase.algorithm())
    state = federation(phase.algorithm(), ours, rounds=2, start=start())
    shared = SHARED
    for _ in range(2):
        w, theta = dict.fromkeys(X, shared), dict.fromkeys(X, shared)
        for i in X:
            for _ in range(2):
                for _ in range(3):
                    theta[i] = theta[i] - LR * (gradient(i, theta[i]) + lam * (theta[i] - w[i]))
                w[i] = w[i] - eta * lam * (w[i] - theta[i])
        shared = shared + beta * (average(w) - shared)
    assert np.abs(state["weight"].numpy() - shared).max() < 1e-12
    for one in ours:
        assert np.abs(weight(one.nets["personal"]) - theta[one.id]).max() < 1e-12


def test_two_rounds_of_proxyfl(monkeypatch):
    """Four peers that learn from labels only: each sends to the next first, then to the one after it."""
    monkeypatch.setitem(X, "3", X["0"][:2])
    monkeypatch.setitem(Y, "3", Y["1"][:2])
    ids = ("0", "1", "2", "3")
    personal_weights = OWN | {"3": SHARED}
    algorithm = ProxyFL(alpha=1, beta=1, own_share=0.25, **ONE).algorithm()
    ours = clients(algorithm, ids=ids, personal_weights=personal_weights)
    shared_state = federation(algorithm, ours, rounds=2, start=make_proxy_state(ids, 2, start()))
    theta = dict.fromkeys(ids, SHARED)
    for hop in (1, 2):
        theta = {i: t - LR * gradient(i, t) for i, t in theta.items()}
        theta = {i: 0.25 * theta[i] + 0.75 * theta[ids[(k - hop) % 4]] for k, i in enumerate(ids)}
    for client in ours:
        personal = personal_weights[client.id]
        for _ in range(2):
            personal = personal - LR * gradient(client.id, personal)
        assert np.abs(weight(client.nets["meme"]) - theta[client.id]).max() < 1e-12
        assert np.abs(weight(client.nets["personal"]) - personal).max() < 1e-12
        assert float(client.memory["mass"]) == 1.0
    assert not [k for k in shared_state if "/" in k], "the relay forgets what it forwarded"


def test_a_lost_proxy_weighs_less_from_then_on():
    """Push-sum: b's proxy is lost in round 1, so a keeps half of its mass; then a has 1/2 . 1/2, and b's half of 3/4."""
    algorithm = ProxyFL(alpha=1, beta=1, **ONE).algorithm()
    learn, mix = algorithm.phases
    a, b = clients(algorithm, ids=("0", "1"))
    masses = {}
    for one, mass in ((a, 0.5), (b, 1.0)):
        one.memory = {"mass": torch.tensor(mass, dtype=torch.float32)}
        reply = learn.end(one, At(0, 1, 3))
        masses[one.id] = reply["mass"].item()
        assert one.memory["mass"].item() == mass / 2
    with torch.no_grad():
        a.nets["meme"].weight.copy_(torch.tensor(OWN["0"]))
    mix.begin(a, {"1/weight": torch.tensor(OWN["1"]), "1/mass": torch.tensor(masses["1"])}, At(0, 1, 3, 1))
    assert np.abs(weight(a.nets["meme"]) - (OWN["0"] / 4 + OWN["1"] / 2) / 0.75).max() < 1e-7
    assert a.memory["mass"].item() == 0.75
    before = weight(b.nets["meme"]).copy()
    mix.begin(b, {}, At(0, 1, 3, 1))
    assert np.array_equal(weight(b.nets["meme"]), before)
    assert b.memory["mass"].item() == 0.5


def test_the_server_of_feddf_takes_two_steps():
    """Of Adam on KL(softmax of the mean logits || own), whose gradient in the logits is (own - teacher) / n.

    Linear networks' mean logits are those of their plain mean, so the average begins elsewhere, by numbers of examples.
    Adam: m = 0.1 g, v = 0.001 g^2 at first, both without their bias; step t of 2 has (1 + cos(pi t / 2)) / 2 of the rate.
    """
    public = np.array([[1.0, 2.0], [-1.0, 0.5], [0.3, -0.7]])
    bench = Bench(layer(np.zeros((2, 2))), Rows(torch.tensor(public), torch.zeros(3).long()))
    phase = FedDF(distill_steps=2, distill_batch=3, distill_lr=0.05, bench=bench)
    replies = {i: {"weight": torch.tensor(OWN[i]), "n_k": torch.tensor(n)} for i, n in zip(X, (1, 2, 5), strict=True)}
    new_weight = phase.receive(start(), replies, At(0, 0, 1))["weight"].numpy()
    teacher = softmax(np.mean([public @ OWN[i].T for i in X], axis=0))
    w, m, v = (OWN["0"] + 2 * OWN["1"] + 5 * OWN["2"]) / 8, 0.0, 0.0
    for t in range(2):
        g = (softmax(public @ w.T) - teacher).T @ public / len(public)
        m, v = 0.9 * m + 0.1 * g, 0.999 * v + 0.001 * g**2
        rate = 0.05 * (1 + np.cos(np.pi * t / 2)) / 2
        w = w - rate * (m / (1 - 0.9 ** (t + 1))) / (np.sqrt(v / (1 - 0.999 ** (t + 1))) + 1e-8)
    assert np.abs(new_weight - w).max() < 1e-10
