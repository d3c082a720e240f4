"""Images with channels last in memory, and fused optimisers: the numbers of the plain layout and the plain optimiser."""

from dataclasses import dataclass

import pytest
import torch
from torch import nn

from fedmutual.algorithms import Independent
from fedmutual.errors import RunError
from fedmutual.rundir.checkpoint import load_client, save_client
from fedmutual.stepping import work
from fedmutual.tensor_files import read_tensors, write_tensors
from toy import Rows, at, client, difference, weights

E = {"local_epochs": 1, "batch_size": 8}


def net(seed):
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 5, 3), nn.Flatten(), nn.Linear(80, 3)).double()


def rows():
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(24, 3, 8, 8, generator=generator, dtype=torch.float64)
    return Rows(x, torch.randint(3, (24,), generator=generator))


def make_client(kind, layout, fused):
    algorithm = Independent(**E).algorithm()
    made = client("0", algorithm, personal=net)
    made.nets["personal"].to(memory_format=layout)
    made.data = {"private": rows()}
    made.optimizers = {"personal": kind(made.nets["personal"].parameters(), fused=fused)}
    return made


KINDS = {
    "sgd": lambda p, fused: torch.optim.SGD(p, momentum=0.9, weight_decay=5e-4, fused=fused),
    "amsgrad": lambda p, fused: torch.optim.Adam(p, weight_decay=5e-4, amsgrad=True, fused=fused),
}


@dataclass(frozen=True, kw_only=True)
class Plain(Independent):
    """Its gradients come in the plain layout, as an algorithm's edit may make them."""

    def edit(self, grads, memory):
        return {k: g.contiguous() for k, g in grads.items()}, memory


@pytest.mark.parametrize("phase", [Independent(**E), Plain(**E)], ids=["as they come", "edited"])
@pytest.mark.parametrize("kind", KINDS)
def test_layout_and_fused_optimiser_change_nothing(kind, phase, tmp_path):
    plain = make_client(KINDS[kind], torch.contiguous_format, fused=False)
    ours = make_client(KINDS[kind], torch.channels_last, fused=True)
    assert not ours.nets["personal"][0].weight.is_contiguous()
    for round in range(3):
        work(phase, plain, {}, at(round))
        work(phase, ours, {}, at(round))
        save_client(ours, tmp_path / "c.safetensors", {"run": "r", "round": "1"})
        ours = make_client(KINDS[kind], torch.channels_last, fused=True)  # as after a crash
        load_client(ours, tmp_path / "c.safetensors", "r", 1)
    assert difference(weights(plain.nets["personal"]), weights(ours.nets["personal"])) < 1e-12


def rename(old, new):
    return lambda state: {new if k == old else k: v for k, v in state.items()}


@pytest.mark.parametrize(
    "damage",
    [
        rename("optimizer.personal.0.step", "optimizer.personal.first.step"),
        rename("optimizer.personal.0.step", "optimizer.personal.0.stop"),
        rename("optimizer.personal.0.step", "optimizer.personal.9.step"),
        lambda state: {k: v for k, v in state.items() if k != "optimizer.personal.1.exp_avg"},
        lambda state: state | {"optimizer.personal.0.exp_avg": torch.zeros(3)},
        lambda state: state | {"optimizer.personal.0.step": torch.zeros(2)},
    ],
    ids=["no number", "other name", "no parameter", "missing", "other shape", "no scalar"],
)
def test_an_optimiser_state_that_is_damaged_is_named(damage, tmp_path):
    made, path = make_client(KINDS["amsgrad"], torch.contiguous_format, fused=False), tmp_path / "c.safetensors"
    work(Independent(**E), made, {}, at(0))
    save_client(made, path, {"run": "r", "round": "1"})
    state, about = read_tensors(path)
    write_tensors(path, damage(state), about)
    fresh = make_client(KINDS["amsgrad"], torch.contiguous_format, fused=False)
    before = {k: v.clone() for k, v in fresh.nets["personal"].state_dict().items()}
    with pytest.raises(RunError, match=r"c\.safetensors: .*client '0'"):
        load_client(fresh, path, "r", 1)
    assert all(torch.equal(v, before[k]) for k, v in fresh.nets["personal"].state_dict().items())
