"""Rows of each kind (ids, series, volumes, several inputs in one), and networks that take them."""

import copy

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import StackDataset

import fedmutual
from fedmutual import Site, UserError

QUICK = {"rounds": 2, "local_epochs": 1, "batch_size": 16, "device": "cpu", "progress": False}
PRIVACY = {"privacy.nets": "both", "privacy.sigma": 1.0, "privacy.clip": 1.0, "privacy.delta": 1e-3}
PUBLIC = {"fedh2l": {"local_epochs": None, "local_steps": 2}, "fedmd": {}}  # method with a public set -> length of a round
WORDS = 97
# A user's module: ids [B, L] of 500 words, and numbers without effect -> logits [B, 2], the mean over the words
EMBEDDING = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(500, 8), nn.Linear(8, 2)

    def forward(self, input_ids, attention_mask=None, table=None, age=None):
        mask = (torch.ones_like(input_ids) if attention_mask is None else attention_mask)[..., None]
        return self.head((self.embed(input_ids) * mask).sum(1) / mask.sum(1))
"""
seen = set()  # types of the inputs that networks of several inputs got


class Words(nn.Module):
    """Ids [B, L] of any size -> logits [B, 2]. `kind`: the layer that reads the ids."""

    def __init__(self, kind="embedding", words=WORDS, sparse=False):
        super().__init__()
        self.embed = (nn.EmbeddingBag if kind == "bag" else nn.Embedding)(words, 4, sparse=sparse)
        self.gru = nn.GRU(4, 4, batch_first=True) if kind == "packed" else None
        self.head = nn.Linear(4, 2)
        self.kind, self.words = kind, words

    def forward(self, ids):
        x = self.embed(ids % WORDS if self.words == WORDS else ids)
        if self.gru is not None:  # 0 is padding, and an example of padding alone is an error
            lengths = (ids != 0).sum(1).cpu()
            x = self.gru(nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False))[1]
            return self.head(x[0])
        return self.head(x if self.kind == "bag" else x.mean(1))


class Fusion(nn.Module):
    """Images [B, 1, 6, 6], tables [B, 3] and ids [B, 5] of 9 words -> logits [B, 2]."""

    def __init__(self):
        super().__init__()
        self.conv, self.embed, self.head = nn.Conv2d(1, 4, 3), nn.Embedding(9, 4), nn.Linear(11, 2)

    def forward(self, image, table, ids):
        seen.add((image.dtype, table.dtype, ids.dtype))
        parts = self.conv(image).amax((2, 3)), table, self.embed(ids).mean(1)
        return self.head(torch.cat(parts, 1))


def ids(seed, n=40, dtype=np.int64, low=1, high=25):
    rng = np.random.default_rng(seed)
    y = rng.integers(0, 2, n)
    return (rng.integers(low, high, (n, 6)) + 25 * y[:, None]).astype(dtype), y


def numbers(seed, shape, n=40):
    rng = np.random.default_rng(seed)
    y = rng.integers(0, 2, n)
    return (rng.normal(size=(n, *shape)) + y.reshape(-1, *(1 for _ in shape))).astype(np.float32), y


def draw_fusion(seed, n=40):
    rng = np.random.default_rng(seed)
    y = rng.integers(0, 2, n)
    image = rng.integers(0, 256, (n, 1, 6, 6)).astype(np.uint8)
    return {"image": image, "table": rng.normal(size=(n, 3)) + y[:, None], "ids": rng.integers(0, 9, (n, 5))}, y


def items(x, y):
    """A Dataset of (x, y), one by one."""
    return StackDataset(StackDataset(**x) if isinstance(x, dict) else x, y.tolist())


def federate(make, net, method="fml", **arguments):
    return fedmutual.federate({i: Site(train=make(k)) for k, i in enumerate("ab")}, method, net, **QUICK | arguments)


def refusal(make, net, **arguments):
    with pytest.raises(UserError) as caught:
        federate(make, net, **arguments)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def federate_with_public_rows(make, build, method):
    """Train the networks that `build` makes on halves of 240 rows, of which all clients have some."""
    x, y = make(0, n=240)
    settings = {"split.public": 0.3, "algorithm.public_batch": 8, "data.classes": ["0", "1"]}
    halves = [({name: v[k::2] for name, v in x.items()} if isinstance(x, dict) else x[k::2], y[k::2]) for k in range(2)]
    sites = {i: Site(train=rows, model=build()) for i, rows in zip("ab", halves, strict=True)}
    return fedmutual.federate(sites, method, **QUICK | PUBLIC[method], settings=settings)


def check_by_hand(net, plain, read, data, container, times):
    """Train by FedAvg for so many rounds, of so many passes of one batch at each client; compare with a plain loop.

    plain: a network with the parameters of `net`, called with `read(x)`. Returns the run.
    """
    arguments = {"rounds": times, "local_epochs": times, "batch_size": 64, "lr": 0.5}
    settings = {"optimizer.momentum": 0.0, "optimizer.weight_decay": 0.0}
    expected = {k: v.clone() for k, v in net.state_dict().items()}
    sites = {i: Site(train=container(*rows), test=container(*rows)) for i, rows in data.items()}
    run = fedmutual.federate(sites, "fedavg", net, **QUICK | arguments, settings=settings)
    for _ in range(times):
        trained = []
        for x, y in data.values():
            client = copy.deepcopy(plain)
            client.load_state_dict(expected)
            optimizer = torch.optim.SGD(client.parameters(), lr=0.5)
            for _ in range(times):
                optimizer.zero_grad()
                nn.functional.cross_entropy(client(*read(x)), torch.tensor(y)).backward()
                optimizer.step()
            trained.append(client.state_dict())
        expected = {k: (trained[0][k] + trained[1][k]) / 2 for k in expected}
    torch.testing.assert_close(dict(run.global_model().state_dict()), expected)
    return run
