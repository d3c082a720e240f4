"""The server's record of its sites on disk: sites that are excluded, and values against which replies are checked."""

import math
from collections.abc import Collection, Mapping
from pathlib import Path

from pydantic import Field

from fedmutual.errors import RunError
from fedmutual.sites.screening import find_outliers
from fedmutual.sites.state_files import StateRecord, read_state_record, write_state_record

FILE = "conduct.json"
ROUNDS = 3  # rounds with recorded norms: those that can be undone


class _ConductRecord(StateRecord):
    """The contents of the file."""

    left_out: dict[str, str] = Field(default_factory=dict)  # site -> why, for the rest of the federation
    examples: dict[str, int] = Field(default_factory=dict)  # site -> the n_k that it stated first
    norms: dict[str, dict[str, float]] = Field(default_factory=dict)  # round, from 0 -> site -> norm of its update
    setbacks: int = 0


class Conduct:
    """The record of one federation."""

    def __init__(self, folder: Path) -> None:
        """folder: the federation's at the server. Raises RunError where the file in it is damaged."""
        self._path = folder / FILE
        self._record = read_state_record(self._path, _ConductRecord) or _ConductRecord()

    @property
    def left_out(self) -> Mapping[str, str]:
        """Site -> why it gets no more orders."""
        return self._record.left_out

    @property
    def examples(self) -> Mapping[str, int]:
        """Site -> the number of examples that it stated first."""
        return self._record.examples

    @property
    def setbacks(self) -> int:
        """The number of rounds that failed although enough sites answered."""
        return self._record.setbacks

    def leave_out(self, sites: Mapping[str, str]) -> None:
        """Leave out these sites for good. sites: site -> why. Raises RunError where the file cannot be written."""
        self._record.left_out |= sites
        self._write()

    def check_quorum(self, sites: Collection[str], quorum: int) -> None:
        """Raise RunError if fewer sites than the quorum remain: the server would restart the federation without end."""
        excluded = sorted(self.left_out.keys() & set(sites))
        if len(sites) - len(excluded) < quorum:
            raise RunError(
                f"{self._path.parent}: {quorum} sites are needed, and of {len(sites)} these are excluded for good: "
                f"{', '.join(excluded)}; log.txt says why; start a federation with another name without them"
            )

    def note(self, round: int, norms: Mapping[str, float], examples: Mapping[str, int]) -> None:
        """Record the L2 norms of the updates and the stated numbers of examples of the accepted replies: site -> number.

        round: from 0.

        Raises:
            RunError: the file cannot be written.
        """
        noted = {**self._record.norms, str(round): dict(norms)}
        last = sorted(map(int, noted))[-ROUNDS:]
        self._record.norms = {str(r): noted[str(r)] for r in last}
        self._record.examples = {**examples, **self._record.examples}
        self._write()

    def find_suspects(self, rounds: Collection[int], limit: float) -> dict[str, int]:
        """Return site -> one of these rounds, from 0, in which the site's update was an outlier. limit: `Limits.update`.

        An update is an outlier if its norm is above the median of the others times the square root of the limit; above the
        median times the limit, the update was refused at once. Two updates are enough to compare: most sites diverged, so
        the larger update is the probable cause.
        """
        norms = {r: self._record.norms.get(str(r), {}) for r in rounds}
        return {i: r for r, of in norms.items() for i in find_outliers(of, math.sqrt(limit), least=2)}

    def count_setback(self, undone: Collection[int] = ()) -> None:
        """Record a failed round. undone: the earlier rounds, from 0, that are done again.

        Raises:
            RunError: the file cannot be written.
        """
        self._record.setbacks += 1
        self._record.norms = {r: of for r, of in self._record.norms.items() if int(r) not in undone}
        self._write()

    def _write(self) -> None:
        write_state_record(self._path, self._record)
