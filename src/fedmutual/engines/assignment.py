"""Assign clients to workers, and report the loss of a worker."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple


class WorkerLost(RuntimeError):
    """A worker with its clients died. The last saved round is complete."""

    def __init__(self, worker: str, clients: Sequence[str], how: str) -> None:
        super().__init__(worker, tuple(clients), how)
        self.worker, self.clients, self.how = worker, tuple(clients), how

    def __str__(self) -> str:
        noun = "client" if len(self.clients) == 1 else "clients"
        return f"{self.worker} with {noun} {', '.join(self.clients)} {self.how}"


def assign_clients(costs: Mapping[str, float], workers: int) -> list[list[str]]:
    """Return the clients of each worker. Each client, largest cost first, goes to the worker with the least work.

    This is the LPT rule (Graham, Bounds on multiprocessing timing anomalies, 1969, https://doi.org/10.1137/0117039). No
    worker is without a client, so there may be fewer workers than `workers`.

    costs: the work of each client, in any unit.

    >>> assign_clients({"0": 3.0, "1": 1.0, "2": 2.0, "3": 2.0}, 2)
    [['0', '1'], ['2', '3']]
    """
    assigned: list[list[str]] = [[] for _ in range(min(workers, len(costs)))]
    load = [0.0] * len(assigned)
    for id in sorted(costs, key=lambda i: -costs[i]):
        lightest = load.index(min(load))
        assigned[lightest].append(id)
        load[lightest] += costs[id]
    return assigned


BALANCED = 1.03
"""The load of the busiest worker over the mean load, up to which no client is split."""


class SplitClient(NamedTuple):
    """A client whose phases two workers share: one takes the first steps of a phase, the other one the rest."""

    workers: tuple[int, int]
    shares: tuple[float, float]  # of the client's work, by worker; they add up to 1

    def get_share(self, worker: int) -> float:
        """Return the share of one of the workers."""
        return self.shares[self.workers.index(worker)]

    def get_other(self, worker: int) -> int:
        """Return the worker that shares the client with `worker`."""
        return self.workers[1 - self.workers.index(worker)]


def split_clients(costs: Mapping[str, float], workers: int) -> tuple[list[list[str]], dict[str, SplitClient]]:
    """Return (the clients of each worker, the clients that two workers share, which both have).

    McNaughton's rule (Scheduling with deadlines and loss functions, 1959, https://doi.org/10.1287/mnsc.6.1.1): fill one
    worker after the other up to the mean load, or up to the largest client; the rest of a client goes to the next worker. A
    worker takes its part of one shared client first, and its part of the other one last, so that two workers never need a
    client at the same time. If `assign_clients` balances the workers, no client is split.

    >>> split_clients({"0": 1.0, "1": 1.0, "2": 1.0}, 2)
    ([['0', '1'], ['1', '2']], {'1': SplitClient(workers=(0, 1), shares=(0.5, 0.5))})
    """
    assigned = assign_clients(costs, workers)
    load = max(sum(costs.values()) / len(assigned), *costs.values())
    if max(sum(costs[id] for id in ids) for ids in assigned) <= BALANCED * load:
        return assigned, {}
    filled: list[list[str]] = [[]]
    split, room = {}, load
    for id in sorted(costs, key=lambda i: -costs[i]):
        filled[-1].append(id)
        remaining_cost = costs[id] - room
        if remaining_cost > 1e-9 * load:
            split[id] = SplitClient((len(filled) - 1, len(filled)), (room / costs[id], remaining_cost / costs[id]))
            filled.append([id])
            room = load - remaining_cost
        elif remaining_cost > -1e-9 * load and len(filled) < len(assigned):
            filled.append([])
            room = load
        else:
            room = -remaining_cost
    return [ids for ids in filled if ids], split
