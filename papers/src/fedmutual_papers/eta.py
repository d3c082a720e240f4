"""Estimate the remaining training time."""

from collections.abc import Iterable, Sequence
from statistics import fmean

from fedmutual.rundir.text import format_duration
from fedmutual_papers.plan import Job


class TimeEstimate:
    """Estimate the time of the remaining runs from the seconds per step or epoch of the finished runs."""

    def __init__(self, unknown: Iterable[Job]) -> None:
        """unknown: the runs to train; runs with one fingerprint count once."""
        once = {job.fingerprint: job for job in unknown}
        self.left = list(once.values())
        self._count = len(self.left)
        self._seen: dict[tuple[str, str], list[float]] = {}

    def remove_finished(self, done: Iterable[Job]) -> int:
        """Remove finished runs from the remaining runs and return how many were removed."""
        prints, before = {job.fingerprint for job in done}, len(self.left)
        self.left = [job for job in self.left if job.fingerprint not in prints]
        return before - len(self.left)

    def report_finished(self, finished_jobs: Sequence[Job], seconds: float, at_once: int = 1) -> str:
        """Record the seconds of finished runs and return a progress line: "3 of 36 runs done, about 1 h 20 min left".

        at_once: how many runs are trained side by side.
        """
        self.remove_finished(finished_jobs)
        work = sum(map(_count_work, finished_jobs))
        for job in finished_jobs:
            self._seen.setdefault((job.cell.id, job.arm), []).append(seconds / work)
        words = f"{self._count - len(self.left)} of {self._count} runs done"
        if not self.left:
            return words
        seconds_left = sum(self._find_rate(job) * _count_work(job) for job in self.left)
        return f"{words}, about {format_duration(seconds_left / at_once)} left"

    def _find_rate(self, job: Job) -> float:
        """Return the seconds per step or epoch of the same arm, else of the same cell, else of all finished runs."""
        same = self._seen.get((job.cell.id, job.arm))
        cell = [v for (id, _), values in self._seen.items() if id == job.cell.id for v in values]
        return fmean(same or cell or [v for values in self._seen.values() for v in values])


def _count_work(job: Job) -> int:
    """Return the number of local steps, or of epochs, over all rounds, because arms differ in the steps of a round."""
    training = job.config.training
    return job.config.rounds * (training.local_steps or training.local_epochs)
