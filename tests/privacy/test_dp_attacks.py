"""Attacks on what leaves: a canary audit of the stated epsilon, and training records read out of a meme."""

import math

import pytest
import torch
from scipy import stats
from torch import nn

from fedmutual.algorithms import FedAvg
from fedmutual.privacy.accountant import NoisedSteps, compute_total_epsilon
from fedmutual.privacy.secret import derive_simulation_secret
from fedmutual.sites import contract as contracts
from fedmutual.sites.protocol import WORK, Order, pack_message, read_answer
from fedmutual.sites.site_runtime import SiteRuntime
from fedmutual.sites.site_settings import read_site_file
from fedmutual.stepping import work
from imprint import craft_model, flatten_rows, read_rows
from noised import protected
from toy import CLASSES, FEATURES, Rows, at, client, rows
from wards import COMMON, SITES, contract, site

pytestmark = pytest.mark.long

SIGMA, STEPS, BATCH, N, DELTA = 4.0, 4, 8, 16, 1e-5
TRAININGS = 100  # with the canary, and as many without


def linear(seed):
    """Logistic regression that begins at zero."""
    net = nn.Sequential(nn.Linear(FEATURES, CLASSES))
    nn.init.zeros_(net[0].weight)
    nn.init.zeros_(net[0].bias)
    return net


def trained(secret, canary, sigma):
    """How far a trained model moved along the canary's gradient. The canary alone has a value in the last feature."""
    data = rows(3, N)
    x, y = data.x.clone(), data.y.clone()
    x[:, -1] = 0
    x[0] = 0
    if canary:
        x[0, -1] = 1000.0
    algorithm = FedAvg(local_steps=STEPS, batch_size=BATCH, weighting="uniform").algorithm()
    one = client("0", algorithm, shared=linear, rate=1e-4)  # so small that the canary is never learned
    one.data = {"private": Rows(x, y)}
    one.optimizers = {"meme": torch.optim.SGD(one.nets["meme"].parameters(), lr=0.0)}
    one = protected(one, ["meme"], sigma, batch_size=BATCH, secret=secret)
    reply, _ = work(algorithm.phases[0], one, {k: v.clone() for k, v in one.nets["meme"].state_dict().items()}, at())
    direction = nn.functional.one_hot(y[0], CLASSES).float() - 1 / CLASSES
    return float(reply["0.weight"][:, -1] @ direction)


def lower_bound(scores, confidence=0.99):
    """A lower bound of epsilon from scores with and without the canary, by the best threshold of the first halves
    (Jagielski et al., 2020, https://arxiv.org/abs/2006.07709), by Clopper and Pearson."""
    half = TRAININGS // 2
    inside, outside = scores
    guesses = sorted(inside[:half] + outside[:half])
    best = max(guesses, key=lambda t: sum(s > t for s in inside[:half]) - 3 * sum(s > t for s in outside[:half]))
    hits, false = (sum(s > best for s in group[half:]) for group in (inside, outside))
    tail = (1 - confidence) / 2
    low = stats.beta.ppf(tail, hits, half - hits + 1) if hits else 0.0
    high = stats.beta.ppf(1 - tail, false + 1, half - false) if false < half else 1.0
    return math.log(max(low - DELTA, 1e-9) / high)


def audit(sigma):
    """The lower bound over all trainings, each with a secret of its own."""
    return lower_bound(
        [[trained(derive_simulation_secret(k, str(held)), held, sigma) for k in range(TRAININGS)] for held in (1, 0)]
    )


def test_a_canary_audit_stays_below_the_stated_epsilon_and_can_see():
    stated = compute_total_epsilon([NoisedSteps(SIGMA, BATCH / N, STEPS)], DELTA)
    without_noise = audit(0.0)
    assert without_noise > stated > 0  # so a mechanism whose noise were missing would be caught
    assert audit(SIGMA) < stated


def test_a_canary_audit_catches_noise_that_is_too_small():
    stated = compute_total_epsilon([NoisedSteps(SIGMA, BATCH / N, STEPS)], DELTA)
    assert audit(SIGMA / 40) > stated


DEFAULT = COMMON | {"algorithm": {"name": "fml"}}


@pytest.mark.parametrize(
    ("common", "is_recovered"),
    [
        (DEFAULT, True),
        (DEFAULT | {"privacy": {"nets": "both", "sigma": 1.0}}, False),
        (DEFAULT | {"privacy": {"nets": "meme", "sigma": 1.0}, "algorithm": {"name": "fml", "beta": 1.0}}, False),
    ],
    ids=["without noise", "both", "meme"],
)
def test_the_imprint_attack_reads_no_record_out_of_a_noised_meme(tmp_path, common, is_recovered):
    """A server chooses a first layer whose units fire for few rows each, and reads those rows out of what comes back."""
    agreed = contracts.read_submitted_contract(
        contract(tmp_path, common | {"share": {"metrics": "none"}}, {"north": SITES["north"]})
    )
    private = {"privacy": {"epsilon": 100.0}} if "privacy" in common else {}
    half = SiteRuntime(agreed, read_site_file(site(tmp_path, "north", SITES["north"], **private)))
    shares = half.experiment.load_rows("north")
    crafted = craft_model(half.experiment.make_server_state(), flatten_rows(shares["validation"]))
    _, meme = read_answer(half.carry_out(pack_message(Order(WORK, 0, 0), crafted)))
    recovered = read_rows(meme, crafted, flatten_rows(shares["private"]))
    assert bool(recovered) == is_recovered
    if is_recovered:
        assert len(recovered) > 3
