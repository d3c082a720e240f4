"""Measure the robustness of a minimum: the loss of a run's last global model under Gaussian noise on its weights."""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import nn

from fedmutual import data
from fedmutual.core import At, Data
from fedmutual.federation.evaluation import ROWS, forward_in_parts
from fedmutual.models.copying import copy_networks
from fedmutual.studies.trained_run import Run

DRAWS = 5


def score_under_noise(run: Run, deviations: Sequence[float]) -> dict[str, float]:
    """Return standard deviation -> mean cross-entropy on the test set over DRAWS draws; "0" is the loss without noise.

    The noise of each tensor is scaled by the tensor's root mean square, so that one deviation is comparable over layers and
    models.

    Raises:
        RunError: the run has no complete global model.
        UserError: the data cannot be read.
    """
    net, test = run.global_model(), data.load(run.config).test
    assert test is not None  # where there is one global model, one network serves all
    rng = At(run.config.seed, run.config.rounds, run.config.rounds).rng("noise")
    losses = {"0": _compute_loss(net, test)}
    for deviation in deviations:
        losses[f"{deviation:g}"] = sum(_compute_loss(_add_noise(net, deviation, rng), test) for _ in range(DRAWS)) / DRAWS
    return losses


@torch.no_grad()
def _add_noise(net: nn.Module, deviation: float, rng: torch.Generator) -> nn.Module:
    shaken = copy_networks(net, share_objects=True)
    for p in shaken.parameters():
        p.add_(torch.randn(p.shape, generator=rng) * p.square().mean().sqrt(), alpha=deviation)
    return shaken


@torch.no_grad()
def _compute_loss(net: nn.Module, test: Data) -> float:
    batches = test.rows(torch.split(torch.arange(len(test)), ROWS))
    return sum(F.cross_entropy(forward_in_parts(net, x), y, reduction="sum").item() for x, y, *_ in batches) / len(test)
