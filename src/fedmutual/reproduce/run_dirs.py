"""Where a run is trained, and with what it goes on there: one folder a run, whichever experiments look at it."""

import re
import shutil
from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path

from fedmutual import numerics
from fedmutual.config import Config, read_dumped
from fedmutual.config.keys import list_effects
from fedmutual.errors import ConfigError, RunError
from fedmutual.federation.build import pick_device
from fedmutual.files import read_json
from fedmutual.reproduce.plan import Job, tells
from fedmutual.rundir.checkpoint import committed, file_name
from fedmutual.rundir.file_names import CONFIG, ENVIRONMENT, LOCK, SUMMARY
from fedmutual.rundir.folder import held, reopen

CLAIMS = "claims"  # below OUT; a folder a run, with the lock that who trains it holds
BEST = "-best"  # a second folder, with the best weights that the first has not
RELEASES = {1: ("0.1.0",)}  # numerics version -> releases that named a run's folder by themselves and not by it
_RESUMABLE = frozenset(key for key, effect in list_effects(Config).items() if effect.resumable)


def folder(out: Path, job: Job) -> Path:
    """The folder of a run. Another numerics version trains anew; so does who needs best weights of a run that kept none."""
    named = [out / "runs" / f"{job.fingerprint}-{name}" for name in _names()]
    plain = next((p for p in named if p.exists() or p.with_name(p.name + BEST).exists()), named[0])
    best = plain.with_name(plain.name + BEST)
    lacking = job.cell.about.node is not None and (plain / CONFIG).exists() and not _keeps(plain)
    return best if lacking or best.exists() else plain


def _names() -> tuple[str, ...]:
    """What a run's folder may end with after the fingerprint: today's name first, then those of earlier releases."""
    return (f"n{numerics.VERSION}", *RELEASES.get(numerics.VERSION, ()))


def claim(out: Path, fingerprint: str) -> AbstractContextManager[None]:
    """Holds a run for this process, before it has a folder and until its result is kept.

    Entering it raises Busy where another process holds it, and RunError where nothing can be written.
    """
    return held(out / CLAIMS / f"{fingerprint}-{_names()[0]}", "trains this run")


def foreign(place: Path, rounds: int) -> str | None:
    """The device that the run there was begun on, and goes on with to so many rounds, if this machine has no such."""
    if not (place / CONFIG).exists() or ((place / SUMMARY).exists() and read_dumped(place / CONFIG).rounds >= rounds):
        return None
    name = str(read_json(place / ENVIRONMENT).get("device", "cpu"))
    try:
        pick_device(name)
    except ConfigError:
        return name
    return None


def as_begun(config: Config, place: Path) -> Config:
    """With all that tells in no result as the run that is there was begun with, if one is: it goes on with that alone.

    So another cell's run, and one whose command is given again with other threads, are gone on with.
    """
    if not (place / CONFIG).exists():
        return config
    before = read_dumped(place / CONFIG)
    kept = {}
    for table in ("data", "engine", "records"):
        ours, theirs = getattr(config, table), getattr(before, table)
        kept[table] = ours.model_copy(update={key: getattr(theirs, key) for key in _silent(table, type(ours).model_fields)})
    return config.model_copy(update={"name": before.name, **kept})


def otherwise(asked: Config, begun: Config) -> list[str]:
    """What a run goes on with that was asked for otherwise: "engine.threads = 1"."""
    tables = [(table, getattr(asked, table), getattr(begun, table)) for table in ("data", "engine", "records")]
    return [
        f"{table}.{key} = {str(now).lower() if isinstance(now, bool) else now}"
        for table, before, after in tables
        for key in type(before).model_fields
        if getattr(before, key) != (now := getattr(after, key))
    ]


def _silent(table: str, keys: Collection[str]) -> Iterator[str]:
    return (key for key in keys if not tells(f"{table}.{key}") and f"{table}.{key}" not in _RESUMABLE)


def _keeps(place: Path) -> bool:
    """Whether a run keeps the weights of its best round."""
    return read_dumped(place / CONFIG).records.keep_best


def lengthen(job: Job, config: Config, place: Path, out: Path) -> None:
    """Begin with a copy of the same run of fewer rounds, where there is one that may be gone on with.

    Raises:
        RunError: it cannot be copied.
    """
    for rounds, begun in _shorter(out, job) if not place.exists() else []:
        with ExitStack() as holding:
            try:
                holding.enter_context(claim(out, f"{job.fingerprint.partition('-')[0]}-{rounds}"))
                holding.enter_context(held(begun))
                reopen(begun, as_begun(config, begun))
                saved = committed(begun)
                lacking = job.cell.about.node is not None and not _keeps(begun)
                if saved is None or lacking or foreign(begun, config.rounds) is not None:
                    continue
            except RunError:  # another process trains it, a schedule moves by the number of rounds, or it is damaged
                continue
            _copy(begun, place, saved.round)
            return


def _shorter(out: Path, job: Job) -> list[tuple[int, Path]]:
    """The same run with fewer rounds, and their folders; the longest first."""
    digest, _, rounds = job.fingerprint.partition("-")
    pattern = re.compile(rf"{digest}-(\d+)-(?:{'|'.join(map(re.escape, _names()))})(?:{BEST})?")
    names = {p: pattern.fullmatch(p.name) for p in (out / "runs").glob(f"{digest}-*")}
    found = {p: int(match[1]) for p, match in names.items() if match and (p / CONFIG).exists()}
    return sorted(((n, p) for p, n in found.items() if n < int(rounds)), key=lambda one: (-one[0], one[1].name))


def _copy(begun: Path, place: Path, round: int) -> None:
    """Copy a run as it was saved. Who holds it is alone with the part that is being made."""
    part = place.with_name(f".{place.name}.{begun.name}.part")
    shutil.rmtree(part, ignore_errors=True)
    try:
        shutil.copytree(begun, part, ignore=_not_of(round))
        part.rename(place)
    except OSError as problem:  # shutil's own has no words
        shutil.rmtree(part, ignore_errors=True)
        why = problem.strerror or "not every file of it can be read"
        raise RunError(
            f"{place}: cannot be begun with a copy of {begun} ({why}); mend that, or choose another folder with --out"
        ) from None


def _not_of(round: int) -> Callable[[str, list[str]], list[str]]:
    """Names that are not copied: locks, what is being written, and weights of other rounds than the saved one."""

    def others(_: str, names: list[str]) -> list[str]:
        kept = file_name(round)
        return [n for n in names if n == LOCK or n.endswith(".part") or (n.startswith("round-") and n != kept)]

    return others
