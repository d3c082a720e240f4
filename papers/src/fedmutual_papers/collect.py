"""Read a `Result` from the folder of a finished run: its scores and work, the loss under noise, the analysis of one node."""

import math
import re
import shlex
import sys
from collections.abc import Iterable, Mapping, Sequence
from math import isclose, isfinite
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

import fedmutual
from fedmutual import data, numerics
from fedmutual.algorithms.agree import Agree, Compare
from fedmutual.algorithms.fedh2l import Local, Mutual
from fedmutual.algorithms.fedmd import Announce, Digest, Revisit, Transfer
from fedmutual.algorithms.local import LocalEpochs
from fedmutual.config import Config, is_pooled, make_algorithm
from fedmutual.core import At, Data, Diverged, Phase
from fedmutual.data.division import divide
from fedmutual.errors import ConfigError
from fedmutual.federation.evaluation import ROWS, forward_in_parts
from fedmutual.federation.networks import POOLED
from fedmutual.models.copying import copy_networks
from fedmutual.results.frame import RunFacts, read_run
from fedmutual.rundir.schema import TRANSFER_DATA
from fedmutual.studies.run import RunRequest
from fedmutual.studies.trained_run import Run, open_trained_run
from fedmutual_papers.plan import Job
from fedmutual_papers.store import ClientResult, Cloud, NodeAnalysis, Origin, Result

DIGITS = 5  # of an accuracy
FINE = 3  # digits of a coordinate
POINTS, DRAWN = 600, 0  # the number of points of a cloud that are kept; the seed whose cloud is drawn
DRAWS = 5  # of noise
_OUT_FOLDER = re.compile(r"(the shared model of ).*[/\\]runs[/\\]")


Work = tuple[float, float]
"""The number of gradient steps, and the number of examples in these steps; NaN: unknown."""


def make_result(job: Job, request: RunRequest, problem: Diverged | None, together: int = 1) -> Result:
    """Return the result of a run that has ended, from its folder.

    problem: the error of a run in which a client diverged. together: the number of runs that were trained in common stacks
    with this run, itself included.

    Raises:
        RunError: a file of the run's folder is missing or damaged.
        UserError: the data, which the loss under noise and the analysis of a node need, cannot be read.
    """
    run, about = read_run(request.folder), job.cell.about
    facts = _describe_run(job, run, together)
    if problem is not None:
        return Result(**facts, seconds=0.0, failed=str(problem))
    summary, serves = run.summary, next(iter(run.models), None)
    assert summary is not None  # it is finished
    finished = open_trained_run(request.folder, request.config)
    has_global_model = finished.summary["global"]["test_accuracy"] is not None
    noise = score_under_noise(finished, about.noise) if about.noise and has_global_model else {}
    if unbounded := [deviation for deviation, (loss, _) in noise.items() if not isfinite(loss)]:
        return Result(**facts, seconds=0.0, failed=f"the loss with noise {unbounded[0]} on the weights is not finite")
    rounds = [evaluation.round for evaluation in run.evaluations]
    models = {"own": serves, "copies": "copy"}
    accuracies = {name: [_read_scores(run, round, model) for round in rounds] for name, model in models.items()}
    curves = {"global_test": [_read_scores(run, round, "global", "test") for round in rounds]}
    for name, by_round in accuracies.items():
        curves[name] = [{i: of[i] for i in about.clients or of if i in of} for of in by_round]
    epsilon = summary.privacy.epsilon if summary.privacy else None
    transfer = {name: of for name in TRANSFER_DATA if summary.transfer and (of := getattr(summary.transfer, name))}
    later = run.messages[run.messages["round"] > 0]  # the bytes of public examples, which are sent once, stand apart
    traffic: dict[Any, int] = {way: int(later[way].sum()) for way in ("up", "down")}
    return Result(
        **facts,
        seconds=round(summary.seconds or 0.0, 1),
        model=serves,
        curves={
            name: _shorten(sum(of.values()) / len(of) for of in scores) for name, scores in curves.items() if all(scores)
        },
        clients=_read_clients(job, run, accuracies["own"]),
        noise={k: round(loss, DIGITS) for k, (loss, _) in noise.items()},
        noise_accuracy={k: round(accuracy, DIGITS) for k, (_, accuracy) in noise.items()},
        traffic=traffic | ({"seed": run.seed_bytes} if run.seed_bytes else {}),
        steps=job.config.training.local_steps or 0,
        budget=_read_budget(job, run),
        closeup=close_up(finished, about.node) if about.node else None,
        transfer={name: _read_ends(of) for name, of in transfer.items()},
        projected=round(summary.projected.mean, DIGITS) if summary.projected else None,
        epsilon=None if epsilon is None else round(epsilon, DIGITS),
    )


def _read_ends(of: Any) -> dict[Any, dict[str, float]]:
    return {at: {i: round(v, DIGITS) for i, v in getattr(of, at).per_client.items()} for at in ("last", "best")}


def _shorten(values: Iterable[float]) -> tuple[float, ...]:
    return tuple(round(v, DIGITS) for v in values)


def _read_scores(run: RunFacts, round: int, model: str | None, data: str = "validation") -> dict[str, float]:
    """Return client ("": the common test set) -> the main metric of a model after a round; {} without the model."""
    rows = run.get_rows(round, model, data) if model else {}
    return {i or "": row.find_number(run.metric.name) or 0.0 for i, row in rows.items() if (i is None) == (data == "test")}


def _read_clients(job: Job, run: RunFacts, scores: Sequence[Mapping[str, float]]) -> dict[str, ClientResult]:
    """Return the result of each client. scores: after each evaluation, client -> its accuracy."""
    models, clients = run.environment.models, {}
    for i in scores[-1] if scores else ():
        network, curve = models.personal.get(i) or models.shared, _shorten(of[i] for of in scores if i in of)
        clients[i] = ClientResult(
            network=network.name if network else "",
            examples=sum(run.partition.clients[i].counts["private"]),
            last=curve[-1],
            best=max(curve),
            curve=curve if job.cell.about.each else (),
        )
    return clients


def _read_budget(job: Job, run: RunFacts) -> dict[Any, float | None]:
    """Return the work of a client as the ledger has it; with the examples if `count_budget` counts as many steps."""
    total, passes = run.totals["steps"], run.totals["forwards"]
    counts = {i: held.counts for i, held in run.partition.clients.items()}
    public = {i: sum(c["public"]) for i, c in counts.items() if "public" in c}
    counted = count_budget(job.config, {i: sum(c["private"]) for i, c in counts.items()}, public)
    clients = len(set(run.work["client"]))
    steps = total / clients if total is not None else counted and counted[0]
    budget = {
        "steps": steps,
        "examples": counted[1] if counted and steps is not None and isclose(counted[0], steps) else None,
        "forwards": passes / clients if passes is not None else None,
    }
    return {key: number for key, number in budget.items() if number is not None}


def _describe_run(job: Job, run: RunFacts, together: int) -> dict[str, Any]:
    environment, config, models = run.environment, job.config, run.environment.models
    machine = environment.model_dump(include={"python", "torch", "torchvision", "platform", "cpus", "device", "threads"})
    networks = [*([models.shared] if models.shared else []), *models.personal.values()]
    # of a source that is a run folder only its place below --out is kept: "the shared model of runs/FINGERPRINT-NUMERICS"
    sources = tuple(dict.fromkeys(_OUT_FOLDER.sub(r"\1runs/", n.weights) for n in networks if n.weights))
    return {
        "arm": job.arm,
        "seed": job.seed,
        "fingerprint": job.fingerprint,
        "version": fedmutual.__version__,
        "numerics": numerics.VERSION,
        "rounds": config.rounds,
        "every": config.records.evaluate_every,
        "limit": job.scale.rounds,
        "changed": dict(job.scale.changed),
        "made": Origin(
            command=get_command(),
            engine=environment.engine.name if environment.engine else "",
            together=together,
            weights=sources if set(sources) - {"random weights"} else (),
            **machine,
        ),
    }


def get_command() -> str:
    """Return the command line of this process: the program's name without its path, and no `--out`.

    The folder of `--out` affects no number, and its path says how the disk of the measuring machine is arranged.
    """
    program, arguments = Path(sys.argv[0]).name, iter(sys.argv[1:])
    shown = []
    for argument in arguments:
        if argument == "--out":
            next(arguments, None)
        elif not argument.startswith("--out="):
            shown.append(argument)
    return shlex.join(["fedmutual" if program == "__main__.py" else program, *shown])


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
    The run has passed `check_node`.

    Raises:
        RunError: the best round's weights are missing, because `records.keep_best` is not set; or a file is damaged.
        UserError: the data cannot be read.
    """
    record = read_run(run.folder)
    evaluations, model = record.evaluations, next(iter(record.models), None)
    scores = [e.get_client_scores(model, "validation.all")[client] for e in evaluations]
    terms = [e.train.get(client, {}) for e in evaluations]
    losses = {term: _shorten([of[term] for of in terms]) for term in terms[0] if all(term in of for of in terms)}
    return NodeAnalysis(client=client, validation=_shorten(scores), losses=losses, cloud=_compute_cloud(run, client))


def _compute_cloud(run: Run, client: str) -> Cloud:
    """Return the features of all clients' test examples under the client's model, on the two principal axes."""
    from sklearn.decomposition import PCA
    from sklearn.metrics import silhouette_score

    names = run.summary["personal"]["model"]
    net = run.global_model(best=True) if names == "global" else run.personal_model(client, best=True)
    federation = data.load(run.config)
    tests = {i: shares.test for i, shares in federation.clients.items() if shares.test is not None}
    client_features = [compute_features(net, test) for test in tests.values()]
    all_features, labels = (np.concatenate(parts) for parts in zip(*client_features, strict=True))
    domains = np.repeat(np.arange(len(client_features)), [len(y) for _, y in client_features])
    pca = PCA(2, svd_solver="full")
    positions = pca.fit_transform(all_features)
    rows = np.random.default_rng(run.config.seed).permutation(len(positions))
    drawn_rows = np.sort(rows[: POINTS if run.config.seed == DRAWN else 0])
    first, second = (round(float(share), 4) for share in pca.explained_variance_ratio_)
    return Cloud(
        domains=tuple(tests),
        classes=federation.space.classes,
        explained=(first, second),
        silhouette=round(float(silhouette_score(all_features, labels)), 4),
        points=tuple(
            (int(domains[k]), int(labels[k]), round(float(x), FINE), round(float(y), FINE))
            for k, (x, y) in zip(drawn_rows, positions[drawn_rows], strict=True)
        ),
    )


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


@torch.no_grad()
def score_under_noise(run: Run, deviations: Sequence[float]) -> dict[str, tuple[float, float]]:
    """Return standard deviation -> (mean cross-entropy, mean accuracy) on the test set over DRAWS draws; "0": no noise.

    The noise of each tensor is scaled by the tensor's root mean square, so that one deviation is comparable over layers and
    models.

    Raises:
        RunError: the run has no complete global model.
        UserError: the data cannot be read.
    """
    trained, test = run.global_model(), data.load(run.config).test
    assert test is not None  # where there is one global model, one network serves all
    rng = At(run.config.seed, run.config.rounds, run.config.rounds).rng("noise")

    def score(net: nn.Module) -> tuple[float, float]:
        batches = test.rows(torch.split(torch.arange(len(test)), ROWS))
        outputs = ((forward_in_parts(net, x), y) for x, y, *_ in batches)
        sums = [(F.cross_entropy(z, y, reduction="sum").item(), (z.argmax(1) == y).sum().item()) for z, y in outputs]
        loss, accuracy = (sum(of) / len(test) for of in zip(*sums, strict=True))
        return loss, accuracy

    def add_noise(deviation: float) -> nn.Module:
        shaken = copy_networks(trained)
        for p in shaken.parameters():
            p.add_(torch.randn(p.shape, generator=rng) * p.square().mean().sqrt(), alpha=deviation)
        return shaken

    def score_draws(deviation: float) -> tuple[float, float]:
        loss, accuracy = (fmean(of) for of in zip(*(score(add_noise(deviation)) for _ in range(DRAWS)), strict=True))
        return loss, accuracy

    return {"0": score(trained), **{f"{d:g}": score_draws(d) for d in deviations}}


def count_budget(config: Config, private: Mapping[str, int], public: Mapping[str, int]) -> Work | None:
    """Return the gradient steps of a client's model and the examples in these steps: the means over clients.

    private, public: client id -> number of rows. A step that trains two networks, as in FML, counts once. Return None if
    the algorithm has a phase with an unknown number of steps, such as a phase of the user's algorithm.
    """
    algorithm = make_algorithm(config)
    if is_pooled(config):
        private, public = {POOLED: sum(private.values()) + sum(public.values())}, {}
    parts = {*algorithm.trains_on} - ({"own public"} if "public" in algorithm.trains_on else set())  # public has its own
    taking_part = max(1, round(config.engine.participation * len(private))) / len(private) if private else 0.0
    of_all, works = sum(public.values()), list[Any]()
    for client, rows in private.items():
        trained = sum({"private": rows, "own public": public.get(client, 0), "public": of_all}[part] for part in parts)
        starts = [_count_phase_work(phase, trained, of_all, len(private), True) for phase in algorithm.start]
        rounds = [_count_phase_work(phase, trained, of_all, len(private), False) for phase in algorithm.phases]
        works.append(np.sum([(0, 0), *starts], 0) + np.sum(rounds, 0) * (config.rounds * taking_part))
    steps, examples = np.mean(works, 0).tolist() if works else (math.nan, math.nan)
    return None if math.isnan(steps) else (steps, examples)


def _count_phase_work(phase: Phase, private: int, public: int, clients: int, start: bool) -> Work:
    """Return the work of a client in one execution of a phase."""

    def take(steps: float, batch: int, rows: int) -> Work:
        return steps, steps * min(batch, rows)

    def take_passes(epochs: int, batch: int, rows: int) -> Work:
        leaves_one_row = rows > batch > 1 and rows % batch == 1  # a single row joins the batch before it
        return epochs * (math.ceil(rows / batch) - leaves_one_row), epochs * rows

    match phase:
        case Mutual() if clients > 1:
            pairs = min(math.ceil(phase.pairs * clients - 1e-9), clients // 2)
            partners, share = (clients - 1, 1.0) if phase.peers == "all" else (1, 2 * pairs / clients)
            return share, partners * phase.public_batch * share
        case Transfer():
            return take_passes(phase.transfer_epochs, phase.batch_size, public)
        case Revisit() if start:
            return take_passes(phase.transfer_epochs, phase.batch_size, private)
        case Digest():
            return phase.digest_steps, phase.digest_steps * phase.public_batch
        case Mutual() | Agree() | Compare() | Announce():
            return 0, 0
        case Local() | LocalEpochs() if phase.local_steps is not None:
            return take(phase.local_steps, phase.batch_size, private)
        case LocalEpochs():
            return take_passes(phase.local_epochs, phase.batch_size, private)
    return math.nan, math.nan
