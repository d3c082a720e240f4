"""Plan the training runs: one configuration and one fingerprint for each cell, arm and seed."""

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from fractions import Fraction
from types import MappingProxyType
from typing import Any

from fedmutual.config import Config, list_keys, list_setting_types
from fedmutual.config.checks import describe_foreign_key
from fedmutual.config.keys import list_effects
from fedmutual.errors import ConfigError
from fedmutual.role import DEFAULT_ALGORITHM
from fedmutual_papers.experiment_files import Arm, Cell
from fedmutual_papers.store import Result, ResultStore

_SILENT = frozenset(key for key, effect in list_effects(Config).items() if effect.affects in ("machine", "record"))

Here = Mapping[str, Any]
Changed = tuple[tuple[str, Any], ...]


@dataclass(frozen=True)
class Scale:
    """How much of a cell is trained: a limit on the rounds, and changed keys. The pages name every reduction."""

    rounds: int | None = None
    changed: Changed = ()

    def fit_to(self, cell: Cell) -> "Scale":
        """Return the scale for one cell, without a limit that no arm exceeds and without keys that change no arm.

        Raises:
            ConfigError: an arm cannot have such a value.
        """

        def list_prints(changed: Changed) -> list[str]:
            configs = (make_arm_config(cell, arm, 0, Scale(None, changed)) for arm in cell.arms)
            return [compute_result_fingerprint(config, {}) for config in configs]

        algorithms = _list_algorithms(cell)
        changed = tuple((k, v) for k, v in self.changed if has_effect(k) and any(_accepts(a, k) for a in algorithms))
        prints = list_prints(changed) if changed else []
        for pair in changed:
            fewer = tuple(p for p in changed if p != pair)
            with suppress(ConfigError):  # an error: another key needs this one
                changed = fewer if list_prints(fewer) == prints else changed
        return Scale(self.rounds if self.rounds is not None and self.rounds < cell.most_rounds else None, changed)

    def describe(self, cell: Cell, arm: str | None = None) -> str:
        """Return "shortened: 50 of 200 rounds, partition.examples = 200" for a cell or one arm; "" for the full length."""
        full_rounds = cell.most_rounds
        rounds, full_rounds = (self.rounds or full_rounds, full_rounds) if arm is None else self.count_rounds(cell, arm)
        parts = [f"{rounds} of {full_rounds} rounds"] if rounds < full_rounds else []
        parts += [f"{k} = {json.dumps(v)}" for k, v in self.changed]
        return f"shortened: {', '.join(parts)}" if parts else ""

    def compute_length(self, cell: Cell) -> tuple[Fraction, str]:
        """Return (the share of the cell's rounds, the changed keys as JSON)."""
        rounds = cell.common_rounds if self.rounds is None else min(self.rounds, cell.common_rounds)
        return Fraction(rounds, cell.common_rounds), json.dumps(self.changed)

    def count_rounds(self, cell: Cell, arm: str) -> tuple[int, int]:
        """Return (the arm's rounds at this scale, its full rounds), or of the arm it starts from, if that is cut more."""
        chain = [arm, *filter(None, (cell.arms[arm].needs,))]
        pairs = [(cell.limit_rounds(a, self.rounds), cell.get_rounds(a)) for a in chain]
        return min(pairs, key=lambda pair: Fraction(*pair))


@dataclass(frozen=True)
class Job:
    """One training run."""

    cell: Cell
    arm: str
    seed: int
    scale: Scale  # of this cell
    config: Config  # without what only a machine knows: see `run._begin_run`
    fingerprint: str  # of the configuration and of the run it starts from; the version comes beside it
    needs: "Job | None" = None

    @property
    def label(self) -> str:
        """Return the name of the run for people."""
        return f"{self.cell.name}, {self.arm}, seed {self.seed}"

    @property
    def about(self) -> Arm:
        """Return the arm of the run."""
        return self.cell.arms[self.arm]

    def find_result(self, store: ResultStore, numerics: int | None = None) -> Result | None:
        """Return the stored result of this run, which any experiment may have made, as this cell shows it; or None.

        numerics: of this numerics version; None: of any.
        """
        result = store.find(self.fingerprint, self.cell.id, numerics)
        return result and result.model_copy(update={"arm": self.arm, "seed": self.seed})


def list_jobs(cell: Cell, seeds: Iterable[int], scale: Scale, here: Here = MappingProxyType({})) -> Iterator[Job]:
    """Yield all runs of a cell; a run comes after the run that it starts from.

    here: keys of this machine that do not change a result, such as engine.name.

    Raises:
        ConfigError: an arm's configuration is not valid; the message names file, arm and key.
    """
    of_cell, configs = scale.fit_to(cell), dict[str, Config]()
    for seed in seeds:
        # parsing takes a millisecond, and seeds differ in one key only
        configs = configs or {arm: make_arm_config(cell, arm, seed, of_cell, here) for arm in cell.arms}
        jobs: dict[str, Job] = {}
        for arm in dict.fromkeys(a for k, about in cell.arms.items() for a in (about.needs, k) if a is not None):
            about, config = cell.arms[arm], configs[arm].model_copy(update={"seed": seed})
            start = jobs[about.needs] if about.needs else None
            parts = {"needs": start and start.fingerprint, "clients": about.clients, "examples": about.examples}
            jobs[arm] = Job(cell, arm, seed, of_cell, config, compute_result_fingerprint(config, parts), start)
        yield from jobs.values()


def make_arm_config(cell: Cell, arm: str, seed: int, scale: Scale, here: Here = MappingProxyType({})) -> Config:
    """Return the configuration of an arm at a scale of its cell, with the keys of this machine.

    Raises:
        ConfigError: as `Cell.make_config`.
    """
    limit = {} if scale.rounds is None else {"rounds": cell.limit_rounds(arm, scale.rounds)}
    # As in `compare --set`, a key is only for the algorithms that have the key.
    changed = {k: v for k, v in (*scale.changed, *here.items()) if _accepts(_name_algorithm(cell, arm), k)}
    return cell.make_config(arm, changed | {"seed": seed, **limit})


def _name_algorithm(cell: Cell, arm: str) -> str:
    return str(cell.arms[arm].set.get("algorithm.name", cell.tables.get("algorithm", {}).get("name", DEFAULT_ALGORITHM)))


def _list_algorithms(*cells: Cell) -> list[str]:
    return list(dict.fromkeys(_name_algorithm(cell, arm) for cell in cells for arm in cell.arms))


def _accepts(algorithm: str, key: str) -> bool:
    table, _, rest = key.partition(".")
    try:
        return table != "algorithm" or ":" in algorithm or rest.partition(".")[0] in list_setting_types(algorithm)
    except LookupError:
        return True  # an unknown algorithm, which the parser of the configuration reports with its place


def compute_result_fingerprint(config: Config, parts: Mapping[str, Any]) -> str:
    """Return the identity of a run: a digest of all set keys that change the result and of `parts`, then the rounds.

    Defaults are left out, so that a new key in a later version does not change the fingerprint of older runs.
    """
    set_keys = config.model_dump(mode="json", exclude={"rounds"}, exclude_defaults=True)
    counted = {k: _drop_silent(v, f"{k}.") for k, v in _drop_silent(set_keys).items()}
    counted["given"] = {k: v for k, v in parts.items() if v is not None}
    text = json.dumps({k: v for k, v in counted.items() if v != {}}, sort_keys=True)
    return f"{hashlib.sha256(text.encode()).hexdigest()[:20]}-{config.rounds}"


def _drop_silent(value: Any, prefix: str = "") -> Any:
    return {k: v for k, v in value.items() if prefix + k not in _SILENT} if isinstance(value, dict) else value


def has_effect(key: str) -> bool:
    """Return whether a dotted key can change a result; keys that say where to compute or where data lie cannot."""
    return key not in _SILENT


def check(changed: Mapping[str, Any], cells: Iterable[Cell]) -> None:
    """Raise ConfigError if --set names a key that the command or an arm sets, a complete table, or a key that no arm has."""
    algorithms = _list_algorithms(*cells)
    others = {"seed": "use --seeds", "rounds": "use --rounds", "name": "use --out"}
    others["algorithm.name"] = "write a cell of your own"
    for key in changed:
        inner = [k for k in list_keys() if k.startswith(f"{key}.")]
        if key in others:
            raise ConfigError(f"--set {key}: cells and arms have their own; {others[key]}")
        if inner or key == "clients":
            like = "algorithm.alpha" if key == "algorithm" else (inner or ["clients.ID.algorithm.alpha"])[0]
            raise ConfigError(f"--set {key}: it is a table; set its keys one by one, as --set {like}=...")
        if not any(_accepts(a, key) for a in algorithms):
            raise ConfigError(f"--set: {describe_foreign_key('algorithm', key.split('.')[1], algorithms)}")
