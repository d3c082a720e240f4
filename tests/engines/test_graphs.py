"""Steps of a stack as graphs. A traced program stands in for a CUDA graph: both run on the tensors of their capture."""

from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._pytree import tree_leaves

import fedmutual
from fedmutual.algorithms import FedAvg
from fedmutual.engines import select
from fedmutual.engines.graphs import Graphs
from fedmutual.engines.stacked import Stacked, Stacker
from fedmutual.errors import ConfigError
from fedmutual.federation.build import check_experiment
from kills import tensors
from log_lines import read_scores
from toy import at, client, difference, server


class Recorder:
    """Captures work as a program of torch's operations, and counts captures and replays."""

    def __init__(self):
        self.captures = self.replays = 0
        self.is_capturing = False

    def __call__(self, work):
        results = []
        self.is_capturing = True
        program = make_fx(
            lambda: results.append(work()) or [t for t in tree_leaves(results[0]) if isinstance(t, torch.Tensor)]
        )()
        self.is_capturing = False
        self.captures += 1
        fixed = [t for t in tree_leaves(results[0]) if isinstance(t, torch.Tensor)]
        first = [True]  # tracing has run the work once, and a CUDA capture runs nothing

        def replay():
            self.replays += 1
            if first:
                first.clear()
            else:
                with torch.no_grad():  # a graph knows no autograd, and writes to the tensors of its capture
                    for leaf, value in zip(fixed, program(), strict=True):
                        leaf.copy_(value)
            return results[0]

        return replay


RATES = {"start": 0.02, "end": 0.005, "shape": "linear"}
CASES = {
    "fml with sgd": {},
    "adam with a rate of each round": {"optimizer.name": "adam", "optimizer.lr": RATES},
    "fedprox": {"algorithm.name": "fedprox"},
    "accumulated batches": {"training.accumulate": 2},
    "clipped gradients": {"training.clip_norm": 0.5},
    "half of the clients": {"engine.participation": 0.5},
    "half of the clients with adam": {"engine.participation": 0.5, "optimizer.name": "adam"},
    "clients of unequal size": {"partition.examples": None},
    "batch norm": {"data.size": [16, 16], "model.shared": "lenet5-bn", "model.personal": ["lenet5-bn"]},
}


@pytest.mark.long
@pytest.mark.parametrize("changes", CASES.values(), ids=CASES)
def test_replayed_steps_have_the_bits_of_steps(small, monkeypatch, changes):
    config, recorder = fedmutual.load_config(small, **{"engine.name": "stacked", "rounds": 3, **changes}), Recorder()
    plain, step = fedmutual.run(config, "plain").folder, torch.optim.Adam.step

    def take_step(optimizer):
        """As torch does where a GPU captures."""
        if recorder.is_capturing and not all(group["capturable"] for group in optimizer.param_groups):
            raise RuntimeError("Attempting CUDA graph capture of step(), but param_groups' capturable is False")
        return step(optimizer)

    monkeypatch.setattr(torch.optim.Adam, "step", take_step)
    monkeypatch.setattr(select, "make_stacker", lambda configs, obstacle: Stacker(capture=recorder))  # engine.graphs
    ours = fedmutual.run(config, "graphs").folder
    assert difference(tensors(ours), tensors(plain)) == 0.0
    assert read_scores(ours) == read_scores(plain)
    is_captured = recorder.replays > recorder.captures > 0
    is_refused = "engine.participation" in changes and changes.get("optimizer.name") == "adam"
    assert is_captured == (not is_refused), "Adam's step counts are of all clients"


def test_each_shape_is_captured_once_and_read_from_its_inputs():
    recorder, state = Recorder(), torch.zeros(())
    graphs = Graphs([], recorder)

    def work(x):
        state.add_(x.sum())
        return {"double": 2 * x, "name": "x"}

    results = [graphs.run("work", work, torch.full((2,), float(n))) for n in (1, 2, 3, 4)]
    graphs.run("work", work, torch.ones(3))
    assert [r["double"].tolist() for r in results] == [[2, 2], [4, 4], [6, 6], [8, 8]], "results are not overwritten"
    assert state == 2 * (1 + 2 + 3 + 4) + 3
    assert (recorder.captures, recorder.replays) == (1, 3)


def test_an_input_whose_elements_share_memory_is_captured():
    """As vmap returns a value of an algorithm's memory that is equal for all clients."""
    recorder = Recorder()
    graphs = Graphs([], recorder)
    results = [graphs.run("work", lambda x: 2 * x, torch.tensor(float(n)).expand(3)).tolist() for n in (1, 2, 3)]
    assert (results, recorder.captures) == ([[2.0] * 3, [4.0] * 3, [6.0] * 3], 1)


def test_work_that_cannot_be_captured_runs_as_it_is():
    remarks = []

    def refuse(work):
        raise RuntimeError("operation not permitted when stream is capturing\nmore")

    graphs = Graphs(remarks, refuse)
    results = [graphs.run("work", lambda x: x + 1, torch.tensor(n)).item() for n in (1, 2, 3, 4)]
    assert results == [2, 3, 4, 5]
    assert remarks == [
        "engine.graphs has no effect here: a step cannot be captured (operation not permitted when stream is capturing)"
    ]


def test_graphs_that_were_not_launched_for_long_are_forgotten(monkeypatch):
    """A round that draws its clients may need graphs that no other round needs: so their number has a bound."""
    monkeypatch.setattr("fedmutual.engines.graphs.MOST_GRAPHS", 2)
    recorder = Recorder()
    graphs = Graphs([], recorder)
    for key, captures in zip("aabbacccab", (0, 1, 1, 2, 2, 2, 3, 3, 3, 3), strict=True):  # the first c forgets b, not a
        graphs.run(key, lambda x: x + 1, torch.ones(()))
        assert recorder.captures == captures
    assert len(graphs._replays) == 2


def test_work_that_cannot_be_captured_is_told_once():
    remarks = []

    def refuse(work):
        raise RuntimeError("operation not permitted when stream is capturing")

    for key in ("full batches", "last batches"):
        graphs = Graphs(remarks, refuse)
        for _ in range(2):
            graphs.run(key, lambda x: x + 1, torch.ones(()))
    assert len(remarks) == 1


def test_a_memory_whose_names_are_in_another_order_is_not_mixed_up():
    """The first step of a phase has them as `begin` makes them, later steps as `edit` returns them."""

    @dataclass(frozen=True, kw_only=True)
    class Turned(FedAvg):
        def begin(self, client, inbox, at):
            client.memory = {"added": torch.tensor(1.0), "sum": torch.tensor(0.0)}
            return super().begin(client, inbox, at)

        def edit(self, grads, memory):
            return grads, {"sum": memory["sum"] + memory["added"], "added": memory["added"]}

    algorithm = Turned(local_epochs=1, batch_size=5).algorithm()
    clients, recorder = [client(str(i), algorithm, n=20) for i in range(2)], Recorder()
    for c in clients:
        c.optimizers["meme"] = torch.optim.SGD(c.nets["meme"].parameters(), lr=0.0, fused=True)
    engine = Stacked({c.id: c for c in clients}.get, [c.id for c in clients], Stacker(capture=recorder))
    (phase,) = algorithm.phases
    for round in range(2):
        list(engine.train(phase, at(round), {c.id: server() for c in clients}, phase.leaves(server())))
        assert [c.memory["sum"].item() for c in clients] == [4.0, 4.0]  # of four steps
    assert recorder.replays > 0


def test_graphs_need_a_gpu(small):
    with pytest.raises(ConfigError, match=r"engine\.graphs = true needs an NVIDIA GPU"):
        fedmutual.run(fedmutual.load_config(small, **{"engine.name": "stacked", "engine.graphs": True}), "run")


def test_graphs_are_of_the_first_gpu(small):
    """A capture on the stream of one GPU does not hold the work of another one, which then ran once and never again."""
    config = fedmutual.load_config(small, **{"engine.name": "stacked", "engine.graphs": True})
    with pytest.raises(ConfigError, match=r"takes the first GPU; set .* CUDA_VISIBLE_DEVICES"):
        check_experiment(SimpleNamespace(config=config, device=torch.device("cuda:1")))
