"""The stored result of a finished run: curves, each client's last and best value, and its origin. All numbers are finite."""

import json
from typing import Any

from pydantic import BaseModel, ConfigDict, field_validator

from fedmutual.rundir.schema import Share


class _ResultRecord(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class ClientResult(_ResultRecord):
    """The accuracy of one client's model on its validation data."""

    network: str
    examples: int
    last: Share
    best: Share
    curve: tuple[Share, ...] = ()  # where the cell keeps every client's


class Ends(_ResultRecord):
    """Each client's number after the last round, and after its best round."""

    last: dict[str, Share]
    best: dict[str, Share]


class Traffic(_ResultRecord):
    """The bytes of all clients together, over the whole run."""

    up: int
    down: int
    seed: int = 0  # what public examples the clients gave out, once, before round 1; not in `up`


class Budget(_ResultRecord):
    """The training work of a client, mean over clients, over the whole run."""

    steps: float  # gradient steps of its own model; a client with two networks takes each with both
    examples: float | None = None  # in these steps, an example counted each time; None for a method with other phases
    forwards: float | None = None  # forward passes of these steps; None in results of earlier versions


class Cloud(_ResultRecord):
    """The features of test examples on their first two principal axes, with the domain and the class of each."""

    domains: tuple[str, ...]
    classes: tuple[str, ...]
    explained: tuple[Share, Share]  # the share of the variance on each axis
    silhouette: float  # of the classes, over all features: -1 to 1, large where classes lie apart
    points: tuple[tuple[int, int, float, float], ...]  # (domain, class, x, y) of some of them, of one seed


class NodeAnalysis(_ResultRecord):
    """The analysis of one client. Each curve has one value for each evaluated round."""

    client: str
    validation: tuple[Share, ...]  # its model on all clients' validation data
    losses: dict[str, tuple[float, ...]]  # loss term -> its mean over the round
    cloud: Cloud


class Origin(_ResultRecord):
    """The origin of a result: command, versions and machine."""

    command: str
    python: str
    torch: str
    torchvision: str
    platform: str
    cpus: int
    device: str
    threads: int
    engine: str
    weights: tuple[str, ...] = ()  # what networks began with, in words, where not all of them are random
    together: int = 1  # so many runs were trained at once, in common stacks; `seconds` are then those of all


class Result(_ResultRecord):
    """One finished run. Accuracies are fractions; each curve has one value for each evaluated round."""

    arm: str
    seed: int
    fingerprint: str
    version: str  # the version of fedmutual that made the result
    numerics: int = 1  # fedmutual.numerics.VERSION of the run; 1 in older results, which do not have this field
    rounds: int
    every: int
    limit: int | None = None  # as --rounds asked
    changed: dict[str, Any] = {}  # as --set asked
    seconds: float
    model: str | None = None  # what a client uses: "personal", "global", "meme"
    curves: dict[str, tuple[Share, ...]] = {}
    clients: dict[str, ClientResult] = {}
    noise: dict[str, float] = {}  # standard deviation -> loss
    transfer: dict[str, Ends] = {}  # "acc", "bwt", "fwt", where clients are domains
    traffic: Traffic | None = None
    steps: int = 0  # local steps of a round, where they are counted; else a round is passes over the data
    budget: Budget | None = None  # unset in results of before it was kept: counted from the cell's configuration then
    projected: Share | None = None  # the share of mutual steps whose gradient was projected
    closeup: NodeAnalysis | None = None  # of the node that the cell names
    epsilon: float | None = None  # of what leaves, the largest of any client; None without noise, or if it is infinite
    target: Share | None = None  # the paper's accuracy of FedAvg in this cell, a fraction
    failed: str = ""  # why there are no numbers: a client diverged
    made: Origin

    @field_validator("changed")
    @classmethod
    def _check_finite(cls, changed: dict[str, Any]) -> dict[str, Any]:
        """Check the values of `changed`, which may have any type, because pydantic does not look for NaN there."""
        try:
            json.dumps(changed, allow_nan=False)
        except ValueError:
            raise ValueError("input should be finite numbers") from None
        return changed

    @property
    def evaluated(self) -> list[int]:
        """Return the rounds that the curves have values for."""
        return [r for r in range(1, self.rounds + 1) if r % self.every == 0 or r == self.rounds]

    @property
    def all_curves(self) -> list[tuple[float, ...]]:
        """Return every curve that must have one value for each evaluated round."""
        close = [self.closeup.validation, *self.closeup.losses.values()] if self.closeup else []
        of_clients = [client.curve for client in self.clients.values() if client.curve]
        return [*self.curves.values(), *of_clients, *close]
