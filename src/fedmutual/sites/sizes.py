"""The largest sizes of orders, answers and messages between sites, computed from the contract before any message arrives.

The receiver refuses longer bytes before it parses them.
"""

import json
from collections.abc import Collection
from math import prod

import torch

from fedmutual.algorithms.peers import PEER, is_peer_to_peer
from fedmutual.core import Algorithm, Message, Spec
from fedmutual.sites.protocol import Limit, MalformedMessage, Order, SiteAnswer, read_answer
from fedmutual.sites.secure_sum.fixed_point import count_words
from fedmutual.sites.secure_sum.messages import CONTENT, LONGEST_CONTENT, WORDS
from fedmutual.sites.statistics import declare_scaling, find_sums

_TEXT = 2**20  # bytes of an answer's scores, and of the keys, brackets and numbers of an order or an answer
_TEXT_PER_SITE = 2**15  # bytes of a site's names in them, and of a remark on the site; a character takes up to 14 bytes
_PEER_TEXT = 2**10  # bytes of the text of a message from site to site
_ALIGNED = 8  # bytes in multiples of which safetensors fills its header up


class MessageSizes:
    """The limits of the messages of one federation: `order` and `answer`, and `peer_message` from site to site."""

    def __init__(self, algorithm: Algorithm, state: Message, sites: Collection[str], is_masked: bool = False) -> None:
        """state: what all know before the first round. is_masked: whether stages of a secure sum are further phases."""
        phases, sums, count = (*algorithm.start, *algorithm.phases), find_sums(algorithm), len(sites)
        replies = [phase.leaves(state) for phase in phases]
        text = _TEXT + count * len(phases) * _TEXT_PER_SITE  # a remark on each sender in each earlier phase
        inbox = {k: (v.dtype, tuple(v.shape)) for k, v in state.items()}  # and all replies of earlier phases
        for number, reply in enumerate(replies):
            inbox |= {f"{number}{PEER}{i}{PEER}{k}": what for k, what in reply.items() for i in sites}
        inbox |= declare_scaling(sums.layout) if sums is not None else {}
        answers: list[Spec] = [{}, *replies]
        if is_masked:
            content: Spec = {CONTENT: (torch.uint8, (LONGEST_CONTENT,))}
            inbox |= content
            answers = [content, *({WORDS: (torch.int64, (count_words(phase, state),))} for phase in phases)]
        if is_peer_to_peer(algorithm):
            inbox, answers = {}, [{}]
        self._site_count = count
        self._traffic = count * sum(count_bytes(reply) for reply in replies)  # of one round, at most
        self.order = limit_message([inbox], text)
        self.answer = limit_message(answers, text)
        self.peer_message = limit_message(replies, _PEER_TEXT)

    @property
    def longest_bytes(self) -> int:
        """The number of bytes of the longest message."""
        return _ALIGNED + max(limit.header + limit.tensors for limit in (self.order, self.answer, self.peer_message))

    def open_answer(self, order: Order, content: bytes) -> tuple[SiteAnswer, Message]:
        """Return a site's answer to an order, and the tensors of the answer.

        Raises MalformedMessage where the bytes are not an answer, are longer than any answer, or state larger counts than
        possible.
        """
        answer, message = read_answer(content, self.answer)
        possible = order.phase * self._site_count  # one on each sender in each earlier phase
        if len(answer.remarks) > possible:
            raise MalformedMessage(f"it makes {len(answer.remarks):,} remarks, and {possible} are possible")
        if max(answer.up or 0, answer.down or 0) > self._traffic:
            raise MalformedMessage("it counts more bytes than the messages of a round have")
        return answer, message


def limit_message(declared: Collection[Spec], words: int) -> Limit:
    """Return the limit of messages, each with the tensors of one Spec and this number of bytes of words in its header."""
    headers, sizes = [], []
    for spec in declared:
        sizes.append(count_bytes(spec))
        entry = {"dtype": "F8_E8M0", "data_offsets": [sizes[-1], sizes[-1]]}  # the longest name of a dtype
        headers.append(len(json.dumps({k: {**entry, "shape": list(shape)} for k, (_, shape) in spec.items()})))
    return Limit(max(headers) + words + _ALIGNED, max(sizes))


def count_bytes(declared: Spec) -> int:
    """Return the bytes of all declared tensors together, without names and header."""
    return sum(prod(shape) * dtype.itemsize for dtype, shape in declared.values())
