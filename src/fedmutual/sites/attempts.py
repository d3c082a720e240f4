"""The record, on the server's disk, of the orders of the current round and of the number of attempts.

After a restart in a round the server repeats the round, and sends the recorded orders again. A site answers a phase once
(`admission`). If other sites answer in the repeated round, later phases begin with other tensors, and sites that have
answered these phases would decline. The server then increases the number of the attempt, which sites accept `ATTEMPTS`
times in the life of a federation.
"""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

from fedmutual.core import Message
from fedmutual.errors import RunError
from fedmutual.sites.protocol import ATTEMPTS, Order, digest_order
from fedmutual.sites.state_files import StateRecord, read_state_record, write_state_record

FILE = "attempts.json"
Orders = Mapping[str, tuple[Order, Message]]
"""Site -> its order, all of one phase."""


class _Phase(BaseModel):
    """The orders of one phase."""

    model_config = ConfigDict(strict=True)

    senders: tuple[str, ...] | None
    digests: dict[str, str]  # site -> digest of its order


class _AttemptsRecord(StateRecord):
    """The contents of the file."""

    attempt: Annotated[int, Field(ge=0)] = 0
    round: int | None = None
    phases: dict[Annotated[str, Field(pattern="^[0-9]{1,9}$")], _Phase] = Field(default_factory=dict)


class Attempts:
    """The number of the server's attempt, and the digests of its orders in the current round."""

    def __init__(self, folder: Path) -> None:
        """folder: the federation's at the server. Raises RunError where the file in it is damaged."""
        self._path = folder / FILE
        record = read_state_record(self._path, _AttemptsRecord) or _AttemptsRecord()
        self.number, self._round, self._phases = record.attempt, record.round, record.phases

    def raise_number(self) -> None:
        """Begin a new attempt at a round that sites have already answered, with other tensors.

        Raises:
            RunError: no attempt is left, or the file cannot be written.
        """
        if self.number >= ATTEMPTS:
            raise RunError(
                f"{self._path}: the federation went back {ATTEMPTS} times, and sites accept no further attempt; start "
                "a federation with another name"
            )
        self.number += 1
        self._round, self._phases = None, {}
        self._write()

    def settle_senders(self, round: int, phase: int, spoke: tuple[str, ...]) -> tuple[str, ...]:
        """Return the sites with usable messages in a phase: those of its first order; without a first order, `spoke`."""
        known = self._phases.get(str(phase)) if round == self._round else None
        return spoke if known is None or known.senders is None else known.senders

    def stamp(self, orders: Orders) -> dict[str, tuple[Order, Message]]:
        """Record the orders of a phase, and return them with the number of the attempt.

        Raises:
            RunError: the file cannot be written.
        """
        first = next((order for order, _ in orders.values()), None)
        if first is not None and first.phase > 0:  # the first phase begins with what is saved: always the same
            self._note(first, {site: digest_order(*order) for site, order in orders.items()})
        return {site: (replace(order, attempt=self.number), inbox) for site, (order, inbox) in orders.items()}

    def _note(self, order: Order, digests: Mapping[str, str]) -> None:
        if order.round != self._round:
            self._round, self._phases = order.round, {}
        known = self._phases.get(str(order.phase))
        place_digests = known.digests if known else {}
        if any(place_digests.get(site, digest) != digest for site, digest in digests.items()):
            self.number = min(self.number + 1, ATTEMPTS)  # beyond that, sites that answered before decline
            self._phases = {phase: about for phase, about in self._phases.items() if int(phase) < order.phase}
            place_digests = {}
        self._phases[str(order.phase)] = _Phase(senders=order.senders, digests={**place_digests, **digests})
        self._write()

    def _write(self) -> None:
        write_state_record(self._path, _AttemptsRecord(attempt=self.number, round=self._round, phases=self._phases))
