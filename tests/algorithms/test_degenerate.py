"""Where two methods must coincide they do, to the last bit; also methods that are FedAvg with keys of [model]."""

import pytest
import torch

import fedmutual
from fedmutual.aggregation import mean
from fedmutual.algorithms import (
    APFL,
    FML,
    MOON,
    Ditto,
    FedAvg,
    FedAvgFT,
    FedDF,
    FedGen,
    FedKD,
    FedProto,
    FedProx,
    FedRep,
    FedTGP,
    Independent,
    ProxyFL,
)
from fedmutual.core import At
from toy import ENGINES, client, difference, federation, first_state, mlp, server, weights

pytestmark = pytest.mark.long

E = {"local_epochs": 2, "batch_size": 8}


@pytest.fixture(params=["inprocess", "stacked"])
def engine(request):
    """Others have the bits of `inprocess`, which test_equal.py checks for every method."""
    return request.param


def ids(k=3):
    return [str(i) for i in range(k)]


def sizes(k=3):
    return dict(zip(ids(k), (20, 25, 31), strict=True))


def clients(algorithm, **changes):
    return [client(i, algorithm, n=n, **changes) for i, n in sizes().items()]


def same(ours, theirs, net="personal", other="personal"):
    return all(difference(weights(a.nets[net]), weights(b.nets[other])) == 0.0 for a, b in zip(ours, theirs, strict=True))


def alike(seed):
    """Personal nets that begin as the shared one does."""
    return mlp(0)


def exempt(made):
    """Nets that begin equal may send what equals a tensor of the personal one, as `boundary_exempt` finds it."""
    for one in made:
        one.boundary_exempt = frozenset(one.shared)
    return made


FEDAVG, EQUAL_FEDAVG, ALONE = FedAvg(**E), FedAvg(weighting="uniform", **E), Independent(**E)
SAME = {  # a method; that with the same shared model; that with the same personal models
    "fml, beta = 1": (FML(alpha=0.3, beta=1, **E), EQUAL_FEDAVG, None),
    "fml, alpha = 1": (FML(alpha=1, beta=0.3, **E), None, ALONE),
    "fedprox without pull": (FedProx(mu=0, **E), FEDAVG, None),
    "ditto without pull": (Ditto(lam=0, **E), FEDAVG, ALONE),
    "apfl of own weights": (APFL(mix=1, **E), FEDAVG, ALONE),
    "moon without contrast": (MOON(contrast=0, **E), FEDAVG, None),
    "nothing is tuned": (FedAvgFT(tune_epochs=0, **E), FEDAVG, None),
    "no layer stays home": (FedRep(**E), FEDAVG, None),
    "nothing is distilled": (FedDF(distill_steps=0, **E), FEDAVG, None),
    "fedproto without pull": (FedProto(proto_lam=0, **E), None, ALONE),
    "fedtgp without pull": (FedTGP(proto_lam=0, server_epochs=2, **E), None, ALONE),
}


@pytest.mark.parametrize("name", SAME)
def test_a_method_without_its_own_part_is_another_method(name, engine):
    method, of_shared, of_personal = SAME[name]
    algorithm = method.algorithm()
    net = {"personal": alike} if of_shared and of_personal else {}
    ours = exempt(clients(algorithm, **net))
    got = federation(algorithm, ours, engine=engine)
    if of_shared is not None:
        other = of_shared.algorithm()
        assert difference(got, federation(other, clients(other), engine=engine)) == 0.0
        assert difference(got, server()) > 0.01
    if of_personal is not None:
        other = of_personal.algorithm()
        theirs = clients(other, **net)
        federation(other, theirs, engine=engine)
        assert same(ours, theirs)
    if name == "nothing is tuned":
        assert all(difference(weights(one.nets["personal"]), got) == 0.0 for one in ours)


@pytest.mark.parametrize(("method", "other", "net"), [(FML(**E), ALONE, "personal"), (FedProx(mu=1, **E), FEDAVG, "meme")])
def test_a_method_with_its_own_part_is_no_other_method(method, other, net, engine):
    ours, theirs = clients(method.algorithm()), clients(other.algorithm())
    federation(method.algorithm(), ours, engine=engine)
    federation(other.algorithm(), theirs, engine=engine)
    assert difference(weights(ours[0].nets[net]), weights(theirs[0].nets[net])) > 1e-3


def test_fedprox_pulls_towards_the_received_weights_only():
    """With a last layer that stays at the client, the pull applies to the first layer."""
    home = ("2.weight", "2.bias")
    prox = FedProx(mu=1.0, **E).algorithm()
    one = client("0", prox, home=home)
    const = prox.phases[0].begin(one, server(home=home), At(0, 0, 1))
    assert set(const) == {"w.0.weight", "w.0.bias", "mu"}
    federation(prox, [one], start=server(home=home))


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("kind", [FML, FedAvg, FedProto, ProxyFL])
def test_the_order_of_clients_does_not_matter(kind, engine):
    algorithm = kind(**E).algorithm()

    def net(seed):
        return mlp(seed, norm=True)

    first, second = clients(algorithm, personal=net, shared=net), clients(algorithm, personal=net, shared=net)
    start = first_state(algorithm, ids(), net)
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
        one.boundary_exempt = frozenset(one.shared)
    federation(algorithm, twins, rounds=1)
    for one in twins:
        assert difference(weights(one.nets["personal"]), weights(one.nets["meme"])) == 0.0


def test_from_their_own_streams_round_one_teaches():
    """Were nothing taught, both KL terms would be 0, and the losses half of cross-entropy: the step would be halved."""
    algorithm = FML(**E).algorithm()
    ours = clients(algorithm)
    half = clients(algorithm, task=HalfCrossEntropy())
    federation(algorithm, ours, rounds=1)
    federation(algorithm, half, rounds=1)
    for one, other in zip(ours, half, strict=True):
        assert difference(weights(one.nets["personal"]), weights(other.nets["personal"])) > 1e-3


class HalfCrossEntropy:
    def fit(self, output, target):
        return torch.nn.functional.cross_entropy(output, target)

    def mutual(self, personal, meme, target, alpha, beta, temperature):
        return alpha * self.fit(personal, target), beta * self.fit(meme, target)


def test_apfl_without_own_weights_is_the_clients_copy(engine):
    algorithm = APFL(mix=0, **E).algorithm()
    ours = exempt(clients(algorithm, personal=alike))
    federation(algorithm, ours, engine=engine)
    assert same(ours, ours, "personal", "meme")


def test_two_peers_of_proxyfl_are_fml(engine):
    """Each keeps half of its proxy and has half of the other's: the plain mean of both."""
    proxyfl, fml = ProxyFL(alpha=0.3, beta=0.6, **E).algorithm(), FML(alpha=0.3, beta=0.6, **E).algorithm()
    ours, theirs = clients(proxyfl)[:2], clients(fml)[:2]
    federation(proxyfl, ours, engine=engine)
    shared = federation(fml, theirs, engine=engine)
    assert same(ours, theirs)
    assert all(difference(weights(one.nets["meme"]), shared) == 0.0 for one in ours)


def test_fedkd_of_full_rank_sends_the_mentee(engine):
    algorithm = FedKD(rank=1, **E).algorithm()
    assert set(algorithm.phases[0].leaves(server())) == set(server())
    ours = clients(algorithm)
    got = federation(algorithm, ours, rounds=1, engine=engine)
    memes = {one.id: weights(one.nets["meme"]) for one in ours}
    assert difference(got, mean(memes)) == 0.0


def test_fedgen_without_weights_is_fedavg(engine):
    fedgen, fedavg = FedGen(gen_alpha=0.0, gen_beta=0.0, gen_steps=2, **E).algorithm(), FedAvg(**E).algorithm()
    got = federation(fedgen, clients(fedgen), engine=engine)
    expected = federation(fedavg, clients(fedavg), engine=engine)
    assert difference({k: got[k] for k in expected}, expected) < 1e-6


EVERYTHING = ["features", "classifier"]


def train_preset(small, name, folder, **overrides):
    """The server's tensors after three rounds."""
    config = fedmutual.load_config(small, **{"algorithm.name": name, "engine.name": "inprocess", **overrides})
    run = fedmutual.run(config, folder)
    return {name: tensor for client in "012" for name, tensor in run.meme(client).state_dict().items()}


@pytest.mark.filterwarnings("ignore:algorithm ")
@pytest.mark.parametrize("name", ["lg-fedavg", "fedper", "fedrep"])
def test_a_part_that_is_everything_would_be_fedavg_and_is_refused(small, name):
    with pytest.raises(fedmutual.ConfigError, match="remove the key to share the whole network"):
        train_preset(small, name, "ours", **{"model.part": EVERYTHING})


@pytest.mark.filterwarnings("ignore:algorithm ")
@pytest.mark.parametrize("name", ["lg-fedavg", "fedper"])
def test_a_part_that_stays_home_makes_another_method(small, name):
    ours, theirs = train_preset(small, name, "ours"), train_preset(small, "fedavg", "theirs")
    assert not all(torch.equal(ours[key], theirs[key]) for key in theirs)


@pytest.mark.filterwarnings("ignore:algorithm ")
def test_fedbn_without_batchnorm_is_fedavg(small):
    ours, theirs = train_preset(small, "fedbn", "ours"), train_preset(small, "fedavg", "theirs")
    assert all(torch.equal(ours[key], theirs[key]) for key in theirs)


@pytest.mark.filterwarnings("ignore:algorithm ")
def test_fedbn_with_batchnorm_is_not_fedavg(small, tmp_path):
    (tmp_path / "normed.py").write_text(
        "from torch import nn\n\n\ndef net(shape, classes):\n"
        "    return nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, classes))\n"
    )
    network = {"model.shared": "normed:net"}
    ours, theirs = (train_preset(small, name, name, **network) for name in ("fedbn", "fedavg"))
    assert not torch.equal(ours["2.running_mean"], theirs["2.running_mean"])
