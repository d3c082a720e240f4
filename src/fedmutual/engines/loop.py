"""The rounds of a federation, the same over every engine: who takes part, what is sent, what comes back, what is told."""

from collections.abc import Sequence
from dataclasses import replace

import torch

from fedmutual.core import At, Bench, Message, Phase, Unusable, Work
from fedmutual.engines.base import Engine, evaluate_client, participate
from fedmutual.engines.user_errors import check_state, make_user_error
from fedmutual.evaluation import COPY
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
from fedmutual.federation.plan import Judge, RoundPlan


class Paused(Exception):
    """Raised by an observer of `RoundDone`: the rounds end here for now; what was saved goes on later."""


def federate(
    plan: RoundPlan, engine: Engine, server: Message, saved: int | None, observers: Sequence[Observer], judge: Judge | None
) -> Message:
    """Run the rounds that are left after the `saved` ones -> the server's last state.

    saved: None before anything was; the algorithm's start then comes first.
    An exception of any client's, and a stop by hand, is told as `Failed` and raised again.
    """

    def tell(event: Event) -> None:
        for observer in observers:
            observer(event)

    round = done = saved or 0
    try:
        tell(Started(done, plan.rounds, plan.clients, plan.notes))
        if saved is None and plan.seeds:
            others = {i: _others(plan, own) for i, own in plan.seeds.items()}
            tell(PhaseDone(0, "seed", others, plan.seeds, {}))
        if saved is None and plan.algorithm.start:
            server, _ = _exchange(plan, engine, server, -1, plan.algorithm.start, tell)
            tell(RoundDone(0, plan.rounds, server, engine.each))
        for round in range(done, plan.rounds):
            server, train = _exchange(plan, engine, server, round, plan.algorithm.phases, tell)
            if (round + 1) % plan.evaluate_every == 0 or round + 1 == plan.rounds:
                tell(_evaluate(plan, engine, server, round, train, judge))
                _say_remarks(engine, round, tell)
            tell(RoundDone(round + 1, plan.rounds, server, engine.each))
    except Paused:
        raise
    except BaseException as problem:
        told = make_user_error(problem)
        tell(Failed(round + 1, told))
        if told is problem:
            raise
        raise told from problem
    tell(Finished(plan.rounds))
    return server


def _others(plan: RoundPlan, own: int) -> int:
    """Bytes of the public data that a client has from the others: none where they are the server's."""
    use = plan.algorithm.public
    return 0 if use is not None and use.server else sum(plan.seeds.values()) - own


Train = dict[str, dict[str, float]]


def _exchange(
    plan: RoundPlan, engine: Engine, server: Message, round: int, phases: Sequence[Phase], tell: Observer
) -> tuple[Message, Train]:
    """All phases of a round, or of the start -> (server's next state, mean of each client's loss terms)."""
    train: Train = {}
    for number, phase in enumerate(phases):
        at = At(plan.seed, round, plan.rounds, number)
        name = type(phase).__name__.lower()
        asked = draw_participants(plan.clients, plan.participation if round >= 0 else 1.0, at)
        declared = phase.leaves(server)
        inboxes = {i: phase.send(server, i, at) for i in asked}
        replies: dict[str, Message] = {}
        told: Train = {}
        works: dict[str, Work] = {}
        down = {i: count_bytes(inbox) for i, inbox in inboxes.items()}
        up = dict.fromkeys(asked, 0)
        for i, reply in engine.each(participate, {i: (phase, inboxes[i], declared, at) for i in asked}):
            if reply.message or not declared:
                replies[i] = reply.message
            told[i] = reply.train
            if reply.work is not None:
                works[i] = reply.work
            up[i], down[i] = reply.up or count_bytes(reply.message), reply.down or down[i]
            tell(Replied(round + 1, name, i, len(told), len(asked)))
        replies = {i: replies[i] for i in asked if i in replies}  # in one order, whoever answered first
        server = _received(_equip(phase, plan.bench), server, replies, at, tell)
        _say_remarks(engine, round, tell)
        told = {i: told[i] for i in asked if told.get(i)}
        tell(PhaseDone(round + 1, name, down, up, told, works))
        check_state(phase, server, declared, inboxes[asked[0]], "global" in plan.algorithm.scores)
        for i, terms in told.items():
            train[i] = train.get(i, {}) | terms
    return server, train


def _equip(phase: Phase, bench: Bench | None) -> Phase:
    """The phase as the server has it: with the bench, where the phase has a field for it. No client's copy ever has one."""
    return replace(phase, bench=bench) if bench is not None and hasattr(phase, "bench") else phase  # type: ignore[type-var]


def _received(phase: Phase, server: Message, replies: dict[str, Message], at: At, tell: Observer) -> Message:
    """The server's next state; whose reply is of no use is named, and left out."""
    try:
        return phase.receive(server, replies, at)
    except Unusable as problem:
        if not problem.why.keys() & replies.keys():
            raise
        for i, why in problem.why.items():
            tell(Noted(at.round + 1, f"the message of client {i!r} is left out: {why}"))
        return _received(phase, server, {i: r for i, r in replies.items() if i not in problem.why}, at, tell)


def _say_remarks(engine: Engine, round: int, tell: Observer) -> None:
    """What came up at the engine since it was last asked."""
    for remark in engine.remarks():
        tell(Noted(round + 1, remark))


def _evaluate(plan: RoundPlan, engine: Engine, server: Message, round: int, train: Train, judge: Judge | None) -> Evaluated:
    """Score the shared model beside the clients, and their nets where they live, in the order of the clients."""
    at = At(plan.seed, round, plan.rounds, len(plan.algorithm.phases) - 1)
    asked = draw_participants(plan.clients, plan.participation, at)
    exams = {i: tuple(e for e in all_ if i in asked or e.model != COPY) for i, all_ in plan.exams.items()}
    given = {i: (own, _shared(plan, server, i, at), round + 1, plan.homes.get(i), plan.keep) for i, own in exams.items()}
    answers = engine.each(evaluate_client, given)
    scores = [judge(server)] if judge else []  # while workers, where there are any, score theirs
    told = dict(answers)
    return Evaluated(round + 1, train, (*scores, *(s for i in plan.exams for s in told.get(i, ()))))


def _shared(plan: RoundPlan, server: Message, to: str, at: At) -> Message:
    """What a client is sent to be scored: by the last of a round's phases that sends anything."""
    sent = (phase.send(server, to, replace(at, phase=n)) for n, phase in reversed(list(enumerate(plan.algorithm.phases))))
    return next((message for message in sent if message), {})


def draw_participants(clients: Sequence[str], fraction: float, at: At) -> tuple[str, ...]:
    """Who is asked in a round: that fraction of the clients, at least one, drawn anew each round; the same in its phases."""
    count = max(1, round(fraction * len(clients)))
    drawn = torch.randperm(len(clients), generator=At(at.seed, at.round, at.rounds).rng("participants"))[:count]
    return tuple(clients[i] for i in sorted(drawn.tolist()))


def count_bytes(message: Message) -> int:
    """Bytes of the tensors of a message."""
    return sum(t.numel() * t.element_size() for t in message.values())
