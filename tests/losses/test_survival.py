"""Survival, ordered classes, several numbers and missing targets: losses by hand and by torch, scores by lifelines and
scikit-learn.
"""

import math

import numpy as np
import pandas as pd
import pytest
import torch
import torch.nn.functional as F
from lifelines import CoxPHFitter, KaplanMeierFitter
from lifelines.utils import concordance_index
from sklearn.metrics import cohen_kappa_score, mean_absolute_error
from torch.distributions import Categorical, kl_divergence

from fedmutual import losses
from fedmutual.losses import Classification, Cox, MultiLabel, Ordinal, Regression, Segmentation, Survival
from fedmutual.scores import OF_HAZARDS, OF_RANKS, OF_RISKS, score_survival

HALF = torch.tensor(0.5)
TIMES = (1.0, 2.0, 4.0)


def draw(seed=0, rows=60):
    rng = np.random.default_rng(seed)
    x = rng.normal(size=rows)
    time = rng.exponential(2 * np.exp(-x)).clip(max=5).round(1)
    return x, torch.tensor(np.stack([time, (time < 5) & (rng.random(rows) < 0.8)], 1), dtype=torch.float32)


def compute_posterior(task, output):
    """The probabilities of an event in each interval and after the last, from those of no event up to each end."""
    survived = F.pad(task.answer(output), (1, 1), value=0.0)
    survived[..., 0] = 1
    return -survived.diff()


def test_outputs_of_zero_give_each_interval_one_probability():
    task = Survival().with_outputs(("1", "2", "4"))
    assert task.times == TIMES
    torch.testing.assert_close(compute_posterior(task, torch.zeros(2, 3)), torch.full((2, 4), 0.25))


def test_the_likelihood_of_hazards_by_hand():
    # events at 0.5 and 3 are in intervals 0 and 2; without an event at 2, two intervals are survived, and at 3 half of the
    # third more: (1/2)^(1/2) of its survival, as P(no event up to 4 | none up to 2) = 1/2
    target = torch.tensor([[0.5, 1], [3, 1], [2, 0], [3, 0], [9, 0], [9, 1]])
    expected = [math.log(4), math.log(4), math.log(2), math.log(2) + 0.5 * math.log(2), math.log(4), math.log(4)]
    task, output = Survival(times=TIMES), torch.zeros(1, 3)
    assert [task.fit(output, row[None]).item() for row in target] == pytest.approx(expected)
    assert task.fit(output.expand(6, 3), target).item() == pytest.approx(np.mean(expected)), "a mean over examples"


def test_the_divergence_of_hazards_is_that_of_the_times_of_the_event():
    task, (p, q) = (
        Survival(times=TIMES),
        torch.randn(2, 50, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0)),
    )
    expected = kl_divergence(*(Categorical(compute_posterior(task, z)) for z in (p, q))).mean()
    torch.testing.assert_close(task.diverge(p, q), expected)
    nothing = torch.tensor(0.0)
    personal, meme = task.mutual(q, p, torch.zeros(50, 2), nothing, nothing, 1.0)
    torch.testing.assert_close(personal, expected)
    torch.testing.assert_close(meme, task.diverge(q, p))


def test_the_partial_likelihood_is_that_of_lifelines():
    x, target = draw(rows=40)
    target[:, 0] += torch.arange(40) * 1e-3  # no ties, which lifelines treats by Efron's rule
    table = pd.DataFrame({"x": x, "time": target[:, 0], "event": target[:, 1]})
    fitted = CoxPHFitter().fit(table, "time", "event")
    output = torch.tensor(fitted.params_["x"] * (x - x.mean())).unsqueeze(1)
    events = target[:, 1].sum().item()
    assert Cox().fit(output, target).item() * events == pytest.approx(-fitted.log_likelihood_, rel=1e-6)
    assert Cox().fit(output + 7, target).item() == pytest.approx(Cox().fit(output, target).item()), (
        "a constant means nothing"
    )
    assert Cox().fit(output[:1], target[:1]).item() == 0, "a batch of one row teaches nothing"
    torch.testing.assert_close(Cox().diverge(output, output + 7), torch.tensor(0.0, dtype=torch.float64))


def test_the_concordance_is_that_of_lifelines():
    x, target = draw()
    output = torch.tensor(np.round(x, 1)).unsqueeze(1)  # with ties
    scores = Cox().score(output, target)
    assert tuple(scores) == OF_RISKS
    time, event = target.T.numpy()
    assert scores["concordance"] == pytest.approx(concordance_index(time, -output[:, 0].numpy(), event))
    # one rate for all intervals: then hazards order the rows at all times alike
    rate, task = torch.linspace(0.05, 0.5, 60)[:, None], Survival(times=(1.0, 2.0, 3.0, 4.0, 5.0))
    hazards = (1 - (-rate).exp()).logit() + torch.arange(5, 0, -1).log()
    scores = task.score(hazards, target)
    assert tuple(scores) == OF_HAZARDS
    assert scores["concordance"] == pytest.approx(concordance_index(time, -rate[:, 0].numpy(), event))
    torch.testing.assert_close(task.answer(hazards), (-rate * torch.arange(1, 6)).exp())
    torch.testing.assert_close(
        task.compute_log_survival(hazards, torch.tensor([0.5, 2.25])), -rate * torch.tensor([0.5, 2.25])
    )


def test_the_calibration_is_the_observed_share_minus_the_predicted():
    _, target = draw(1)
    task = Survival(times=(1.0, 2.0, 40.0))
    observed = KaplanMeierFitter().fit(*target.T.numpy()).predict([1.0, 2.0]).tolist()
    differences = task.score(torch.zeros(60, 3), target)["calibration"]
    assert differences == [pytest.approx(observed[0] - 0.75), pytest.approx(observed[1] - 0.5), None], (
        "nobody is observed up to 40"
    )


def test_scores_without_a_pair_or_with_outputs_that_are_not_finite():
    _, target = draw()
    target[:, 1] = 0
    assert Cox().score(torch.zeros(60, 1), target)["concordance"] is None
    scores = score_survival(lambda t: torch.full((60, len(t)), torch.nan), target, math.nan, TIMES)
    assert scores == {"examples": 60, "loss": None, "concordance": None, "calibration": [None] * 3}


def test_cumulative_logits_are_those_of_the_probabilities():
    z = torch.randn(20, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    above = 1 - z.softmax(1).cumsum(1)[:, :-1]
    torch.testing.assert_close(losses.compute_cumulative_logits(z), above.logit())


def test_losses_of_ordered_classes_by_hand():
    # probabilities 1/2, 1/4, 1/4: P(y > 0) = 1/2, P(y > 1) = 1/4
    z = torch.tensor([[0.5, 0.25, 0.25]]).log()
    expected = [(math.log(2) + math.log(4 / 3)) / 2, (math.log(2) + math.log(4 / 3)) / 2, (math.log(2) + math.log(4)) / 2]
    assert [Ordinal().fit(z, torch.tensor([y])).item() for y in range(3)] == pytest.approx(expected)
    sharp = torch.tensor([[4.0, 0.0, 0.0]])
    near, far = (Ordinal().fit(sharp, torch.tensor([y])).item() for y in (1, 2))
    assert far > 1.5 * near, "a greater distance costs more"
    assert Ordinal().diverge(z, z).item() == pytest.approx(0, abs=1e-7)


def test_scores_of_ordered_classes_are_scikit_learns():
    rng = np.random.default_rng(0)
    z, y = torch.tensor(rng.normal(size=(50, 4))), torch.tensor(rng.integers(0, 4, 50))
    scores, predicted = Ordinal().score(z, y), z.argmax(1)
    assert tuple(scores) == OF_RANKS
    assert scores["quadratic_kappa"] == pytest.approx(cohen_kappa_score(y, predicted, weights="quadratic"))
    assert scores["mean_absolute_error"] == pytest.approx(mean_absolute_error(y, predicted))
    assert scores["accuracy"] == pytest.approx((y == predicted).double().mean().item())
    assert Ordinal().score(torch.eye(3)[[1, 1]], torch.tensor([1, 1]))["quadratic_kappa"] is None


@pytest.mark.parametrize("task", [Classification(), Ordinal()])
@pytest.mark.parametrize(("without", "accuracy"), [([0], 0.75), ([0, 1, 2, 3], 0.0)])
def test_there_is_an_accuracy_whatever_answers_are_finite(task, without, accuracy):
    """A server that chooses the weights would see which rows a network answers: only an accuracy is sent, or nothing."""
    z, y = 9 * torch.eye(3)[[0, 1, 2, 0]], torch.tensor([0, 1, 2, 0])
    z[without] = torch.nan
    scores = task.score(z, y)
    assert (scores["examples"], scores["accuracy"], scores["loss"]) == (4, accuracy, None)


def test_several_numbers_have_scores_of_their_own():
    task = Regression().with_outputs(("a", "b"))
    y = torch.tensor([[1.0, 10], [2, 30]])
    scores = task.score(y + torch.tensor([1.0, 4]), y)
    assert (task.outputs, tuple(scores)) == (2, task.tells)
    assert scores["output_mean_absolute_error"] == [1.0, 4.0]
    assert (scores["mean_absolute_error"], scores["loss"]) == (2.5, (1 + 16) / 2)
    assert task.fit(y + 1, y).item() == 1
    assert Regression().with_outputs(("a",)) == Regression()


def drop(y, rows):
    y = y.clone()
    y[rows] = torch.nan if y.is_floating_point() else -1
    return y


GENERATOR = torch.Generator().manual_seed(0)
BATCHES = {
    "classification": (Classification, torch.randn(6, 3, generator=GENERATOR), torch.tensor([0, 1, 2, 0, 1, 2])),
    "ordinal": (Ordinal, torch.randn(6, 3, generator=GENERATOR), torch.tensor([0, 1, 2, 0, 1, 2])),
    "regression": (Regression, torch.randn(6, 1, generator=GENERATOR), torch.randn(6, generator=GENERATOR)),
    "multilabel": (MultiLabel, torch.randn(6, 3, generator=GENERATOR), torch.ones(6, 3)),
    "segmentation": (
        Segmentation,
        torch.randn(6, 2, 2, 2, 2, generator=GENERATOR),
        torch.ones(6, 2, 2, 2, dtype=torch.int64),
    ),
}


@pytest.mark.parametrize("name", BATCHES)
def test_a_missing_target_teaches_by_the_other_network_alone(name):
    kind, z, y = BATCHES[name]
    task, part = kind(missing=True), drop(y, [1, 4])
    labelled = [0, 2, 3, 5]
    torch.testing.assert_close(task.fit(z, part), kind().fit(z[labelled], y[labelled]))
    assert "missing=True" in repr(task)
    assert "missing" not in repr(kind())
    z = z.clone().requires_grad_()
    alone = task.fit(z, drop(y, slice(None)))
    (slope,) = torch.autograd.grad(alone, z)
    assert alone.item() == 0
    assert not slope.any()
    other = torch.randn(z.shape, generator=torch.Generator().manual_seed(1))
    (slope,) = torch.autograd.grad(task.mutual(z, other, part, HALF, HALF, 1.0)[0], z)
    assert slope[1].any()
    with_all = torch.func.vmap(task.fit)(z.detach().unsqueeze(1), part.unsqueeze(1))  # as each row of a noised step
    assert with_all.isfinite().all()
    assert not with_all[[1, 4]].any()
    scores, of_labelled = task.score(z.detach(), part), kind().score(z.detach()[labelled], y[labelled])
    for name in scores.keys() - {"examples"}:
        assert scores[name] == pytest.approx(of_labelled[name])
    assert kind().score(z.detach(), drop(y, slice(None)))["loss"] is None
