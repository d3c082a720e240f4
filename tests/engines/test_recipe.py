"""What a client's recipe does to its steps, by hand: early stopping, loss scaling, accumulation; the words in Python."""

import itertools

import pytest
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import fedmutual
from fedmutual import Site
from fedmutual.algorithms import FML, FedAvg, Independent
from fedmutual.config.methods import make_optimizer
from fedmutual.config.schema import OptimizerConfig
from fedmutual.core import At, Recipe
from fedmutual.events import Finished, RoundDone
from fedmutual.rundir.record_files import read_records
from fedmutual.rundir.schema import LedgerLine
from fedmutual.stepping import work
from toy import Rows, client, weights

E = {"local_epochs": 1, "batch_size": 8}


def test_a_client_without_progress_stops_and_sends_its_last_meme():
    """With a rate of 0 the personal network never improves: its loss counts from round 2 on, and round 4 has no step."""
    phase = FML(**E)
    ours = client("0", phase.algorithm(), n=24)
    ours.data, ours.rate, ours.recipe = {**ours.data, "validation": ours.data["private"]}, 0.0, Recipe(patience=2)
    received = weights(ours.nets["meme"])
    steps, replies = [], []
    for round in range(6):
        reply, _ = work(phase, ours, {k: v + round for k, v in received.items()}, At(0, round, 6))
        steps.append(ours.work.steps)
        replies.append(next(iter(reply.values())).clone())
    first = next(iter(received.values()))
    assert steps == [3, 3, 3, 0, 0, 0]
    for round, reply in enumerate(replies):
        torch.testing.assert_close(reply, first + min(round, 2))


@pytest.mark.parametrize(
    ("scales", "stopped"), [((torch.inf, 1), None), ((torch.inf, torch.inf), 2), ((1, torch.nan), 2), ((1, 1), None)]
)
def test_a_loss_that_is_not_finite_is_no_progress_and_the_first_stops_no_client(scales, stopped):
    """A client that takes part from round 2 on has no meme of its own in that round."""
    phase = FedAvg(**E)
    ours = client("0", phase.algorithm(), n=24)
    x, y = next(iter(ours.data["private"].rows([torch.arange(24)])))
    inbox, ours.recipe = weights(ours.nets["meme"]), Recipe(patience=1)
    for round, scale in enumerate(scales, 1):
        ours.data = {**ours.data, "validation": Rows(x * scale, y)}
        inbox = {k: inbox[k].clone() for k in ours.shared}
        inbox, _ = work(phase, ours, inbox, At(0, round, 9))
    assert ours.recipe_state.get("stopped") == stopped


def test_patience_changes_nothing_before_it_stops_a_client():
    results = []
    for patience in (None, 100):
        phase = FedAvg(**E)
        ours = client("0", phase.algorithm(), n=24)
        ours.data, ours.recipe = {**ours.data, "validation": ours.data["private"]}, Recipe(patience=patience)
        inbox = weights(ours.nets["meme"])
        for round in range(3):
            inbox, _ = work(phase, ours, inbox, At(0, round, 3))
            inbox = {k: inbox[k].clone() for k in ours.shared}
        results.append(inbox)
    assert all(torch.equal(results[0][k], results[1][k]) for k in results[0])


def test_batches_of_a_step_are_one_large_batch():
    phases = [Independent(local_epochs=2, batch_size=size) for size in (8, 24)]
    ours = [client("0", phase.algorithm(), n=24) for phase in phases]
    ours[0].recipe = Recipe(accumulate=3)
    losses = [work(phase, one, {}, At(0, 0, 1))[1] for phase, one in zip(phases, ours, strict=True)]
    assert ours[0].work.steps == ours[1].work.steps == 2
    assert ours[0].work.forwards == 6
    torch.testing.assert_close(losses[0], losses[1])
    torch.testing.assert_close(weights(ours[0].nets["personal"]), weights(ours[1].nets["personal"]))


def test_the_loss_scale_falls_until_float16_can_hold_the_gradients():
    phase, before = Independent(local_epochs=2, batch_size=8), {}
    trained = []
    for precision, scale in ((None, None), (torch.float16, 2.0**16), (torch.float16, 2.0**30)):
        ours = client("0", phase.algorithm(), n=24)
        before, ours.precision = weights(ours.nets["personal"]), precision
        if scale is not None:
            ours.recipe_state["scale"] = torch.tensor(scale)
        work(phase, ours, {}, At(0, 0, 1))
        trained.append(weights(ours.nets["personal"]))
    torch.testing.assert_close(trained[1], trained[0], rtol=0.02, atol=0.002)
    assert ours.recipe_state["scale"] == 2.0**24, "halved in each of 6 steps"
    assert all(torch.equal(trained[2][k], before[k]) for k in before), "steps that overflow are left out"


X, Y = load_digits(return_X_y=True)
DATA = TensorDataset(torch.from_numpy(X[:200] / 16).float().view(-1, 1, 8, 8), torch.from_numpy(Y[:200]))


def run(folder, **arguments):
    sites = {name: Site(train=arguments.pop(name, DATA)) for name in ("north", "south")}
    arguments = {"rounds": 2, "local_epochs": 1, "device": "cpu", "progress": False, "batch_size": 40} | arguments
    run = fedmutual.federate(sites, "fml", shared="mlp", out=folder, **arguments)
    return run, [line.steps for line in read_records(run.folder / "ledger.jsonl", LedgerLine)]


def read_scores(run):
    return run.history()["value"].tolist()


def test_the_words_of_the_file_in_python(tmp_path):
    events = []
    by_name, _ = run(
        tmp_path / "a", optimizer="NAdam", settings={"training.label_smoothing": 0.1}, observers=[events.append]
    )
    loss = torch.nn.CrossEntropyLoss(label_smoothing=0.1)
    by_object, _ = run(tmp_path / "b", optimizer=torch.optim.NAdam, loss=loss)
    assert read_scores(by_name) == pytest.approx(read_scores(by_object), rel=1e-3)
    assert sum(isinstance(e, RoundDone) for e in events) == 2
    assert isinstance(events[-1], Finished)


def test_a_dataloader_gives_its_batch_size(tmp_path):
    with pytest.warns(fedmutual.errors.RemarkWarning, match="site 'north': its DataLoader has batches of 20"):
        _, steps = run(tmp_path / "a", north=DataLoader(DATA, batch_size=20), rounds=1)
    assert steps == [8, 4], "160 rows each"


def test_a_loss_that_fails_is_named(tmp_path):
    with pytest.raises(fedmutual.UserError, match=r"key 'training.loss': .* returned a tensor"):
        run(tmp_path / "a", loss=lambda output, target: output)


@pytest.mark.parametrize("engine", ["inprocess", "stacked"])
def test_a_loss_without_a_gradient_is_refused(tmp_path, engine):
    with pytest.raises(fedmutual.UserError, match=r"key 'training.loss': .* returned a tensor without a gradient"):
        run(tmp_path / "a", engine=engine, loss=lambda output, target: (output.argmax(1) != target).float().mean())


def test_a_loss_of_zero_without_a_gradient_leaves_a_batch_out(tmp_path):
    """As of a batch without labels or events, which rows decide: no error may depend on it."""
    calls = itertools.count()

    def leave_out_each_second(output, target):
        return torch.tensor(0.0) if next(calls) % 2 else nn.functional.cross_entropy(output, target)

    run(tmp_path / "a", engine="inprocess", loss=leave_out_each_second, rounds=1)
    assert next(calls) > 2


@pytest.mark.parametrize(("name", "why"), [("math:pi", "is not a callable"), ("builtins:dict", "no signature")])
def test_an_optimiser_that_cannot_be_made_is_named(name, why):
    with pytest.raises(fedmutual.UserError, match=f"key 'optimizer.name': '{name}' cannot be made: .*{why}"):
        make_optimizer(OptimizerConfig(name=name), None, [torch.zeros(1, requires_grad=True)])


@pytest.mark.parametrize("every", [1, 2])
def test_a_federation_without_progress_ends_and_stays_ended(tmp_path, every):
    """With a rate of 0 no evaluation is better than the first: of two further ones the second ends the run."""
    ended, steps = run(tmp_path / "a", rounds=9, lr=0.0, settings={"records.patience": 2, "records.evaluate_every": every})
    assert (ended.round, ended.finished, len(steps)) == (3 * every, True, 2 * 3 * every)
    resumed, steps = run(
        tmp_path / "a", rounds=10, lr=0.0, settings={"records.patience": 2, "records.evaluate_every": every}, resume=True
    )
    assert (resumed.round, len(steps)) == (3 * every, 2 * 3 * every)
    assert f"finished {3 * every} rounds" in (resumed.folder / "log.txt").read_text().splitlines()[-1]
