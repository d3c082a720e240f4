"""What engines with several workers share: who works where, and what a worker is lost."""

from collections.abc import Mapping, Sequence


class WorkerLost(RuntimeError):
    """A worker died with the clients that lived there. What was saved is whole."""

    def __init__(self, worker: str, clients: Sequence[str], how: str) -> None:
        super().__init__(worker, tuple(clients), how)
        self.worker, self.clients, self.how = worker, tuple(clients), how

    def __str__(self) -> str:
        held = "client" if len(self.clients) == 1 else "clients"
        return f"{self.worker} with {held} {', '.join(self.clients)} {self.how}"


def assign_clients(costs: Mapping[str, float], workers: int) -> list[list[str]]:
    """Clients by worker, none empty: the heaviest first, each to who has the least so far.

    >>> assign({"0": 3.0, "1": 1.0, "2": 2.0, "3": 2.0}, 2)
    [['0', '1'], ['2', '3']]
    """
    held: list[list[str]] = [[] for _ in range(min(workers, len(costs)))]
    load = [0.0] * len(held)
    for id in sorted(costs, key=lambda i: -costs[i]):
        lightest = load.index(min(load))
        held[lightest].append(id)
        load[lightest] += costs[id]
    return held
