"""Assign clients to workers, and report the loss of a worker."""

from collections.abc import Mapping, Sequence


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

    No worker is without a client, so there may be fewer workers than `workers`.

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
