"""What is kept of a finished run: its curves, each client's last and best, and what made it."""

from typing import Any

from pydantic import BaseModel, ConfigDict


class _Kept(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class ClientResult(_Kept):
    """One client's model on its own validation data."""

    network: str
    examples: int
    last: float
    best: float
    curve: tuple[float, ...] = ()  # where the cell keeps every client's


class Made(_Kept):
    """What made a result."""

    command: str
    python: str
    torch: str
    torchvision: str
    platform: str
    cpus: int
    device: str
    threads: int
    engine: str
    together: int = 1  # so many runs were trained at once, in common stacks; `seconds` are then those of all


class Result(_Kept):
    """One finished run. Accuracies are fractions; curves hold a value for each evaluated round."""

    arm: str
    seed: int
    fingerprint: str
    version: str
    rounds: int
    every: int
    limit: int | None = None  # as --rounds asked
    changed: dict[str, Any] = {}  # as --set asked
    seconds: float
    model: str | None = None  # what a client uses: "personal", "global", "meme"
    curves: dict[str, tuple[float, ...]] = {}
    clients: dict[str, ClientResult] = {}
    noise: dict[str, float] = {}  # standard deviation -> loss
    target: float | None = None  # the paper's accuracy of FedAvg in this cell, a fraction
    failed: str = ""  # why there are no numbers: a client diverged
    made: Made

    @property
    def evaluated(self) -> list[int]:
        """The rounds that curves have values of."""
        return [r for r in range(1, self.rounds + 1) if r % self.every == 0 or r == self.rounds]
