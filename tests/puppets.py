"""Sites of a few lines, which train nothing: for what a server does with what it is sent."""

from dataclasses import replace

import torch

from fedmutual.events import Noted
from fedmutual.rundir.text import told
from fedmutual.sites import contract as contracts
from fedmutual.sites.coordinator import Coordinator
from fedmutual.sites.protocol import EXAM, SiteAnswer, pack_message, read_order
from wards import COMMON, Desk, contract

SITES = ("north", "south", "west")
DIVERGED = "it diverged: its loss or its weights are no longer finite"


def moved(inbox, by):
    """The shared model, each of its floating tensors moved by so much in every element."""
    return {k: v + by if v.is_floating_point() else v + 1 for k, v in inbox.items()}


class Puppet:
    """Answers an order of work by `does(order, inbox)`: a message, an Answer, or both; scores nothing. Keeps its orders."""

    def __init__(self, does=lambda asked, inbox: moved(inbox, 0.01)):
        self.does, self.orders = does, []

    def do(self, content):
        asked, inbox = read_order(content)
        self.orders.append(asked)
        if asked.kind == EXAM:
            return pack_message(SiteAnswer(asked), {})
        found = self.does(asked, inbox)
        said, message = (
            found if isinstance(found, tuple) else (found, {}) if isinstance(found, SiteAnswer) else (None, found)
        )
        return pack_message(SiteAnswer(asked) if said is None else replace(said, order=asked), message)

    def letters(self, content):
        return {}

    def rounds(self):
        """(attempt, round) of each order of work, in their order."""
        return [(asked.attempt, asked.round) for asked in self.orders if asked.kind != EXAM]


def healthy(limit, by=0.01):
    """A site that diverges where the shared model that it is sent has an element beyond the limit."""

    def does(asked, inbox):
        if any(v.abs().max() > limit for v in inbox.values() if v.is_floating_point()):
            return SiteAnswer(asked, problem=DIVERGED, diverged=True)
        return moved(inbox, by)

    return does


class Federation:
    """Puppets, a contract, and what came of them."""

    def __init__(self, folder, common=COMMON, sites=SITES, **given):
        folder.mkdir(exist_ok=True)
        self.folder, self.notes = folder / "server", []
        self.agreed = contracts.read_contract(contract(folder, common, sites, **given))
        self.desk = Desk({i: Puppet() for i in sites})

    def __getitem__(self, site):
        return self.desk.halves[site]

    def run(self, *observers):
        def noted(event):
            if isinstance(event, Noted):
                self.notes += told(event)

        Coordinator(self.agreed, self.folder).run(self.desk, [noted, *observers])
        return self

    def about(self, site):
        """The notes that name a site."""
        return [note for note in self.notes if repr(site) in note]


def element(model):
    """One element of a shared model: puppets move all of them alike."""
    return torch.as_tensor(model["classifier.bias"][0]).item()
