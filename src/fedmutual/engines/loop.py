"""The rounds of a federation on any engine: draw participants, send messages, receive replies, and report events."""

from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import fields, is_dataclass, replace
from functools import partial
from typing import TypeVar

import torch

from fedmutual.aggregation import RunningMean
from fedmutual.core import At, Message, Phase, Spec, Total, Unusable, Work
from fedmutual.cpu import compute_on_cpu
from fedmutual.engines.base import Engine, Replies, ScoreOrder, Simulation, check_state, make_user_error
from fedmutual.events import (
    Evaluated,
    Event,
    Failed,
    Finished,
    Noted,
    Observer,
    PhaseDone,
    Replied,
    RoundDone,
    Started,
)
from fedmutual.federation.evaluation import COPY
from fedmutual.federation.experiment import Judge, RoundPlan
from fedmutual.rundir.schema import SEED

R = TypeVar("R")


class Paused(Exception):
    """Raised by an observer of `RoundDone` to stop the rounds; the saved run can be resumed."""


PhaseOrder = tuple[Phase, At, Mapping[str, Message], Spec]
"""The arguments of `Engine.train` for a phase."""

RunPhase = Callable[[], Replies]
"""Runs the phase of an order, and yields as `Engine.train`."""

Rounds = Generator[PhaseOrder, RunPhase, Message]
"""Yields the order of each phase, receives a function that runs the phase, and returns the server's last state."""


def federate(
    plan: RoundPlan, engine: Engine, server: Message, saved: int | None, observers: Sequence[Observer], judge: Judge | None
) -> Message:
    """Run `generate_rounds` with an engine, and return the server's state after the last round.

    Raises:
        Exception: as `generate_rounds`.
    """
    return drive(generate_rounds(plan, engine, server, saved, observers, judge), engine)


def drive(rounds: Generator[PhaseOrder, RunPhase, R], engine: Engine) -> R:
    """Run the phases of one run with its engine, and return the result of the generator.

    Raises:
        Exception: as `generate_rounds`.
    """
    try:
        order = next(rounds)
        while True:
            order = rounds.send(partial(engine.train, *order))
    except StopIteration as end:
        result: R = end.value
        return result


def generate_rounds(
    plan: RoundPlan, engine: Engine, server: Message, saved: int | None, observers: Sequence[Observer], judge: Judge | None
) -> Rounds:
    """Run the rounds after the `saved` rounds. The caller runs the phases; several runs can share their phases in this way.

    engine: scores the clients; in a simulation observers may visit them.
    saved: the number of saved rounds; None: a new run, which begins with the start phases of the algorithm.
    judge: scores the shared model at the server; None: it is not scored there.

    Raises:
        Exception: any exception of a client or an observer, and KeyboardInterrupt; observers receive `Failed` first.
        AlgorithmError: a phase that the user wrote raised an error, or returned something that cannot be used.
        Paused: an observer stopped the rounds; observers do not receive `Failed`.
    """

    def report(event: Event) -> None:
        for observer in observers:
            observer(event)

    visit = engine.visit if isinstance(engine, Simulation) else None
    round = finished_rounds = saved or 0
    try:
        report(Started(finished_rounds, plan.rounds, plan.clients, plan.notes, plan.choices))
        if saved is None and plan.seeds:
            use = plan.algorithm.public
            received = 0 if use is not None and use.server else sum(plan.seeds.values())  # by a client, with its own rows
            others = {i: max(received - sent, 0) for i, sent in plan.seeds.items()}
            report(PhaseDone(0, SEED, others, plan.seeds, {}))
        if saved is None and plan.algorithm.start:
            server, _ = yield from _exchange(plan, engine, server, -1, plan.algorithm.start, report)
            report(RoundDone(0, plan.rounds, server, visit))
        rounds = finished_rounds if saved is not None and plan.is_over() else plan.rounds
        for round in range(finished_rounds, rounds):
            server, train = yield from _exchange(plan, engine, server, round, plan.algorithm.phases, report)
            if (round + 1) % plan.evaluate_every == 0 or round + 1 == plan.rounds:
                report(_evaluate(plan, engine, server, round, train, judge, report))
                _report_remarks(engine, round, report)
            if plan.is_over():
                rounds = round + 1
                report(Noted(rounds, f"early stopping (records.patience): the run ends after round {rounds}"))
            report(RoundDone(round + 1, rounds, server, visit))
            if rounds == round + 1:
                break
    except (Paused, GeneratorExit):
        raise
    except BaseException as problem:
        error = make_user_error(problem)
        report(Failed(round + 1, error))
        if error is problem:
            raise
        raise error from problem
    report(Finished(rounds))
    return server


Train = dict[str, dict[str, float]]


def _exchange(
    plan: RoundPlan, engine: Engine, server: Message, round: int, phases: Sequence[Phase], report: Observer
) -> Generator[PhaseOrder, RunPhase, tuple[Message, Train]]:
    """Run the phases of a round, or of the start -> (server's next state, each client's mean loss terms)."""
    train: Train = {}

    def report_unusable(client: str, why: str) -> None:
        report(Noted(round + 1, f"the message of client {client!r} is left out: {why}"))

    for number, phase in enumerate(phases):
        at = At(plan.seed, round, plan.rounds, number)
        name = type(phase).__name__.lower()
        participants = draw_participants(plan.clients, plan.participation if round >= 0 else 1.0, at)
        declared = phase.leaves(server)
        inboxes = {i: phase.send(server, i, at) for i in participants}
        messages: dict[str, Message] = {}
        mean = RunningMean(participants)
        total: Total | None = None
        losses: Train = {}
        works: dict[str, Work] = {}
        down = {i: count_bytes(inbox) for i, inbox in inboxes.items()}
        up = dict.fromkeys(participants, 0)
        run_phase = yield phase, at, inboxes, declared
        for answer in run_phase():
            if isinstance(answer, Total):
                total = answer
                continue
            i, reply = answer
            if weighed := phase.weigh_reply(reply.message):
                with compute_on_cpu():
                    mean.add(i, *weighed)
            elif reply.message or not declared:
                messages[i] = reply.message
            losses[i] = reply.train
            if reply.work is not None:
                works[i] = reply.work
            up[i], down[i] = reply.up or count_bytes(reply.message), reply.down or down[i]
            report(Replied(round + 1, name, i, len(losses), len(participants)))
        down |= dict.fromkeys({*engine.list_unsent()} - losses.keys(), 0)  # an absent site may be in a sum begun earlier
        in_order = {i: messages[i] for i in participants if i in messages}  # the order of arrival has no effect
        with compute_on_cpu():
            replies = (mean.finish() or in_order) if total is None else total
        values = {"bench": plan.bench, "clients": len(plan.clients)}  # a client's copy of a phase never has these
        names = {f.name for f in fields(phase) if f.metadata.get("from") == "run"} if is_dataclass(phase) else ()
        servers = replace(phase, **{k: v for k, v in values.items() if k in names}) if names else phase
        server = receive_usable(servers, server, replies, at, report_unusable)
        _report_remarks(engine, round, report)
        losses = {i: losses[i] for i in participants if losses.get(i)}
        report(PhaseDone(round + 1, name, down, up, losses, works))
        check_state(phase, server, declared, inboxes[participants[0]], "global" in plan.algorithm.scores)
        for i, terms in losses.items():
            train[i] = train.get(i, {}) | terms
    return server, train


@compute_on_cpu()
def receive_usable(
    phase: Phase, server: Message, replies: Mapping[str, Message], at: At, report: Callable[[str, str], object]
) -> Message:
    """Return the next state after the usable replies. report: called with the sender and the fault of each other reply.

    Raises:
        Unusable: the phase names no sender of a reply.
    """
    try:
        return phase.receive(server, replies, at)
    except Unusable as problem:
        if not problem.why.keys() & replies.keys():
            raise
        for sender, why in problem.why.items():
            report(sender, why)
        usable = {sender: reply for sender, reply in replies.items() if sender not in problem.why}
        return receive_usable(phase, server, usable, at, report)


def _report_remarks(engine: Engine, round: int, report: Observer) -> None:
    """Report the new remarks of the engine."""
    for remark in engine.take_remarks():
        report(Noted(round + 1, remark))


def _evaluate(
    plan: RoundPlan, engine: Engine, server: Message, round: int, train: Train, judge: Judge | None, report: Observer
) -> Evaluated:
    """Score the shared model at the server and the clients' nets in their processes; scores are in the clients' order."""
    at = At(plan.seed, round, plan.rounds, len(plan.algorithm.phases) - 1)
    participants = set(draw_participants(plan.clients, plan.participation, at))
    evaluations = {i: tuple(e for e in all_ if i in participants or e.model != COPY) for i, all_ in plan.evaluations.items()}
    orders = {
        i: ScoreOrder(specs, _get_inbox(plan, server, i, at), round + 1, plan.homes.get(i), plan.keep)
        for i, specs in evaluations.items()
    }
    answers = engine.score(orders)
    shared = judge(server, round + 1) if judge else None  # worker processes score their clients meanwhile
    by_client = dict(answers)
    of_clients = [by_client[i] for i in plan.evaluations if i in by_client]
    for remark in (*(shared[1] if shared else ()), *(remark for _, remarks in of_clients for remark in remarks)):
        report(Noted(round + 1, remark))
    return Evaluated(round + 1, train, (*((shared[0],) if shared else ()), *(s for scores, _ in of_clients for s in scores)))


def _get_inbox(plan: RoundPlan, server: Message, to: str, at: At) -> Message:
    """Return the message that a client is scored with: that of the last phase of a round that sends tensors."""
    messages = (
        phase.send(server, to, replace(at, phase=n)) for n, phase in reversed(list(enumerate(plan.algorithm.phases)))
    )
    return next((message for message in messages if message), {})


def draw_participants(clients: Sequence[str], fraction: float, at: At) -> tuple[str, ...]:
    """Return the clients that take part in a round, in the order of `clients`: a random fraction, at least one.

    This is the sampling of FedAvg (McMahan et al. 2017, https://arxiv.org/abs/1602.05629, Algorithm 1). All phases of a
    round draw equally. fraction: in (0, 1].
    """
    count = max(1, round(fraction * len(clients)))
    drawn = torch.randperm(len(clients), generator=At(at.seed, at.round, at.rounds).rng("participants"))[:count]
    return tuple(clients[i] for i in sorted(drawn.tolist()))


def count_bytes(message: Message) -> int:
    """Return the bytes of the tensors of a message."""
    return sum(t.numel() * t.element_size() for t in message.values())
