"""One client of a finished run, looked at closely: its curves, and where its model puts all clients' test examples."""

import numpy as np
import torch
from torch import nn

from fedmutual import data
from fedmutual.config import Config
from fedmutual.core import Data
from fedmutual.data.division import divide
from fedmutual.errors import ConfigError
from fedmutual.evaluation import ROWS, forward_in_parts
from fedmutual.reproduce.result import CloseUp, Cloud
from fedmutual.rundir.recorded_run import read_run
from fedmutual.studies.trained_run import Run

POINTS, DRAWN = 600, 0  # so many are kept, of the seed whose cloud is drawn
FINE = 3  # digits of a coordinate


def check(config: Config, node: str, source: str) -> None:
    """Check, before a run is trained, that a node of it can be looked at closely afterwards.

    Raises:
        UserError: it keeps too little, there is no such node, or the data cannot be read.
    """
    needs = {
        "records.keep_best = true": config.records.keep_best,
        "partition.kind = 'domains'": config.partition.kind in data.OF_DOMAINS,
        "split.validation": config.split.validation is not None or config.split.preset == "v1",  # else they are test data
    }
    if lacking := [key for key, there in needs.items() if not there]:
        raise ConfigError(f"{source}: [cell] has a node, which needs {lacking[0]}; set it, or take 'node' out")
    known = divide(config, data.prepare(config)[""].table).clients
    if node not in known:
        raise ConfigError(f"{source}: there is no client {node!r} to look at closely; there are {', '.join(known)}")


def close_up(run: Run, client: str) -> CloseUp:
    """A client's curves, and the features of its model after its best round.

    Raises:
        ConfigError: the run has no such client, or nothing was scored on all clients' validation data.
        RunError: the weights of its best round were not kept, for lack of `records.keep_best`.
    """
    found = read_run(run.folder)
    if client not in found.partition.clients:
        known = ", ".join(found.partition.clients)
        raise ConfigError(f"{run.folder}: there is no client {client!r} to look at closely; there are {known}")
    scores = [e.per_client(found.serves or "", "validation.all").get(client) for e in found.evaluations]
    if None in scores:
        raise ConfigError(
            f"{run.folder}: client {client!r} has no score on all clients' validation data, as nodes have that are domains"
        )
    terms = [e.train.get(client, {}) for e in found.evaluations]
    return CloseUp(
        client=client,
        validation=tuple(round(s.accuracy, 5) for s in scores if s is not None),
        losses={t: tuple(round(of[t], 5) for of in terms) for t in terms[0] if all(t in of for of in terms)},
        cloud=_cloud(run, client),
    )


def _cloud(run: Run, client: str) -> Cloud:
    """The client's model's features of all clients' test examples, on their principal axes."""
    from sklearn.decomposition import PCA
    from sklearn.metrics import silhouette_score

    names = run.summary["personal"]["model"]
    net = run.global_model(best=True) if names == "global" else run.personal_model(client, best=True)
    federation = data.load(run.config)
    tests = {i: shares.test for i, shares in federation.clients.items() if shares.test is not None}
    read = [features(net, test) for test in tests.values()]
    seen, labels = np.concatenate([x for x, _ in read]), np.concatenate([y for _, y in read])
    of = np.repeat(np.arange(len(read)), [len(y) for _, y in read])
    pca = PCA(2, svd_solver="full")
    places = pca.fit_transform(seen)
    rng = np.random.default_rng(run.config.seed)
    kept = np.sort(rng.permutation(len(places))[: POINTS if run.config.seed == DRAWN else 0])
    first, second = pca.explained_variance_ratio_
    return Cloud(
        domains=tuple(tests),
        classes=federation.space.classes,
        explained=(round(float(first), 4), round(float(second), 4)),
        silhouette=round(float(silhouette_score(seen, labels)), 4),
        points=tuple((int(of[k]), int(labels[k]), *_short(places[k])) for k in kept),
    )


def _short(place: np.ndarray) -> tuple[float, float]:
    x, y = (round(float(v), FINE) for v in place)
    return x, y


@torch.no_grad()
def features(net: nn.Module, examples: Data) -> tuple[np.ndarray, np.ndarray]:
    """(what the network's last linear layer takes [N, F], the labels [N])."""
    last = [m for m in net.modules() if isinstance(m, nn.Linear)][-1]
    taken: list[torch.Tensor] = []
    hook = last.register_forward_pre_hook(lambda _, inputs: taken.append(inputs[0].flatten(1)))
    labels = []
    for x, y, *_ in examples.rows(torch.split(torch.arange(len(examples)), ROWS)):
        forward_in_parts(net, x)
        labels.append(y)
    hook.remove()
    return torch.cat(taken).numpy(), torch.cat(labels).numpy()
