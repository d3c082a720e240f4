"""Measure a finished run by its weights: the loss under noise, and the curves and features of one client."""

from collections.abc import Sequence

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from fedmutual import data
from fedmutual.config import Config
from fedmutual.core import At, Data
from fedmutual.data.division import divide
from fedmutual.errors import ConfigError
from fedmutual.federation.evaluation import ROWS, forward_in_parts
from fedmutual.models.copying import copy_networks
from fedmutual.results.frame import read_run
from fedmutual.studies.trained_run import Run
from fedmutual_papers.result import Cloud, NodeAnalysis

POINTS, DRAWN = 600, 0  # so many are kept, of the seed whose cloud is drawn
FINE = 3  # digits of a coordinate


def check_node(config: Config, node: str, source: str) -> None:
    """Check, before a run is trained, that one of its nodes can be analysed afterwards.

    Raises:
        UserError: the run would not keep the weights for the analysis, the node does not exist, or the data cannot be read.
    """
    needs = {
        "records.keep_best = true": config.records.keep_best,
        "partition.kind = 'domains'": config.partition.kind in data.OF_DOMAINS,
        "split.validation": config.split.validation is not None or config.split.preset == "v1",  # else they are test data
    }
    if unmet := [key for key, is_met in needs.items() if not is_met]:
        raise ConfigError(f"{source}: [cell] has a node, which needs {unmet[0]}; set it, or remove 'node'")
    client_ids = divide(config, data.prepare(config)[""].table).clients
    if node not in client_ids:
        raise ConfigError(f"{source}: there is no client {node!r}; set 'node' to one of {', '.join(client_ids)}")


def close_up(run: Run, client: str) -> NodeAnalysis:
    """Return a client's curves, and the features of its model after its best round on two principal axes.

    The curves are those of the FedH2L paper, Figure 2, and the features those of Figure 1 (https://arxiv.org/abs/2101.11296).

    Raises:
        ConfigError: the run has no such client, or no score on all clients' validation data.
        RunError: the best round's weights are missing, because `records.keep_best` is not set; or a file is damaged.
        UserError: the data cannot be read.
    """
    run_record = read_run(run.folder)
    if client not in run_record.partition.clients:
        known = ", ".join(run_record.partition.clients)
        raise ConfigError(f"{run.folder}: there is no client {client!r}; set 'node' to one of {known}")
    model = next(iter(run_record.models), None)
    scores = [e.get_client_scores(model, "validation.all").get(client) for e in run_record.evaluations]
    if None in scores:
        raise ConfigError(
            f"{run.folder}: client {client!r} has no score on all clients' validation data; set partition.kind = 'domains'"
        )
    terms = [e.train.get(client, {}) for e in run_record.evaluations]
    return NodeAnalysis(
        client=client,
        validation=tuple(round(s, 5) for s in scores if s is not None),
        losses={t: tuple(round(of[t], 5) for of in terms) for t in terms[0] if all(t in of for of in terms)},
        cloud=_compute_cloud(run, client),
    )


def _compute_cloud(run: Run, client: str) -> Cloud:
    """Return the features of all clients' test examples under the client's model, on the two principal axes."""
    from sklearn.decomposition import PCA
    from sklearn.metrics import silhouette_score

    names = run.summary["personal"]["model"]
    net = run.global_model(best=True) if names == "global" else run.personal_model(client, best=True)
    federation = data.load(run.config)
    tests = {i: shares.test for i, shares in federation.clients.items() if shares.test is not None}
    client_features = [compute_features(net, test) for test in tests.values()]
    all_features, labels = np.concatenate([x for x, _ in client_features]), np.concatenate([y for _, y in client_features])
    domain_index = np.repeat(np.arange(len(client_features)), [len(y) for _, y in client_features])
    pca = PCA(2, svd_solver="full")
    positions = pca.fit_transform(all_features)
    rng = np.random.default_rng(run.config.seed)
    kept_rows = np.sort(rng.permutation(len(positions))[: POINTS if run.config.seed == DRAWN else 0])
    first, second = pca.explained_variance_ratio_
    return Cloud(
        domains=tuple(tests),
        classes=federation.space.classes,
        explained=(round(float(first), 4), round(float(second), 4)),
        silhouette=round(float(silhouette_score(all_features, labels)), 4),
        points=tuple((int(domain_index[k]), int(labels[k]), *_round_position(positions[k])) for k in kept_rows),
    )


def _round_position(place: np.ndarray) -> tuple[float, float]:
    x, y = (round(float(v), FINE) for v in place)
    return x, y


@torch.no_grad()
def compute_features(net: nn.Module, examples: Data) -> tuple[np.ndarray, np.ndarray]:
    """Return (the inputs of the network's last linear layer [N, F], the labels [N])."""
    last = [m for m in net.modules() if isinstance(m, nn.Linear)][-1]
    layer_inputs: list[torch.Tensor] = []
    hook = last.register_forward_pre_hook(lambda _, inputs: layer_inputs.append(inputs[0].flatten(1)))
    labels = []
    for x, y, *_ in examples.rows(torch.split(torch.arange(len(examples)), ROWS)):
        forward_in_parts(net, x)
        labels.append(y)
    hook.remove()
    return torch.cat(layer_inputs).numpy(), torch.cat(labels).numpy()


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
