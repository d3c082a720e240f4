"""The interface of all engines, the functions that an engine runs at each client, and the errors of a user's algorithm."""

import abc
import traceback
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Concatenate, NamedTuple, TypeVar

import torch
from torch import Tensor

from fedmutual.boundary import Refused, release, release_metrics
from fedmutual.core import PREVIOUS, At, Client, Diverged, Message, Phase, Spec, Total, Work, format_tensor
from fedmutual.cpu import compute_on_cpu
from fedmutual.errors import TRACE_IN_LOG, AlgorithmError, format_error, format_line
from fedmutual.events import Score
from fedmutual.federation.evaluation import EVAL_MODE_FIX, EvalSpec, compute_scores, select_metrics
from fedmutual.rundir import best
from fedmutual.rundir.best import BestRule
from fedmutual.rundir.logs import append_scores
from fedmutual.scores import drop_values
from fedmutual.stepping import PhaseResult, describe_stop, work

R = TypeVar("R")
Do = Callable[Concatenate[Client, ...], R]
"""A function that runs with a client, and further arguments."""

Arguments = Mapping[str, tuple[Any, ...]]
"""Client -> the further arguments."""

Make = Callable[[str], Client]
"""Builds the client with an id. It is called in the process that will hold the client."""


class WorkerLost(RuntimeError):
    """A worker with its clients died. The last saved round is complete."""

    def __init__(self, worker: str, clients: tuple[str, ...], how: str) -> None:
        super().__init__(worker, clients, how)
        self.worker, self.clients, self.how = worker, clients, how

    def __str__(self) -> str:
        noun = "client" if len(self.clients) == 1 else "clients"
        return f"{self.worker} with {noun} {', '.join(self.clients)} {self.how}"


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


class Engine(abc.ABC):
    """Trains and scores the clients of a run. Messages move between processes; clients stay in theirs."""

    @abc.abstractmethod
    def train(self, phase: Phase, at: At, inboxes: Mapping[str, Message], declared: Spec) -> Replies:
        """Run a phase at each client with an inbox, and yield the replies, or replies without messages and their total.

        declared: all that a reply may hold.

        Raises:
            Exception: as `participate`.
            WorkerLost: a worker died.
        """

    @abc.abstractmethod
    def score(self, orders: Mapping[str, ScoreOrder]) -> Iterator[tuple[str, ClientScores]]:
        """Score each client with an order; yield (client, its scores) as clients finish.

        Raises:
            Exception: as `evaluate_client`.
            WorkerLost: a worker died.
        """

    def take_remarks(self) -> list[str]:
        """Return new remarks for the user about how this engine works; each remark is returned once."""
        return []

    def list_unsent(self) -> Collection[str]:
        """Return the clients to which the last phase sent nothing, although they have an inbox: absent real sites."""
        return ()

    @abc.abstractmethod
    def close(self) -> None:
        """Release the clients, and the processes or memory that held them."""


class Simulation(Engine):
    """An engine whose clients are in processes of this user, so that any function can run at the clients."""

    @abc.abstractmethod
    def visit(self, do: Do[R], arguments: Arguments, reads: bool = False) -> Iterator[tuple[str, R]]:
        """Run ``do(client, *arguments[id])`` in the process of each client; yield (id, result) as clients finish.

        reads: whether `do` leaves the state of the client as it is, or changes it in a way that no later round reads. A
        state that is stored on disk is written again after other functions.

        Raises:
            Exception: any exception of `do`.
            WorkerLost: a worker died.
        """

    def train(self, phase: Phase, at: At, inboxes: Mapping[str, Message], declared: Spec) -> Replies:
        """As `Engine.train`."""
        in_order = sorted(inboxes)  # as a mean adds the replies
        return self.visit(participate, {i: (phase, inboxes[i], declared, at) for i in in_order})

    def score(self, orders: Mapping[str, ScoreOrder]) -> Iterator[tuple[str, ClientScores]]:
        """As `Engine.score`. An evaluation changes the shared part of the meme, which each round copies again."""
        return self.visit(evaluate_client, orders, reads=True)


@compute_on_cpu()
def participate(
    client: Client, phase: Phase, inbox: Message, declared: Spec, at: At, warn: Callable[[Refused], None] | None = None
) -> Reply:
    """Run a phase at a client: train, then return the reply that passed the boundary checks. warn: as in `boundary.release`.

    Raises:
        Diverged: a loss or a weight is not finite.
        Refused: the message or the metrics hold more than declared, or the message holds private data.
        AlgorithmError: the user's phase raised an error.
    """
    with raise_user_errors(phase, client.id):
        return release_reply(client, phase, inbox, declared, work(phase, client, inbox, at), warn)


def release_reply(
    client: Client,
    phase: Phase,
    inbox: Message,
    declared: Spec,
    result: PhaseResult,
    warn: Callable[[Refused], None] | None = None,
) -> Reply:
    """Return the reply of a client after the boundary checks. result: as `stepping.work` returns it. Raises Refused."""
    message, train = result
    metrics = release_metrics(train, phase.terms, client.id) if client.metrics == "all" else {}
    # metrics.jsonl holds numbers only; an infinite loss of a network without noise must not stop a client with noise
    finite = {name: value for name, value in metrics.items() if value is not None}
    released = release(message, declared, client, inbox, warn)
    if phase.keeps_reply and message:  # after the check: the next reply must not hold these tensors
        kept = {f"{PREVIOUS}{k}": v.detach().clone(memory_format=torch.contiguous_format) for k, v in message.items()}
        client.memory = {**client.memory, **kept}
    if phase.adopts_reply and message:  # likewise
        personal = client.nets["personal"]
        personal.load_state_dict(personal.state_dict() | {k: message[k] for k in client.shared})
    return Reply(released, finite, work=client.work)


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
    if keep is not None and home is not None:
        keep_best_personal(client, evaluations, scores, home, round, keep)
    stopped = describe_stop(client) if client.metrics == "all" else ()
    if client.metrics != "all" and home is not None:
        home.mkdir(parents=True, exist_ok=True)
        append_scores(home, round, scores)
    return select_metrics(client, measured), (*unusable.values(), *stopped)


def keep_best_personal(
    client: Client, evaluations: Sequence[EvalSpec], scores: Sequence[Score], home: Path, round: int, keep: best.BestRule
) -> None:
    """Save the personal net of a client in its folder, if the client has one and no earlier round was better.

    round: from 1. Raises RunError as `best.save_if_better`.
    """
    if "personal" in client.nets:
        models = {e.model for e in evaluations if e.net == "personal"}  # trained on pooled data, it is reported as "global"
        rows = "test" if "global" in models else "validation"
        merit = best.compute_merit([s for s in scores if s.model in models], rows, keep.by, keep.metric)
        state = client.nets["personal"].state_dict()
        best.save_if_better(home, lambda: {f"personal.{k}": v for k, v in state.items()}, merit, round, keep)


def count_parameters(client: Client) -> dict[str, int]:
    """Return the number of parameters of each of a client's nets."""
    return {name: sum(p.numel() for p in net.parameters()) for name, net in client.nets.items()}


HOOKS = ("leaves", "send", "begin", "batches", "loss", "edit", "end", "receive")


def make_user_error(problem: BaseException, phase: Phase | None = None, client: str = "") -> BaseException:
    """Return an AlgorithmError for an exception in a phase that the user wrote; for another exception, the exception itself.

    phase: the phase that a client ran; None: the phase is searched for in the traceback.
    """
    if not isinstance(problem, Exception) or _is_fedmutuals(type(problem)):  # such an exception is one sentence already
        return problem
    raising_phase, hook = _find_hook(problem)
    phase = raising_phase or phase
    if phase is None or _is_fedmutuals(type(phase)):
        return problem
    where = f" at client {client!r}" if client else ""
    raised = f"{hook or 'its work'}{where} raised {format_error(problem)}{format_line(problem, type(phase).__module__)}"
    sentence = f"{_name_phase(phase)}: {raised}{TRACE_IN_LOG}"
    return AlgorithmError(sentence, "".join(traceback.format_exception(problem)))


@contextmanager
def raise_user_errors(phase: Phase, client: str) -> Iterator[None]:
    """Describe an exception in the block, which runs a phase at a client, as `make_user_error` does.

    Raises:
        AlgorithmError: the exception is of a phase that the user wrote. Other exceptions pass unchanged.
    """
    try:
        yield
    except Exception as problem:
        user_error = make_user_error(problem, phase, client)
        if user_error is problem:
            raise
        raise user_error from problem


def check_state(phase: Phase, state: object, declared: Spec, sent: Message, shared: bool) -> None:
    """Check the result of `receive` in a phase that the user wrote.

    declared: the tensors that replies may hold. sent: a message to a client. shared: whether there is a shared model.

    Raises:
        AlgorithmError: the result is no message, or the shared model has another shape or dtype.
    """
    if _is_fedmutuals(type(phase)):
        return
    returned = f"{_name_phase(phase)}: receive returned"
    if not isinstance(state, Mapping):
        raise AlgorithmError(f"{returned} {type(state).__name__}; return a dictionary, name -> tensor")
    for name, value in state.items():
        if not isinstance(value, Tensor):
            raise AlgorithmError(f"{returned} {type(value).__name__} for {name!r}; return a tensor")
    for name in (k for k in sent if shared and k in declared):
        before, after = format_tensor(sent[name]), format_tensor(state[name]) if name in state else "nothing"
        if before != after:
            raise AlgorithmError(f"{returned} {after} for {name!r} of the shared model; return {before}")


def _is_fedmutuals(kind: type) -> bool:
    return kind.__module__.partition(".")[0] == "fedmutual"


def _name_phase(phase: Phase) -> str:
    kind = type(phase)
    return f"phase {kind.__name__.lower()!r} of your algorithm ({kind.__module__}:{kind.__qualname__})"


def _find_hook(problem: Exception) -> tuple[Phase | None, str]:
    """Return the user's phase and hook in a traceback; (None, "") without one."""
    for frame, _ in traceback.walk_tb(problem.__traceback__):
        phase = frame.f_locals.get("self")
        if frame.f_code.co_name in HOOKS and isinstance(phase, Phase) and not _is_fedmutuals(type(phase)):
            return phase, frame.f_code.co_name
    return None, ""
