"""A round or two of each method on linear networks small enough to be followed by hand, in numpy, apart from torch."""

import numpy as np
import pytest
import torch
from torch import nn

from fedmutual.aggregation import Aggregation
from fedmutual.algorithms import (
    APFL,
    FD,
    FML,
    SCAFFOLD,
    Ditto,
    FedALA,
    FedAPEN,
    FedAvg,
    FedAvgFT,
    FedDF,
    FedGen,
    FedGH,
    FedKD,
    FedOpt,
    FedProto,
    FedProx,
    FedRep,
    FedTGP,
    PFedMe,
    ProxyFL,
)
from fedmutual.algorithms.class_means import EXAMPLES, PROTOTYPES
from fedmutual.algorithms.fedprox import compute_proximal
from fedmutual.algorithms.ktpfl import KTpFL, move_coefficients
from fedmutual.algorithms.peers import make_agreed_state, make_proxy_state
from fedmutual.core import At, Bench, Client, Net, Recipe, Schedule, Unusable
from fedmutual.engines.base import participate
from toy import Rows, federation

LR = 0.3
X = {
    "0": np.array([[1.0, 0.0], [0.0, 2.0], [0.5, -1.0]]),
    "1": np.array([[1.0, 1.0], [-1.0, 0.5], [0.0, 1.0]]),
    "2": np.array([[0.3, 1.0], [2.0, -0.5]]),
}
Y = {"0": np.array([0, 1, 1]), "1": np.array([1, 0, 1]), "2": np.array([0, 1])}
SHARED = np.array([[0.1, -0.2], [0.3, 0.4]])
OWN = {i: SHARED + 0.1 * (k + 1) * np.array([[1.0, -1.0], [0.5, 2.0]]) for k, i in enumerate(X)}
ONE = {"local_epochs": 1, "batch_size": 8}


@pytest.fixture(autouse=True)
def _float64():
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def layer(w):
    net = nn.Linear(w.shape[1], w.shape[0], bias=False)
    net.weight = nn.Parameter(torch.tensor(w))
    return net


def clients(algorithm, ids=tuple(X), shared=SHARED, personal_weights=OWN, home=()):
    """All of a client's rows in one batch, plain SGD: an epoch is one gradient step. Weights [C, F], or a list of layers."""
    one_step_clients = []
    for i in ids:
        nets = {} if "personal" not in algorithm.scores else {"personal": stacked(personal_weights[i])}
        nets |= {"meme": stacked(shared)} if {"global", "proxy"} & set(algorithm.scores) else {}
        optimizers = {k: torch.optim.SGD(m.parameters(), lr=0.0) for k, m in nets.items()}
        data = {"private": Rows(torch.tensor(X[i]), torch.tensor(Y[i]))}
        crosses = tuple(k for k in nets["meme"].state_dict() if k not in home) if "meme" in nets else ()
        one_step_clients.append(
            Client(i, nets, optimizers, data, rate=LR, shared=crosses, proxy="proxy" in algorithm.scores)
        )
    return one_step_clients


def stacked(w):
    return nn.Sequential(*map(layer, w)) if isinstance(w, list) else layer(w)


def softmax(z):
    e = np.exp(z - z.max(1, keepdims=True))
    return e / e.sum(1, keepdims=True)


def gradient(i, w, teacher=None, a=1.0, t=1.0):
    """d/dw of a CE + (1 - a) T^2 KL(teacher_T || softmax(z / T)), means over client i's rows, with logits z = x w'.

    dCE/dz = (softmax(z) - onehot) / n; dKL/dz = (softmax(z / T) - teacher_T) / (T n); dz/dw by the chain rule.
    """
    z = X[i] @ w.T
    dz = a * (softmax(z) - np.eye(2)[Y[i]])
    if teacher is not None:
        dz = dz + (1 - a) * t * (softmax(z / t) - softmax(X[i] @ teacher.T / t))
    return dz.T @ X[i] / len(X[i])


def weight(net):
    return net.weight.detach().numpy()


def average(copies, ids=tuple(X)):
    """By numbers of examples."""
    return sum(len(Y[i]) * copies[i] for i in ids) / sum(len(Y[i]) for i in ids)


def start():
    return {"weight": torch.tensor(SHARED)}


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


BODY, HEAD = np.array([[0.5, -0.1], [0.2, 0.3], [-0.4, 0.6]]), np.array([[0.2, 0.1, -0.3], [-0.2, 0.4, 0.5]])


def halves(i, body, head, prototypes=None, known=None, lam=0.0):
    """d/dhead and d/dbody of cross-entropy of logits x body' head', and lam mean |x body' - p_y|^2 of the known classes."""
    h = X[i] @ body.T
    dz = (softmax(h @ head.T) - np.eye(2)[Y[i]]) / len(X[i])
    dh = dz @ head
    if prototypes is not None:
        dh = dh + lam * 2 * (h - prototypes[Y[i]]) * known[Y[i]][:, None] / h.size
    return dz.T @ h, dh.T @ X[i]


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
    for k, layer in enumerate((body, head)):
        assert np.abs(state[f"{k}.weight"].numpy() - layer).max() < 1e-12
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


def own_prototypes(i, body):
    """The mean of x body' over a client's rows of each class, as it crosses; and how many rows."""
    h, counts = X[i] @ body.T, np.bincount(Y[i], minlength=2)
    sums = np.stack([h[Y[i] == c].sum(0) for c in range(2)])
    return (sums / np.maximum(counts, 1)[:, None]).astype(np.float32), counts


@pytest.mark.parametrize("weighting", ["uniform", "samples"])
def test_two_rounds_of_fedproto(weighting, monkeypatch):
    lam = 0.7
    personal_weights = {i: [BODY + 0.1 * k, HEAD - 0.1 * k] for k, i in enumerate(X)}
    algorithm = FedProto(proto_lam=lam, proto_weighting=weighting, **ONE).algorithm()
    monkeypatch.setitem(Y, "1", np.ones(3, dtype=int))  # a client without the class 0
    ours = clients(algorithm, personal_weights=personal_weights)
    shared_state = federation(algorithm, ours, rounds=2, start=algorithm.begins(stacked([BODY, HEAD]), 2))
    prototypes, known = np.zeros((2, 3)), np.zeros(2)
    for _ in range(2):
        sent = {}
        for i in X:
            head, body = halves(i, *personal_weights[i], prototypes, known, lam)
            personal_weights[i] = [personal_weights[i][0] - LR * body, personal_weights[i][1] - LR * head]
            sent[i] = own_prototypes(i, personal_weights[i][0])
        shares = np.stack([n if weighting == "samples" else (n > 0) for _, n in sent.values()]).astype(float)
        prototypes = sum(p * share[:, None] for (p, _), share in zip(sent.values(), shares, strict=True))
        prototypes, known = prototypes / shares.sum(0)[:, None], (shares.sum(0) > 0).astype(float)
    assert np.abs(shared_state[PROTOTYPES].numpy() - prototypes).max() < 1e-6  # they cross as float32
    assert shared_state[EXAMPLES].tolist() == ([2, 6] if weighting == "samples" else [2, 3])
    for one in ours:
        for k in range(2):
            assert np.abs(weight(one.nets["personal"][k]) - personal_weights[one.id][k]).max() < 1e-6


def test_three_rounds_of_fd(monkeypatch):
    """Cross-entropy, and gamma times that to the others' mean posterior of the class; client "1" alone has no class 0."""
    gamma = 0.7
    phase = FD(fd_weight=gamma, **ONE)
    monkeypatch.setitem(Y, "1", np.ones(3, dtype=int))
    ours = clients(phase.algorithm())
    federation(phase.algorithm(), ours, rounds=3, start=phase.begins(layer(SHARED), 2))
    w, sent = dict(OWN), {}
    for _ in range(3):
        for i in X:
            p = softmax(X[i] @ w[i].T)
            dz = p - np.eye(2)[Y[i]]
            for c in range(2):
                others = [sent[j][c] for j in sent if j != i and c in sent[j]]
                if others:
                    dz[Y[i] == c] += gamma * (p[Y[i] == c] - np.mean(others, axis=0))
            w[i] = w[i] - LR * dz.T @ X[i] / len(X[i])
        p = {i: softmax(X[i] @ w[i].T) for i in X}
        sent = {i: {c: p[i][Y[i] == c].mean(0) for c in set(Y[i].tolist())} for i in X}
    for one in ours:
        assert np.abs(weight(one.nets["personal"]) - w[one.id]).max() < 1e-6  # means cross as float32


def test_fd_teaches_no_client_by_its_own_posteriors():
    """A client that was absent learns from those that replied, and a client without others from none."""
    phase = FD()

    def reply(share, weight=1):
        return {PROTOTYPES: torch.tensor([[share, 1 - share], [1 - share, share]]), EXAMPLES: torch.tensor([weight] * 2)}

    state = phase.receive(phase.begins(layer(SHARED), 2), {"0": reply(0.9), "1": reply(0.5), "2": reply(0.7, 10**6)}, None)
    assert phase.send(state, "0", None)[PROTOTYPES][0, 0].item() == pytest.approx(0.6), "each client counts once"
    state = phase.receive(state, {"1": reply(0.2), "2": reply(0.2)}, None)
    assert phase.send(state, "0", None)[PROTOTYPES][0, 0].item() == pytest.approx(0.2)
    state = phase.receive(state, {"0": reply(0.9)}, None)
    assert phase.send(state, "0", None)[EXAMPLES].tolist() == [0, 0]


def test_two_rounds_of_fedgh():
    """Each client begins with the server's last layer, which takes a step on the means of all clients' classes."""
    phase = FedGH(head_lr=0.4, **ONE)
    bodies = {i: BODY + 0.1 * k for k, i in enumerate(X)}
    ours = clients(phase.algorithm(), personal_weights={i: [body, HEAD + 1] for i, body in bodies.items()})
    state = federation(phase.algorithm(), ours, rounds=2, start=phase.begins(stacked([BODY, HEAD]), 2))
    head = HEAD
    for _ in range(2):
        q, y, heads = [], [], {}
        for i in X:
            of_head, of_body = halves(i, bodies[i], head)
            bodies[i], heads[i] = bodies[i] - LR * of_body, head - LR * of_head
            means, counts = own_prototypes(i, bodies[i])
            q, y = [*q, *means[counts > 0]], [*y, *np.flatnonzero(counts)]
        q = np.array(q, dtype=float)
        head = head - 0.4 * (softmax(q @ head.T) - np.eye(2)[y]).T @ q / len(y)
    assert np.abs(state["head weight"].numpy() - head).max() < 1e-6
    for one in ours:
        assert np.abs(weight(one.nets["personal"][0]) - bodies[one.id]).max() < 1e-6
        assert np.abs(weight(one.nets["personal"][1]) - heads[one.id]).max() < 1e-6


def test_features_of_another_size_are_means_over_neighbours():
    """Six features as three numbers: means of two."""
    rng = np.random.default_rng(0)
    body, head = rng.normal(size=(6, 2)), rng.normal(size=(2, 6))
    algorithm = FedProto(proto_size=3, **ONE).algorithm()
    (client,) = clients(algorithm, ids=("0",), personal_weights={"0": [body, head]})
    shared_state = federation(algorithm, [client], rounds=1, start=algorithm.begins(stacked([body, head]), 2))
    expected, _ = own_prototypes("0", weight(client.nets["personal"][0]))
    assert np.abs(shared_state[PROTOTYPES].numpy() - expected.reshape(2, 3, 2).mean(-1)).max() < 1e-6


def test_the_server_of_fedtgp_takes_a_step():
    """One batch of four prototypes q of classes y; p = O relu(H e + b) + c of the embedding e; d the distances.

    L = mean CE(-(d + m [c = y])): dL/dd = -(softmax(-(d + m)) - onehot) / 4, dd/dp = (p - q) / d, then back by layers.
    """
    q = np.array([[0.0, 0.0], [3.0, 4.0], [1.0, 0.5], [-2.0, 1.0]])
    replies = {
        "a": {PROTOTYPES: torch.tensor([[0.0, 0.0], [3.0, 4.0], [9.0, 9.0]]).float(), EXAMPLES: torch.tensor([1, 1, 0])},
        "b": {PROTOTYPES: torch.tensor([[1.0, 0.5], [9.0, 9.0], [-2.0, 1.0]]).float(), EXAMPLES: torch.tensor([1, 0, 1])},
    }
    y, onehot = np.array([0, 1, 0, 2]), np.eye(3)[[0, 1, 0, 2]]
    rng = np.random.default_rng(3)
    e, h, o = rng.normal(size=(3, 2)), rng.normal(size=(2, 2)), rng.normal(size=(2, 2))
    b, c = rng.normal(size=2), rng.normal(size=2)
    names = {"embedding": e, "hidden.weight": h, "hidden.bias": b, "output.weight": o, "output.bias": c}
    server = {f"tgp.{k}": torch.tensor(v).float() for k, v in names.items()}
    server |= {PROTOTYPES: torch.zeros(3, 2).float(), EXAMPLES: torch.zeros(3, dtype=torch.int64)}
    phase = FedTGP(server_epochs=1, server_lr=0.1, batch_size=4, margin=100.0)
    new_state = phase.receive(server, replies, At(0, 0, 1))

    means = np.array([[0.5, 0.25], [3.0, 4.0], [-2.0, 1.0]])
    gaps = np.linalg.norm(means[:, None] - means, axis=-1) + np.diag([np.inf] * 3)
    margin = gaps.min(1).max()
    hidden = np.maximum(e @ h.T + b, 0)
    p = hidden @ o.T + c
    d = np.linalg.norm(q[:, None] - p, axis=-1)
    up = -(softmax(-(d + margin * onehot)) - onehot) / len(y)
    dp = (up[:, :, None] * (p - q[:, None]) / d[:, :, None]).sum(0)
    dh = (dp @ o) * (hidden > 0)
    steps = {"embedding": dh @ h, "hidden.weight": dh.T @ e, "hidden.bias": dh.sum(0)}
    steps |= {"output.weight": dp.T @ hidden, "output.bias": dp.sum(0)}
    e, h, b, o, c = (v - 0.1 * steps[k] for k, v in names.items())
    assert np.abs(new_state[PROTOTYPES].numpy() - (np.maximum(e @ h.T + b, 0) @ o.T + c)).max() < 1e-5
    assert new_state[EXAMPLES].tolist() == [1, 1, 1]
    for k, v in zip(names, (e, h, b, o, c), strict=True):
        assert np.abs(new_state[f"tgp.{k}"].numpy() - v).max() < 1e-5


def test_prototypes_of_fedtgp_move_apart():
    """A margin in the loss pulls a class's prototype closer to its own than to the others': the training loss falls."""
    replies = {
        i: {PROTOTYPES: torch.randn(4, 5).float() + 3 * k, EXAMPLES: torch.ones(4).long()} for k, i in enumerate("ab")
    }
    first = {PROTOTYPES: torch.zeros(4, 5).float(), EXAMPLES: torch.zeros(4).long()}
    losses = []
    for epochs in (1, 200):
        got = FedTGP(server_epochs=epochs, server_lr=0.05).receive(first, replies, At(0, 0, 1))
        prototypes = torch.cat([r[PROTOTYPES] for r in replies.values()])
        distance = torch.cdist(prototypes, got[PROTOTYPES])
        losses.append(nn.functional.cross_entropy(-distance, torch.arange(4).repeat(2)).item())
    assert losses[1] < losses[0]


def fedkd_loss(i, mentor, mentee):
    """The four terms of FedKD in their order, of a mentor and a mentee of two linear layers."""
    z, h = {}, {}
    for name, (body, head) in (("t", mentor), ("s", mentee)):
        h[name] = X[i] @ body.T
        z[name] = h[name] @ head.T
    p = {k: softmax(v) for k, v in z.items()}
    n = len(Y[i])
    ce = {k: -np.log(v[np.arange(n), Y[i]]).mean() for k, v in p.items()}
    taught = sum((p[a] * (np.log(p[a]) - np.log(p[b]))).sum(1).mean() for a, b in ("st", "ts"))
    total = ce["t"] + ce["s"]
    return ce["t"], ce["s"], taught / total, 2 * ((h["t"] - h["s"]) ** 2).mean() / total


def numeric(f, tensors, step=1e-6):
    """Central differences of f() in each number of these arrays."""
    results = []
    for t in tensors:
        g = np.zeros_like(t)
        for at in np.ndindex(*t.shape):
            before = t[at]
            t[at] = before + step
            up = f()
            t[at] = before - step
            g[at] = (up - f()) / (2 * step)
            t[at] = before
        results.append(g)
    return results


def test_a_round_of_fedkd():
    """A step down the sum of all terms, in both networks; of what each matrix learned the best approximation of rank 1."""
    personal_weights = {i: [BODY + 0.1 * k, HEAD - 0.1 * k] for k, i in enumerate(X)}
    wide = [np.random.default_rng(5).normal(size=(3, 2)) / 2, np.random.default_rng(6).normal(size=(2, 3)) / 2]
    algorithm = FedKD(rank=0.5, **ONE).algorithm()
    ours = clients(algorithm, shared=wide, personal_weights=personal_weights)
    first_state = {f"{k}.weight": torch.tensor(w) for k, w in enumerate(wide)}
    assert algorithm.phases[0].leaves(first_state) == {
        **{f"left.{k}.weight": (torch.float64, s) for k, s in enumerate([(3, 1), (2, 1)])},
        **{f"right.{k}.weight": (torch.float64, s) for k, s in enumerate([(1, 2), (1, 3)])},
    }
    shared_state = federation(algorithm, ours, rounds=1, start=first_state)
    learned = []
    for client in ours:
        mentor, mentee = [w.copy() for w in personal_weights[client.id]], [w.copy() for w in wide]
        steps = numeric(lambda: sum(fedkd_loss(client.id, mentor, mentee)), [*mentor, *mentee])  # noqa: B023
        for k in range(2):
            assert np.abs(weight(client.nets["personal"][k]) - (mentor[k] - LR * steps[k])).max() < 1e-8
        learned.append([])
        for k in range(2):
            u, s, v = np.linalg.svd(-LR * steps[2 + k], full_matrices=False)
            learned[-1].append(s[0] * np.outer(u[:, 0], v[0]))
        assert not any(name.startswith("w.") for name in client.memory)
    for k in range(2):
        assert (
            np.abs(shared_state[f"{k}.weight"].numpy() - (wide[k] + np.mean([m[k] for m in learned], axis=0))).max() < 1e-7
        )


class Published(nn.Module):
    """FedGen's generator as its authors build it: noise and one-hot label, a hidden layer with BatchNorm, features."""

    def __init__(self, noise, classes, hidden, features):
        super().__init__()
        self.classes = classes
        self.hidden, self.norm = nn.Linear(noise + classes, hidden), nn.BatchNorm1d(hidden)
        self.output = nn.Linear(hidden, features)

    def forward(self, y, noise):
        one_hot = nn.functional.one_hot(y, self.classes).to(noise)
        return self.output(self.norm(self.hidden(torch.cat((noise, one_hot), 1))).relu())


def step_published_generator(net, optimizer, heads, rows, y, noise):
    """Their step: the teachers' weighted NLL of the labels, and exp(-mean of noise distance times feature distance)."""
    made = net(y, noise)
    loss = 0
    for head, mine in zip(heads, rows, strict=True):
        fit = nn.NLLLoss(reduction="none")((made @ head.T).log_softmax(1), y)
        loss = loss + (fit * (mine / rows.sum(0))[y]).mean()
    n = len(y)
    features = (made.expand(n, n, -1) - made.unsqueeze(1)).abs().mean(2)
    distances = (noise.expand(n, n, -1) - noise.unsqueeze(1)).pow(2).mean(2)
    optimizer.zero_grad()
    (loss + torch.exp(torch.mean(-distances * features))).backward()
    optimizer.step()


@pytest.mark.parametrize("rows", [[-1, 4], [2, 10**6], [0, 0]], ids=["negative", "too many", "none"])
def test_rows_of_classes_that_are_not_n_k_rows_leave_a_client_out_of_fedgen(rows):
    """They weigh the generator's losses; of n_k, real sites have bounds."""
    algorithm = FedGen(gen_steps=1).algorithm()
    (phase,), model = algorithm.phases, {"0.weight": torch.tensor(BODY), "1.weight": torch.tensor(HEAD)}
    server = {**model, **algorithm.begins(stacked([BODY, HEAD]), 2)}
    replies = {i: {**model, "n_k": torch.tensor(3), "rows by class": torch.tensor([1, 2])} for i in ("north", "south")}
    replies["west"] = {**replies["north"], "rows by class": torch.tensor(rows)}
    with pytest.raises(Unusable) as problem:
        phase.receive(server, replies, At(7, 0, 2))
    assert problem.value.why.keys() == {"west"}


def test_two_rounds_of_fedgen():
    """The authors' losses, written anew with modules of torch: a plain round, steps of the generator, a taught round."""
    n, noise, alpha, beta = 8, 4, 3.0, 2.0
    more = {"gen_steps": 3, "gen_lr": 0.01, "gen_noise": noise, "gen_hidden": 5, "gen_alpha": alpha, "gen_beta": beta}
    algorithm = FedGen(**more, local_epochs=1, batch_size=n).algorithm()
    ours = clients(algorithm, shared=[BODY, HEAD])
    model = {"0.weight": torch.tensor(BODY), "1.weight": torch.tensor(HEAD)}
    begun = algorithm.begins(stacked([BODY, HEAD]), 2)
    assert begun["rows by class"].tolist() == [0, 0]
    first = {**model, **begun}
    assert not any(k.startswith("generator") for k in algorithm.phases[0].send(first, "0", At(7, 0, 2)))
    got = federation(algorithm, ours, rounds=2, start=first)
    assert {k: v.shape for k, v in got.items()} == {k: v.shape for k, v in first.items()}, "sites limit messages by them"
    rows = torch.tensor(np.stack([np.bincount(Y[i], minlength=2) for i in X]))
    with torch.random.fork_rng():
        torch.manual_seed(At(7, 0, 2).rng("generator").initial_seed())
        net = Published(noise, 2, 5, 3)
    body, head = (v.clone() for v in model.values())
    for number in range(2):
        at, learned = At(7, number, 2), {}
        for i in X:
            weights = [v.clone().requires_grad_() for v in (body, head)]
            order = torch.randperm(len(Y[i]), generator=at.rng(i, "batches"))
            x, y = torch.tensor(X[i])[order], torch.tensor(Y[i])[order]
            own = (x @ weights[0].T @ weights[1].T).log_softmax(1)
            loss = nn.NLLLoss()(own, y)
            if number:
                stream = at.rng(i, "generator")
                other = torch.randint(2, (len(y),), generator=stream)
                first, second = torch.rand(len(y), 2 * noise, generator=stream).chunk(2, 1)
                with torch.no_grad():
                    net.eval()
                    made = net(torch.cat((y, other)), torch.cat((first, second)))
                target = (made[: len(y)] @ weights[1].T).softmax(1).detach()
                loss = loss + 0.98 * beta * nn.KLDivLoss(reduction="batchmean")(own, target)
                loss = loss + 0.98 * alpha * nn.NLLLoss()((made[len(y) :] @ weights[1].T).log_softmax(1), other)
            loss.backward()
            learned[i] = [(v - LR * v.grad).detach() for v in weights]
        stream, optimizer = (
            at.rng("generator", "steps"),
            torch.optim.Adam(net.parameters(), 0.01 * 0.98**number, weight_decay=0.01),
        )
        net.train()
        for _ in range(3):
            y = torch.randint(2, (n,), generator=stream)
            step_published_generator(
                net, optimizer, [w[1] for w in learned.values()], rows, y, torch.rand(n, noise, generator=stream)
            )
        body, head = (average({i: w[k] for i, w in learned.items()}) for k in range(2))
    assert (got["0.weight"] - body).abs().max() < 1e-12
    assert (got["1.weight"] - head).abs().max() < 1e-12
    for name, v in net.state_dict().items():
        if v.is_floating_point():
            assert (got[f"generator {name}"] - v).abs().max() < 1e-12, name
    assert got["rows by class"].tolist() == [3, 5]


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
