"""Three clients with linear networks and few rows, which tests of methods follow by hand, and their gradients in numpy."""

import numpy as np
import torch
from torch import nn

from fedmutual.core import Client
from toy import Rows

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
    e = np.exp(z - z.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


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


BODY, HEAD = np.array([[0.5, -0.1], [0.2, 0.3], [-0.4, 0.6]]), np.array([[0.2, 0.1, -0.3], [-0.2, 0.4, 0.5]])


def halves(i, body, head, prototypes=None, known=None, lam=0.0):
    """d/dhead and d/dbody of cross-entropy of logits x body' head', and lam mean |x body' - p_y|^2 of the known classes."""
    h = X[i] @ body.T
    dz = (softmax(h @ head.T) - np.eye(2)[Y[i]]) / len(X[i])
    dh = dz @ head
    if prototypes is not None:
        dh = dh + lam * 2 * (h - prototypes[Y[i]]) * known[Y[i]][:, None] / h.size
    return dz.T @ h, dh.T @ X[i]
