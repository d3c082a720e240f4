"""The interface of all engines, and the functions that an engine runs at each client."""

import abc
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Concatenate, NamedTuple, Protocol, TypeVar

from fedmutual.boundary import Refused, release, release_metrics
from fedmutual.core import At, Client, Diverged, Message, Phase, Spec, Total, Work
from fedmutual.cpu import compute_on_cpu
from fedmutual.engines.user_errors import raise_user_errors
from fedmutual.events import Score
from fedmutual.federation.evaluation import EVAL_MODE_FIX, EvalSpec, compute_scores, select_metrics
from fedmutual.rundir import best
from fedmutual.rundir.best import BestRule
from fedmutual.rundir.observers import append_scores
from fedmutual.scores import drop_values
from fedmutual.stepping import work

R = TypeVar("R")

Make = Callable[[str], Client]
"""Builds the client with an id. It is called in the process that will hold the client."""


class Reply(NamedTuple):
    """What a client sends after a phase.

    `message` holds the tensors, which passed the boundary checks; the other fields are the second channel.
    """

    message: Message  # empty where only the total of all clients is known
    train: dict[str, float]  # mean of each loss term; empty unless the client shares all metrics
    up: int | None = None  # bytes that the client sent to other clients directly; None: it sends to the server
    down: int | None = None  # bytes that the client received from other clients
    work: Work | None = None  # None from a real site


Replies = Iterator[tuple[str, Reply] | Total]
"""(client, reply) as clients finish; where replies are masked, their messages are empty, and their total comes last."""


class ScoreOrder(NamedTuple):
    """The arguments of `evaluate_client` at one client."""

    evaluations: tuple[EvalSpec, ...]
    inbox: Message
    round: int  # from 1
    home: Path | None
    keep: BestRule | None = None


ClientScores = tuple[tuple[Score, ...], tuple[str, ...]]
"""The scores that a client shares, and remarks for the user."""


class Engine(Protocol):
    """Trains and scores the clients of a run. Messages move between processes; clients stay in theirs."""

    def take_remarks(self) -> list[str]:
        """Return new remarks for the user about how this engine works; each remark is returned once."""
        ...

    def close(self) -> None:
        """Release the clients, and the processes or memory that held them."""
        ...

    def train(self, phase: Phase, at: At, inboxes: Mapping[str, Message], declared: Spec) -> Replies:
        """Run a phase at each client with an inbox, and yield the replies, or replies without messages and their total.

        declared: all that a reply may hold.

        Raises:
            Exception: as `participate`.
            WorkerLost: a worker died.
        """
        ...

    def score(self, orders: Mapping[str, ScoreOrder]) -> Iterator[tuple[str, ClientScores]]:
        """Score each client with an order; yield (client, its scores) as clients finish.

        Raises:
            Exception: as `evaluate_client`.
            WorkerLost: a worker died.
        """
        ...


class Simulation(abc.ABC):
    """An engine whose clients are in processes of this user, so that any function can run at the clients."""

    @abc.abstractmethod
    def visit(
        self, do: Callable[Concatenate[Client, ...], R], arguments: Mapping[str, tuple[Any, ...]], reads: bool = False
    ) -> Iterator[tuple[str, R]]:
        """Run ``do(client, *arguments[id])`` in the process of each client; yield (id, result) as clients finish.

        reads: whether `do` leaves the state of the client as it is, or changes it in a way that no later round reads. A
        state that is stored on disk is written again after other functions.

        Raises:
            Exception: any exception of `do`.
            WorkerLost: a worker died.
        """

    def train(self, phase: Phase, at: At, inboxes: Mapping[str, Message], declared: Spec) -> Replies:
        """As `Engine.train`."""
        return self.visit(participate, {i: (phase, inbox, declared, at) for i, inbox in inboxes.items()})

    def score(self, orders: Mapping[str, ScoreOrder]) -> Iterator[tuple[str, ClientScores]]:
        """As `Engine.score`. An evaluation changes the shared part of the meme, which each round copies again."""
        return self.visit(evaluate_client, orders, reads=True)

    def take_remarks(self) -> list[str]:
        """As `Engine.take_remarks`: no remarks."""
        return []

    @abc.abstractmethod
    def close(self) -> None:
        """As `Engine.close`."""


@compute_on_cpu()
def participate(
    client: Client,
    phase: Phase,
    inbox: Message,
    declared: Spec,
    at: At,
    warn: Callable[[Refused], None] | None = None,
) -> Reply:
    """Run a phase at a client: train, then return the reply that passed the boundary checks. warn: as in `boundary.release`.

    Raises:
        Diverged: a loss or a weight is not finite.
        Refused: the message or the metrics hold more than declared.
        AlgorithmError: the user's phase raised an error.
    """
    with raise_user_errors(phase, client.id):
        message, train = work(phase, client, inbox, at)
        return release_reply(client, phase, message, train, inbox, declared, warn)


def release_reply(
    client: Client,
    phase: Phase,
    message: Message,
    train: dict[str, float],
    inbox: Message,
    declared: Spec,
    warn: Callable[[Refused], None] | None = None,
) -> Reply:
    """Return the reply of a client after the boundary checks. warn: as in `boundary.release`.

    Raises:
        Refused: the message or the metrics hold more than declared, or the message holds private data.
    """
    metrics = release_metrics(train, phase.terms, client.id) if client.metrics == "all" else {}
    # metrics.jsonl holds numbers only; an infinite loss of a network without noise must not stop a client with noise
    finite = {name: value for name, value in metrics.items() if value is not None}
    return Reply(release(message, declared, client, inbox, warn), finite, work=client.work)


def evaluate_client(
    client: Client,
    evaluations: tuple[EvalSpec, ...],
    inbox: Message,
    round: int,
    home: Path | None,
    keep: BestRule | None = None,
) -> ClientScores:
    """Score a client's nets, and return (the scores that the client shares, remarks for the user).

    The meme is scored as it was trained, then again with the tensors that the server sent in `inbox`. A client that does
    not share all scores writes all of them to `home`. With `keep`, the client's best personal weights are saved there.
    If outputs are not finite, the scores of a client with `privacy` are None, with a remark: its weights may stop being
    finite without an error.

    round: from 1.

    Raises:
        Diverged: outputs of a net of a client without `privacy` are not finite.
        Refused: the task returns a score that the task does not declare.
        RunError: a file in `home` is damaged or cannot be written.
    """
    unusable: dict[EvalSpec, str] = {}

    def report(spec: EvalSpec, what: str) -> None:
        if client.privacy is None:
            raise Diverged(client.id, round - 1, None, f"{what} {EVAL_MODE_FIX}")
        unusable[spec] = f"client {client.id!r}: {what} in eval mode, so these scores are missing"

    measured = compute_scores(client, evaluations, inbox, report)
    measured |= {spec: replace(measured[spec], values=drop_values(measured[spec].values)) for spec in unusable}
    scores = tuple(measured.values())
    if keep is not None and home is not None and "personal" in client.nets:
        _keep_best(client, evaluations, scores, round, home, keep)
    if client.metrics != "all" and home is not None:
        home.mkdir(parents=True, exist_ok=True)
        append_scores(home, round, scores)
    return select_metrics(client, measured), tuple(unusable.values())


def _keep_best(
    client: Client, evaluations: tuple[EvalSpec, ...], scores: tuple[Score, ...], round: int, home: Path, keep: BestRule
) -> None:
    """Save the weights of a client's personal net in `home` if they score better than in all rounds before."""
    models = {e.model for e in evaluations if e.net == "personal"}  # a net trained on pooled data is reported as "global"
    reported = "test" if "global" in models else "validation"
    merit = best.compute_merit([s for s in scores if s.model in models], reported, keep.by, keep.metric)
    personal = client.nets["personal"]
    best.save_if_better(home, lambda: {f"personal.{k}": v for k, v in personal.state_dict().items()}, merit, round, keep)


def count_parameters(client: Client) -> dict[str, int]:
    """Return the number of parameters of each of a client's nets."""
    return {name: sum(p.numel() for p in net.parameters()) for name, net in client.nets.items()}
