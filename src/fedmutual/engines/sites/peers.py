"""Sites that send to each other: what one site hands to the others after a phase, and what it makes of theirs.

FedH2L has no server that computes. Every site holds what the relay of other engines would, and calls `Phase.receive` and
`Phase.send` itself; the coordinator only says when, and whose messages count.
"""

from collections.abc import Mapping
from pathlib import Path

from fedmutual.algorithms.peers import Peering
from fedmutual.boundary import check_declared
from fedmutual.core import Algorithm, At, Message, Phase, Unusable
from fedmutual.engines.loop import size
from fedmutual.engines.sites.post import Answer, Garbled, Order, packed
from fedmutual.engines.sites.post import answer as opened
from fedmutual.records.files import read_tensors, write_tensors

Letters = dict[str, bytes]
"""What goes to other sites: site -> bytes."""


def by_hand(algorithm: Algorithm) -> bool:
    """Whether sites send to each other: no phase needs a server that computes."""
    return all(isinstance(phase, Peering) for phase in algorithm.phases)


class Exchange:
    """One site's hand in it."""

    def __init__(self, algorithm: Algorithm, state: Message, site: str, sites: tuple[str, ...], folder: Path) -> None:
        """state: what all know before the first round. folder: where its own messages are kept until the round is over."""
        self._algorithm, self._state, self._site, self._folder = algorithm, state, site, folder / "letters"
        self._others = tuple(i for i in sites if i != site)
        self._mail: dict[tuple[int, int], dict[str, bytes]] = {}

    def receive(self, sender: str, letter: bytes) -> None:
        """Put a letter of another site's by. Raises Garbled where it is none."""
        order = opened(letter)[0].order
        self._mail.setdefault((order.round, order.phase), {})[sender] = letter

    def letters(self, order: Order, at: At) -> Letters:
        """What goes to whom after a phase, as it was kept."""
        phases, message = self._phases(order), self._kept(order)
        if not message or order.phase + 1 == len(phases):
            return {}
        phase, following = phases[order.phase : order.phase + 2]
        held = phase.receive(self._state, {self._site: message}, at)
        letter = packed(Answer(order), message)
        return {i: letter for i in self._others if following.send(held, i, _next(at))}

    def keep(self, order: Order, message: Message) -> None:
        """Keep one's own message, to be sent again if it was lost; those of earlier rounds are over."""
        for file in self._folder.glob("*.safetensors"):
            if not file.name.startswith(f"{order.round + 1}-"):
                file.unlink(missing_ok=True)
        self._mail = {place: mail for place, mail in self._mail.items() if place[0] >= order.round}
        write_tensors(self._file(order), message, {"format": "1"})

    def inbox(self, order: Order, at: At) -> tuple[Message, int, tuple[str, ...]]:
        """What a phase begins with -> (inbox, bytes of it that came from others, whose messages were left out and why)."""
        phases, held, remarks = self._phases(order), self._state, list[str]()
        for number, phase in enumerate(phases[: order.phase]):
            done = Order(order.kind, order.round, number)
            replies, odd = self._replies(phase, done, order.senders or ())
            then = At(at.seed, at.round, at.rounds, number)
            held, unusable = _received(phase, held, replies, then)
            remarks += [f"{i}: {why}" for i, why in (odd | unusable).items()]
        inbox = phases[order.phase].send(held, self._site, at)
        return inbox, size(inbox), tuple(remarks)

    def _replies(self, phase: Phase, order: Order, senders: tuple[str, ...]) -> tuple[dict[str, Message], dict[str, str]]:
        """The messages of those who count, one's own among them; and what is wrong with the others."""
        found, odd = dict[str, Message](), dict[str, str]()
        mail, declared = self._mail.get((order.round, order.phase), {}), phase.leaves(self._state)
        for i in sorted({*senders, self._site}):
            if i == self._site:
                message = self._kept(order)
            elif i not in mail:
                continue  # it had nothing for this site, or its letter was lost
            else:
                try:
                    message = opened(mail[i])[1]
                    check_declared(message, declared, i)
                except (Garbled, RuntimeError) as problem:
                    odd[i] = str(problem)
                    continue
            if message:
                found[i] = message
        return found, odd

    def _kept(self, order: Order) -> Message:
        return read_tensors(self._file(order))[0] if self._file(order).exists() else {}

    def _file(self, order: Order) -> Path:
        return self._folder / f"{order.round + 1}-{order.phase + 1}.safetensors"

    def _phases(self, order: Order) -> tuple[Phase, ...]:
        return self._algorithm.start if order.round < 0 else self._algorithm.phases


def _received(phase: Phase, held: Message, replies: Mapping[str, Message], at: At) -> tuple[Message, dict[str, str]]:
    """What all know and were told; who told nonsense is left out, with the reason."""
    try:
        return phase.receive(held, replies, at), {}
    except Unusable as problem:
        if not problem.why.keys() & replies.keys():
            raise
        left, why = _received(phase, held, {i: r for i, r in replies.items() if i not in problem.why}, at)
        return left, {**problem.why, **why}


def _next(at: At) -> At:
    return At(at.seed, at.round, at.rounds, at.phase + 1)
