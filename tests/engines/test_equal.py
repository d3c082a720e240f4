"""Every engine does the same with every algorithm: the same bits where that is promised, else the same but for rounding."""

from dataclasses import dataclass, fields, replace
from functools import cache, partial
from itertools import product

import pytest
import torch
from torch import nn

from fedmutual.aggregation import Aggregation
from fedmutual.algorithms import (
    APFL,
    FD,
    FML,
    MOON,
    SCAFFOLD,
    Aggregate,
    Ditto,
    FedALA,
    FedAPEN,
    FedAvg,
    FedAvgFT,
    FedGen,
    FedGH,
    FedH2L,
    FedKD,
    FedMD,
    FedOpt,
    FedProto,
    FedProx,
    FedRep,
    FedTGP,
    Independent,
    KTpFL,
    PFedMe,
    ProxyFL,
)
from fedmutual.config.methods import make_optimizer
from fedmutual.config.schema import OptimizerConfig
from fedmutual.core import PLAIN, Client, Recipe, Schedule
from fedmutual.engines.stack import FIELDS_OF_PHASES, FREE_FIELDS, group_alike
from fedmutual.events import Noted, PhaseDone
from peers import nodes, run
from toy import CLASSES, ENGINES, EXACT, FEATURES, Spare, client, difference, federation, first_state, mlp, weights

pytestmark = pytest.mark.long

E = {"local_epochs": 2, "batch_size": 8}
SIZES = (24, 24, 21, 17)
PHASES = {
    "fml": FML(alpha=0.3, beta=Schedule(0.9, 0.2), temperature=2.0, **E),
    "fedavg": FedAvg(**E),
    "fedprox": FedProx(mu=0.5, **E),
    "independent": Independent(**E),
    "fml, median": FML(aggregate=Aggregation("median"), **E),
    "fedavg, median": FedAvg(aggregate=Aggregation("median"), **E),
    "fedavg, trimmed mean": FedAvg(aggregate=Aggregation("trimmed-mean", 0.3), **E),
    "fedprox, trimmed mean": FedProx(mu=0.5, aggregate=Aggregation("trimmed-mean", 0.3), **E),
    "fml, fixed sum": FML(aggregate=Aggregation(sum="fixed"), **E),
    "fedavg, fixed sum": FedAvg(aggregate=Aggregation(sum="fixed"), **E),
    "fedavg-ft": FedAvgFT(tune_epochs=2, **E),
    "ditto": Ditto(lam=0.3, **E),
    "apfl": APFL(mix=Schedule(0.9, 0.4), **E),
    "apfl, adaptive": APFL(mix=0.3, adaptive=True, **E),
    "fedrep": FedRep(head_epochs=3, **E),
    "fedproto": FedProto(proto_lam=0.7, **E),
    "fedproto, fewer numbers": FedProto(proto_lam=0.7, proto_size=5, proto_weighting="samples", **E),
    "fedtgp": FedTGP(proto_lam=0.7, server_epochs=5, **E),
    "fedopt": FedOpt(kind="yogi", **E),
    "scaffold": SCAFFOLD(server_step=0.7, **E),
    "moon": MOON(**E),
    "fedala": FedALA(share_rate=5.0, **E),
    "pfedme": PFedMe(moreau_lam=0.5, inner_steps=2, **E),
    "fd": FD(fd_weight=0.7, **E),
    "fedgh": FedGH(head_lr=0.3, **E),
    "fedgen": FedGen(gen_steps=3, gen_noise=4, gen_hidden=5, **E),
    "fedapen": FedAPEN(adapt_share=0.2, adapt_rate=0.5, **E),
    "fedkd": FedKD(rank=0.2, **E),
    "proxyfl": ProxyFL(alpha=0.3, **E),
}
HOME = {"fedrep": ("2.weight", "2.bias", "3.weight", "3.bias")}  # of a net without BatchNorm, or with it
BOUND = {torch.float64: 1e-12, torch.float32: 1e-5}


SETTINGS = [(e, torch.float32) for e in ENGINES if e != "inprocess"]
SETTINGS += [(e, torch.float64) for e in ENGINES if e not in EXACT]  # equal bits of one type say enough


def name_setting(setting):
    return f"{setting[0]}-{str(setting[1]).removeprefix('torch.')}"


@pytest.fixture(params=SETTINGS, ids=name_setting)
def setting(request):
    """Set the default type of tensors; return the engine and the type."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(request.param[1])
    yield request.param
    torch.set_default_dtype(before)


@pytest.fixture
def engine(setting):
    return setting[0]


@pytest.fixture
def dtype(setting):
    return setting[1]


@dataclass(frozen=True)
class Net:
    norm: bool = False

    def __call__(self, seed):
        return mlp(seed, norm=self.norm)


def spare(seed):
    return Spare()


def sgd(net):
    return torch.optim.SGD([p for p in net.parameters() if p.requires_grad], momentum=0.9, weight_decay=5e-4)


def amsgrad(net):
    """With an epsilon that gradients near 0 do not pass: Adam divides by their size, so that rounding decides their sign."""
    return torch.optim.Adam([p for p in net.parameters() if p.requires_grad], amsgrad=True, weight_decay=5e-4, eps=1e-4)


def clients(algorithm, personal=mlp, shared=mlp, optimizer=sgd, sizes=SIZES, home=(), ids=False, recipe=PLAIN):
    equal_clients = []
    for i, n in enumerate(sizes):
        new_client = client(str(i), algorithm, n=n, personal=personal, shared=shared, home=home)
        for rows in new_client.data.values() if ids else ():
            rows.x = (rows.x + 3).clamp(0, 6).long()
        new_client.optimizers = {k: optimizer(net) for k, net in new_client.nets.items()}
        new_client.rate, new_client.recipe = 0.05, recipe
        if recipe.patience is not None:
            new_client.data = {**new_client.data, "validation": new_client.data["private"]}
            new_client.rate = 0.0 if i == 1 else 0.05
        equal_clients.append(new_client)
    return equal_clients


def train(engine, algorithm, rounds=1, participation=1.0, start=None, stacked=True, client_settings=None, **made):
    """Return everything that a run leaves, by name, and its losses."""
    ours = clients(algorithm, **made)
    for client_, settings in zip(ours, client_settings or [{}] * len(ours), strict=False):
        client_.settings = settings
    events = []
    last = federation(algorithm, ours, rounds=rounds, start=start, engine=engine, participation=participation, events=events)
    left = {f"server.{k}": v for k, v in last.items()}
    for client_ in ours:
        for net, module in client_.nets.items():
            left |= {f"{client_.id}.{net}.{k}": v for k, v in weights(module).items()}
        left |= {f"{client_.id}.memory.{k}": v for k, v in client_.memory.items()}
        for net, optimizer in client_.optimizers.items():
            for slot, values in optimizer.state_dict()["state"].items():
                tensors = {k: v for k, v in values.items() if isinstance(v, torch.Tensor)}
                left |= {f"{client_.id}.{net}.{slot}.{k}": v.clone() for k, v in tensors.items() if v.any()}
    if stacked:
        assert not [e.text for e in events if isinstance(e, Noted)], "nobody was refused"
    losses = [
        (e.round, e.phase, i, k, v)
        for e in events
        if isinstance(e, PhaseDone)
        for i in e.train
        for k, v in e.train[i].items()
    ]
    return left, losses


def compare(first, second):
    """Return the largest difference between two results of `train`."""
    (left, losses), (left2, losses2) = first, second
    assert [entry[:4] for entry in losses] == [entry[:4] for entry in losses2]
    loss_difference = max((abs(a[4] - b[4]) for a, b in zip(losses, losses2, strict=True)), default=0.0)
    return max(difference(left, left2), loss_difference)


def apart(engine, algorithm, **settings):
    """Return the largest difference between a run in one process and a run on another engine."""
    return compare(train("inprocess", algorithm, **settings), train(engine, algorithm, **settings))


def check(engine, dtype, distance, bound=BOUND):
    if engine in EXACT:
        assert distance == 0.0
    else:
        assert 0.0 <= distance < bound[dtype]


def train_unequal(engine, kind, norm):
    algorithm = PHASES[kind].algorithm()
    net, home = Net(norm), HOME.get(kind, ())
    start = first_state(algorithm, map(str, range(len(SIZES))), net, home)
    return train(engine, algorithm, rounds=2, start=start, personal=net, shared=net, home=home)


@cache
def train_unequal_in_process(kind, norm, dtype):
    """Train once for all engines. dtype: the default type of tensors now."""
    return train_unequal("inprocess", kind, norm)


# An engine with equal bits sends BatchNorm's statistics as other tensors, and a cluster sends what other worker processes
# send, so a few kinds of methods are enough there.
FEW = ("fml", "fedrep", "apfl, adaptive", "fedkd", "proxyfl")
UNEQUAL = [
    (setting, kind, norm)
    for setting, kind, norm in product(SETTINGS, PHASES, (False, True))
    if kind in FEW or (not norm and setting[0] != "cluster") or setting == ("stacked", torch.float64)
]


@pytest.mark.parametrize(
    ("setting", "kind", "norm"), UNEQUAL, indirect=["setting"], ids=[f"{name_setting(s)}-{k}-{n}" for s, k, n in UNEQUAL]
)
def test_unequal_clients(engine, dtype, kind, norm):
    check(engine, dtype, compare(train_unequal_in_process(kind, norm, dtype), train_unequal(engine, kind, norm)))


def words(seed):
    """A network of ids 0 to 6."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Embedding(7, 4), nn.Flatten(), nn.Linear(4 * FEATURES, CLASSES))


def volumes(seed):
    """A network of volumes [1, 1, 2, 3]."""
    torch.manual_seed(seed)
    layers = nn.Unflatten(1, (1, 1, 2, 3)), nn.Conv3d(1, 4, 3, padding=1), nn.BatchNorm3d(4), nn.ReLU(), nn.Flatten()
    return nn.Sequential(*layers, nn.Linear(4 * FEATURES, CLASSES))


@pytest.mark.parametrize("net", [words, volumes])
def test_networks_of_ids_and_of_volumes(engine, dtype, net):
    def run_on(engine):
        start = {k: v.clone() for k, v in net(0).state_dict().items()}
        return train(engine, PHASES["fml"].algorithm(), start=start, personal=net, shared=net, ids=net is words)

    check(engine, dtype, compare(run_on("inprocess"), run_on(engine)))


@pytest.mark.parametrize("recipe", [Recipe(clip_norm=0.05, clip_value=0.02), Recipe(accumulate=2), Recipe(patience=1)])
def test_clients_with_a_recipe(engine, dtype, recipe):
    run_on = partial(train, algorithm=PHASES["fml"].algorithm(), rounds=4, stacked=recipe.patience is None)
    plain, changed = (run_on("inprocess", recipe=r)[0] for r in (PLAIN, recipe))
    assert difference(*({k: left[k] for k in plain if k in changed} for left in (plain, changed))) > 1e-4, "it has an effect"
    check(engine, dtype, compare(run_on("inprocess", recipe=recipe), run_on(engine, recipe=recipe)))


@pytest.mark.parametrize("name", ["adafactor", "adagrad", "asgd", "nadam", "rmsprop", "rprop"])
@pytest.mark.parametrize("kind", ["fml", "independent"])
def test_every_optimiser_of_torch(engine, dtype, kind, name):
    """An engine that stores clients on a disk restores their states before each phase, as a resumed run does."""
    table, algorithm = OptimizerConfig(name=name), replace(PHASES[kind], local_epochs=1).algorithm()

    def make(net):
        return make_optimizer(table, None, [p for p in net.parameters() if p.requires_grad])

    assert apart(engine, algorithm, rounds=2, optimizer=make, stacked=False) == 0.0


@pytest.mark.parametrize("optimizer", [sgd, amsgrad])
@pytest.mark.parametrize("kind", ["fml", "independent"])
def test_a_part_of_the_clients_takes_part_and_optimisers_go_on(engine, dtype, kind, optimizer):
    algorithm = replace(PHASES[kind], local_epochs=1).algorithm()
    differences = apart(engine, algorithm, rounds=3, participation=0.6, optimizer=optimizer)
    check(engine, dtype, differences)


@pytest.mark.parametrize("optimizer", [sgd, amsgrad])
def test_frozen_layers_and_unused_parameters(engine, dtype, optimizer):
    differences = apart(engine, PHASES["fml"].algorithm(), personal=spare, optimizer=optimizer)
    check(engine, dtype, differences, {torch.float64: 1e-10, torch.float32: 1e-4} if optimizer is amsgrad else BOUND)


def test_clients_with_settings_of_their_own(engine, dtype):
    settings = [{"alpha": 0.9}, {"local_epochs": 1}, {"batch_size": 5, "beta": 0.1}, {"alpha": Schedule(0.2, 0.8)}]
    check(engine, dtype, apart(engine, PHASES["fml"].algorithm(), client_settings=settings))


def dropping(seed):
    net = mlp(seed)
    return nn.Sequential(net[0], nn.Dropout(0.5), net[2])


def test_active_dropout_steps_clients_in_turn_with_a_remark():
    algorithm = PHASES["independent"].algorithm()
    differences = apart("stacked", algorithm, rounds=2, personal=dropping, stacked=False)
    assert differences == 0.0
    events = []
    federation(algorithm, clients(algorithm, personal=dropping), rounds=3, engine="stacked", events=events)
    (note,) = [e.text for e in events if isinstance(e, Noted)]
    assert note.startswith("clients 0, 1, 2, 3 step one after the other, not stacked: vmap refuses (")
    assert "random" in note


def train_widths(engine, algorithm, widths, optimizer=sgd, **settings):
    """Return the weights of clients whose networks have these widths, after a run."""
    ours = [client(str(i), algorithm, n=20, personal=lambda s, h=h: mlp(s, hidden=h)) for i, h in enumerate(widths)]
    for one in ours if optimizer is amsgrad else ():
        one.optimizers, one.rate = {"personal": amsgrad(one.nets["personal"])}, 0.01
    last = federation(algorithm, ours, engine=engine, **settings)
    return last | {f"{c.id}.{k}": v for c in ours for k, v in weights(c.nets["personal"]).items()}


def test_architectures_are_stacked_by_group():
    algorithm, widths = PHASES["fml"].algorithm(), (8, 9, 8, 9, 7)
    distance = difference(*(train_widths(engine, algorithm, widths) for engine in ("inprocess", "stacked")))
    assert 0 < distance < 1e-5, "rounding tells that they were stacked"


def test_adam_where_a_client_is_stacked_in_one_round_and_alone_in_the_next():
    algorithm, run = replace(PHASES["independent"], local_epochs=1).algorithm(), {"rounds": 12, "participation": 0.4}
    results = [train_widths(engine, algorithm, (8, 9, 8, 9, 8), amsgrad, **run) for engine in ("inprocess", "stacked")]
    assert difference(*results) < 1e-4


class Tied(nn.Module):
    """Two layers of one weight."""

    def __init__(self, seed):
        super().__init__()
        self.first, self.second, self.last = mlp(seed, hidden=6)[0], mlp(seed, hidden=6)[0], mlp(seed, hidden=6)[2]
        self.second.weight = self.first.weight

    def forward(self, x):
        return self.last(self.second(self.first(x).relu()))


def test_tied_parameters():
    algorithm = PHASES["independent"].algorithm()
    assert apart("stacked", algorithm, rounds=2, personal=Tied) < 1e-5


class Scaled(nn.Module):
    """Nets alike but for a plain number, or a tensor that is no buffer."""

    def __init__(self, seed):
        super().__init__()
        self.net, self._scale, self.mask = mlp(seed), float(seed), torch.full((6,), float(seed))

    def forward(self, x):
        return self.net(x * self.mask) * self._scale / 100


def test_nets_that_compute_unlike_things_are_not_stacked():
    algorithm = PHASES["independent"].algorithm()
    assert apart("stacked", algorithm, rounds=2, personal=Scaled) == 0.0


OTHER_VALUES = {
    "nets": {"personal": mlp(1, hidden=9)},
    "optimizers": {"personal": torch.optim.Adam(mlp(1).parameters())},
    "precision": torch.bfloat16,
}


@pytest.mark.parametrize("name", [field.name for field in fields(Client)])
def test_each_field_of_a_client_is_equal_in_a_stack_or_is_declared_free(name):
    ours = [client(str(i), PHASES["independent"].algorithm()) for i in range(2)]
    assert len(group_alike(ours)) == 1
    setattr(ours[1], name, OTHER_VALUES.get(name, object()))
    assert (len(group_alike(ours)) == 1) == (name in FREE_FIELDS | FIELDS_OF_PHASES)


def test_a_new_field_of_clients_is_equal_in_a_stack():
    @dataclass
    class Clipped(Client):
        clip_norm: float = 1.0

    algorithm = PHASES["independent"].algorithm()
    ours = [Clipped(**vars(client(str(i), algorithm)), clip_norm=norm) for i, norm in enumerate((1.0, 1.0, 2.0))]
    assert [[one.clip_norm for one in group] for group in group_alike(ours)] == [[1.0, 1.0], [2.0]]


def test_clients_with_learning_rates_of_their_own(monkeypatch):
    from fedmutual.engines import stacked

    rehearsed = []
    real = stacked.check_stackable
    monkeypatch.setattr(stacked, "check_stackable", lambda parts: (rehearsed.append(parts), real(parts)))
    algorithm = replace(PHASES["fml"], local_epochs=1).algorithm()
    results = []
    for name in ("inprocess", "stacked"):
        ours = clients(algorithm)
        for one, rate in zip(ours, (Schedule(0.1, 0.01), Schedule(0.1, 0.01), 0.02, 0.02), strict=True):
            one.rate = rate
        results.append(federation(algorithm, ours, rounds=4, engine=name))
    assert difference(*results) < 1e-5
    assert len(rehearsed) == 1, "a rate that moves makes nothing new"


@dataclass(frozen=True, kw_only=True)
class Odd(Independent):
    """Constants of another shape for one client; another takes no step, and remembers nothing."""

    def begin(self, client, inbox, at):
        return {"c": torch.ones(4 if client.id == "2" else 2)}

    def batches(self, client, inbox, at):
        return () if client.id == "1" else super().batches(client, inbox, at)

    def edit(self, grads, memory):
        return grads, {"steps": memory.get("steps", torch.zeros(())) + 1}


@dataclass(frozen=True, kw_only=True)
class Idle(Odd):
    """`Odd` without the odd shape."""

    def begin(self, client, inbox, at):
        return {}


@pytest.mark.parametrize("kind", [Odd, Idle])
def test_odd_constants_and_clients_without_a_step(kind):
    algorithm = kind(**E).algorithm()
    assert apart("stacked", algorithm, rounds=2) < 1e-5


PEERS = {
    "fedh2l": FedH2L(batch_size=8, public_batch=5, local_steps=2),
    "fedh2l in pairs": FedH2L(batch_size=8, public_batch=5, peers="pairs"),
    "fedh2l, pcgrad, two optimisers": FedH2L(batch_size=8, public_batch=5, projection="pcgrad", optimizers=2, eta=0.02),
    "fedh2l, strict": FedH2L(batch_size=8, public_batch=5, labels=False, confidence=False, local_data="private"),
    "fedmd": FedMD(batch_size=8, public_batch=5, local_steps=2, transfer_epochs=1, digest_steps=2),
    "kt-pfl": KTpFL(batch_size=8, public_batch=5, local_steps=2, match_steps=2),
    "fedmd, posteriors": FedMD(batch_size=8, public_batch=5, local_steps=2, transfer_epochs=1, consensus="posteriors"),
    "fedmd, no labels": FedMD(batch_size=8, public_batch=5, local_steps=2, transfer_epochs=1, labels=False),
    # not the median of five nodes: it is one node's own logits, where the absolute difference has no gradient
    "fedmd, trimmed mean": FedMD(
        batch_size=8, public_batch=5, transfer_epochs=1, aggregate=Aggregation("trimmed-mean", 0.2)
    ),
    "aggregate": Aggregate(batch_size=8, local_steps=3),
}


@pytest.mark.parametrize("kind", PEERS)
def test_peers(engine, dtype, kind):
    """Nodes without a shared model, one of another architecture: 5 rounds."""
    results = []
    for name in ("inprocess", engine):
        labelled = PEERS[kind].algorithm().public.labelled
        ours = nodes(5, net=lambda seed: mlp(seed, hidden=9 if seed == 104 else 8), labelled=labelled)
        for peer in ours:
            peer.optimizers = {"personal": amsgrad(peer.nets["personal"])}
        events = []
        run(PEERS[kind].algorithm(), ours, rounds=5, engine=name, events=events)
        left = {f"{peer.id}.{k}": v for peer in ours for k, v in weights(peer.nets["personal"]).items()}
        left |= {f"{peer.id}.memory.{k}": v for peer in ours for k, v in peer.memory.items()}
        facts = {
            (e.round, e.phase, i, k): torch.tensor(v)
            for e in events
            if isinstance(e, PhaseDone)
            for i, terms in e.train.items()
            for k, v in terms.items()
        }
        assert not [e.text for e in events if isinstance(e, Noted)], "nobody was refused"
        results.append(left | facts)
    check(engine, dtype, difference(*results), {**BOUND, torch.float32: 1e-4})  # 5 rounds of Adam
