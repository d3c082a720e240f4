"""The largest sizes of orders, answers and messages between sites, computed from the contract.

The receiver refuses longer bytes before it parses them.
"""

import json
from collections.abc import Collection
from math import prod

import torch

from fedmutual.algorithms.peers import PEER
from fedmutual.core import Algorithm, Message, Spec
from fedmutual.sites.protocol import EVALUATE, LONGEST_TEXT, WORK, Limit, MalformedMessage, Order, SiteAnswer, read_answer
from fedmutual.sites.secure_sum.messages import CONTENT, LONGEST_CONTENT, WORDS, Stage
from fedmutual.sites.statistics import declare_scaling, find_sums

_ESCAPED = 14  # bytes that a character takes at most, in JSON that is a text within JSON
_FIXED = 2**10  # bytes of an order's or an answer's own keys, brackets and numbers
_NUMBER = 32  # bytes of one more name's quotes and number
_ALIGNED = 8  # bytes in multiples of which safetensors fills its header up
_SCORES = 2**20  # the most bytes of all scores of an answer: some networks on some rows, with one number for each class


class MessageSizes:
    """The largest sizes of the messages of one federation, computed from the contract before any message arrives."""

    def __init__(
        self, algorithm: Algorithm, state: Message, sites: Collection[str], peer_to_peer: bool, words: int | None = None
    ) -> None:
        """state: what all know before the first round. peer_to_peer: sites send their messages to each other.

        words: of an update in a secure sum, whose stages are further places of a round; None: there is none.
        """
        self._algorithm, self._state, self._sites, self._peer_to_peer = algorithm, state, tuple(sites), peer_to_peer
        self._words_of_update = words
        phases = (*algorithm.start, *algorithm.phases)
        self._traffic = len(self._sites) * sum(count_bytes(phase.leaves(state)) for phase in phases)  # of one round, at most
        self._secure_sum_message: Spec = {CONTENT: (torch.uint8, (LONGEST_CONTENT,))}

    @property
    def order_limit(self) -> Limit:
        """The limit of an order: names of sites, and an inbox with the state and all replies of earlier phases."""
        held = {k: (v.dtype, tuple(v.shape)) for k, v in self._state.items()}
        for number, phase in enumerate((*self._algorithm.start, *self._algorithm.phases)):
            leaves = phase.leaves(self._state).items()
            held |= {f"{number}{PEER}{i}{PEER}{k}": what for k, what in leaves for i in self._sites}
        held |= self._secure_sum_message if self._words_of_update is not None else {}
        sums = find_sums(self._algorithm)
        held |= declare_scaling(sums.layout) if sums is not None else {}
        return limit_message({} if self._peer_to_peer else held, self._count_word_bytes())

    @property
    def peer_message_limit(self) -> Limit:
        """The limit of the largest message from site to site."""
        limits = [
            limit_message(phase.leaves(self._state), _FIXED) for phase in (*self._algorithm.start, *self._algorithm.phases)
        ]
        return Limit(max(one.header for one in limits), max(one.tensors for one in limits))

    @property
    def longest_bytes(self) -> int:
        """The number of bytes of the longest message."""
        rounds = ((-1, self._algorithm.start), (0, self._algorithm.phases))
        work = [self._limit_answer(Order(WORK, round, n)) for round, phases in rounds for n in range(len(phases))]
        if self._words_of_update is not None:
            work += [self._limit_answer(Order(WORK, round, stage)) for round, phases in rounds if phases for stage in Stage]
        answers = (*work, self._limit_answer(Order(EVALUATE, 0, 0)))
        return _ALIGNED + max(one.header + one.tensors for one in (self.order_limit, self.peer_message_limit, *answers))

    def open_answer(self, order: Order, content: bytes) -> tuple[SiteAnswer, Message]:
        """Return a site's answer to an order, and the tensors of the answer.

        Raises:
            MalformedMessage: the bytes are not an answer, are longer than any answer, or state larger counts than possible.
        """
        answer, message = read_answer(content, self._limit_answer(order))
        if len(answer.remarks) > self._count_remarks(order):
            raise MalformedMessage(
                f"it makes {len(answer.remarks):,} remarks, and {self._count_remarks(order)} are possible"
            )
        if max(answer.up or 0, answer.down or 0) > self._traffic:
            raise MalformedMessage("it counts more bytes than the messages of a round have")
        return answer, message

    def _limit_answer(self, order: Order) -> Limit:
        """Of an answer: scores, or a message, losses and remarks."""
        if order.kind == EVALUATE:
            return limit_message({}, self._count_word_bytes() + _SCORES)
        phases = self._algorithm.start if order.round < 0 else self._algorithm.phases
        if self._words_of_update is not None and order.phase >= len(phases):
            sums = find_sums(self._algorithm)
            count = self._words_of_update if order.round >= 0 or sums is None else sums.layout.count
            upload: Spec = {WORDS: (torch.int64, (count,))}
            return limit_message(
                upload if order.phase == Stage.UPLOAD else self._secure_sum_message, self._count_word_bytes()
            )
        phase, is_hidden = phases[order.phase], self._peer_to_peer or self._words_of_update is not None
        return limit_message(
            {} if is_hidden else phase.leaves(self._state), self._count_word_bytes(self._count_remarks(order), phase.terms)
        )

    def _count_remarks(self, order: Order) -> int:
        """Return the largest number of remarks in an answer: one on each sender in each earlier phase."""
        return order.phase * len(self._sites)

    def _count_word_bytes(self, remarks: int = 0, terms: Collection[str] = ()) -> int:
        """Return the largest number of bytes of a header: three lists of sites, the remarks, one problem and the losses."""
        names = (*self._sites, *self._sites, *self._sites, *terms)
        sentences = (remarks + 1) * _ESCAPED * (LONGEST_TEXT + _NUMBER)
        return _FIXED + sum(_ESCAPED * len(name) + _NUMBER for name in names) + sentences


def limit_message(declared: Spec, words: int) -> Limit:
    """Return the limit of a message with the declared tensors and this number of bytes of words in its header."""
    size = count_bytes(declared)
    entry = {"dtype": "F8_E8M0", "data_offsets": [size, size]}  # the longest name of a dtype
    table = json.dumps({k: {**entry, "shape": list(shape)} for k, (_, shape) in declared.items()})
    return Limit(len(table) + words + _ALIGNED, size)


def count_bytes(declared: Spec) -> int:
    """Return the bytes of all declared tensors together, without names and header."""
    return sum(prod(shape) * dtype.itemsize for dtype, shape in declared.values())
