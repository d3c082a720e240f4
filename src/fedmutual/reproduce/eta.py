"""How long what is left will take."""

from collections.abc import Iterable, Sequence
from statistics import fmean

from fedmutual.reproduce.plan import Job
from fedmutual.rundir.text import duration


class Pace:
    """How long the runs that are left will take, by the seconds that a step or epoch took in those that are done."""

    def __init__(self, unknown: Iterable[Job]) -> None:
        once = {job.fingerprint: job for job in unknown}
        self.left = list(once.values())
        self._count = len(self.left)
        self._seen: dict[tuple[str, str], list[float]] = {}

    def drop(self, done: Iterable[Job]) -> int:
        """Leave out what need not be trained any more -> how many of those were left."""
        prints, before = {job.fingerprint for job in done}, len(self.left)
        self.left = [job for job in self.left if job.fingerprint not in prints]
        return before - len(self.left)

    def after(self, done: Sequence[Job], seconds: float) -> str:
        """ "3 of 36 runs done, about 1 h 20 min left"."""
        self.drop(done)
        work = sum(map(_work, done))
        for job in done:
            self._seen.setdefault((job.cell.id, job.arm), []).append(seconds / work)
        words = f"{self._count - len(self.left)} of {self._count} runs done"
        if not self.left:
            return words
        return f"{words}, about {duration(sum(self._rate(job) * _work(job) for job in self.left))} left"

    def _rate(self, job: Job) -> float:
        """Seconds a step or epoch: of the same arm, else of its cell, else of all so far."""
        same = self._seen.get((job.cell.id, job.arm))
        cell = [v for (id, _), values in self._seen.items() if id == job.cell.id for v in values]
        return fmean(same or cell or [v for values in self._seen.values() for v in values])


def _work(job: Job) -> int:
    """Local steps, or epochs, of all its rounds: arms differ in how many of them a round has."""
    training = job.config.training
    return job.config.rounds * (training.local_steps or training.local_epochs)
