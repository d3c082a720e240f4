"""A round or two of methods that exchange what classes look like, by hand: prototypes, posteriors, generated features."""

import numpy as np
import pytest
import torch
from torch import nn

from fedmutual.algorithms import (
    FD,
    FedGen,
    FedGH,
    FedProto,
    FedTGP,
)
from fedmutual.algorithms.class_means import EXAMPLES, PROTOTYPES
from fedmutual.algorithms.fedgen import measure_likeness
from fedmutual.core import At, Unusable
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
    halves,
    layer,
    softmax,
    stacked,
    weight,
)
from toy import federation

pytestmark = pytest.mark.usefixtures("in_float64")


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
    rng = np.random.default_rng(7)  # each hidden unit is dead for some classes only
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


def test_likeness_is_that_of_all_pairs_of_rows():
    """Value and gradient, by the authors' differences [B, B, D]; rows 0 and 1 are equal."""
    noise, made = torch.rand(7, 4), torch.randn(7, 5)
    noise[1], made[1] = noise[0], made[0]
    found, right = made.clone().requires_grad_(), made.clone().requires_grad_()
    value = measure_likeness(noise, found)
    apart = (right[:, None] - right).abs().mean(-1) * (noise[:, None] - noise).square().mean(-1)
    expected = (-apart.mean()).exp()
    assert abs(value - expected) < 1e-12
    value.backward()
    expected.backward()
    assert (found.grad - right.grad).abs().max() < 1e-12


def test_two_rounds_of_fedgen():
    """The authors' losses, written anew with modules of torch: a plain round, steps of the generator, a taught round.

    Their Adam and its schedule go on from round to round.
    """
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
    optimizer = torch.optim.Adam(net.parameters(), 0.01, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.98)
    body, head = (v.clone() for v in model.values())
    for number in range(2):
        at, learned = At(7, number, 2), {}
        for i in X:
            weights = [v.clone().requires_grad_() for v in (body, head)]
            order = torch.randperm(len(Y[i]), generator=at.rng(i, "batches"))
            x, y = torch.tensor(X[i])[order], torch.tensor(Y[i])[order]
            output = (x @ weights[0].T @ weights[1].T).log_softmax(1)
            loss = nn.NLLLoss()(output, y)
            if number:
                stream = at.rng(i, "generator")
                other = torch.randint(2, (len(y),), generator=stream)
                first, second = torch.rand(len(y), 2 * noise, generator=stream).chunk(2, 1)
                with torch.no_grad():
                    net.eval()
                    made = net(torch.cat((y, other)), torch.cat((first, second)))
                target = (made[: len(y)] @ weights[1].T).softmax(1).detach()
                loss = loss + 0.98 * beta * nn.KLDivLoss(reduction="batchmean")(output, target)
                loss = loss + 0.98 * alpha * nn.NLLLoss()((made[len(y) :] @ weights[1].T).log_softmax(1), other)
            loss.backward()
            learned[i] = [(v - LR * v.grad).detach() for v in weights]
        stream = at.rng("generator", "steps")
        net.train()
        for _ in range(3):
            y = torch.randint(2, (n,), generator=stream)
            step_published_generator(
                net, optimizer, [w[1] for w in learned.values()], rows, y, torch.rand(n, noise, generator=stream)
            )
        schedule.step()
        body, head = (average({i: w[k] for i, w in learned.items()}) for k in range(2))
    assert (got["0.weight"] - body).abs().max() < 1e-12
    assert (got["1.weight"] - head).abs().max() < 1e-12
    for name, v in net.state_dict().items():
        if v.is_floating_point():
            assert (got[f"generator {name}"] - v).abs().max() < 1e-12, name
    assert got["rows by class"].tolist() == [3, 5]
