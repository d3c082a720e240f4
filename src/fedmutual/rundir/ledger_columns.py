"""ledger.jsonl as columns of numbers: a run of 10,000 rounds has 80,000 lines, and a report can hold dozens of runs."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from fedmutual.rundir.schema import SEED, LedgerLine

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class LedgerColumns:
    """Bytes of the tensors sent, one row for each round, phase and client. The bytes of a public seed set are kept apart."""

    clients: tuple[str, ...]
    round: Ints  # [rows]; 0: before the first round
    client: Ints  # [rows], an index of `clients`
    up: Ints  # [rows]
    down: Ints  # [rows]
    seed: Mapping[str, int]  # client -> bytes of the public data that the client sent once
    steps: int | None = None  # gradient steps of all clients in the run; None if a line does not have the number
    forwards: int | None = None  # forward passes of these steps; None likewise

    def __bool__(self) -> bool:
        return bool(len(self.round) or self.seed)

    @property
    def visits(self) -> int:
        """Return how many times a client took part in a round, summed over clients."""
        later = self.round > 0
        return len(np.unique(self.round[later] * len(self.clients) + self.client[later]))

    def sum_bytes(self, way: str, start: bool = True) -> int:
        """Return the bytes of all clients in the run. way: "up" or "down". start: with the bytes before the first round."""
        return int(self._get_column(way)[self.round >= (0 if start else 1)].sum())

    def sum_by_client(self, way: str) -> dict[str, int]:
        """Return the bytes of each client in the run, by client."""
        return dict(zip(self.clients, _sum_by_index(self.client, self._get_column(way), len(self.clients)), strict=True))

    def sum_by_round(self, way: str) -> dict[int, int]:
        """Return the bytes of all clients in a round, by round. Rounds without a line are left out."""
        rounds, place = np.unique(self.round, return_inverse=True)
        return dict(zip(rounds.tolist(), _sum_by_index(place, self._get_column(way), len(rounds)), strict=True))

    def sum_until(self, rounds: Sequence[int], way: str = "up") -> list[int]:
        """Return the bytes of all clients up to the end of each of these rounds, with the bytes before the first round."""
        order = np.argsort(self.round, kind="stable")
        sums = np.concatenate([[0], np.cumsum(self._get_column(way)[order])])
        totals: list[int] = sums[np.searchsorted(self.round[order], rounds, side="right")].tolist()
        return totals

    def _get_column(self, way: str) -> Ints:
        return {"up": self.up, "down": self.down}[way]


def make_columns(lines: Iterable[LedgerLine]) -> LedgerColumns:
    """Return the lines of a ledger as columns. The lines of the public seed set only count for `LedgerColumns.seed`."""
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
    steps, forwards = (_add_up(column) for column in zip(*works, strict=True)) if works else (None, None)
    return LedgerColumns(tuple(places), round, client, up, down, seed, steps, forwards)


def _add_up(column: Sequence[int | None]) -> int | None:
    """Return the sum of a column; None if a value is missing."""
    known = [value for value in column if value is not None]
    return sum(known) if len(known) == len(column) else None


def _sum_by_index(index: Ints, values: Ints, n: int) -> list[int]:
    """Return the sum of the values at each index 0 .. n - 1, in integers: np.bincount would sum in floating point."""
    sums = np.zeros(n, dtype=np.int64)
    np.add.at(sums, index, values)
    totals: list[int] = sums.tolist()
    return totals
