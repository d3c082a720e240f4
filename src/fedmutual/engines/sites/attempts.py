"""How often the server went back to an earlier round, on its disk: every order of it says so, and sites follow."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from fedmutual.core import Message
from fedmutual.engines.sites.post import ATTEMPTS, Order
from fedmutual.errors import RunError
from fedmutual.records.files import read_json, write_json

FILE = "attempts.json"
Orders = Mapping[str, tuple[Order, Message]]
"""Site -> its order, all of one phase."""


class Attempts:
    """The server's count."""

    def __init__(self, folder: Path) -> None:
        """folder: the federation's at the server. Raises RunError where the file in it is damaged."""
        self._path = folder / FILE
        self.number: int = read_json(self._path).get("attempt", 0) if self._path.exists() else 0

    def raise_number(self) -> None:
        """Begin a new attempt: of a round that sites answered already, with other tensors.

        Raises:
            RunError: the attempts are used up, or it cannot be written.
        """
        if self.number >= ATTEMPTS:
            raise RunError(
                f"{self._path}: the federation went back {ATTEMPTS} times, and sites follow no further; give it another "
                "name, to begin it anew"
            )
        self.number += 1
        write_json(self._path, {"format": 1, "attempt": self.number})

    def stamp(self, orders: Orders) -> dict[str, tuple[Order, Message]]:
        """The orders of a phase, as they are to be sent: with the attempt."""
        return {site: (replace(order, attempt=self.number), inbox) for site, (order, inbox) in orders.items()}
