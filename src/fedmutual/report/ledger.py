"""ledger.jsonl as columns of numbers: a run of 10,000 rounds has 80,000 lines, and a report may hold dozens of such runs."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from fedmutual.report.lines import Transfer

SEED = "seed"  # the phase of round 0 in which clients give out their public data, once
Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Ledger:
    """Bytes of the tensors sent, a row a round, phase and client; apart from them what a public seed set took."""

    clients: tuple[str, ...]
    round: Ints  # [rows]; 0: before the first round
    client: Ints  # [rows], as a place in `clients`
    up: Ints  # [rows]
    down: Ints  # [rows]
    seed: Mapping[str, int]  # client -> bytes of the public data that it gave out, once
    steps: int | None = None  # gradient steps of all clients in the whole run; None where a line does not tell them
    forwards: int | None = None  # likewise the forward passes of these steps

    def __bool__(self) -> bool:
        return bool(len(self.round) or self.seed)

    @property
    def visits(self) -> int:
        """How many times a client took part in a round."""
        later = self.round > 0
        return len(np.unique(self.round[later] * len(self.clients) + self.client[later]))

    def total(self, way: str, start: bool = True) -> int:
        """Bytes of all clients in the whole run, "up" or "down"; without `start` in its rounds alone."""
        return int(self._way(way)[self.round >= (0 if start else 1)].sum())

    def by_client(self, way: str) -> dict[str, int]:
        """Client -> its bytes in the whole run."""
        return dict(zip(self.clients, _sums(self.client, self._way(way), len(self.clients)), strict=True))

    def by_round(self, way: str) -> dict[int, int]:
        """Round -> the bytes of all clients in it, of the rounds that have any line."""
        rounds, place = np.unique(self.round, return_inverse=True)
        return dict(zip(rounds.tolist(), _sums(place, self._way(way), len(rounds)), strict=True))

    def until(self, rounds: Sequence[int], way: str = "up") -> list[int]:
        """Bytes of all clients up to the end of each of these rounds, the start's with them."""
        order = np.argsort(self.round, kind="stable")
        sums = np.concatenate([[0], np.cumsum(self._way(way)[order])])
        found: list[int] = sums[np.searchsorted(self.round[order], rounds, side="right")].tolist()
        return found

    def _way(self, way: str) -> Ints:
        return {"up": self.up, "down": self.down}[way]


def columns(lines: Iterable[Transfer]) -> Ledger:
    """The ledger of its lines."""
    places: dict[str, int] = {}
    seed: dict[str, int] = {}
    rows: list[tuple[int, int, int, int]] = []
    works: list[tuple[int | None, int | None]] = []
    for line in lines:
        place = places.setdefault(line.client, len(places))
        if line.round == 0 and line.phase == SEED:
            seed[line.client] = seed.get(line.client, 0) + line.up
        else:
            rows.append((line.round, place, line.up, line.down))
            works.append((line.steps, line.forwards))
    round, client, up, down = np.array(rows, dtype=np.int64).reshape(-1, 4).T
    steps, forwards = (_total(column) for column in zip(*works, strict=True)) if works else (None, None)
    return Ledger(tuple(places), round, client, up, down, seed, steps, forwards)


def _total(column: Sequence[int | None]) -> int | None:
    """The sum of a column; None where a value is missing."""
    known = [value for value in column if value is not None]
    return sum(known) if len(known) == len(column) else None


def _sums(place: Ints, values: Ints, n: int) -> list[int]:
    """Sums of values by place 0 .. n - 1, exact: not in floating point, as np.bincount has them."""
    sums = np.zeros(n, dtype=np.int64)
    np.add.at(sums, place, values)
    found: list[int] = sums.tolist()
    return found
