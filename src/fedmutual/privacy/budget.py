"""A site's privacy budget on disk. Costs are written before private rows are read, so a crash loses no cost.

A line of a ledger is the cost of one phase, in any federation. A ledger belongs to one data set, and all ledgers of a
folder share one budget: data that differ in one row or column have a ledger of their own, and mostly the same people. The
total is computed with Renyi divergences of one order: their sum is valid even where later settings depend on earlier answers
(Lecuyer, 2021, https://arxiv.org/abs/2103.01379).

A ledger that was lost, cut or edited would restart the budget. So the site's journals, which are other files, record the
number and the digest of the ledgers' lines, and each ledger must begin with these lines. A ledger may have more lines: a
crash after the ledger is written, and before the journal is, leaves a line that no journal records.
"""

import hashlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from fedmutual.errors import RunError, format_count
from fedmutual.files import sync_folder, write_bytes
from fedmutual.privacy.accountant import NoisedSteps, compute_fixed_order_epsilon, compute_total_epsilon
from fedmutual.privacy.mechanism import Release
from fedmutual.rundir.folder import lock_folder
from fedmutual.rundir.record_files import append_lines

_PATIENCE = 60.0  # seconds to wait while another federation of this site writes its line


LedgerDigests = Mapping[str, tuple[int, str]]
"""File name of a ledger -> the number of its recorded lines, which are its first lines, and their SHA-256 in hex."""


class BudgetExceeded(RunError):
    """A site's privacy budget does not allow the next answer."""


class BudgetLine(BaseModel):
    """The privacy cost of one phase in one federation."""

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
    """The privacy budget of one site, and the ledger of one of its data sets."""

    def __init__(
        self,
        path: Path,
        federation: str,
        unit: Literal["example", "group"],
        most: float,
        delta: float,
        recorded: Iterable[LedgerDigests] = (),
    ) -> None:
        """path: the ledger of the data set. most: the largest total epsilon at delta, over all ledgers beside it.

        recorded: the lines that each journal of the site records.

        Raises:
            RunError: a ledger is damaged, lacks recorded lines, or has another unit of privacy.
        """
        self._path, self._federation, self._unit, self._most, self._delta = path, federation, unit, most, delta
        self._recorded: dict[str, tuple[int, str]] = {}
        for digests in recorded:
            self._check_recorded(digests)
        self._check_unit(self._read_all_lines())

    @property
    def recorded(self) -> LedgerDigests:
        """The number and the digest of the lines of each ledger in the folder, when this object last read the ledgers."""
        return self._recorded

    @property
    def spent(self) -> float:
        """The epsilon that the site has spent, over all federations and data sets; 0 before the first phase.

        Raises:
            RunError: a ledger is damaged, lacks recorded lines, or cannot be read.
            ConfigError: the extra `privacy` is missing.
        """
        return self._compute_total(map(_parse_steps, self._read_all_lines()))

    def compute_epsilon_with(self, planned: NoisedSteps) -> float:
        """Return the epsilon of the site after these additional steps. Nothing is written.

        Raises:
            RunError, ConfigError: as `spent`.
        """
        return self._compute_total([*map(_parse_steps, self._read_all_lines()), planned])

    def sum_up_federation(self) -> dict[str, float]:
        """Return the "epsilon", the number of "steps" and the "rate" of this federation on these data.

        The rate is the last sampling rate, a fraction in [0, 1]. Without steps all three are 0.

        Raises:
            RunError, ConfigError: as `spent`.
        """
        ledger_lines = _parse_lines(self._path, self._read_complete(self._path))
        federation_steps = [_parse_steps(line) for line in ledger_lines if line.federation == self._federation]
        rate = federation_steps[-1].rate if federation_steps else 0.0
        return {
            "epsilon": compute_total_epsilon(federation_steps, self._delta),
            "steps": sum(steps.number for steps in federation_steps),
            "rate": rate,
        }

    def spend(self, release: Release) -> None:
        """Write the cost of a phase to the disk; nothing where the ledger has the label, for an equal answer costs nothing.

        Raises:
            BudgetExceeded: the total would exceed the budget. Nothing is written.
            RunError: a ledger is damaged, lacks recorded lines, has another unit, or cannot be written; or another
                federation of this site holds the lock for more than 60 seconds.
            ConfigError: the extra `privacy` is missing.
        """
        counted = {"round": release.round + 1, "phase": release.phase + 1}
        line = BudgetLine(federation=self._federation, unit=self._unit, **release._asdict() | counted)
        with lock_folder(self._path.parent, "is spending this site's privacy budget", "try again", _PATIENCE):
            self._read_complete(self._path, has_lock=True)
            lines = self._read_all_lines()
            self._check_unit(lines)
            if any(earlier.label == line.label for earlier in lines):
                return
            total = self._compute_total(map(_parse_steps, [*lines, line]))
            if total > self._most:
                raise BudgetExceeded(
                    f"the privacy budget of this site is spent: {line.steps} more steps would bring epsilon to {total:.4g} "
                    f"at delta {self._delta:g}, and privacy.epsilon is {self._most:g}; the site declines, and the "
                    "federation continues without it"
                )
            append_lines(self._path, [line.model_dump_json()], sync=True)
            sync_folder(self._path.parent)
            self._read_all_lines()  # the journal's next entry records the line

    def _check_unit(self, lines: list[BudgetLine]) -> None:
        """Raise RunError where a line has another unit: an epsilon for groups and an epsilon for examples have no sum."""
        other = next((line for line in lines if line.unit != self._unit), None)
        if other is not None:
            raise RunError(
                f"{self._path.parent}: federation {other.federation!r} spent by {other.unit}, and this one counts by "
                f"{self._unit}; these do not add up to one epsilon, so agree on privacy.unit = {other.unit!r}, or give "
                "data of other people another state.folder"
            )

    def _compute_total(self, taken: Iterable[NoisedSteps]) -> float:
        return compute_fixed_order_epsilon(list(taken), self._delta, self._most)

    def _read_all_lines(self) -> list[BudgetLine]:
        """Return the lines of all ledgers in the folder, and record their digests.

        Raises:
            RunError: a ledger is damaged, or lacks recorded lines.
        """
        self._check_recorded(self._recorded)
        ledgers = {path: self._read_complete(path) for path in list_ledgers(self._path.parent)}
        self._recorded = {path.name: (len(lines), _compute_digest(lines)) for path, lines in ledgers.items()}
        return [line for path, lines in ledgers.items() for line in _parse_lines(path, lines)]

    def _check_recorded(self, recorded: LedgerDigests) -> None:
        """Raise RunError unless each ledger begins with its recorded lines."""
        for name, (count, digest) in recorded.items():
            path = self._path.parent / name
            first_lines = self._read_complete(path)[:count]
            if len(first_lines) == count and _compute_digest(first_lines) == digest:
                continue
            if len(first_lines) < count:
                fault = f"has {format_count(len(first_lines), 'line')}, but the journal of this site records {count}"
            else:
                fault = f"has other lines than the {count} that the journal of this site records"
            raise RunError(
                f"{path}: this privacy ledger {fault}, so the spent epsilon is unknown; restore the ledger from the "
                "newest copy of the state folder"
            )

    def _read_complete(self, path: Path, has_lock: bool = False) -> list[bytes]:
        """Return all complete lines. An incomplete last line, left by a crash, does not count: no row was read for it.

        has_lock: whether this process has the ledgers' lock; then an incomplete line is removed from the file.
        """
        try:
            complete, end, cut_line = path.read_bytes().rpartition(b"\n")
        except FileNotFoundError:
            return []
        except OSError as problem:
            raise RunError(f"{path}: cannot be read ({problem.strerror})") from None
        if has_lock and cut_line:
            write_bytes(path, complete + end)
        return complete.splitlines()


def _parse_lines(path: Path, lines: Iterable[bytes]) -> list[BudgetLine]:
    """Return the lines of a ledger. Raises RunError where a line is damaged."""
    parsed = []
    for number, line in enumerate(lines, 1):
        try:
            parsed.append(BudgetLine.model_validate_json(line))
        except ValidationError:
            raise RunError(
                f"{path}: line {number} is damaged, so the spent epsilon is unknown; restore the file from a copy"
            ) from None
    return parsed


def _compute_digest(lines: Iterable[bytes]) -> str:
    return hashlib.sha256(b"\n".join(lines)).hexdigest()


def _parse_steps(line: BudgetLine) -> NoisedSteps:
    return NoisedSteps(line.sigma, line.rate, line.steps)


def list_ledgers(folder: Path) -> list[Path]:
    """Return the paths of all ledgers in a site's folder, one for each data set, sorted."""
    return sorted(folder.glob("*.jsonl"))
