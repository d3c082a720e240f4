"""Where two methods must coincide they do, to the last bit."""

import pytest
import torch

from fedmutual.algorithms import FML, FedAvg, FedProx, Independent
from fedmutual.core import At
from toy import ENGINES, client, difference, federation, mlp, server, weights

E = {"local_epochs": 2, "batch_size": 8}


@pytest.fixture(params=ENGINES)
def engine(request):
    return request.param


def ids(k=3):
    return [str(i) for i in range(k)]


def sizes(k=3):
    return dict(zip(ids(k), (20, 25, 31), strict=True))


def clients(algorithm, **changes):
    return [client(i, algorithm, n=n, **changes) for i, n in sizes().items()]


def test_beta_one_alone_is_equal_weight_fedavg_on_the_meme(engine):
    fml, fedavg = FML(alpha=0.3, beta=1, **E).algorithm(), FedAvg(weighting="uniform", **E).algorithm()
    ours = federation(fml, clients(fml), engine=engine)
    assert difference(ours, federation(fedavg, clients(fedavg), engine=engine)) == 0.0
    assert difference(ours, server()) > 0.01


def test_alpha_one_alone_is_independent_training_on_the_personal_model(engine):
    fml, alone = FML(alpha=1, beta=0.3, **E).algorithm(), Independent(**E).algorithm()
    ours, theirs = clients(fml), clients(alone)
    federation(fml, ours, engine=engine)
    federation(alone, theirs, engine=engine)
    for a, b in zip(ours, theirs, strict=True):
        assert difference(weights(a.nets["personal"]), weights(b.nets["personal"])) == 0.0


def test_half_and_half_is_neither(engine):
    fml, alone = FML(**E).algorithm(), Independent(**E).algorithm()
    ours, theirs = clients(fml), clients(alone)
    federation(fml, ours, engine=engine)
    federation(alone, theirs, engine=engine)
    assert difference(weights(ours[0].nets["personal"]), weights(theirs[0].nets["personal"])) > 1e-3


def test_fedprox_without_pull_is_fedavg(engine):
    prox, fedavg = FedProx(mu=0, **E).algorithm(), FedAvg(**E).algorithm()
    assert (
        difference(federation(prox, clients(prox), engine=engine), federation(fedavg, clients(fedavg), engine=engine)) == 0.0
    )
    prox = FedProx(mu=1, **E).algorithm()
    assert (
        difference(federation(prox, clients(prox), engine=engine), federation(fedavg, clients(fedavg), engine=engine)) > 1e-3
    )


def test_fedprox_pulls_towards_what_was_received_and_nothing_else():
    """Of a model whose last layer stays home the first layer has an anchor."""
    home = ("2.weight", "2.bias")
    prox = FedProx(mu=1.0, **E).algorithm()
    one = client("0", prox, home=home)
    const = prox.phases[0].begin(one, server(home=home), At(0, 0, 1))
    assert set(const) == {"w.0.weight", "w.0.bias", "mu"}
    federation(prox, [one], start=server(home=home))


@pytest.mark.parametrize("kind", [FML, FedAvg, FedProx, Independent])
@pytest.mark.parametrize("norm", [False, True])
def test_the_order_of_clients_does_not_matter(kind, norm, engine):
    algorithm = kind(**E).algorithm()

    def net(seed):
        return mlp(seed, norm=norm)

    first, second = clients(algorithm, personal=net, shared=net), clients(algorithm, personal=net, shared=net)
    start = server(net) if "global" in algorithm.scores else {}
    a = federation(algorithm, first, start=start, engine=engine)
    b = federation(algorithm, second[::-1], start=start, engine=engine)
    assert not a or difference(a, b) == 0.0
    for one, other in zip(first, second, strict=True):
        for name in one.nets:
            assert difference(weights(one.nets[name]), weights(other.nets[name])) == 0.0


def test_leaving_a_client_out_of_a_round_leaves_the_others_personal_models_of_that_round(engine):
    algorithm = FML(**E).algorithm()
    everyone, fewer = clients(algorithm), clients(algorithm)[:2]
    federation(algorithm, everyone, rounds=1, engine=engine)
    federation(algorithm, fewer, rounds=1, engine=engine)
    for one, other in zip(everyone[:2], fewer, strict=True):
        assert difference(weights(one.nets["personal"]), weights(other.nets["personal"])) == 0.0


def test_when_all_start_equal_and_alpha_is_beta_nothing_is_taught_in_round_one():
    """The trap that `model.start = "own"` avoids: two equal nets with equal losses stay equal."""
    algorithm = FML(**E).algorithm()
    twins = clients(algorithm, personal=lambda seed: mlp(0))
    for one in twins:
        one.twins = frozenset(one.shared)
    federation(algorithm, twins, rounds=1)
    for one in twins:
        assert difference(weights(one.nets["personal"]), weights(one.nets["meme"])) == 0.0


def test_from_their_own_streams_round_one_teaches():
    """Were nothing taught, both KL terms would be 0, and the losses half of cross-entropy: the step would be halved."""
    algorithm = FML(**E).algorithm()
    ours = clients(algorithm)
    half = clients(algorithm, own={"task": HalfCrossEntropy()})
    federation(algorithm, ours, rounds=1)
    federation(algorithm, half, rounds=1)
    for one, other in zip(ours, half, strict=True):
        assert difference(weights(one.nets["personal"]), weights(other.nets["personal"])) > 1e-3


class HalfCrossEntropy:
    def fit(self, output, target):
        return torch.nn.functional.cross_entropy(output, target)

    def mutual(self, personal, meme, target, alpha, beta, temperature):
        return alpha * self.fit(personal, target), beta * self.fit(meme, target)
