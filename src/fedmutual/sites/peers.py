"""Sites that send to each other: what one site hands to the others after a phase, and what it makes of theirs.

FedH2L has no server that computes. Every site holds what the relay of other engines would, and calls `Phase.receive` and
`Phase.send` itself; the coordinator only says when, and whose messages count.
"""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from fedmutual.algorithms.peers import Peering, forwarded
from fedmutual.core import Algorithm, At, Message, Phase, Spec, Unusable
from fedmutual.engines.loop import count_bytes
from fedmutual.sites.mailbox import Mailbox, Place
from fedmutual.sites.protocol import Order, SiteAnswer, clean_text, pack_message
from fedmutual.sites.sizes import MessageSizes
from fedmutual.tensor_files import read_tensors, write_tensors

Letters = dict[str, bytes]
"""What goes to other sites: site -> bytes."""


def is_peer_to_peer(algorithm: Algorithm) -> bool:
    """Whether sites send to each other: no phase needs a server that computes."""
    return all(isinstance(phase, Peering) for phase in algorithm.phases)


class PeerMailbox:
    """One site's hand in it."""

    def __init__(
        self, algorithm: Algorithm, state: Message, site: str, sites: tuple[str, ...], folder: Path, rounds: int
    ) -> None:
        """state: what all know before the first round. folder: where its own messages are kept until the round is over."""
        self._algorithm, self._state, self._site, self._folder = algorithm, state, site, folder / "letters"
        self._others, self._rounds = tuple(i for i in sites if i != site), rounds
        self.mail = Mailbox(self._others, self._declared, MessageSizes(algorithm, state, sites, by_hand=True).letter)

    def receive(self, sender: str, letter: bytes) -> None:
        """Put a letter of another site's by. Raises Garbled, with the reason, where it is refused."""
        self.mail.put(sender, letter)

    def _declared(self, place: Place) -> Spec | None:
        """What a letter of a place holds; None where sites send none."""
        round, number = place
        phases = self._algorithm.start if round < 0 else self._algorithm.phases
        if round >= self._rounds or number + 1 >= len(phases):
            return None
        return phases[number].leaves(self._state) or None

    def letters(self, order: Order, at: At) -> Letters:
        """What goes to whom after a phase, as it was kept."""
        message = self._kept(order)
        letter = pack_message(SiteAnswer(Order(order.kind, order.round, order.phase)), message)
        return dict.fromkeys(self._listeners(order, message, at), letter)

    def keep(self, order: Order, message: Message, at: At) -> int:
        """Keep one's own message, to be sent again if it was lost; those of earlier rounds are over -> bytes that go out.

        Raises:
            Unusable: others could make nothing of it.
        """
        up = count_bytes(message) * len(self._listeners(order, message, at))
        for file in self._folder.glob("*.safetensors"):
            if not file.name.startswith(f"{order.round + 1}-"):
                file.unlink(missing_ok=True)
        write_tensors(self._file(order), message, {"format": "1"})
        return up

    def inbox(self, order: Order, at: At) -> tuple[Message, int, tuple[str, ...]]:
        """What a phase begins with -> (inbox, bytes of it that came from others, whose messages were left out and why)."""
        self.mail.begin(order.round)
        phases, held, remarks = self._phases(order), self._state, list[str]()
        for number, phase in enumerate(phases[: order.phase]):
            done, then = replace(order, phase=number), replace(at, phase=number)
            replies, odd = self._replies(done, then)
            held, unusable = _received(phase, held, replies, then)
            remarks += [clean_text(f"{i!r}: {why}") for i, why in (odd | unusable).items()]
        inbox = phases[order.phase].send(held, self._site, at)
        return inbox, count_bytes(inbox), tuple(remarks)

    def _replies(self, order: Order, at: At) -> tuple[dict[str, Message], dict[str, str]]:
        """The messages of those who count, one's own among them; and what is wrong with the others."""
        own, mail = self._kept(order), self.mail.letters((order.round, order.phase))
        found, odd = {self._site: own} if own else {}, dict[str, str]()
        for i in (i for i in self._others if i in (order.senders or ())):
            if i in mail:
                found[i] = mail[i]
            elif self._hears(self._site, i, own, order, at):
                odd[i] = self.mail.take_reason(i) or "its letter did not come"
        return dict(sorted(found.items())), odd

    def _listeners(self, order: Order, message: Message, at: At) -> tuple[str, ...]:
        """To whom one's own message goes."""
        there = self._others if order.asked is None else [i for i in self._others if i in order.asked]
        return tuple(i for i in there if self._hears(i, self._site, message, order, at))

    def _hears(self, to: str, sender: str, message: Message, order: Order, at: At) -> bool:
        """Whether one is to have what another said in a phase, by a message that it might have said."""
        phases = self._phases(order)
        if not message or order.phase + 1 == len(phases):
            return False
        phase, following = phases[order.phase : order.phase + 2]
        try:
            held = phase.receive(self._state, {sender: message}, at)
        except Unusable:  # of another sender's rows this site's own message cannot speak; who hears whom is the same
            held = self._state | forwarded({sender: message})
        return bool(following.send(held, to, replace(at, phase=order.phase + 1)))

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
