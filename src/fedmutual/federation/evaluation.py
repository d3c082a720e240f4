"""Score a client's networks: which network on which rows, which scores the client sends, and the ensemble of two."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor, nn

from fedmutual.boundary import release_metrics
from fedmutual.calling import Inputs, call_network, list_tensors
from fedmutual.core import Algorithm, Client, Data, Message, Task
from fedmutual.cpu import compute_on_cpu
from fedmutual.data.federation import Federation, Shares
from fedmutual.data.rows import ChainedRows, Rows, merge_rows
from fedmutual.events import Score
from fedmutual.losses import Classification
from fedmutual.scores import Scores, coarsen_accuracy, find_finite_answers

ENSEMBLE = "ensemble"  # what the model is called, beside "personal" and "global"
WEIGHT = "ensemble.weight"  # of a client's memory: the personal network's weight, float64 []
_WEIGHTS = 20  # the weights are 0, 1/20, ..., 1


class Ensemble(nn.Module):
    """The mixture w p_personal + (1 - w) p_shared, as log-probabilities [B, C]: their softmax is the mixture.

    Close to FedAPEN (Qin, Deng, Zhao & Yan, FedAPEN: Personalized Cross-silo Federated Learning with Adaptability to
    Statistical Heterogeneity, KDD 2023, https://doi.org/10.1145/3580305.3599344), which learns w on training rows in every
    round. Here hold-out rows choose each client's w whenever models are scored; training does not use the ensemble, and
    nothing is sent.
    """

    def __init__(self, personal: nn.Module, shared: nn.Module, weight: float) -> None:
        """weight: w, of the personal network, 0 to 1."""
        super().__init__()
        self.personal, self.shared, self.weight = personal, shared, weight

    def forward(self, x: Inputs) -> Tensor:
        """Return the log-probabilities [B, C] for inputs x [B, ...]."""
        personal, shared = (call_network(net, x).log_softmax(1) for net in (self.personal, self.shared))
        return mix_log_probabilities(personal, shared, self.weight)


def mix_log_probabilities(personal: Tensor, shared: Tensor, weight: float) -> Tensor:
    """Return log(w p + (1 - w) q) [B, C] from the log-probabilities log p and log q [B, C]."""
    log_weights = torch.tensor([weight, 1 - weight], dtype=personal.dtype, device=personal.device).log()
    return torch.logaddexp(personal + log_weights[0], shared + log_weights[1])


def choose_weight(personal: Tensor, shared: Tensor, target: Tensor) -> float:
    """Return the personal network's weight in [0, 1], a multiple of 1/20, with the smallest mean negative log-likelihood.

    Of equally good weights, the nearest to 1/2 is returned.

    personal, shared: logits [N, C] on rows that no network was trained on; target: their classes int64 [N].
    """
    p, q = (logits.double().log_softmax(1).gather(1, target[:, None]).squeeze(1) for logits in (personal, shared))
    weights = [k / _WEIGHTS for k in range(_WEIGHTS + 1)]
    losses = {w: -mix_log_probabilities(p[:, None], q[:, None], w).mean().item() for w in weights}
    return min(weights, key=lambda w: (losses[w], abs(w - 0.5), w))


COPY = "copy"  # a client's trained fork of the shared model, before it is averaged
ROWS = 512  # rows of an evaluation's batch
EVAL_MODE_FIX = (  # the end of an error about outputs in an evaluation
    "in eval mode, although the losses and weights are finite; look at what the network computes in eval mode only, such as "
    "`if not self.training`, or for these rows"
)
_NUMBERS = 2**22  # of inputs that a network sees at once then: its layers hold many times as much


class EvalSpec(NamedTuple):
    """Which of a client's nets is scored on which of its rows, and the name of that score."""

    net: str  # "personal", "meme", or "ensemble" of both
    rows: str  # key of Client.data
    model: str
    client: str | None
    data: str


def compute_scores(
    client: Client, evaluations: tuple[EvalSpec, ...], inbox: Message, report: Callable[[EvalSpec, str], object]
) -> dict[EvalSpec, Score]:
    """Return spec -> all its scores; the client's copy of the shared model is scored before the server's replaces it.

    report: called with an evaluation whose outputs are not finite, and a clause for messages, before it is scored.

    Raises:
        Refused: the task returns a score that `tells` does not declare, or a score of a wrong type.
        DataError: a row cannot be read.
    """
    task, nets = Classification() if client.task is None else client.task, dict(client.nets)

    def scored(e: EvalSpec) -> Score:
        def report_outputs(what: str) -> None:
            report(e, f"its {e.model} model gives {what} {e.data} rows")

        return Score(e.model, e.client, e.data, score(nets[e.net], client.data[e.rows], task, client.id, report_outputs))

    measured = {e: scored(e) for e in evaluations if e.model == COPY}
    if inbox and "meme" in client.nets:
        meme = client.nets["meme"]
        meme.load_state_dict(meme.state_dict() | {k: inbox[k] for k in client.shared})
    if any(e.net == ENSEMBLE for e in evaluations):
        nets[ENSEMBLE] = _make_ensemble(client)
    return measured | {e: scored(e) for e in evaluations if e.model != COPY}


def _make_ensemble(client: Client) -> Ensemble:
    """Return the ensemble of a client's two nets. The hold-out rows choose the weight, which is stored and never sent."""
    (personal, target), (shared, _) = (compute_outputs(client.nets[n], client.data["holdout"]) for n in ("personal", "meme"))
    known = target >= 0
    weight = choose_weight(personal[known], shared[known], target[known])
    client.memory = {**client.memory, WEIGHT: torch.tensor(weight, dtype=torch.float64, device=personal.device)}
    return Ensemble(client.nets["personal"], client.nets["meme"], weight)


def select_metrics(client: Client, measured: Mapping[EvalSpec, Score]) -> tuple[Score, ...]:
    """Return the scores that a client sends, by `share.metrics`: all, none, or coarse accuracies of models after a round.

    A copy of the shared model is not a model after a round, because it is averaged before the round ends.
    """
    if client.metrics == "all":
        return tuple(measured.values())
    if client.metrics == "none":
        return ()
    sizes = {e: len(client.data[e.rows]) for e in measured}
    for e, one in measured.items():  # rows with a label
        examples = one.values.get("examples")
        sizes[e] = min(sizes[e], examples) if isinstance(examples, int) else sizes[e]
    coarse = {e: coarsen_accuracy(s.values, sizes[e]) for e, s in measured.items() if e.model != COPY}
    return tuple(replace(measured[e], values=values) for e, values in coarse.items() if values is not None)


def forward_in_parts(net: nn.Module, x: Inputs) -> Tensor:
    """Return a net's output [N, C, ...] for x [N, ...], in parts for large examples.

    VGG11's first layer needs 6.6 GB for 512 images of 224 x 224 pixels.
    """
    tensors = list_tensors(x)
    size = max(_NUMBERS // sum(one[0].numel() for one in tensors), 1)
    parts = [torch.split(one, size) for one in tensors]
    inputs = parts[0] if isinstance(x, Tensor) else [dict(zip(x, part, strict=True)) for part in zip(*parts, strict=True)]
    return torch.cat([call_network(net, part) for part in inputs])


@compute_on_cpu()
@torch.no_grad()
def compute_outputs(net: nn.Module, data: Data) -> tuple[Tensor, Tensor]:
    """Return (a net's outputs over all rows [N, C, ...] in eval mode, their targets [N, ...]).

    Raises:
        DataError: a row cannot be read.
    """
    net.eval()
    outputs: list[Tensor] = []
    targets: list[Tensor] = []
    for x, y, *_ in data.rows(torch.split(torch.arange(len(data)), ROWS)):
        outputs.append(forward_in_parts(net, x))
        targets.append(y)
    return torch.cat(outputs), torch.cat(targets)


def describe_not_finite(output: Tensor) -> str | None:
    """Return for how many rows outputs [N, C, ...] are not finite, as words such as "nan for 3 of 40"; None if for none."""
    answered = find_finite_answers(output)
    if answered.all():
        return None
    rows = int((~answered).reshape(len(output), -1).any(1).sum())
    return f"{output.amax(1)[~answered][0].item()} for {rows} of {len(output)}"


@compute_on_cpu()
@torch.no_grad()
def score(net: nn.Module, data: Data, task: Task, owner: str, report: Callable[[str], object]) -> Scores:
    """Return a net's scores over all rows in eval mode: the scores that the task declares.

    report: called before outputs that are not finite are scored, with words such as "nan for 3 of 40".

    Raises:
        Refused: the task returns a score that `tells` does not declare, or a score of a wrong type.
        DataError: a row cannot be read.
    """
    output, target = compute_outputs(net, data)
    if what := describe_not_finite(output):
        report(what)
    return release_metrics(task.score(output, target), task.tells, owner, width=output.shape[1])


View = Rows | ChainedRows
EVALUATION_KINDS = ("validation", "holdout")  # rows of a client's own data that are not training rows
ACROSS = ("test", "test.own", "test.others", "validation.all")  # only if all clients divide one data set
SITE_SCORES = frozenset(
    (model, kind) for model in ("personal", "global", "meme", ENSEMBLE, COPY) for kind in (*EVALUATION_KINDS, *ACROSS)
)
"""The pairs (model, rows) that a client can have a score of."""


def pool_rows(data: Federation) -> dict[str, View]:
    """Return the rows of the method `centralised` by name: the rows of all clients, and each client's evaluation rows."""
    views: dict[str, View | None] = {"private": data.pool_clients().private, "test": data.test}
    for i, shares in data.clients.items():
        views |= {f"validation of {i}": shares.validation, f"holdout of {i}": shares.holdout}
    return {k: v for k, v in views.items() if v is not None}


def list_client_rows(data: Federation, client: str, algorithm: Algorithm) -> dict[str, View]:
    """Return a client's rows by name: "private" for training, "public" of the seed set, and the evaluation rows.

    If each client has test rows out of one common data set, as domains have, the evaluation rows include the client's test
    rows, the test rows of the others, and the validation rows of all clients. If a client has a data set of its own, no
    other client sees rows of that data set.
    """
    shares = data.clients[client]
    views: dict[str, View | None] = {
        "private": _select_training_rows(data, shares, algorithm),
        "validation": shares.validation,
        "holdout": shares.holdout,
    }
    if data.public is not None and algorithm.public is not None and not algorithm.public.server:
        views["public"] = data.public.show_to(client, algorithm.public.labelled)
    if not isinstance(data.test, Rows):  # clients do not divide one data set
        return {k: v for k, v in views.items() if v is not None}
    views["test"] = data.test
    if shares.test is not None:
        others = [s.test for i, s in data.clients.items() if i != client and s.test is not None]
        views |= {"test.own": shares.test, "test.others": merge_rows(others) if others else None}
        if not are_validation_rows_test_rows(data):
            views["validation.all"] = merge_rows([s.validation for s in data.clients.values()])
    return {k: v for k, v in views.items() if v is not None}


def are_validation_rows_test_rows(data: Federation) -> bool:
    """Return whether validation rows are test rows: a model chosen by them is then chosen by its test score."""
    test = set(data.test.index.tolist()) if isinstance(data.test, Rows) else set[int]()
    return any(not test.isdisjoint(s.validation.index.tolist()) for s in data.clients.values())


def describe_evaluation_rows(data: Federation, best_by: str | None) -> tuple[str, ...]:
    """Return the remarks for the user about the evaluation rows. best_by: `records.best_by`."""
    clients, is_common = data.clients.values(), isinstance(data.test, Rows)
    if all(s.test is None for s in clients) or not is_common or not are_validation_rows_test_rows(data):
        return ()
    if best_by == "holdout" or (best_by is None and all(s.holdout is not None for s in clients)):
        return ()
    return (
        "split.validation is unset, so clients' validation rows are test rows, and the best round would be chosen by its "
        "test score; set split.validation or split.holdout",
    )


def _select_training_rows(data: Federation, shares: Shares, algorithm: Algorithm) -> View:
    is_outside = data.public is not None and data.public.file is not None  # whose rows are nobody's own
    if data.public is None or (shares.public is None and not is_outside):
        return shares.private
    parts = {"private": [shares.private], "own public": [] if shares.public is None else [shares.public]}
    parts["public"] = [*data.public.parts]
    selected = [part for name in algorithm.trains_on for part in parts[name]]
    if is_outside and len(selected) == 1:
        return selected[0]
    return merge_rows(selected) if isinstance(data.test, Rows) and not is_outside else ChainedRows(selected)


def list_evaluations(
    known: Iterable[str], algorithm: Algorithm, complete: bool, copies: bool, client: str, ensemble: bool = False
) -> Iterable[EvalSpec]:
    """Yield the evaluations at a client that has these rows.

    The personal net is scored on all rows. The shared model is scored on rows of the client's own data; if clients are
    domains, on all rows. The ensemble of both is scored on all rows but the hold-out rows, which choose its weight.

    known: the names of the client's rows. complete: whether the server holds all tensors of the shared model.
    copies, ensemble: the keys `records.copies` and `records.ensemble`.
    """
    names, scores = list(known), set(algorithm.scores)
    own = [kind for kind in EVALUATION_KINDS if kind in names]
    every = [*own, *(kind for kind in ACROSS if kind in names)]
    scored = {  # (network, model) -> the kinds of rows
        ("personal", "personal"): every if "personal" in scores else [],
        ("meme", "proxy"): every if "proxy" in scores else [],
        (ENSEMBLE, ENSEMBLE): [k for k in every if k != "holdout"] if ensemble and {"personal", "global"} <= scores else [],
        ("meme", "global"): (every if "test.own" in names else own) if "global" in scores else [],
        ("meme", COPY): own if copies and "global" in scores else [],
    }
    for (net, model), kinds in scored.items():
        name = "meme" if model == "proxy" or (model == "global" and not complete) else model
        yield from (EvalSpec(net, kind, name, client, kind) for kind in kinds)


def list_pooled_evaluations(known: Iterable[str]) -> Iterable[EvalSpec]:
    """Yield the evaluations of the method `centralised`; the score of its only net is the score of the shared model.

    known: the names of the rows, as `pool_rows` returns them.
    """
    yield EvalSpec("personal", "test", "global", None, "test")
    for rows in known:
        kind, _, of = rows.partition(" of ")
        if of:
            yield EvalSpec("personal", rows, "global", of, kind)
