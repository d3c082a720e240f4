"""Sites that train nothing, to test how a server treats what it receives."""

from dataclasses import replace

import torch

import wards
from fedmutual.sites.protocol import EVALUATE, SiteAnswer, pack_message, read_order
from wards import COMMON

SITES = ("north", "south", "west")


def diverged(inbox):
    """Return the message of a site whose phase failed."""
    return {k: torch.full_like(v, torch.nan) for k, v in inbox.items()}


def moved(inbox, by):
    """Return the shared model with `by` added to every floating element, and 1 to every integer."""
    return {k: v + by if v.is_floating_point() else v + 1 for k, v in inbox.items()}


class Puppet:
    """A site that answers an order by `does(order, inbox)`: a message, an Answer, or both. It keeps its orders."""

    def __init__(self, does=lambda asked, inbox: moved(inbox, 0.01)):
        self.does, self.orders = does, []

    def carry_out(self, content):
        order, inbox = read_order(content)
        self.orders.append(order)
        if order.kind == EVALUATE:
            return pack_message(SiteAnswer(order), {})
        reaction = self.does(order, inbox)
        answer, message = (
            reaction
            if isinstance(reaction, tuple)
            else (reaction, {})
            if isinstance(reaction, SiteAnswer)
            else (None, reaction)
        )
        return pack_message(SiteAnswer(order) if answer is None else replace(answer, order=order), message)

    def make_peer_messages(self, content):
        return {}

    def rounds(self):
        """Return (attempt, round) of each order of work, in order."""
        return [(asked.attempt, asked.round) for asked in self.orders if asked.kind != EVALUATE]


def healthy(limit, by=0.01):
    """Return a site that diverges if the received shared model has an element above the limit."""

    def does(asked, inbox):
        if any(v.abs().max() > limit for v in inbox.values() if v.is_floating_point()):
            return diverged(inbox)
        return moved(inbox, by)

    return does


class Federation(wards.Federation):
    """Puppets, a contract, and their outcome."""

    def __init__(self, folder, common=COMMON, sites=SITES, **given):
        super().__init__(folder, common, {i: {} for i in sites}, start=lambda name: Puppet(), **given)


def element(model):
    """Return one element of a shared model; puppets change all elements equally."""
    return torch.as_tensor(model["classifier.bias"][0]).item()
