"""One round of each algorithm on a federation small enough to be followed by hand, in numpy, apart from torch."""

import numpy as np
import pytest
import torch
from torch import nn

from fedmutual.aggregation import Aggregation
from fedmutual.algorithms import FML, FedAvg, FedProx
from fedmutual.algorithms.fedprox import compute_proximal
from fedmutual.core import Client, Net, Schedule
from toy import Rows, difference, federation

LR = 0.5
X = {"0": np.array([[1.0, 0.0], [0.0, 2.0]]), "1": np.array([[1.0, 1.0], [-1.0, 0.5], [0.0, 1.0]])}
Y = {"0": np.array([0, 1]), "1": np.array([1, 0, 1])}
SHARED = np.array([[0.1, -0.2], [0.3, 0.4]])
OWN = {"0": np.array([[0.5, 0.0], [-0.5, 1.0]]), "1": np.array([[0.0, 0.2], [0.2, 0.0]])}


@pytest.fixture(autouse=True)
def _float64():
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def linear(w):
    net = nn.Linear(2, 2, bias=False)
    net.weight = nn.Parameter(torch.tensor(w))
    return net


def one_step_clients(algorithm, **changes):
    """All of a client's rows in one batch, plain SGD: a round is one gradient step."""
    clients = []
    for i in X:
        nets = {"meme": linear(SHARED)} | ({"personal": linear(OWN[i])} if "personal" in algorithm.scores else {})
        optimizers = {k: torch.optim.SGD(m.parameters(), lr=0.0) for k, m in nets.items()}
        data = {"private": Rows(torch.tensor(X[i]), torch.tensor(Y[i]))}
        clients.append(Client(i, nets, optimizers, data, rate=LR, shared=("weight",), **changes))
    return clients


def softmax(z):
    e = np.exp(z - z.max(1, keepdims=True))
    return e / e.sum(1, keepdims=True)


def gradient(x, y, student, teacher=None, a=1.0, t=1.0):
    """d/dW of a CE + (1 - a) T^2 KL(teacher_T || softmax(x W'/T)), means over the batch.

    For z = x W': dCE/dz = (softmax(z) - onehot) / n; dKL/dz = (softmax(z/T) - teacher_T) / (T n); dz/dW by the chain rule.
    """
    z = x @ student.T
    dz = a * (softmax(z) - np.eye(2)[y])
    if teacher is not None:
        dz = dz + (1 - a) * t * (softmax(z / t) - softmax(x @ teacher.T / t))
    return dz.T @ x / len(x)


@pytest.mark.parametrize("t", [1.0, 2.0])
def test_a_round_of_fml(t):
    alpha, beta = 0.3, 0.6
    algorithm = FML(alpha=alpha, beta=beta, temperature=t, local_epochs=1, batch_size=8).algorithm()
    clients = one_step_clients(algorithm)
    shared_state = federation(algorithm, clients, rounds=1, start={"weight": torch.tensor(SHARED)})
    memes = []
    for c in clients:
        x, y, personal_weight = X[c.id], Y[c.id], OWN[c.id]
        memes.append(SHARED - LR * gradient(x, y, SHARED, personal_weight, beta, t))
        personal = personal_weight - LR * gradient(x, y, personal_weight, SHARED, alpha, t)
        assert np.abs(c.nets["personal"].weight.detach().numpy() - personal).max() < 1e-12
    assert np.abs(shared_state["weight"].numpy() - (memes[0] + memes[1]) / 2).max() < 1e-12


@pytest.mark.parametrize(("weighting", "shares"), [("samples", (2 / 5, 3 / 5)), ("uniform", (1 / 2, 1 / 2))])
def test_a_round_of_fedavg(weighting, shares):
    algorithm = FedAvg(weighting=weighting, local_epochs=1, batch_size=8).algorithm()
    got = federation(algorithm, one_step_clients(algorithm), rounds=1, start={"weight": torch.tensor(SHARED)})
    copies = [SHARED - LR * gradient(X[i], Y[i], SHARED) for i in X]
    assert np.abs(got["weight"].numpy() - (shares[0] * copies[0] + shares[1] * copies[1])).max() < 1e-12


@pytest.mark.parametrize("rule", ["median", "trimmed-mean"])
def test_only_the_mean_asks_for_the_number_of_examples(rule):
    """For two copies, median and trimmed mean equal the unweighted mean, whatever n_k is."""
    algorithm = FedAvg(weighting="samples", aggregate=Aggregation(rule), local_epochs=1, batch_size=8).algorithm()
    start = {"weight": torch.tensor(SHARED)}
    assert algorithm.phases[0].leaves(start).keys() == {"weight"}
    got = federation(algorithm, one_step_clients(algorithm), rounds=1, start=start)
    copies = [SHARED - LR * gradient(X[i], Y[i], SHARED) for i in X]
    assert np.abs(got["weight"].numpy() - (copies[0] + copies[1]) / 2).max() < 1e-12


def test_two_epochs_of_fedprox():
    """The pull mu (w - w_t) is zero in the first step and not in the second."""
    mu = 0.7
    algorithm = FedProx(mu=mu, weighting="uniform", local_epochs=2, batch_size=8).algorithm()
    shared_state = federation(algorithm, one_step_clients(algorithm), rounds=1, start={"weight": torch.tensor(SHARED)})
    copies = []
    for i in X:
        w = SHARED - LR * gradient(X[i], Y[i], SHARED)
        copies.append(w - LR * (gradient(X[i], Y[i], w) + mu * (w - SHARED)))
    assert np.abs(shared_state["weight"].numpy() - (copies[0] + copies[1]) / 2).max() < 1e-12


def test_a_clients_own_alpha_and_a_schedule():
    """alpha runs 1 -> 0 over three rounds at client 0; client 1 keeps its own 1: independent training."""
    algorithm = FML(alpha=Schedule(1.0, 0.0), beta=1, local_epochs=1, batch_size=8).algorithm()
    clients = one_step_clients(algorithm)
    clients[1].settings = {"alpha": 1.0}
    federation(algorithm, clients, rounds=3, start={"weight": torch.tensor(SHARED)})
    shared, personal_weights = SHARED, dict(OWN)
    for a in (1.0, 0.5, 0.0):
        memes = [shared - LR * gradient(X[i], Y[i], shared) for i in X]
        personal_weights = {
            i: personal_weights[i] - LR * gradient(X[i], Y[i], personal_weights[i], shared, a if i == "0" else 1.0)
            for i in X
        }
        shared = (memes[0] + memes[1]) / 2
    for c in clients:
        assert np.abs(c.nets["personal"].weight.detach().numpy() - personal_weights[c.id]).max() < 1e-12


def test_lr_schedule_moves_the_step():
    algorithm = FedAvg(weighting="uniform", local_epochs=1, batch_size=8).algorithm()
    clients = one_step_clients(algorithm)
    for c in clients:
        c.rate = Schedule(LR, 0.0)
    got = federation(algorithm, clients, rounds=2, start={"weight": torch.tensor(SHARED)})
    once = [SHARED - LR * gradient(X[i], Y[i], SHARED) for i in X]
    assert difference(got, {"weight": torch.tensor((once[0] + once[1]) / 2)}) < 1e-12


def test_the_proximal_term_is_on_the_device_of_the_weights():
    """A setting is a tensor [] on the CPU. The device "meta" refuses what a GPU refuses, on a machine without a GPU."""
    weights = {"a": torch.zeros(3, device="meta")}
    received = {"w.a": torch.ones(3, device="meta"), "mu": torch.tensor(0.5)}
    assert compute_proximal(Net(len, weights), received, "mu").device.type == "meta"
