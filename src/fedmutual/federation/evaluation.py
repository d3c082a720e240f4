"""Score a client's networks: which network on which rows, and which scores the client sends."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor, nn

from fedmutual.boundary import release_metrics
from fedmutual.core import Client, Data, Message, Task
from fedmutual.cpu import compute_on_cpu
from fedmutual.events import Score
from fedmutual.federation.ensemble import ENSEMBLE, WEIGHT, Ensemble, choose_weight
from fedmutual.losses import Classification
from fedmutual.scores import Scores, coarsen_accuracy, find_finite_answers

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
    weight = choose_weight(personal, shared, target)
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
    coarse = {e: coarsen_accuracy(s.values, len(client.data[e.rows])) for e, s in measured.items() if e.model != COPY}
    return tuple(replace(measured[e], values=values) for e, values in coarse.items() if values is not None)


def forward_in_parts(net: nn.Module, x: Tensor) -> Tensor:
    """Return a net's output [N, C, ...] for x [N, ...], in parts for large examples.

    VGG11's first layer needs 6.6 GB for 512 images of 224 x 224 pixels.
    """
    return torch.cat([net(part) for part in torch.split(x, max(_NUMBERS // x[0].numel(), 1))])


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
