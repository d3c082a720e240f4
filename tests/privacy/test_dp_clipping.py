"""The clipped sum: a plain loop's, moved by one record by its bound at most, and by a record elsewhere not at all."""

import pytest
import torch
from torch import nn

from fedmutual.algorithms import FML, FedAvg, FedProx, Independent
from fedmutual.core import Net
from fedmutual.cpu import flush_denormals
from fedmutual.privacy import clipping, layers
from fedmutual.privacy.clipping import compute_clipped_sum
from fedmutual.stepping import trainable
from noised import Images, convolutions, distance, job, looped, norm, row_gradients
from toy import CLASSES, FEATURES, Spare, at, client, mlp, rows, server

C = 0.5
CONST = {"alpha": torch.tensor(0.3), "beta": torch.tensor(0.4)}


def batch(n=12, seed=5):
    """A batch, one row of which has a gradient far above the bound, and one below it."""
    data = rows(seed, n)
    x = data.x.clone()
    x[0], x[1] = 50 * x[0], 0.001 * x[1]
    return x, data.y


def images(n=10):
    rng = torch.Generator().manual_seed(2)
    return torch.randn(n, 1, 8, 8, generator=rng), torch.randint(0, 3, (n,), generator=rng)


class Mixed(nn.Module):
    """A network that is no `Sequential`, with GroupNorm and a layer that is used twice."""

    def __init__(self):
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(4)
            self.first, self.norm, self.last = nn.Linear(FEATURES, 8), nn.GroupNorm(2, 8), nn.Linear(8, CLASSES)
            self.again = nn.Linear(8, 8)

    def forward(self, x):
        x = self.norm(torch.relu(self.first(x)))
        return self.last(self.again(torch.relu(self.again(x))))


CASES = {
    "mlp": (Independent(), lambda: {"personal": mlp(1)}, {}, batch),
    "both networks together": (FML(), lambda: {"personal": mlp(1), "meme": mlp(2, hidden=5)}, CONST, batch),
    "convolutions": (FedAvg(), lambda: {"meme": convolutions()}, {}, images),
    "convolutions of an unknown class": (FedAvg(), lambda: {"meme": convolutions(Images)}, {}, images),
    "a network that is no Sequential": (Independent(), lambda: {"personal": Mixed()}, {}, batch),
    "a frozen layer and an unused one": (Independent(), lambda: {"personal": Spare()}, {}, batch),
    "one of each kind": (FML(), lambda: {"personal": Mixed(), "meme": mlp(2)}, CONST, batch),
}


@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_clipped_sum_is_that_of_a_plain_loop(case):
    phase, make, const, draw = CASES[case]
    nets, taken = make(), draw()
    grads = row_gradients(phase, nets, taken, const)
    norms = torch.sqrt(sum(g.flatten(1).square().sum(1) for g in grads.values()))
    middle = float(norms.median())  # half of the rows are clipped, and half are not
    clipped, terms = compute_clipped_sum(*job(phase, nets, const, middle), taken, None)
    expected = looped(grads, middle)
    assert distance(clipped, expected) < 1e-4 * norm(expected)
    batch_losses = phase.loss({n: Net(m, trainable(m)) for n, m in nets.items()}, taken, const)
    for name, value in terms.items():
        torch.testing.assert_close(value, batch_losses[name].detach() * len(taken[0]))


def test_a_proximal_term_is_clipped_with_the_row_that_it_is_added_to():
    phase = FedProx(mu=0.7)
    fedprox_client = client("0", phase.algorithm())
    const = phase.begin(fedprox_client, server(), at())
    with torch.no_grad():
        fedprox_client.nets["meme"][0].weight.add_(0.3)
    clipped, terms = compute_clipped_sum(*job(phase, fedprox_client.nets, const, C), batch(), None)
    expected = looped(row_gradients(phase, fedprox_client.nets, batch(), const), C)
    assert distance(clipped, expected) < 1e-4 * norm(expected)
    assert terms["proximal"] > 0


def test_layers_without_a_rule_go_by_the_gradient_of_every_row():
    plain = {"meme": nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Sequential(nn.Dropout(), nn.Linear(4, 2)))}
    assert all(map(layers.is_plain, plain.values()))
    shared = nn.Linear(4, 4)
    without_rule = [
        nn.Sequential(nn.Linear(4, 4), nn.ReLU(inplace=True)),
        nn.Sequential(shared, nn.ReLU(), shared),
        nn.Sequential(nn.Conv2d(2, 2, 3, groups=2)),
        nn.Sequential(nn.Conv2d(2, 2, 3, padding="same")),
        nn.Sequential(nn.GroupNorm(2, 4)),
        nn.Sequential(nn.Flatten(0)),
        nn.utils.parametrizations.weight_norm(nn.Linear(4, 4)),
    ]
    tied = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    tied[1].weight = tied[0].weight
    hooked = nn.Sequential(nn.Linear(4, 4))
    hooked[0].register_forward_hook(lambda module, taken, given: 2 * given)
    assert not any(map(layers.is_plain, [*without_rule, tied, hooked]))


@pytest.mark.parametrize("memory", [1, 4 * 83 * 3], ids=["row by row", "three rows at once"])
def test_how_many_rows_are_held_at_once_changes_nothing(memory, monkeypatch):
    nets, taken, codes = {"personal": Mixed()}, batch(), torch.tensor([0, 1, 1, 2, 0, 3, 3, 3, 3, 4, 0, 5])
    expected_sums = [compute_clipped_sum(*job(Independent(), nets, clip=C), taken, units)[0] for units in (None, codes)]
    monkeypatch.setattr(clipping, "MEMORY", memory)
    for units, expected in zip((None, codes), expected_sums, strict=True):
        assert distance(compute_clipped_sum(*job(Independent(), nets, clip=C), taken, units)[0], expected) < 1e-5


def test_the_gradient_sum_of_a_group_is_clipped():
    nets, taken, codes = {"personal": mlp(1)}, batch(), torch.tensor([4, 1, 1, 2, 4, 3, 3, 3, 3, 4, 0, 5])
    clipped, _ = compute_clipped_sum(*job(Independent(), nets, clip=C), taken, codes)
    grads = row_gradients(Independent(), nets, taken, {})
    expected = looped(grads, C, codes)
    assert distance(clipped, expected) < 1e-4 * norm(expected)
    assert distance(clipped, looped(grads, C)) > 0.1 * C
    without = codes != 3
    fewer, _ = compute_clipped_sum(*job(Independent(), nets, clip=C), tuple(t[without] for t in taken), codes[without])
    assert distance(clipped, fewer) <= C


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("scale", [1e-3, 1.0, 1e6], ids="{:g}".format)
def test_one_record_moves_the_sum_by_its_bound_at_most(case, scale):
    phase, make, const, draw = CASES[case]
    nets, (x, y) = make(), draw()
    x = x.clone()
    x[3] *= scale
    other_x, other_y = x.clone(), y.clone()
    other_x[3], other_y[3] = -x[3].flip(0), (y[3] + 1) % 3
    is_kept = torch.arange(len(x)) != 3
    original, replaced, removed = (
        compute_clipped_sum(*job(phase, nets, const, C), taken, None)[0]
        for taken in ((x, y), (other_x, other_y), (x[is_kept], y[is_kept]))
    )
    added = [distance(sums, removed) for sums in (original, replaced)]
    assert max(added) <= C
    assert distance(original, replaced) <= 2 * C
    if scale > 1:
        assert max(added) > 0.99 * C  # the bound is reached: the test can tell


@pytest.mark.parametrize("case", ["mlp", "a network that is no Sequential"])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), 1e38])
def test_a_record_without_a_finite_gradient_adds_nothing(case, value):
    phase, make, const, draw = CASES[case]
    nets, (x, y) = make(), draw()
    bad = x.clone()
    bad[3] = value
    is_kept = torch.arange(len(x)) != 3
    clipped, _ = compute_clipped_sum(*job(phase, nets, const, C), (bad, y), None)
    expected, _ = compute_clipped_sum(*job(phase, nets, const, C), (x[is_kept], y[is_kept]), None)
    assert all(g.isfinite().all() for g in clipped.values())
    assert distance(clipped, expected) <= C
    if value != 1e38:
        assert distance(clipped, expected) < 1e-6


STEPS, RATE = 60, 0.2


@pytest.mark.parametrize("width", [32, "each row"])
@pytest.mark.parametrize(("slope", "size"), [(1e-19, 1.6e19), (1e-20, 1.8e19), (1e18, 1e-19)])
def test_weights_whose_squares_leave_the_range_of_float32_do_not_lift_the_bound(slope, size, width):
    """A server chooses the weights: |d|^2 below 1.2e-38 was zero, so that a gradient |d| |a| of 45 C was not clipped."""
    hidden = 32
    net = nn.Sequential(
        nn.Linear(8, hidden), nn.ReLU(), nn.Linear(hidden, hidden, bias=slope < 1), nn.ReLU(), nn.Linear(hidden, 10)
    )
    with torch.no_grad():
        for p in net.parameters():
            p.zero_()
        net[0].weight[0] = size / 8
        (net[2].bias if slope < 1 else net[2].weight[:, 0]).fill_(1e-3 if slope < 1 else 1e17)
        net[4].weight[3] = slope if slope < 1 else 1e17
    with flush_denormals():
        units = None if width == 32 else torch.zeros(1, dtype=torch.int64)
        sums, _ = compute_clipped_sum(*job(FedAvg(), {"meme": net}, {}, C), (torch.ones(1, 8), torch.tensor([3])), units)
    assert norm(sums) <= C


@pytest.mark.parametrize("size", [1e3, 1e6, 1e12])
def test_a_convolution_whose_positions_cancel_each_other_is_clipped_with_its_rounding(size):
    net = nn.Sequential(nn.Conv2d(1, 4, 1, bias=False), nn.Flatten(), nn.Linear(4 * 64, 10, bias=False))
    weight = torch.randn(10, 4, 64, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        net[0].weight.zero_()
        net[2].weight.copy_((weight - weight.mean(2, keepdim=True)).flatten(1))
    x = size + torch.rand(3, 1, 8, 8, generator=torch.Generator().manual_seed(1))
    for row in range(3):
        taken = x[row : row + 1], torch.tensor([3])
        sums, _ = compute_clipped_sum(*job(FedAvg(), {"meme": net}, {}, C), taken, None)
        assert norm(sums) == pytest.approx(C, rel=1e-3)
        assert norm(sums) <= C


@pytest.mark.parametrize("setting", ["meme", "both"])
def test_batches_without_the_record_move_by_exactly_nothing(setting):
    """ProxyFL's loop: two worlds, one of which holds a mislabelled record; what is released is the same in both so far."""
    sums, _ = two_worlds(setting)
    without, holding = ([moved for held, moved in sums if held is is_present] for is_present in (False, True))
    assert len(without) > 20
    assert len(holding) > 5
    assert max(without) == 0.0
    assert 0 < max(holding) <= 2 * C


def test_noise_on_the_meme_alone_would_not_hold():
    """The measurement above, of a meme that a network without noise teaches: it fails there, so it can fail."""
    _, taught = two_worlds("meme", beta=0.5)
    assert max(moved for held, moved in taught if not held) > 0.05 * C


def two_worlds(setting, beta=1.0):
    """The distance of the sums of two worlds at each step, and whether its batch holds the record: as ours are taken, and as
    they would be if the loss saw the personal network."""
    phase, const = FML(), {"alpha": torch.tensor(0.5), "beta": torch.tensor(beta)}
    data, rng = rows(1, 60), torch.Generator().manual_seed(8)
    labels = [data.y, data.y.clone()]
    labels[1][7] = (labels[1][7] + 1) % CLASSES
    worlds = [{"personal": mlp(1), "meme": mlp(2)} for _ in labels]
    noised = ("meme",) if setting == "meme" else ("personal", "meme")
    optimizers = [torch.optim.SGD(w["personal"].parameters(), lr=0.3, momentum=0.9) for w in worlds]
    ours, taught = [], []
    for _ in range(STEPS):
        index = (torch.rand(60, generator=rng) < RATE).nonzero()[:, 0]
        silent = tuple(n for n in worlds[0] if n not in noised)
        clipped_sums, naive, released = [], [], {}
        for nets, y in zip(worlds, labels, strict=True):
            taken = data.x[index], y[index]
            noised_nets = {n: nets[n] for n in noised}
            clipped_sums.append(compute_clipped_sum(*job(phase, noised_nets, const, C, silent), taken, None)[0])
            grads = row_gradients(phase, nets, taken, const)
            naive.append(looped({k: g for k, g in grads.items() if k.startswith("meme.")}, C))
        held = bool((index == 7).any())
        ours.append((held, distance(*clipped_sums)))
        taught.append((held, distance(*naive)))
        released = {k: g + 0.3 * torch.randn(g.shape, generator=rng, dtype=g.dtype) for k, g in clipped_sums[0].items()}
        for nets, y, optimizer in zip(worlds, labels, optimizers, strict=True):
            with torch.no_grad():
                for n in noised:
                    for k, p in nets[n].named_parameters():
                        p -= 0.1 * released[f"{n}.{k}"].to(p)
            if setting == "meme":
                loss = nn.functional.cross_entropy(nets["personal"](data.x[index]), y[index])
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
    return ours, taught
