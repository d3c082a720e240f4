"""Read the experiments from files: `<id>/index.toml` describes an experiment; each other TOML file below it is a cell.

A cell is a configuration with one additional table, [cell]. The reader removes [cell] before it checks the configuration.
"""

import re
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatch
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from fedmutual.config import Config, check_scored, parse_config, read_tables
from fedmutual.config.keys import Table
from fedmutual.errors import ConfigError
from fedmutual_papers.checks import check_claims, check_measures, suggest_near
from fedmutual_papers.schema import Arm, CellTable, Claim, Index, Notes
from fedmutual_papers.tuning import Tuning, make_tuned_settings, read_tuning

INDEX, NOTES, RESULTS = "index.toml", "notes.toml", "results"
DEFAULT_RATE = Config.model_fields["optimizer"].default.lr


@dataclass(frozen=True)
class Cell:
    """One TOML file of an experiment: a configuration that is trained once for each arm."""

    id: str  # "table1/mnist/mlp-iid", where its results are kept
    name: str  # what `--only` matches: "mnist/mlp-iid"
    path: Path
    tables: Table  # the configuration, unchecked
    about: CellTable
    arms: dict[str, Arm]  # the arms that the experiment shows, and the arms that they need; `set` holds what sweeps chose
    tunings: dict[str, Tuning] = field(default_factory=dict)  # arm -> the sweep that chose its settings

    @property
    def shown(self) -> dict[str, Arm]:
        """Return the arms that have a row in the tables."""
        return {k: a for k, a in self.arms.items() if a.shown}

    @property
    def title(self) -> str:
        """Return a title for people, such as "MNIST MLP, IID"."""
        return f"{self.about.column}, {self.about.row}"

    @property
    def validates_on_test(self) -> bool:
        """Return whether the clients' validation data are test images, as in the journal version of the FML paper."""
        split = self.tables.get("split", {})
        return split.get("preset", "journal") == "journal" and "validation" not in split

    @property
    def target(self) -> float | None:
        """Return the paper's FedAvg accuracy for this cell, a fraction, for the measure `rounds_to`; or None."""
        arm = self.about.arms.get("fedavg")
        return arm.paper / 100 if arm is not None and isinstance(arm.paper, float) else None

    def make_config(self, arm: str, overrides: Mapping[str, Any] = MappingProxyType({})) -> Config:
        """Return the configuration of an arm. overrides: dotted key -> value, set after the values of the arm.

        Raises:
            ConfigError: the configuration is not valid; the message names file, arm and key.
        """
        tables, source = {"name": self.id.replace("/", "-"), **self.tables}, f"{self.path}, arm {arm!r}"
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # that FedAvg has no alpha is as it should be
                config = parse_config(tables, source, {**self.arms[arm].set, **overrides})
                check_scored(config, source)
                return config
        except ConfigError as problem:
            message = str(problem)
            raise ConfigError(message if source in message else f"{source}: {message}") from None

    def get_rounds(self, arm: str) -> int:
        """Return the full number of rounds of an arm."""
        return int(self.arms[arm].set.get("rounds") or self.common_rounds)

    @property
    def common_rounds(self) -> int:
        """Return the number of rounds of every arm that does not set `rounds` itself."""
        return int(self.tables.get("rounds") or Config.model_fields["rounds"].default)

    def limit_rounds(self, arm: str, limit: int) -> int:
        """Return the number of rounds of an arm, at least 1, when the cell is shortened to `limit` rounds.

        An arm with fewer rounds than the cell is shortened in the same proportion as the cell, rounded half up. An arm with
        more rounds, such as a federation from which other arms start, is shortened to `limit`.
        """
        arm_rounds, common = self.get_rounds(arm), self.common_rounds
        return max(min(arm_rounds, limit, (2 * limit * arm_rounds + common) // (2 * common)), 1)


@dataclass(frozen=True)
class PaperExperiment:
    """An experiment: its index, its cells and its differences from the paper."""

    id: str
    index: Index
    cells: tuple[Cell, ...]
    differences: tuple[str, ...] = ()  # from the paper: its own, and those that it shares with others
    code: tuple[str, ...] = ()  # what the authors' public code does otherwise

    def choose_cells(self, only: Sequence[str]) -> tuple[Cell, ...]:
        """Return the cells whose names match one of the patterns; without patterns, all cells.

        Raises:
            ConfigError: a pattern matches no cell; the message suggests the nearest name.
        """
        for pattern in only:
            if not any(fnmatch(c.name, pattern) for c in self.cells):
                raise ConfigError(f"--only {pattern!r} matches no cell of {self.id}{suggest_near(pattern, self.names)}")
        return tuple(c for c in self.cells if not only or any(fnmatch(c.name, p) for p in only))

    @property
    def names(self) -> list[str]:
        """Return the names of the cells, as `--only` matches them."""
        return [c.name for c in self.cells]


def find_home() -> Path:
    """Return the folder of the experiments: in the source checkout, else in the installed package.

    Raises:
        ConfigError: this installation has no experiments.
    """
    package = Path(__file__).resolve().parent
    for folder in (package.parents[1] / "experiments", package / "experiments"):
        if any(folder.glob(f"*/{INDEX}")):
            return folder
    raise ConfigError("this installation of fedmutual-papers has no experiments; name their folder with --experiments")


def read_experiments(root: Path) -> list[PaperExperiment]:
    """Return all experiments of a folder, in the order of their indexes.

    Raises:
        ConfigError: the folder has no experiment, or an experiment cannot be read.
    """
    read = [read_experiment(root, path.parent.name) for path in root.glob(f"*/{INDEX}")]
    if not read:
        raise ConfigError(_format_no_experiment(root))
    return sorted(read, key=lambda e: (e.index.order, e.id))


def _format_no_experiment(root: Path) -> str:
    return f"{root}: contains no experiment, no */{INDEX}; name another folder with --experiments"


def read_experiment(root: Path, id: str) -> PaperExperiment:
    """Return one experiment with its cells and with the cells that it borrows from another experiment.

    Raises:
        ConfigError: the id is unknown (the message suggests the nearest id), or a file of the experiment is not valid.
    """
    path = root / id / INDEX
    known = sorted(p.parent.name for p in root.glob(f"*/{INDEX}"))
    if not known:
        raise ConfigError(_format_no_experiment(root))
    if id not in known:
        raise ConfigError(f"there is no experiment {id!r}{suggest_near(id, known)}")
    index = _validate(Index, read_tables(path), path)
    check_measures(index, path)
    own_cells = [_read_cell(root, file, id, id, index) for file in _list_cell_files(root / id)]
    lender, _, pattern = index.cells.partition("/")
    borrowed = [
        _read_cell(root, file, lender, id, index)
        for file in (_list_cell_files(root / lender) if lender else [])
        if fnmatch(_name_cell(root / lender, file), pattern or "*")
    ]
    if not own_cells + borrowed:
        raise ConfigError(
            f"{path}: the experiment has no cell; write the TOML file of a cell beside this file, or name cells of another "
            "experiment with the key 'cells'"
        )
    order = {column: n for n, column in enumerate(index.columns)}
    check_claims(index, {c.name: c.arms.keys() for c in own_cells + borrowed}, path)
    cells = sorted((*borrowed, *own_cells), key=lambda c: order.get(c.about.column, len(order)))
    return PaperExperiment(id, index, tuple(cells), *_read_notes(root, index, path))


def _read_notes(root: Path, index: Index, path: Path) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return (the differences from the paper with the shared notes, the differences of the authors' public code)."""
    if not index.notes and not index.code:
        return index.differences, ()
    notes = _validate(Notes, read_tables(root / NOTES), root / NOTES)
    for name, known in ((name, notes.differences) for name in index.notes):
        if name not in known:
            raise ConfigError(
                f"{path}: key 'notes' names {name!r}, which {NOTES} does not have{suggest_near(name, list(known))}"
            )
    if index.code and index.code not in notes.code:
        suggestion = suggest_near(index.code, list(notes.code))
        raise ConfigError(f"{path}: key 'code' names {index.code!r}, which {NOTES} does not have{suggestion}")
    return (*index.differences, *(notes.differences[name] for name in index.notes)), notes.code.get(index.code, ())


def _list_cell_files(folder: Path) -> list[Path]:
    """Return the cell files of a folder: fewer subfolders first, then by name, with digits sorted as numbers."""
    return sorted((p for p in folder.rglob("*.toml") if p.name != INDEX), key=lambda p: _sort_naturally(folder, p))


def _sort_naturally(folder: Path, path: Path) -> list[tuple[int, str]]:
    """Return a sort key that puts "n500" before "n2000" and "cifar10" before "cifar100"."""
    words = re.findall(r"\d+|\D+", _name_cell(folder, path))
    return [(int(word), "") if word.isdigit() else (-1, word) for word in words]


def _name_cell(folder: Path, path: Path) -> str:
    return path.relative_to(folder).with_suffix("").as_posix()


def _read_cell(root: Path, path: Path, owner: str, id: str, index: Index) -> Cell:
    tables = dict(read_tables(path))
    if "cell" not in tables:
        raise ConfigError(f"{path}: has no table [cell]; the table gives the cell's row and column, and its arms")
    about = _validate(CellTable, tables.pop("cell"), path, "cell")
    arms = {**about.arms, **index.add}
    if index.cells:
        # the paper's numbers belong to the measure of the experiment that owns the cell
        arms = {k: a if owner == id else a.model_copy(update={"paper": None}) for k, a in arms.items()}
    for k, arm in arms.items():
        if arm.needs is not None and (arm.needs not in arms or arms[arm.needs].needs):
            free = [other for other, a in arms.items() if a.needs is None]
            like = suggest_near(arm.needs, free)
            raise ConfigError(
                f"{path}: arm {k!r} needs arm {arm.needs!r}, but {arm.needs!r} is not defined, or {arm.needs!r} itself "
                f"needs another arm{like}"
            )
    wanted = [k for k in index.arms or arms if k in arms]
    wanted += dict.fromkeys(need for k in wanted if (need := arms[k].needs) and need not in wanted)
    if not wanted:
        raise ConfigError(
            f"{path}: has none of the arms that experiment {index.title!r} uses; change 'arms' or 'cells' of the experiment"
        )
    name = _name_cell(root / owner, path)
    swept = {k: arms[k] for k in wanted if arms[k].sweep}
    tunings = {k: read_tuning(root, arm.sweep, arm.rate_times, f"{path}, arm {k!r}") for k, arm in swept.items()}
    resolved = {k: _resolve_settings(arms[k], tunings.get(k), tables, f"{path}, arm {k!r}") for k in wanted}
    cell = Cell(f"{owner}/{name}", name, path, tables, about, resolved, tunings)
    for k in cell.arms:  # raises the errors of a configuration before the tables are used
        cell.make_config(k)
    return cell


def _resolve_settings(arm: Arm, tuning: Tuning | None, tables: Table, source: str) -> Arm:
    """Return the arm with the settings from its sweep and with its share of the learning rate."""
    optimizer = tables.get("optimizer")
    rate = optimizer.get("lr", DEFAULT_RATE) if isinstance(optimizer, dict) else DEFAULT_RATE
    try:
        return arm.model_copy(update={"set": make_tuned_settings(arm.set, tuning, arm.rate_times, rate)})
    except ValueError as problem:
        raise ConfigError(f"{source}: {problem}; set the arm's rate itself") from None


S = TypeVar("S", bound=BaseModel)


def _validate(kind: type[S], tables: Any, path: Path, prefix: str = "") -> S:
    try:
        return kind.model_validate(tables)
    except ValidationError as problem:
        first = problem.errors()[0]
        place = [str(p) for p in (*filter(None, (prefix,)), *first["loc"])]
        if first["type"] == "extra_forbidden":
            like = suggest_near(place[-1], [*Arm.model_fields, *Claim.model_fields, *kind.model_fields])
            raise ConfigError(f"{path}: unknown key {'.'.join(place)!r}{like}") from None
        raise ConfigError(f"{path}: key {'.'.join(place)!r}: {first['msg'][0].lower()}{first['msg'][1:]}") from None
