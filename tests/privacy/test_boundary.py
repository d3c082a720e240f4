"""What leaves a client, tested on the bytes: an honest reply passes, every way of smuggling is refused before it is sent."""

import math
import re
from dataclasses import dataclass

import pytest
import torch

from fedmutual.algorithms import FML, FedAvg, Independent
from fedmutual.boundary import Refused, release
from fedmutual.engines.base import evaluate_client
from fedmutual.events import PhaseDone, Replied
from fedmutual.federation.evaluation import EvalSpec
from fedmutual.federation.networks import find_exempt_tensors
from fedmutual.losses import Classification
from toy import FEATURES, Rows, client, federation, mlp, server, weights

E = {"local_epochs": 1, "batch_size": 8}


@dataclass(frozen=True, kw_only=True)
class Leak(FML):
    """FML whose clients send something else under the meme's own names; personal nets have the meme's architecture."""

    what: str = "personal"

    def end(self, client, at):
        reply = super().end(client, at)
        personal = client.nets["personal"].state_dict()
        match self.what:
            case "personal":
                return dict(personal)
            case "copy":
                return {k: v.clone() for k, v in personal.items()}
            case "into the meme":
                client.nets["meme"].load_state_dict(personal)
                return super().end(client, at)
            case "one layer":
                return reply | {"0.weight": personal["0.weight"]}
            case "momentum":
                slot = client.optimizers["personal"].state[client.nets["personal"][0].weight]
                return reply | {"0.weight": slot["momentum_buffer"]}
            case "memory":
                client.memory = {"secret": torch.arange(48.0).reshape(8, 6)}
                return reply | {"0.weight": client.memory["secret"].clone()}
            case "statistics":
                mine = {k: v for k, v in personal.items() if k.startswith("1.")}
                client.nets["meme"].load_state_dict(client.nets["meme"].state_dict() | mine)
                return super().end(client, at)
            case "less":
                return {k: v for k, v in reply.items() if k != "2.bias"}
            case "name":
                return reply | {"extra": torch.zeros(1)}
            case "shape":
                return reply | {"0.bias": torch.zeros(9)}
            case "dtype":
                return reply | {"0.bias": reply["0.bias"].double()}
        raise AssertionError(self.what)


@pytest.mark.parametrize(
    ("what", "sentence"),
    [
        ("personal", "its bytes are those of '0.weight' of its personal net"),
        ("copy", "its bytes are those of '0.weight' of its personal net"),
        ("into the meme", "its bytes are those of '0.weight' of its personal net"),
        ("one layer", "its bytes are those of '0.weight' of its personal net"),
        ("momentum", "'momentum_buffer' of its personal optimiser"),
        ("memory", "'secret' of its memory"),
        ("name", "the phase declares only 0.bias, 0.weight, 2.bias, 2.weight"),
        ("shape", "declared as torch.float32 (8,), found torch.float32 (9,)"),
        ("dtype", "found torch.float64"),
        ("less", "'2.bias': it is declared, but missing"),
    ],
)
def test_a_leaking_algorithm_is_refused(what, sentence):
    algorithm = Leak(what=what, **E).algorithm()
    clients = [client(i, algorithm) for i in ("0", "1")]
    events = []
    with pytest.raises(Refused, match="client '0' must not send") as refused:
        federation(algorithm, clients, events=events)
    assert sentence in str(refused.value)
    assert not [e for e in events if isinstance(e, Replied | PhaseDone)], "something was sent before the refusal"


def test_the_honest_algorithm_passes_with_equal_architectures():
    algorithm = FML(**E).algorithm()
    assert federation(algorithm, [client(i, algorithm) for i in ("0", "1")])


def wide(seed):
    return torch.nn.Linear(20, 3)


def among_noise(row, count):
    return torch.cat([torch.randn(count - 1, 20, generator=torch.Generator().manual_seed(1)), row[None]])


STOLEN = {  # what is made of a private row -> whether it is refused: the boundary compares bytes, and guards against slips
    "alone": (lambda row: among_noise(row, 1), True),
    "among noise": (lambda row: among_noise(row, 3), True),
    "doubled": (lambda row: 2 * row, False),
    "larger by one bit": (lambda row: torch.nextafter(row, torch.full_like(row, torch.inf)), False),
    "backwards": (lambda row: row.flip(0), False),
    "in another dtype": (lambda row: row.double(), False),
}


@dataclass(frozen=True, kw_only=True)
class RowLeak(FML):
    """Declares a tensor for the purpose: what is declared is refused all the same when it is a row."""

    how: str = "alone"

    def leaves(self, server):
        row = STOLEN[self.how][0](torch.zeros(20))
        return {**super().leaves(server), "stolen": (row.dtype, tuple(row.shape))}

    def end(self, client, at):
        return super().end(client, at) | {"stolen": STOLEN[self.how][0](client.data["private"].x[3])}


@pytest.mark.parametrize("how", STOLEN)
def test_a_row_is_refused_byte_for_byte_and_code_that_means_to_leak_is_not_stopped(how):
    """docs/run-folder.md calls the boundary a guard against slips: a reader must not think more of the boundary."""
    algorithm = RowLeak(how=how, **E).algorithm()
    x = torch.randn(12, 20, generator=torch.Generator().manual_seed(3))
    one = client("0", algorithm, personal=wide, shared=wide, data={"private": Rows(x, torch.arange(12) % 3)})
    if STOLEN[how][1]:
        with pytest.raises(Refused, match="it holds a row of the client's private data"):
            federation(algorithm, [one], start=server(wide), rounds=1)
    else:
        assert federation(algorithm, [one], start=server(wide), rounds=1)


@dataclass(frozen=True, kw_only=True)
class TableLeak(FML):
    """Sends some of a table's rows, under a name that it declares, from one of the client's kinds of data."""

    kind: str = "private"
    dtype: torch.dtype = torch.float32

    def leaves(self, server):
        return {**super().leaves(server), "stolen": (self.dtype, tuple(self._of_bytes(torch.zeros(3, FEATURES)).shape))}

    def end(self, client, at):
        return super().end(client, at) | {"stolen": self._of_bytes(client.data[self.kind].x[3:6])}

    def _of_bytes(self, x):
        return x.clone().view(self.dtype)


def table(values, rows=12, is_integer=False):
    """Rows of `FEATURES` columns with so many different values in each."""
    x = torch.randn(rows, FEATURES, generator=torch.Generator().manual_seed(3))
    x = (x * 1000).round() if is_integer else x
    return torch.cat([x[:, :values], x[:, :1].expand(-1, FEATURES - values)], 1).contiguous()


@pytest.mark.parametrize("kind", ["private", "holdout", "validation", "test.own"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.uint8, torch.int64])
def test_a_short_row_of_a_table_is_refused(kind, dtype):
    algorithm = TableLeak(kind=kind, dtype=dtype, **E).algorithm()
    data = {"private": Rows(torch.zeros(12, FEATURES), torch.arange(12) % 3)}
    one = client("0", algorithm, data=data | {kind: Rows(table(4), torch.arange(12) % 3)})
    with pytest.raises(Refused, match=f"it holds a row of the client's {kind} data"):
        federation(algorithm, [one], rounds=1)


@pytest.mark.parametrize("x", [table(3), table(6, is_integer=True)])
def test_a_short_row_of_few_values_or_of_counts_proves_nothing(x):
    """As docs/run-folder.md says: such a row is soon met by chance."""
    algorithm = TableLeak(**E).algorithm()
    federation(algorithm, [client("0", algorithm, data={"private": Rows(x, torch.arange(12) % 3)})], rounds=1)


@pytest.mark.parametrize("x", [torch.randn(12), torch.empty(0, FEATURES), torch.randint(0, 255, (12, 5), dtype=torch.uint8)])
def test_unusual_private_data_do_not_stop_a_release(x):
    """Rows of single numbers, no rows, and rows of a few bytes."""
    algorithm = FML(**E).algorithm()
    one = client("0", algorithm, data={"validation": Rows(x, torch.zeros(len(x), dtype=torch.long))})
    assert release(dict(one.nets["meme"].state_dict()), algorithm.phases[0].leaves(server()), one, {})


def test_twins_pass_by_storage_and_only_by_storage():
    """model.start = "server", alpha = beta: meme and personal stay equal by right; a copied personal tensor is no meme."""
    algorithm = FML(**E).algorithm()
    meme_client = client("0", algorithm, personal=lambda seed: mlp(0), boundary_exempt=frozenset(server()))
    assert federation(algorithm, [meme_client], rounds=2)
    meme_client = client("0", algorithm, personal=lambda seed: mlp(0))
    with pytest.raises(Refused, match="personal net"):
        federation(algorithm, [meme_client])
    leaking = Leak(what="copy", **E).algorithm()
    meme_client = client("0", leaking, personal=lambda seed: mlp(0), boundary_exempt=frozenset(server()))
    with pytest.raises(Refused, match="personal net"):
        federation(leaking, [meme_client])


def test_what_comes_back_as_it_went_tells_nothing_and_passes():
    """A frozen part that the personal net has in common: equal bytes, but the server sent them."""

    def frozen(seed):
        net = mlp(0)
        net[0].requires_grad_(False)
        return net

    algorithm = FML(alpha=0.3, **E).algorithm()
    one = client("0", algorithm, personal=frozen, shared=frozen)
    start = server()
    got = federation(algorithm, [one], start=start, rounds=1)
    assert torch.equal(got["0.weight"], start["0.weight"])
    assert not torch.equal(got["2.weight"], start["2.weight"])


def test_a_row_that_the_server_guessed_and_the_client_never_touched_is_not_refused():
    """Otherwise a server could put guesses into units that never fire, and a refusal would confirm a guess."""
    algorithm = FML(alpha=0.3, **E).algorithm()
    guessed_client = client("0", algorithm)
    guess = guessed_client.data["private"].x[3].repeat(8, 1)
    sent = {"0.weight": torch.cat([guess[:5], guess[5:] + 2])}
    reply = {"0.weight": torch.cat([guess[:5], guess[5:] + 1])}
    declared = {"0.weight": (torch.float32, tuple(guess.shape))}
    assert torch.equal(release(reply, declared, guessed_client, sent)["0.weight"], reply["0.weight"])
    with pytest.raises(Refused, match="it holds a row of the client's private data"):
        release(
            {"0.weight": reply["0.weight"].flip(0)}, declared, guessed_client, sent
        )  # in other places than it was sent in


def test_what_stays_home_of_the_meme_stays_home():
    algorithm = FML(**E).algorithm()
    home = ("2.weight", "2.bias")
    clients = [client(i, algorithm, home=home) for i in ("0", "1")]
    got = federation(algorithm, clients, start=server(home=home))
    assert set(got) == {"0.weight", "0.bias"}
    adapters = [weights(c.nets["meme"])["2.weight"] for c in clients]
    assert not torch.equal(*adapters), "each client's adaptor goes its own way"


@pytest.mark.parametrize(
    ("algorithm", "names"),
    [
        (FML(**E), {"0.weight", "0.bias", "2.weight", "2.bias"}),
        (FedAvg(**E), {"0.weight", "0.bias", "2.weight", "2.bias", "n_k"}),
        (FedAvg(weighting="uniform", **E), {"0.weight", "0.bias", "2.weight", "2.bias"}),
        (Independent(**E), set()),
    ],
)
def test_how_many_examples_leaves_only_where_it_weighs(algorithm, names):
    phase = algorithm.algorithm().phases[0]
    assert set(phase.leaves(server())) == names


def test_the_released_copy_shares_no_storage_with_the_client():
    algorithm = FML(**E).algorithm()
    one = client("0", algorithm)
    reply = dict(one.nets["meme"].state_dict())
    for name, tensor in release(reply, algorithm.phases[0].leaves(server()), one, {}).items():
        assert tensor.untyped_storage().data_ptr() != reply[name].untyped_storage().data_ptr()


def test_losses_are_sent_only_with_share_metrics_all():
    algorithm = FML(**E).algorithm()
    events, metrics = [], {"0": "all", "1": "none", "2": "accuracy"}
    clients = [client(i, algorithm, metrics=shared) for i, shared in metrics.items()]
    federation(algorithm, clients, rounds=1, events=events)
    (done,) = [e for e in events if isinstance(e, PhaseDone)]
    assert set(done.train) == {"0"}
    assert set(done.up) == {"0", "1", "2"}


def test_bytes_are_counted_from_the_tensors_sent():
    """The toy net: 6 x 8 + 8 + 8 x 3 + 3 = 83 floats of 4 bytes; n_k is one int64."""
    assert FEATURES == 6
    for phase, up in ((FML(**E), 332), (FedAvg(**E), 340)):
        algorithm = phase.algorithm()
        events = []
        federation(algorithm, [client("0", algorithm)], rounds=1, events=events)
        (done,) = [e for e in events if isinstance(e, PhaseDone)]
        assert (done.down, done.up) == ({"0": 332}, {"0": up})


def normed(seed):
    return mlp(seed, hidden=16, norm=True)


def built(algorithm, net, features=FEATURES, **changes):
    """A client whose exempt tensors are those of an experiment."""
    one = client("0", algorithm, personal=net, shared=net, **changes)
    one.boundary_exempt = find_exempt_tensors(one.nets, one.shared, torch.rand(2, features))
    return one


def test_equal_initial_batchnorm_tensors_are_not_exempt_from_the_boundary():
    assert built(FML(**E).algorithm(), normed).boundary_exempt == frozenset()
    leaking = Leak(what="statistics", **E).algorithm()
    with pytest.raises(Refused, match=r"its bytes are those of '1[.]weight' of its personal net"):
        federation(leaking, [built(leaking, normed)], start=server(normed), rounds=1)
    honest = FML(**E).algorithm()
    assert federation(honest, [built(honest, normed)], start=server(normed))


def seeded(make):
    """A function seed -> network with random weights of that seed."""

    def build(seed):
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            return make()

    return build


class Late(torch.nn.Module):
    """Declares the norm of its input last."""

    def __init__(self):
        super().__init__()
        self.head = torch.nn.Linear(20, 3)
        self.norm = torch.nn.BatchNorm1d(20)

    def forward(self, x):
        return self.head(self.norm(x))


def plain():
    return torch.nn.Sequential(torch.nn.BatchNorm1d(20, track_running_stats=False), torch.nn.Linear(20, 3))


INPUTS = {  # statistics of the input are the same in both nets by right, wherever they are declared
    "first": (
        lambda: torch.nn.Sequential(torch.nn.BatchNorm1d(20), torch.nn.Linear(20, 3)),
        {"0.running_mean", "0.running_var"},
    ),
    "declared last": (Late, {"norm.running_mean", "norm.running_var"}),
    "none": (plain, set()),
}


@pytest.mark.parametrize(("make", "expected"), INPUTS.values(), ids=INPUTS)
def test_statistics_of_the_input_are_exempt(make, expected):
    algorithm, net = FML(**E).algorithm(), seeded(make)
    x = torch.randn(20, 20, generator=torch.Generator().manual_seed(3))
    one = built(algorithm, net, 20, data={"private": Rows(x, torch.arange(20) % 3)})
    assert one.boundary_exempt == expected
    got = federation(algorithm, [one], start=server(net), rounds=2)
    assert all(torch.equal(got[name], one.nets["personal"].state_dict()[name]) for name in expected)


def test_rows_of_zeros_do_not_make_a_hidden_norm_one_of_the_input():
    def hidden():
        convolution = torch.nn.Conv2d(1, 1, 3, padding=1, bias=False)
        return torch.nn.Sequential(convolution, torch.nn.BatchNorm2d(1), torch.nn.Flatten(), torch.nn.Linear(16, 3))

    nets = {"personal": seeded(hidden)(0), "meme": seeded(hidden)(1)}
    assert find_exempt_tensors(nets, tuple(nets["meme"].state_dict()), torch.zeros(2, 1, 4, 4)) == frozenset()


@pytest.mark.parametrize("weight", [0.5, 1.0])
def test_nets_that_begin_equal_may_go_on_so_in_what_begins_constant_too(weight):
    algorithm = FML(alpha=weight, beta=weight, **E).algorithm()
    one = client("0", algorithm, personal=lambda seed: normed(0), shared=normed)
    one.boundary_exempt = find_exempt_tensors(one.nets, one.shared, torch.rand(2, FEATURES))
    assert one.boundary_exempt == set(one.shared)
    got = federation(algorithm, [one], start=server(normed), rounds=1)
    assert torch.equal(got["1.weight"], one.nets["personal"].state_dict()["1.weight"])  # what was refused


@dataclass(frozen=True, kw_only=True)
class LossLeak(FML):
    """Tells weights as if they were losses."""

    def loss(self, nets, batch, const):
        weights = nets["personal"].params["0.weight"].flatten()
        return super().loss(nets, batch, const) | {f"w{i}": w for i, w in enumerate(weights[:5])}


def test_what_training_tells_is_declared_too():
    algorithm = LossLeak(**E).algorithm()
    events = []
    with pytest.raises(Refused, match="client '0' must not send 'w0': its phase or task declares only the names personal"):
        federation(algorithm, [client("0", algorithm)], events=events)
    assert not [e for e in events if isinstance(e, PhaseDone)]


class Talker(Classification):
    """A task whose scores hold more than scores."""

    def __init__(self, values):
        object.__setattr__(self, "values", values)

    def score(self, output, target):
        return self.values


@pytest.mark.parametrize(
    ("message", "sentence"),
    [
        ({"labels": 1.0}, "'labels': its phase or task declares only the names examples"),
        ({"recall": [0.0] * 12}, "a list of one a class, not list"),
        ({"accuracy": torch.zeros(3)}, "not Tensor"),
        ({"accuracy": "0, 1, 1"}, "not str"),
    ],
)
def test_what_an_evaluation_tells_is_declared_too(message, sentence):
    one = client("0", FML(**E).algorithm(), task=Talker(message))
    spec = EvalSpec("personal", "validation", "personal", "0", "validation")
    with pytest.raises(Refused, match=re.escape(sentence)):
        evaluate_client(one, (spec,), {}, 1, None)


def test_a_score_that_is_not_a_number_is_sent_as_none():
    """For example the correlation of constants: no log holds NaN, and the run continues."""
    talker = Talker({"accuracy": math.nan, "recall": [math.inf, 0.5, 1.0], "examples": 3})
    one = client("0", FML(**E).algorithm(), task=talker)
    (score,), _ = evaluate_client(one, (EvalSpec("personal", "validation", "personal", "0", "validation"),), {}, 1, None)
    assert score.values == {"accuracy": None, "recall": [None, 0.5, 1.0], "examples": 3}
