"""FedMD by hand: transfer and one round of two linear nodes."""

from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from torch import nn

from fedmutual.algorithms import FedMD
from fedmutual.algorithms.fedmd import Announce, Revisit, Transfer
from fedmutual.algorithms.peers import make_agreed_state
from fedmutual.core import At
from fedmutual.events import Noted
from fedmutual.losses import Regression
from fedmutual.stepping import with_client_settings
from linear_clients import softmax
from peers import LR, node, nodes, run, seeds
from toy import Rows, federation


def learned(w, x, y):
    """A step of cross-entropy over all rows."""
    return w - LR * np.einsum("nc,nf->cf", softmax(x @ w.T) - np.eye(2)[y], x) / len(x)


def digested(w, x, transform, consensus):
    """A step of the mean absolute difference: of logits, or of posteriors p, where dp_c/dz_k = p_c (1_ck - p_k)."""
    z = x @ w.T
    if transform is softmax:
        p = softmax(z)
        off = np.sign(p - consensus)
        up = p * (off - (off * p).sum(-1, keepdims=True))
    else:
        up = np.sign(z - consensus)
    return w - LR * np.einsum("nc,nf->cf", up, x) / up.size


@pytest.mark.parametrize("consensus", ["logits", "posteriors"])
def test_transfer_and_a_round_of_two_linear_nodes(consensus):
    """Public data, then one's own; then announce, two steps of the mean absolute difference, one's own again."""
    torch.set_default_dtype(torch.float64)
    try:
        rng = np.random.default_rng(1)
        public, labels = rng.normal(size=(6, 2)), np.array([0, 1, 1, 0, 0, 1])
        inputs, targets = (
            {i: rng.normal(size=(5, 2)) for i in "01"},
            {"0": np.array([0, 0, 1, 0, 1]), "1": np.array([1, 1, 0, 1, 1])},
        )
        w = {i: rng.normal(size=(2, 2)) for i in "01"}
        rows, owners, clients = Rows(torch.tensor(public), torch.tensor(labels)), {"0": range(3), "1": range(3, 6)}, []
        for i in "01":
            net = nn.Linear(2, 2, bias=False)
            net.weight.data = torch.tensor(w[i].copy())
            clients.append(
                node(i, owners, rows, None, net, trains_on=Rows(torch.tensor(inputs[i]), torch.tensor(targets[i])))
            )
            clients[-1].seeds = seeds(rows, owners, classes=2)
        settings = {"batch_size": 100, "public_batch": 6, "transfer_epochs": 1, "digest_steps": 2, "local_steps": 1}
        algorithm = FedMD(**settings, consensus=consensus).algorithm()
        federation(algorithm, clients, rounds=1, start=make_agreed_state(owners, 2))

        for i in "01":
            w[i] = learned(learned(w[i], public, labels), inputs[i], targets[i])
        transform = softmax if consensus == "posteriors" else np.asarray
        mean = np.mean([transform(public @ w[i].T).astype(np.float32) for i in "01"], axis=0)
        for i in "01":
            for _ in range(2):
                w[i] = digested(w[i], public, transform, mean)
            w[i] = learned(w[i], inputs[i], targets[i])
        for client in clients:
            weight = client.nets["personal"].weight.detach().numpy()
            assert np.abs(weight - w[client.id]).max() < 1e-7  # what is said crosses as float32
    finally:
        torch.set_default_dtype(torch.float32)


def test_a_client_with_own_local_steps_transfers_like_all_clients():
    """Local steps are a setting of rounds; the start phase counts its own epochs."""
    rows = Rows(torch.randn(12, 2), torch.arange(12) % 2)
    one = node("0", {"0": range(12)}, rows, None, nn.Linear(2, 2), trains_on=rows)
    one.settings = {"local_steps": 2, "batch_size": 4}
    for kind, at, batches in ((Transfer, -1, 9), (Revisit, -1, 9), (Revisit, 0, 2)):
        phase = with_client_settings(kind(transfer_epochs=3, local_steps=7), one)
        assert len(list(phase.batches(one, {}, At(0, at, 5)))) == batches


def test_posteriors_need_classes():
    with pytest.raises(ValueError, match="consensus cannot be 'posteriors' with a training"):
        FedMD(consensus="posteriors", task=Regression())


@pytest.mark.parametrize("spoil", [lambda p: p * 2, lambda p: -p, lambda p: p * torch.nan])
def test_invalid_posteriors_are_left_out_and_their_sender_named(spoil):
    """A consensus of posteriors is a posterior: one that says 1e30 would be the mean of all."""
    settings = {"batch_size": 8, "public_batch": 6, "local_steps": 1, "consensus": "posteriors"}

    @dataclass(frozen=True, kw_only=True)
    class Liar(Announce):
        def end(self, client, at):
            reply = super().end(client, at)
            return {k: spoil(v) for k, v in reply.items()} if client.id == "1" else reply

    algorithm, events, clients = FedMD(**settings).algorithm(), [], nodes(3)
    spoilt = replace(algorithm, phases=(Liar(**settings), *algorithm.phases[1:]))
    run(spoilt, clients, rounds=1, events=events)
    (note,) = [e.text for e in events if isinstance(e, Noted)]
    assert "client '1'" in note
