"""The experiments as files: `<id>/index.toml` says what an experiment is, every other TOML below it is one of its cells.

A cell is an ordinary configuration and one table more, [cell], which is taken off before the configuration is checked.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from fedmutual.config import Config, read_tables
from fedmutual.config.schema import Table
from fedmutual.errors import ConfigError
from fedmutual.reproduce import measures
from fedmutual.reproduce.schema import Arm, CellTable, Claim, Index

INDEX, RESULTS = "index.toml", "results"


@dataclass(frozen=True)
class Cell:
    """One file: a configuration under several arms."""

    id: str  # "table1/mnist/mlp-iid", where its results are kept
    name: str  # what `--only` matches: "mnist/mlp-iid"
    path: Path
    tables: Table  # the configuration, unchecked
    about: CellTable
    arms: dict[str, Arm]  # those that the experiment looks at, and those that they need

    @property
    def shown(self) -> dict[str, Arm]:
        """The arms that have a row."""
        return {k: a for k, a in self.arms.items() if a.shown}

    @property
    def title(self) -> str:
        """ "MNIST MLP, IID"."""
        return f"{self.about.column}, {self.about.row}"

    @property
    def validates_on_test(self) -> bool:
        """Whether a client's validation data are images of the test set, as the journal has it."""
        split = self.tables.get("split", {})
        return split.get("preset", "journal") == "journal" and "validation" not in split

    @property
    def target(self) -> float | None:
        """The paper's accuracy of FedAvg here, by which `rounds_to` counts; a fraction."""
        arm = self.about.arms.get("fedavg")
        return arm.paper / 100 if arm is not None and isinstance(arm.paper, float) else None

    def rounds(self, arm: str) -> int:
        """The rounds of an arm, as the file has them."""
        return int(self.arms[arm].set.get("rounds") or self.tables.get("rounds") or Config.model_fields["rounds"].default)

    def within(self, arm: str, limit: int) -> int:
        """The rounds of an arm where a cell is cut down to so many: of one with more local steps a round, as many fewer."""
        common = self.tables.get("training", {}).get("local_steps") or 1
        steps = self.arms[arm].set.get("training.local_steps") or common
        return min(max(limit * common // steps, 1), self.rounds(arm))


@dataclass(frozen=True)
class Experiment:
    """An id, with its cells."""

    id: str
    index: Index
    cells: tuple[Cell, ...]

    def chosen(self, only: Sequence[str]) -> tuple[Cell, ...]:
        """The cells that match one of the patterns, all where there is none.

        Raises:
            ConfigError: a pattern matches no cell; the nearest is named.
        """
        for pattern in only:
            if not any(fnmatch(c.name, pattern) for c in self.cells):
                raise ConfigError(f"--only {pattern!r} matches no cell of {self.id}{_near(pattern, self.names)}")
        return tuple(c for c in self.cells if not only or any(fnmatch(c.name, p) for p in only))

    @property
    def names(self) -> list[str]:
        """What its cells are called."""
        return [c.name for c in self.cells]


def home() -> Path:
    """The folder of the experiments: in the installed package, else that of the checkout.

    Raises:
        ConfigError: there is none.
    """
    here = Path(__file__).resolve()
    checkout = here.parents[3] / "experiments"  # first: an editable install may hold a copy of the other
    for folder in (checkout, here.parents[1] / "experiments"):
        if any(folder.glob(f"*/{INDEX}")):
            return folder
    raise ConfigError("this installation of fedmutual has no experiments; name their folder with --experiments")


def experiments(root: Path) -> list[Experiment]:
    """All experiments of a folder, in their order.

    Raises:
        ConfigError: there are none, or one cannot be read.
    """
    found = [read_experiment(root, path.parent.name) for path in root.glob(f"*/{INDEX}")]
    if not found:
        raise ConfigError(f"{root}: holds no experiment, no */{INDEX}; name another folder with --experiments")
    return sorted(found, key=lambda e: (e.index.order, e.id))


def read_experiment(root: Path, id: str) -> Experiment:
    """One experiment, its own cells and those that it borrows.

    Raises:
        ConfigError: there is no such id, the nearest is named; or a file of it is not as it must be.
    """
    path = root / id / INDEX
    known = sorted(p.parent.name for p in root.glob(f"*/{INDEX}"))
    if id not in known:
        raise ConfigError(f"there is no experiment {id!r}{_near(id, known)}")
    index = _checked(Index, read_tables(path), path)
    _check_names(index, path)
    own = [_cell(root, file, id, id, index) for file in _files(root / id)]
    lender, _, pattern = index.cells.partition("/")
    borrowed = [
        _cell(root, file, lender, id, index)
        for file in (_files(root / lender) if lender else [])
        if fnmatch(_name(root / lender, file), pattern or "*")
    ]
    if not own + borrowed:
        raise ConfigError(f"{path}: the experiment has no cell: no TOML file beside it, none that 'cells' names")
    order = {column: n for n, column in enumerate(index.columns)}
    cells = sorted((*borrowed, *own), key=lambda c: order.get(c.about.column, len(order)))
    return Experiment(id, index, tuple(cells))


def _files(folder: Path) -> list[Path]:
    """The cells of a folder: those with fewer folders first, then by name, numbers as numbers."""
    return sorted((p for p in folder.rglob("*.toml") if p.name != INDEX), key=lambda p: _natural(folder, p))


def _natural(folder: Path, path: Path) -> list[tuple[int, str]]:
    """Sorts "n500" before "n2000", and "cifar10" before "cifar100"."""
    words = re.findall(r"\d+|\D+", _name(folder, path))
    return [(int(word), "") if word.isdigit() else (-1, word) for word in words]


def _name(folder: Path, path: Path) -> str:
    return path.relative_to(folder).with_suffix("").as_posix()


def _cell(root: Path, path: Path, owner: str, id: str, index: Index) -> Cell:
    tables = dict(read_tables(path))
    if "cell" not in tables:
        raise ConfigError(f"{path}: has no table [cell]; it says where the cell stands and which arms it has")
    about = _checked(CellTable, tables.pop("cell"), path, "cell")
    arms = {**about.arms, **index.add}
    if index.cells:
        # the paper's numbers are those of the measure that the lender tells
        arms = {k: a if owner == id else a.model_copy(update={"paper": None}) for k, a in arms.items()}
    for k, arm in arms.items():
        if arm.needs is not None and (arm.needs not in arms or arms[arm.needs].needs):
            free = [other for other, a in arms.items() if a.needs is None]
            near = _near(arm.needs, free)
            raise ConfigError(f"{path}: arm {k!r} needs {arm.needs!r}, which is no arm that stands alone{near}")
    wanted = [k for k in index.arms or arms if k in arms]
    wanted += dict.fromkeys(need for k in wanted if (need := arms[k].needs) and need not in wanted)
    if not wanted:
        raise ConfigError(f"{path}: has none of the arms that {index.title!r} looks at")
    name = _name(root / owner, path)
    return Cell(f"{owner}/{name}", name, path, tables, about, {k: arms[k] for k in wanted})


S = TypeVar("S", bound=BaseModel)


def _checked(kind: type[S], tables: Any, path: Path, prefix: str = "") -> S:
    try:
        return kind.model_validate(tables)
    except ValidationError as problem:
        first = problem.errors()[0]
        place = [str(p) for p in (*filter(None, (prefix,)), *first["loc"])]
        if first["type"] == "extra_forbidden":
            near = _near(place[-1], [*Arm.model_fields, *Claim.model_fields, *kind.model_fields])
            raise ConfigError(f"{path}: unknown key {'.'.join(place)!r}{near}") from None
        raise ConfigError(f"{path}: key {'.'.join(place)!r}: {first['msg'][0].lower()}{first['msg'][1:]}") from None


def _check_names(index: Index, path: Path) -> None:
    """Raise ConfigError where a measure that is named does not exist, or is not one of each client where that is asked."""
    for name in (*index.measures, *index.figures, *(c.measure for c in index.claims)):
        try:
            measures.find(name)
        except LookupError as problem:
            raise ConfigError(f"{path}: {problem}{_near(name, list(measures.MEASURES))}") from None
    for name in index.figures:
        if not measures.find(name)[0].curve:
            raise ConfigError(f"{path}: {name!r} has no curve that could be drawn; take it out of 'figures'")
    for claim in index.claims:
        if claim.per == "client" and not measures.find(claim.measure)[0].nodes:
            raise ConfigError(
                f'{path}: {claim.measure!r} is no measure of each client; take per = "client" out of its claim'
            )
        if claim.per == "client" and claim.whose != "every":
            raise ConfigError(f"{path}: the claim {claim.text!r} is of every client; take 'of' out, or per = \"client\"")
        if not (claim.than or claim.less) or (claim.times and (claim.less or not claim.than)):
            what = "'than' alone" if claim.times else "'than' or 'less'"
            raise ConfigError(f"{path}: the claim {claim.text!r} has nothing to be held against; give it {what}")


def _near(word: str, known: Sequence[str]) -> str:
    near = get_close_matches(word, known, 1, 0.5)
    return f"; did you mean {near[0]!r}?" if near else f"; there are {', '.join(known)}"
