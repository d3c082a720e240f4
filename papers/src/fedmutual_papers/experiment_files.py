"""Read the experiments from files: `<id>/index.toml` describes an experiment; each other TOML file below it is a cell.

A cell is a configuration with one additional table, [cell]. The reader removes [cell] before it checks the configuration.
"""

import re
import warnings
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatch
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator

from fedmutual.config import Config, check_scored, parse_config, parse_override, read_tables
from fedmutual.config.checks import parse_table
from fedmutual.config.grid import LEARNING_RATE
from fedmutual.config.keys import Section, Table
from fedmutual.errors import ConfigError, RunError
from fedmutual.files import read_json
from fedmutual.rundir.record_files import check_record
from fedmutual_papers import measures
from fedmutual_papers.measures import End, suggest_near

INDEX, NOTES, RESULTS, SWEEPS = "index.toml", "notes.toml", "results", "sweeps"
DEFAULT_RATE = Config.model_fields["optimizer"].default.lr
MOST_SEEDS = 100  # of a cell
AVERAGE = "average"  # beside the nodes' own, the paper's mean over them

Of = Literal["mean", "every", "most"]
Printed = Annotated[dict[str, dict[str, float]], Field(min_length=1)]
"""Measure -> node -> the paper's number; the node "average" is the mean as the paper prints it."""


def normalize_node(node: str) -> str:
    """Return the node's name in the spelling common to all copies of a data set: "Real_World" becomes "real world"."""
    return node.casefold().replace("_", " ")


def _check_measure(name: str) -> str:
    measures.find(name)
    return name


def _check_figure(name: str) -> str:
    if not measures.find(name)[0].curve:
        raise ValueError(f"{name!r} has no curve that could be drawn; remove it from 'figures'")
    return name


MeasureName = Annotated[str, AfterValidator(_check_measure)]


class _Section(Section):
    model_config = ConfigDict(strict=False)  # TOML has lists for tuples


class Arm(_Section):
    """One way to train a cell: overrides of its configuration, and the paper's numbers."""

    title: str = ""  # what a row is called; unset, the name of its algorithm
    set: Table = Field(default_factory=dict)
    paper: float | Printed | None = None  # a number, whatever is measured; or one a measure and node
    needs: str | None = None  # the arm whose shared model this one starts from (`model.weights`)
    clients: tuple[str, ...] | None = None  # of the partition, these alone take part
    examples: int | None = Field(default=None, ge=1)  # and with so many training examples each
    sweep: str = ""  # the file of `sweeps`, without .json, whose winning settings the arm takes; `set` comes after
    rate_times: float = Field(default=1.0, gt=0)  # so many times the learning rate of the sweep, or of the cell
    shown: bool = True  # False: it is trained only because others need it

    def list_printed(self, measure: str) -> list[tuple[str, str, float]]:
        """Return every printed number as (measure, node, number). measure: for numbers that do not name their measure."""
        if isinstance(self.paper, dict):
            return [(name, normalize_node(node), v) for name, nodes in self.paper.items() for node, v in nodes.items()]
        return [] if self.paper is None else [(measure, AVERAGE, self.paper)]

    def find_printed(self, measure: str, node: str = AVERAGE) -> float | None:
        """Return the paper's number, in the paper's unit; None if the paper has none."""
        return {(m, n): number for m, n, number in self.list_printed(measure)}.get((measure, normalize_node(node)))


class CellTable(_Section):
    """A cell of a table or a figure of a paper: where it stands, and what of its runs is read."""

    row: str
    column: str
    printed_in: str = ""  # the cell, by its id, where the paper's numbers of these arms are counted; unset, here
    clients: tuple[str, ...] | None = None  # the clients that are scored; unset, all
    each: bool = False  # whether every client's curve is kept
    noise: tuple[float, ...] = ()  # Gaussian weight noise under which the last global model is scored
    node: str | None = None  # the node that is looked at closely: its losses over the rounds, its features at the end
    optional: bool = False  # left out, with a word, where its data are not there
    first_seed: int = Field(default=0, ge=0)  # above 0 in a cell that confirms a result of other seeds
    arms: dict[str, Arm]


class Claim(_Section):
    """A claim of the paper in our words, and the difference or ratio of two numbers that decides it."""

    text: str
    finding: str = ""  # the claim as a complete sentence for the page of findings; unset, the page does not have the claim
    measure: MeasureName
    arm: str
    than: str = ""  # another arm, or ARM@CELL, one of another cell; unset, `less` says what is taken off
    less: str = ""  # a cell in which the same is taken, and taken off
    sign: Literal["more", "less", "same"] = "more"
    times: float | None = Field(default=None, gt=0)  # arm is so many times than: the ratio is judged, not the difference
    margin: float = Field(default=0.0, ge=0)  # of "same": so far apart is still the same, in the measure's own unit
    at: End | None = None  # unset, the best round if other data than the measured data chose it, else the mean of the last
    than_at: End | None = None
    per: Literal["cell", "client"] = "cell"
    of: Of | None = None  # of which cells it is; unset, of their mean, and of every client where it is of clients
    by: Literal["", "column"] = ""  # "column": it is decided for each column of the table, and for the table by all columns
    cells: str = "*"
    first_reading: str = "as the paper trains"  # the name of the reading without changes, where there are others
    readings: tuple[dict[Literal["name", "arm", "than"], str], ...] = ()  # judged beside it: a name, and arms in their place

    @model_validator(mode="after")
    def _check(self) -> Self:
        is_of_client = self.per == "client"
        faults = {
            f'has {self.measure!r}, which is no measure of each client; remove per = "client"': (
                is_of_client and not measures.find(self.measure)[0].of_clients
            ),
            "is of every client; remove 'of', or per = \"client\"": is_of_client and self.scope != "every",
            "needs 'than' without 'less', because it has 'times'": self.times and (self.less or not self.than),
            "needs 'than' or 'less'": not (self.than or self.less),
            "has a reading without a name; give it a 'name'": not all("name" in reading for reading in self.readings),
        }
        for fault, is_there in faults.items():
            if is_there:
                raise ValueError(f"the claim {self.text!r} {fault}")
        return self

    @property
    def scope(self) -> Of:
        """Return the scope of the claim: "mean" over cells, "every" cell or client, or "most" cells."""
        return self.of or ("every" if self.per == "client" else "mean")

    @property
    def other(self) -> tuple[str, str]:
        """Return (the arm that is compared with, its cell); the cell is "" if it is the same."""
        arm, _, cell = self.than.partition("@")
        return arm, cell

    def list_readings(self) -> list[tuple[str, "Claim"]]:
        """Return (name, claim) of each reading: first as it is, then with other arms; the name is "" of a sole reading."""
        arms = [(r["name"], {k: v for k, v in r.items() if k != "name"} | {"readings": ()}) for r in self.readings]
        others = [(name, self.model_copy(update=changed)) for name, changed in arms]
        return [(self.first_reading if others else "", self), *others]

    @property
    def is_fact(self) -> bool:
        """Return whether it is arithmetic, such as a number of bytes, which no seed changes."""
        return measures.find(self.measure)[0].unit == "bytes"

    def list_operands(self, cell: str) -> list[tuple[int, str, str, End]]:
        """Return the numbers that are compared in a cell: (+1, or -1 where it is taken off; cell; arm; end)."""
        counts, (than, elsewhere) = measures.find(self.measure)[0].counts, self.other
        operands = []
        for sign, place in ((1, cell), *([(-1, self.less)] if self.less else [])):
            operands.append((sign, place, self.arm, self.at or counts))
            if than:
                operands.append((-sign, elsewhere or place, than, self.than_at or counts))
        return operands


class Index(_Section):
    """The content of index.toml."""

    title: str
    paper: str = ""  # the paper of this experiment; "" where no paper has it
    about: str
    order: int = 0  # its place in lists
    family: str = ""  # the experiments whose claims are corrected together; unset, this one alone
    cells: str = ""  # patterns of cells of another experiment that are looked at, as "table1/mnist/*"; "" is none
    columns: tuple[str, ...] = ()  # the order of the columns; those that are not named come after
    arms: tuple[str, ...] | None = None  # those looked at, in this order; unset, all
    add: dict[str, Arm] = Field(default_factory=dict)  # arms for every cell
    measures: tuple[MeasureName, ...]
    view: Literal["settings", "clients", "nodes"] = "settings"
    figures: tuple[Annotated[str, AfterValidator(_check_figure)], ...] = ()
    draw: str = "*"  # the cells that are drawn
    decimals: int = Field(default=2, ge=0, le=4)
    claims: tuple[Claim, ...] = ()
    supports: str = ""  # which reading of claims that have several the paper's text supports
    differences: tuple[str, ...]  # this experiment's own
    notes: tuple[str, ...] = ()  # differences that others share, by their names in notes.toml
    code: str = ""  # the public code that is compared with this, by its name in notes.toml; "" for none


class Tuning(BaseModel):
    """The settings that a sweep chose for an arm: the keys of sweep.json that describe the choice."""

    model_config = ConfigDict(frozen=True, extra="ignore")
    path: Path  # of the copy of sweep.json
    name: str  # of the configuration
    seeds: tuple[int, ...]  # of each trial
    by: str | None  # the model whose accuracy chose, "global" or "personal"; None: the one that a client would use
    holdout: float  # the fraction of the training rows whose scores chose
    settings: tuple[dict[str, Any], ...]  # all trials, each with "set": key -> value as `--set` takes it
    winner: dict[str, str] = Field(alias="chosen")  # of the best trial

    @cached_property
    def grid(self) -> dict[str, tuple[Any, ...]]:
        """Return key -> the values that were tried, for the keys with several values."""
        tried: dict[str, dict[str, Any]] = {}
        for key, text in (pair for setting in self.settings for pair in setting["set"].items()):
            tried.setdefault(key, {})[text] = parse_override(f"value={text}")[1]
        return {key: tuple(values.values()) for key, values in tried.items() if len(values) > 1}

    @cached_property
    def chosen(self) -> dict[str, Any]:
        """Return key -> the chosen value, for the keys with several values."""
        return {key: parse_override(f"value={self.winner[key]}")[1] for key in self.grid}

    @property
    def ends(self) -> list[str]:
        """Return the keys whose chosen value is the smallest or the largest tried value: a better value may lie outside."""
        numbers = {key: won for key, won in self.chosen.items() if isinstance(won, int | float)}
        return [key for key, won in numbers.items() if won in (min(self.grid[key]), max(self.grid[key]))]

    @property
    def rounds(self) -> int:
        """Return the rounds of each trial: from the sweep's command, else from the configuration beside the sweep file."""
        return int(self.winner.get("rounds") or read_tables(self.path.with_name(f"{self.name}.toml"))["rounds"])


def _read_tuning(root: Path, arm: Arm, source: str) -> Tuning:
    """Return the sweep that an arm names. root: the folder of the experiments.

    Raises:
        ConfigError: the file is missing or is not a sweep, or the sweep chose no setting; the message names file and arm.
    """
    path = root / SWEEPS / f"{arm.sweep}.json"
    try:
        tuning = check_record(path, Tuning, {**read_json(path), "path": path}, "sweep again")
        if tuning.chosen and tuning.rounds:
            return tuning
        reason = "its sweep tried no key with several values"
    except (RunError, KeyError) as problem:
        reason = f"it does not have {problem}" if isinstance(problem, KeyError) else str(problem)
    raise ConfigError(
        f"{source}: the sweep {arm.sweep!r} cannot be used ({reason}); name a file of {root / SWEEPS} without .json"
    )


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

    def list_seeds(self, count: int = MOST_SEEDS) -> range:
        """Return the first seeds of the cell."""
        return range(self.about.first_seed, self.about.first_seed + count)

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

    @property
    def most_rounds(self) -> int:
        """Return the full number of rounds of the arm that has the most."""
        return max(map(self.get_rounds, self.arms))

    def limit_rounds(self, arm: str, limit: int | None) -> int:
        """Return the number of rounds of an arm, at least 1, when the cell is shortened to `limit` rounds; None: not at all.

        An arm with fewer rounds than the cell is shortened in the same proportion as the cell, rounded half up. An arm with
        more rounds, such as a federation from which other arms start, is shortened to `limit`.
        """
        arm_rounds, common = self.get_rounds(arm), self.common_rounds
        if limit is None:
            return arm_rounds
        return max(min(arm_rounds, limit, (2 * limit * arm_rounds + common) // (2 * common)), 1)


@dataclass(frozen=True)
class PaperExperiment:
    """An experiment: its index, its cells and its differences from the paper."""

    id: str
    index: Index
    cells: tuple[Cell, ...]
    differences: tuple[str, ...] = ()  # from the paper: its own, and those that it shares with others
    code: tuple[str, ...] = ()  # what the authors' public code does otherwise

    @property
    def family(self) -> str:
        """Return the name of the experiments whose claims are corrected together."""
        return self.index.family or self.id

    def choose_cells(self, only: Sequence[str]) -> tuple[Cell, ...]:
        """Return the cells whose names match one of the patterns; without patterns, all cells.

        Raises:
            ConfigError: a pattern matches no cell; the message suggests the nearest name.
        """
        for pattern in only:
            if not any(fnmatch(c.name, pattern) for c in self.cells):
                near = suggest_near(pattern, [c.name for c in self.cells])
                raise ConfigError(f"--only {pattern!r} matches no cell of {self.id}{near}")
        return tuple(c for c in self.cells if not only or any(fnmatch(c.name, p) for p in only))


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
    return sorted((read_experiment(root, id) for id in _list_ids(root)), key=lambda e: (e.index.order, e.id))


def _list_ids(root: Path) -> list[str]:
    ids = sorted(p.parent.name for p in root.glob(f"*/{INDEX}"))
    if not ids:
        raise ConfigError(f"{root}: contains no experiment, no */{INDEX}; name another folder with --experiments")
    return ids


def read_experiment(root: Path, id: str) -> PaperExperiment:
    """Return one experiment with its cells and with the cells that it borrows from another experiment.

    Raises:
        ConfigError: the id is unknown (the message suggests the nearest id), or a file of the experiment is not valid.
    """
    path, ids = root / id / INDEX, _list_ids(root)
    if id not in ids:
        raise ConfigError(f"there is no experiment {id!r}{suggest_near(id, ids)}")
    index = parse_table(Index, read_tables(path), str(path))
    lender, _, pattern = index.cells.partition("/")
    cells = [
        _read_cell(root, name, lender, id, index) for name in _list_cells(root, lender) if fnmatch(name, pattern or "*")
    ]
    cells += [_read_cell(root, name, id, id, index) for name in _list_cells(root, id)]
    if not cells:
        raise ConfigError(
            f"{path}: the experiment has no cell; write the TOML file of a cell beside this file, or name cells of another "
            "experiment with the key 'cells'"
        )
    for reading in (reading for claim in index.claims for _, reading in claim.list_readings()):
        _check_claim(reading, {c.name: c.arms.keys() for c in cells}, path)
    order = {column: n for n, column in enumerate(index.columns)}
    cells.sort(key=lambda c: order.get(c.about.column, len(order)))
    notes = read_tables(root / NOTES) if index.notes or index.code else {}

    def find_note(table: str, key: str, name: str) -> Any:
        texts = notes.get(table, {})
        if name not in texts:
            near = suggest_near(name, list(texts))
            raise ConfigError(f"{path}: key {key!r} names {name!r}, which {NOTES} does not have{near}")
        return texts[name]

    differences = (*index.differences, *(find_note("differences", "notes", name) for name in index.notes))
    return PaperExperiment(
        id, index, tuple(cells), differences, tuple(find_note("code", "code", index.code) if index.code else ())
    )


def _check_claim(claim: Claim, arms: Mapping[str, Collection[str]], path: Path) -> None:
    """Raise ConfigError if no cell can decide a claim. arms: cell name -> the names of its arms."""
    (than, elsewhere), text = claim.other, f"{path}: the claim {claim.text!r}"
    matching = [name for name in arms if fnmatch(name, claim.cells)]
    for cell in [claim.cells] * (not matching) + [c for c in (claim.less, elsewhere) if c and c not in arms]:
        raise ConfigError(f"{text} matches no cell {cell!r}{suggest_near(cell, list(arms))}")
    known = list(dict.fromkeys(arm for of_cell in arms.values() for arm in of_cell))
    for arm in (claim.arm, than):
        if arm and arm not in known:
            raise ConfigError(f"{text} has no arm {arm!r}{suggest_near(arm, known)}")
    if not any(all(arm in arms[place] for _, place, arm, _ in claim.list_operands(name)) for name in matching):
        together = " and ".join(repr(arm) for arm in (claim.arm, than) if arm)
        raise ConfigError(f"{text} has {together} in no cell of the claim; name others")


def _list_cells(root: Path, id: str) -> list[str]:
    """Return the cells of an experiment by name: fewer subfolders first, then by name, with digits sorted as numbers.

    "n500" comes before "n2000", and "cifar10" before "cifar100". id: "" has none.
    """

    files = [p.relative_to(root / id) for p in (root / id).rglob("*.toml") if p.name != INDEX] if id else []
    names = (file.with_suffix("").as_posix() for file in files)
    return sorted(names, key=lambda n: [(int(w), "") if w.isdigit() else (-1, w) for w in re.findall(r"\d+|\D+", n)])


def _read_cell(root: Path, name: str, owner: str, id: str, index: Index) -> Cell:
    """Return a cell of an experiment `owner` as the experiment `id` uses the cell."""
    path = root / owner / f"{name}.toml"
    tables = dict(read_tables(path))
    if "cell" not in tables:
        raise ConfigError(f"{path}: has no table [cell]; the table gives the cell's row and column, and its arms")
    about = parse_table(CellTable, tables.pop("cell"), str(path), "cell")
    arms = {**about.arms, **index.add}
    if index.cells and owner != id:  # the paper's numbers belong to the measure of the experiment that owns the cell
        arms = {k: a.model_copy(update={"paper": None}) for k, a in arms.items()}
    for k, arm in arms.items():
        if arm.needs is not None and (arm.needs not in arms or arms[arm.needs].needs):
            raise ConfigError(
                f"{path}: arm {k!r} needs arm {arm.needs!r}, but {arm.needs!r} is not defined, or {arm.needs!r} itself "
                f"needs another arm{suggest_near(arm.needs, [other for other, a in arms.items() if a.needs is None])}"
            )
    wanted = [k for k in index.arms or arms if k in arms]
    wanted += dict.fromkeys(need for k in wanted if (need := arms[k].needs) and need not in wanted)
    if not wanted:
        raise ConfigError(
            f"{path}: has none of the arms that experiment {index.title!r} uses; change 'arms' or 'cells' of the experiment"
        )
    tunings = {k: _read_tuning(root, arms[k], f"{path}, arm {k!r}") for k in wanted if arms[k].sweep}
    resolved = {k: _resolve_settings(arms[k], tunings.get(k), tables, f"{path}, arm {k!r}") for k in wanted}
    cell = Cell(f"{owner}/{name}", name, path, tables, about, resolved, tunings)
    for k in cell.arms:  # raises the errors of a configuration before the tables are used
        cell.make_config(k)
    return cell


def _resolve_settings(arm: Arm, tuning: Tuning | None, tables: Table, source: str) -> Arm:
    """Return the arm with the settings from its sweep, and with its share of the learning rate; its own settings win."""
    settings, optimizer = {**(tuning.chosen if tuning else {}), **arm.set}, tables.get("optimizer")
    if arm.rate_times != 1:
        default = optimizer.get("lr", DEFAULT_RATE) if isinstance(optimizer, dict) else DEFAULT_RATE
        rate = settings.get(LEARNING_RATE, default)
        if isinstance(rate, bool) or not isinstance(rate, int | float):
            raise ConfigError(
                f"{source}: 'rate_times' needs {LEARNING_RATE} as a number, not {rate!r}; set the arm's rate itself"
            )
        settings |= {LEARNING_RATE: rate * arm.rate_times}
    return arm.model_copy(update={"set": settings})
