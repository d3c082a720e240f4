"""What the server writes into its journal: its orders in the current round, and what it knows of the sites.

After a restart in a round the server repeats the round, and sends the recorded orders again. A site answers a phase once
(`site_journal`). If other sites answer in the repeated round, later phases begin with other tensors, and sites that have
answered these phases would decline. The server then increases the number of the attempt, which sites accept `ATTEMPTS` times
in the life of a federation.

Where most sites diverged, the shared model that the server sent was unusable: the server goes back to an earlier model, and
excludes the sites with outlying updates in the undone rounds. A federation ends after `SETBACKS` such rounds;
otherwise it could begin again without end.
"""

import math
from collections.abc import Collection, Mapping
from contextlib import closing
from dataclasses import replace
from pathlib import Path

from fedmutual.core import Message
from fedmutual.errors import RunError
from fedmutual.rundir.checkpoint import make_file_name, read_checkpoint, remove_checkpoint, write_checkpoint
from fedmutual.rundir.file_names import server_folder
from fedmutual.sites.journal import Journal
from fedmutual.sites.protocol import ATTEMPTS, Order, digest_order
from fedmutual.sites.screening import find_outliers

GENERATIONS = 3  # saved states that the server keeps, the last one too; and rounds with recorded norms
SETBACKS = 3  # the last one ends the federation
LEFT = "it left the federation, as its last message said"  # why a site is excluded that excluded itself
Orders = Mapping[str, tuple[Order, Message]]
"""Site -> its order, all of one phase."""


def read_gone(folder: Path) -> dict[str, str]:
    """Return site -> why it gets no more orders, from the journal in a federation's folder at the server."""
    with closing(Journal(folder, read_only=True)) as journal:
        return dict(journal.read("SELECT site, why FROM excluded ORDER BY site"))


class ServerJournal(Journal):
    """The journal of the server of one federation. Each method raises RunError where the file cannot be read or written."""

    @property
    def attempt(self) -> int:
        """The number of the server's attempt."""
        return int(self.get_fact("attempt", int) or 0)

    def raise_attempt(self) -> None:
        """Begin a new attempt at rounds that sites have already answered. Raises RunError where no attempt is left."""
        if self.attempt >= ATTEMPTS:
            raise RunError(
                f"{self.path}: the federation went back {ATTEMPTS} times, and sites accept no further attempt; start "
                "a federation with another name"
            )
        with self.change():
            self.set_fact("attempt", self.attempt + 1)
            self._forget_orders(0)

    def settle_senders(self, round: int, phase: int, spoke: tuple[str, ...]) -> tuple[str, ...]:
        """Return the sites with usable messages in a phase: those of its first order; without a first order, `spoke`."""
        known = self.read("SELECT senders FROM orders WHERE phase = ?", phase) if round == self.get_fact("round") else []
        return spoke if not known or known[0][0] is None else tuple(filter(None, known[0][0].split(",")))

    def stamp(self, orders: Orders) -> dict[str, tuple[Order, Message]]:
        """Record the orders of a phase, and return them with the number of the attempt."""
        first = next((order for order, _ in orders.values()), None)
        if first is not None and first.phase > 0:  # the first phase begins with what is saved: always the same
            with self.change():
                self._note_orders(first, {site: digest_order(*order) for site, order in orders.items()})
        return {site: (replace(order, attempt=self.attempt), inbox) for site, (order, inbox) in orders.items()}

    def _note_orders(self, order: Order, digests: Mapping[str, str]) -> None:
        if order.round != self.get_fact("round"):
            self._forget_orders(0)
            self.set_fact("round", order.round)
        known = dict(self.read("SELECT site, digest FROM orders WHERE phase = ?", order.phase))
        if any(known.get(site, digest) != digest for site, digest in digests.items()):
            self.set_fact("attempt", min(self.attempt + 1, ATTEMPTS))  # beyond that, sites that answered before decline
            self._forget_orders(order.phase)
        senders = None if order.senders is None else ",".join(order.senders)
        rows = ((order.phase, site, digest, senders) for site, digest in digests.items())
        self.write("INSERT OR REPLACE INTO orders VALUES (?, ?, ?, ?)", *rows)

    def _forget_orders(self, phase: int) -> None:
        """Remove the recorded orders of a phase and of all later phases."""
        self.write("DELETE FROM orders WHERE phase >= ?", (phase,))

    @property
    def excluded(self) -> dict[str, str]:
        """Site -> why it gets no more orders."""
        return dict(self.read("SELECT site, why FROM excluded ORDER BY site"))

    @property
    def examples(self) -> dict[str, int]:
        """Site -> the number of examples that it stated first."""
        return dict(self.read("SELECT site, number FROM examples"))

    @property
    def setbacks(self) -> int:
        """The number of rounds that failed although enough sites answered."""
        return int(self.get_fact("setbacks", int) or 0)

    def exclude(self, sites: Mapping[str, str]) -> None:
        """Send these sites no more orders. sites: site -> why."""
        self.write("INSERT OR REPLACE INTO excluded VALUES (?, ?)", *sites.items())

    def check_quorum(self, sites: Collection[str], quorum: int) -> None:
        """Raise RunError if fewer sites than the quorum remain: the server would restart the federation without end."""
        excluded = sorted(self.excluded.keys() & set(sites))
        if len(sites) - len(excluded) < quorum:
            raise RunError(
                f"{self.folder}: {quorum} sites are needed, and of {len(sites)} these left or are excluded for good: "
                f"{', '.join(excluded)}; log.txt says why; start a federation with another name without them"
            )

    def check_setbacks(self) -> None:
        """Raise RunError if so many rounds failed that the federation must end."""
        if self.setbacks >= SETBACKS:
            raise RunError(
                f"{self.folder}: {SETBACKS} rounds failed although enough sites answered, as log.txt says; begin a "
                "federation of another name, with a smaller optimizer.lr if training diverged, or with server.aggregate = "
                "'median' if a site's messages may be hostile"
            )

    def note_replies(self, round: int, norms: Mapping[str, float], examples: Mapping[str, int]) -> None:
        """Record the L2 norms of the updates and the stated numbers of examples of the accepted replies: site -> number.

        round: from 0.
        """
        with self.change():
            self.write("DELETE FROM norms WHERE round = ? OR round <= ?", (round, round - GENERATIONS))
            self.write("INSERT INTO norms VALUES (?, ?, ?)", *((round, site, norm) for site, norm in norms.items()))
            self.write("INSERT OR IGNORE INTO examples VALUES (?, ?)", *examples.items())

    def go_back(self, diverged: bool, update_limit: float) -> list[str]:
        """Prepare another attempt, and return one sentence for each action. diverged: whether most sites diverged.

        The first time the server goes back by one saved round, later to the oldest that it keeps. The failure and the
        exclusions stay counted where no attempt is left that sites accept: then RunError is raised.
        """
        saved = read_checkpoint(self.folder)
        last = saved.round if saved is not None else 0
        target = self._find_target(last) if diverged else last
        why = "its update was unusually large in round {}, after which most sites diverged"
        out = {i: why.format(r + 1) for i, r in self.find_suspects(range(target, last), update_limit).items()}
        with self.change():
            self.exclude(out)
            self.set_fact("setbacks", self.setbacks + 1)
            self.write("DELETE FROM norms WHERE round >= ?", (target,))
            is_last = self.attempt >= ATTEMPTS
            if not is_last:
                self.raise_attempt()
        if is_last:
            self.raise_attempt()
        if saved is None or target == last:
            return ["the round is begun again"]
        if (server_folder(self.folder) / make_file_name(target)).exists():
            write_checkpoint(self.folder, saved.model_copy(update={"round": target}))
        else:  # before round 1 nothing is saved, unless the algorithm has a start
            remove_checkpoint(self.folder)
        model = f"the shared model after round {target}" if target else "the first shared model"
        action = f"the federation goes back to {model}; rounds undone: {last - target}"
        return [action, *(f"site {i!r} is left out for good: {reason}" for i, reason in sorted(out.items()))]

    def _find_target(self, last: int) -> int:
        """Return the number of finished rounds to go back to; `last` where no earlier state is saved."""
        earlier, states = range(max(last - GENERATIONS + 1, 0), last), server_folder(self.folder)
        saved_rounds = [r for r in earlier if r == 0 or (states / make_file_name(r)).exists()]
        return (min if self.setbacks else max)(saved_rounds, default=last)

    def find_suspects(self, rounds: Collection[int], update_limit: float) -> dict[str, int]:
        """Return site -> one of these rounds, from 0, in which the site's update was an outlier.

        An update is an outlier if its norm is above the median of the others times the square root of the limit; above the
        median times the limit, the update was refused at once. Two updates are enough to compare: most sites diverged, so
        the larger update is the probable cause.
        """
        norms = {r: dict(self.read("SELECT site, norm FROM norms WHERE round = ?", r)) for r in rounds}
        return {i: r for r, of in norms.items() for i in find_outliers(of, math.sqrt(update_limit), least=2)}
