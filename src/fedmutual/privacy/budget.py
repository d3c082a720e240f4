"""A site's privacy budget, on its disk: written down before private rows are read, kept over crashes and federations.

A line of the ledger is what the steps of one phase cost. Lines are of one data set, whatever federation they were spent in.
The total is computed by Renyi divergences, for which the sum holds even where later settings were chosen in view of earlier
answers (Lecuyer, 2021, https://arxiv.org/abs/2103.01379).
"""

from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from fedmutual.errors import RunError
from fedmutual.files import sync_folder, write_bytes
from fedmutual.privacy.accountant import NoisedSteps, epsilon
from fedmutual.privacy.mechanism import Release
from fedmutual.rundir.folder import held
from fedmutual.rundir.logs import append

_PATIENCE = 60.0  # seconds that another federation of this site may take to write its line


class Spent(RunError):
    """A site's privacy budget does not allow the next answer."""


class BudgetLine(BaseModel):
    """What one phase of one federation cost."""

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid")

    label: str  # as `Release.label`
    federation: str
    unit: Literal["example", "group"]
    sigma: Annotated[float, Field(gt=0, allow_inf_nan=False)]
    rate: Annotated[float, Field(gt=0, le=1)]
    steps: Annotated[int, Field(ge=1)]
    round: int  # from 1; 0 is the start
    phase: int  # from 1


class PrivacyBudget:
    """What one site may spend on one data set, and what it spent."""

    def __init__(self, path: Path, federation: str, unit: Literal["example", "group"], most: float, delta: float) -> None:
        """path: the ledger of the data set. most: epsilon at delta.

        Raises:
            RunError: the ledger is damaged, or counts by another unit.
        """
        self._path, self._federation, self._unit, self._most, self._delta = path, federation, unit, most, delta
        self._check_unit(self._lines())

    @property
    def spent(self) -> float:
        """Epsilon of all that was spent on these data so far."""
        return epsilon(map(_steps, self._lines()), self._delta)

    def with_steps(self, planned: NoisedSteps) -> float:
        """Epsilon of all that was spent and of these steps besides."""
        return epsilon([*map(_steps, self._lines()), planned], self._delta)

    def of_federation(self) -> dict[str, float]:
        """Epsilon, steps and sampling rate of what this federation spent on these data."""
        own = [_steps(line) for line in self._lines() if line.federation == self._federation]
        rate = own[-1].rate if own else 0.0
        return {"epsilon": epsilon(own, self._delta), "steps": sum(steps.number for steps in own), "rate": rate}

    def spend(self, release: Release) -> None:
        """Write down what a phase costs, until the disk has it; nothing, where the same answer was paid for before.

        Raises:
            Spent: more than the budget would be spent. Nothing is written then.
            RunError: the ledger is damaged, or cannot be written.
        """
        line = BudgetLine(
            label=release.label,
            federation=self._federation,
            unit=self._unit,
            sigma=release.sigma,
            rate=release.rate,
            steps=release.steps,
            round=release.round + 1,
            phase=release.phase + 1,
        )
        with held(self._path.parent, "is spending this site's privacy budget", "try again", _PATIENCE):
            lines = self._lines(mend=True)
            self._check_unit(lines)
            if any(known.label == line.label for known in lines):
                return
            total = epsilon(map(_steps, [*lines, line]), self._delta)
            if total > self._most:
                raise Spent(
                    f"the privacy budget of this site is spent: {line.steps} more steps would bring epsilon to {total:.4g} "
                    f"at delta {self._delta:g}, and privacy.epsilon is {self._most:g}; the site declines, and the "
                    "federation goes on without it"
                )
            append(self._path, [line.model_dump_json()], sync=True)
            sync_folder(self._path.parent)

    def _check_unit(self, lines: list[BudgetLine]) -> None:
        """Raise RunError where lines are counted by another unit: epsilon of groups and of examples do not add up."""
        other = next((line for line in lines if line.unit != self._unit), None)
        if other is not None:
            raise RunError(
                f"{self._path}: federation {other.federation!r} spent on these data by {other.unit}, and this one counts by "
                f"{self._unit}; these do not add up to one epsilon, so agree on privacy.unit = {other.unit!r}"
            )

    def _lines(self, mend: bool = False) -> list[BudgetLine]:
        """All lines. One that a crash cut short was not yet acted on, and does not count. mend: take its bytes out."""
        if not self._path.exists():
            return []
        try:
            whole, _, cut = self._path.read_bytes().rpartition(b"\n")
        except OSError as problem:
            raise RunError(f"{self._path}: cannot be read ({problem.strerror})") from None
        lines = []
        for number, text in enumerate(whole.splitlines(), 1):
            try:
                lines.append(BudgetLine.model_validate_json(text))
            except ValidationError:
                raise RunError(
                    f"{self._path}: line {number} is damaged, so that it cannot be told what was spent; restore the file"
                ) from None
        if mend and cut:
            write_bytes(self._path, whole + b"\n" if whole else b"")
        return lines


def _steps(line: BudgetLine) -> NoisedSteps:
    return NoisedSteps(line.sigma, line.rate, line.steps)


def list_ledgers(folder: Path) -> list[Path]:
    """The ledgers of all data sets in a site's folder."""
    return sorted(folder.glob("*.jsonl"))
