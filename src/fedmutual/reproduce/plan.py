"""What is to be trained: for each cell, arm and seed a configuration, and a fingerprint by which a run is known again."""

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from fractions import Fraction
from types import MappingProxyType
from typing import Any

from fedmutual.config import Config, list_keys, list_setting_types
from fedmutual.config.keys import list_effects
from fedmutual.config.methods import describe_foreign_key
from fedmutual.errors import ConfigError
from fedmutual.reproduce.cells import Cell
from fedmutual.reproduce.schema import Arm

_SILENT = frozenset(key for key, effect in list_effects(Config).items() if effect.affects in ("machine", "record"))

Here = Mapping[str, Any]
Changed = tuple[tuple[str, Any], ...]


@dataclass(frozen=True)
class Scale:
    """How much of a cell is trained: at most so many rounds, with these keys changed. Whatever is less than all is said."""

    rounds: int | None = None
    changed: Changed = ()

    def of(self, cell: Cell) -> "Scale":
        """The same for one cell: rounds that none of its arms exceeds are no limit, a key is no change where none takes it.

        Nor is it where each has that value already.

        Raises:
            ConfigError: an arm cannot have such a value.
        """
        most = max(map(cell.rounds, cell.arms))
        rounds = self.rounds if self.rounds is not None and self.rounds < most else None
        algorithms = _algorithms(cell)
        changed = tuple((k, v) for k, v in self.changed if tells(k) and any(_has(a, k) for a in algorithms))
        return Scale(rounds, _telling(cell, changed))

    def words(self, cell: Cell, arm: str | None = None) -> str:
        """ "shortened: 50 of 200 rounds, partition.examples = 200", of a cell or of one arm; "" where it is whole."""
        if arm is None:
            most = max(map(cell.rounds, cell.arms))
            rounds, own = self.rounds or most, cell.about.paper_rounds or most
        else:
            rounds, own = self.trained(cell, arm)
        parts = [f"{rounds} of {own} rounds"] if rounds < own else []
        parts += [f"{k} = {json.dumps(v)}" for k, v in self.changed]
        return f"shortened: {', '.join(parts)}" if parts else ""

    def length(self, cell: Cell) -> tuple[Fraction, str]:
        """(the share of the cell's rounds, the changed keys as JSON): what cells must have alike to be averaged."""
        rounds = cell.common_rounds if self.rounds is None else min(self.rounds, cell.common_rounds)
        return Fraction(rounds, cell.common_rounds), json.dumps(self.changed)

    def trained(self, cell: Cell, arm: str) -> tuple[int, int]:
        """(rounds of an arm at this scale, its own rounds), or those of the arm that it starts from, if that is cut more.

        Its own rounds are the paper's, where the cell says that the paper trains for more.
        """
        longer = cell.about.paper_rounds / max(map(cell.rounds, cell.arms)) if cell.about.paper_rounds else 1.0
        chain = [arm, *filter(None, (cell.arms[arm].needs,))]
        pairs = [(cell.rounds(a) if self.rounds is None else cell.within(a, self.rounds), cell.rounds(a)) for a in chain]
        rounds, own = min(pairs, key=lambda pair: Fraction(*pair))
        return rounds, round(own * max(longer, 1.0))


def _telling(cell: Cell, changed: Changed) -> Changed:
    """Those of some keys that make other runs."""

    def prints(changed: Changed) -> list[str]:
        return [fingerprint(arm_config(cell, arm, 0, Scale(None, changed)), {}) for arm in cell.arms]

    kept, whole = changed, prints(changed) if changed else []
    for pair in changed:
        fewer = tuple(p for p in kept if p != pair)
        with suppress(ConfigError):  # without this key another cannot be
            kept = fewer if prints(fewer) == whole else kept
    return kept


@dataclass(frozen=True)
class Job:
    """One run that a cell asks for."""

    cell: Cell
    arm: str
    seed: int
    scale: Scale  # of this cell
    config: Config  # without what only a machine knows: see `placed`
    fingerprint: str  # of the configuration and of the run it starts from; the version comes beside it
    needs: "Job | None" = None

    @property
    def label(self) -> str:
        """What a person calls it."""
        return f"{self.cell.name}, {self.arm}, seed {self.seed}"

    @property
    def about(self) -> Arm:
        """Its arm."""
        return self.cell.arms[self.arm]


def jobs(cell: Cell, seeds: Iterable[int], scale: Scale, here: Here = MappingProxyType({})) -> Iterator[Job]:
    """All runs of a cell, those that others need before them.

    here: keys that say how this machine works and tell in no result, such as engine.name.

    Raises:
        ConfigError: an arm's configuration is not valid; file, arm and key are named.
    """
    of_cell = scale.of(cell)
    for seed in seeds:
        made: dict[str, Job] = {}
        for arm in cell.arms:
            yield from _with_needs(cell, arm, seed, of_cell, here, made)


def _with_needs(cell: Cell, arm: str, seed: int, scale: Scale, here: Here, made: dict[str, Job]) -> Iterator[Job]:
    if arm in made:
        return
    need = cell.arms[arm].needs
    if need is not None:
        yield from _with_needs(cell, need, seed, scale, here, made)
    kept, needed = cell.arms[arm], made[need] if need else None
    given = {"needs": needed.fingerprint if needed else None, "clients": kept.clients, "examples": kept.examples}
    config = arm_config(cell, arm, seed, scale, here)
    made[arm] = Job(cell, arm, seed, scale, config, fingerprint(config, given), needed)
    yield made[arm]


def arm_config(cell: Cell, arm: str, seed: int, scale: Scale, here: Here = MappingProxyType({})) -> Config:
    """The configuration of an arm at a scale of its cell, on this machine."""
    algorithm = _algorithm(cell, arm)
    limit = {} if scale.rounds is None else {"rounds": cell.within(arm, scale.rounds)}
    changed = {k: v for k, v in (*scale.changed, *here.items()) if _has(algorithm, k)}  # as `compare --set`: who has it
    return cell.config(arm, changed | {"seed": seed, **limit})


def _algorithm(cell: Cell, arm: str) -> str:
    """The name of an arm's algorithm."""
    return str(cell.arms[arm].set.get("algorithm.name", cell.tables.get("algorithm", {}).get("name", "fml")))


def _algorithms(cell: Cell) -> list[str]:
    """Those of all its arms, each once."""
    return list(dict.fromkeys(_algorithm(cell, arm) for arm in cell.arms))


def _has(algorithm: str, key: str) -> bool:
    """Whether an arm of this algorithm can be given a key: of another algorithm's settings it can not."""
    table, _, rest = key.partition(".")
    try:
        return table != "algorithm" or ":" in algorithm or rest.partition(".")[0] in list_setting_types(algorithm)
    except LookupError:
        return True  # there is no such algorithm: who parses the configuration says so, and where


def fingerprint(config: Config, given: Mapping[str, Any]) -> str:
    """What makes two runs the same: a digest of all that was set and tells in the result, and of what was given; the rounds.

    Defaults are left out, so that a key which a later version adds does not make a run another's.
    """
    set_keys = config.model_dump(mode="json", exclude={"rounds"}, exclude_defaults=True)
    counted = {k: _without_silent(k, v) for k, v in set_keys.items() if k not in _SILENT}
    counted["given"] = {k: v for k, v in given.items() if v is not None}
    text = json.dumps({k: v for k, v in counted.items() if v != {}}, sort_keys=True)
    return f"{hashlib.sha256(text.encode()).hexdigest()[:20]}-{config.rounds}"


def _without_silent(name: str, value: Any) -> Any:
    """Return a table without the keys that cannot change a number of the result; any other value as it is."""
    return {k: v for k, v in value.items() if f"{name}.{k}" not in _SILENT} if isinstance(value, dict) else value


def tells(key: str) -> bool:
    """Return whether a dotted key can change a number of the result; where the work is done, and where data lie, cannot."""
    return key not in _SILENT


def check(changed: Mapping[str, Any], cells: Iterable[Cell]) -> None:
    """Raise ConfigError where --set names what the command or an arm decides, a whole table, or what no arm takes."""
    for key, option in (("seed", "--seeds"), ("rounds", "--rounds"), ("name", "--out")):
        if key in changed:
            raise ConfigError(f"--set {key}: cells have their own; use {option}")
    algorithms = list(dict.fromkeys(a for cell in cells for a in _algorithms(cell)))
    for key in changed:
        inner = [k for k in list_keys() if k.startswith(f"{key}.")]
        if inner or key == "clients":
            like = "algorithm.alpha" if key == "algorithm" else (inner or ["clients.ID.algorithm.alpha"])[0]
            raise ConfigError(f"--set {key}: it is a table; set its keys one by one, as --set {like}=...")
        if key == "algorithm.name":
            raise ConfigError(f"--set {key}: each arm has an algorithm of its own; take it out, or write a cell of your own")
        if not any(_has(a, key) for a in algorithms):
            raise ConfigError(f"--set: {describe_foreign_key('algorithm', key.split('.')[1], algorithms)}")
