"""What every engine does: run a function where each client lives. What a client does there is the same in all of them."""

import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Concatenate, NamedTuple, Protocol, TypeVar

from fedmutual.boundary import release, release_metrics
from fedmutual.core import At, Client, Message, Phase, Spec, Work
from fedmutual.denormals import flush_denormals
from fedmutual.engines.user_errors import make_user_error
from fedmutual.evaluation import EvalSpec, compute_scores, select_metrics
from fedmutual.events import Score
from fedmutual.rundir import best
from fedmutual.rundir.best import Keep
from fedmutual.rundir.logs import METRICS, append
from fedmutual.stepping import work

R = TypeVar("R")


class Engine(Protocol):
    """Holds the clients. Messages cross; clients do not."""

    def remarks(self) -> list[str]:
        """What a user should know of how it works, not said before."""
        ...

    def close(self) -> None:
        """Let go of the clients, and of what they lived in."""
        ...

    def each(
        self, do: Callable[Concatenate[Client, ...], R], arguments: Mapping[str, tuple[Any, ...]]
    ) -> Iterator[tuple[str, R]]:
        """Run ``do(client, *arguments[id])`` for each id where that client lives -> (id, result) as they end."""
        ...


class Reply(NamedTuple):
    """What a client lets go of after a phase."""

    message: Message
    train: dict[str, float]  # mean of each loss term; empty unless the client tells all
    up: int | None = None  # bytes that it sent to others and not by the server, where clients do that
    down: int | None = None  # bytes that it had from them
    work: Work | None = None  # None of a real site, which does not tell it


@flush_denormals()
def participate(client: Client, phase: Phase, inbox: Message, declared: Spec, at: At) -> Reply:
    """A client's whole part in a phase: the work, then the boundary."""
    try:
        message, train = work(phase, client, inbox, at)
        return release_reply(client, phase, message, train, inbox, declared)
    except Exception as problem:
        told = make_user_error(problem, phase, client.id)
        if told is problem:
            raise
        raise told from problem


def release_reply(
    client: Client, phase: Phase, message: Message, train: dict[str, float], inbox: Message, declared: Spec
) -> Reply:
    """What of a client's work passes the boundary."""
    told = release_metrics(train, phase.terms, client.id) if client.metrics == "all" else {}
    return Reply(release(message, declared, client, inbox), told, work=client.work)


def evaluate_client(
    client: Client, exams: tuple[EvalSpec, ...], inbox: Message, round: int, home: Path | None, keep: Keep | None = None
) -> tuple[Score, ...]:
    """Score a client's nets, the meme as it was trained, then with what the server sent -> what the client tells of it.

    A client that does not tell all keeps all at `home`; and any client its best personal weights, if they are to be kept.
    """
    measured = compute_scores(client, exams, inbox)
    scores = tuple(measured.values())
    if keep is not None and home is not None and "personal" in client.nets:
        _keep_best(client, exams, scores, round, home, keep)
    if client.metrics != "all" and home is not None:
        line = {"round": round, "scores": [{"model": s.model, "data": s.data, **s.values} for s in scores]}
        home.mkdir(parents=True, exist_ok=True)
        append(home / METRICS, [json.dumps(line)])
    return select_metrics(client, measured)


def _keep_best(
    client: Client, exams: tuple[EvalSpec, ...], scores: tuple[Score, ...], round: int, home: Path, keep: Keep
) -> None:
    """Keep the weights of a client's personal net at home, if they score better than those of the rounds before."""
    called = {e.model for e in exams if e.net == "personal"}  # the one of pooled data is the "global" one
    reported = "test" if "global" in called else "validation"
    merit = best.merit([s for s in scores if s.model in called], reported, keep.by)
    personal = client.nets["personal"]
    best.offer(home, lambda: {f"personal.{k}": v for k, v in personal.state_dict().items()}, merit, round, keep)


def count_parameters(client: Client) -> dict[str, int]:
    """How many parameters each of a client's nets has."""
    return {name: sum(p.numel() for p in net.parameters()) for name, net in client.nets.items()}
