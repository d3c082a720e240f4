"""A newcomer's part of a configuration; the run gives the rest: the shared model, its inputs and its classes."""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from fedmutual import data
from fedmutual.config import Config, check_scored, merge_overrides, parse_config, read_tables
from fedmutual.config.grid import make_folder_name
from fedmutual.config.keys import FEDERATED, Table
from fedmutual.config.methods import find_adapt_rival, make_algorithm
from fedmutual.core import Task, get_metric, get_target_kind
from fedmutual.data.examples import list_names
from fedmutual.data.labels import UnknownClass
from fedmutual.errors import ConfigError, DataError, RunError
from fedmutual.results.frame import read_method
from fedmutual.role import LOCAL_ONLY
from fedmutual.rundir.checkpoint import make_file_name, read_shared_state
from fedmutual.rundir.file_names import CONFIG, FINE_TUNE, SCRATCH, server_folder
from fedmutual.rundir.record_files import Interface, read_interface
from fedmutual.studies.trained_run import Run
from fedmutual.tasks import make_task
from fedmutual.user_code.recorded_code import check_tables

NAME = "newcomer"  # where the file names none
_SHARES = ("shared", "part", "batchnorm")  # the keys of [model] that all participants of a run have in common
_NOT_ALLOWED = {
    "partition": "a newcomer is one participant, and --examples sets its number of examples",
    "clients": "a newcomer is one participant; its settings are in the other tables",
    "share": "a newcomer discloses nothing to others",
}


@dataclass(frozen=True)
class SourceRun:
    """A run whose shared model is adapted, as after the last saved round."""

    run: Run

    @cached_property
    def takes(self) -> Interface:
        """The inputs and outputs of its shared model. Raises RunError if environment.json is missing or damaged."""
        return read_interface(self.run.folder)

    @cached_property
    def model(self) -> Table:
        """The keys of [model] that describe the shared part."""
        model = self.run.config.model.model_dump(exclude_defaults=True)
        return {"shared": self.run.config.model.shared} | {k: model[k] for k in (*_SHARES, "adaptor") if k in model}

    @cached_property
    def task(self) -> Task:
        """The task that the run learned, and that a newcomer learns."""
        return make_task(self.run.config.training.task)

    @property
    def is_complete(self) -> bool:
        """Whether the layer of the classes is shared too, so that all must have the same ones."""
        return "part" not in self.model

    def describe(self) -> Table:
        """Return the identity of this model: it differs for other models, and for this model after further rounds.

        Raises:
            RunError: a file of the run's folder is missing or damaged.
        """
        digest = hashlib.sha256((server_folder(self.run.folder) / make_file_name(self.run.round)).read_bytes()).hexdigest()
        config = self.run.config
        return {
            "run": str(self.run.folder),
            "algorithm": config.algorithm["name"],
            "title": read_method(self.run.folder).title,
            "model": config.model.shared,
            "round": self.run.round,
            "sha256": digest,
        }


def read_source(folder: Path) -> SourceRun:
    """Return a run's shared model.

    Raises:
        RunError: there is no run, nothing was saved or shared, or its task has no main metric.
        ConfigError: config.toml is damaged, or its shared network or its task is code that may not be imported (see
            `recorded_code`).
    """
    if not (folder / CONFIG).is_file():
        raise RunError(
            f"{folder}: is not a run's folder, because it has no {CONFIG}; name a folder that `fedmutual run` wrote"
        )
    run = Run(folder)
    read_shared_state(folder)
    source = SourceRun(run)
    # the newcomer's own runs build these networks, and learn this task
    check_tables({"model": source.model, "training": {"task": run.config.training.task}}, folder)
    if get_metric(source.task) is None:
        raise RunError(
            f"{folder}: its task {run.config.training.task!r} has no main metric, by which the ways to adapt could be "
            "compared; give it the member 'metric' (see fedmutual.core.Metric)"
        )
    return source


@dataclass(frozen=True)
class Newcomer:
    """A newcomer's part of a configuration, completed by the run."""

    file: str  # what messages call it
    tables: Table
    algorithm: Table  # [algorithm], with the name
    shared: SourceRun
    tuned: SourceRun  # has the shared model that is fine-tuned

    @property
    def ways(self) -> tuple[str, str, str]:
        """Return the ways to adapt, by the names of their folders: the newcomer's algorithm, training alone, fine-tuning."""
        return make_folder_name(self.algorithm["name"]), SCRATCH, FINE_TUNE

    def make_config(self, way: str, size: int | None) -> Config:
        """Return the ordinary configuration of one of `ways`.

        size: the number of training examples; None: all.

        Raises:
            ConfigError: a key of the newcomer's file does not fit this way.
        """
        model_keys = {k: v for k, v in self.tables.get("model", {}).items() if k not in _SHARES}
        personal, adaptor = ({k: v for k, v in model_keys.items() if k == key} for key in ("personal", "adaptor"))
        start = {"start": "server"}  # needs a whole model
        algorithm: Table = {"name": LOCAL_ONLY}
        if way == SCRATCH:
            model = {"shared": self.shared.model["shared"], **personal}
        elif way == FINE_TUNE:
            model = {**self.tuned.model, **(start if self.tuned.is_complete else adaptor)}
            if not self.tuned.is_complete:  # a part with an adaptor, in a federation of one
                algorithm = {"name": find_adapt_rival(self.algorithm["name"])}
        else:
            algorithm = self.algorithm
            model = {**self.shared.model, **model_keys, **({} if personal or not self.shared.is_complete else start)}
        if way != SCRATCH:
            source = self.tuned if way == FINE_TUNE else self.shared
            model["weights"] = str(source.run.folder.resolve())
        return parse_config(
            {
                "name": NAME,
                **self.tables,
                "partition": {"kind": "iid", "clients": 1, **({} if size is None else {"examples": size})},
                "algorithm": algorithm,
                "model": model,
            },
            self.file,
        )

    def prepare(self) -> data.Prepared:
        """Read the newcomer's data, and check that they fit each complete shared model.

        Raises:
            UserError: the data cannot be read; or the model does not have a class, or takes examples of another shape, other
                columns or another scaling.
        """
        try:
            read = data.prepare(self.make_config(self.ways[0], None))[""]
        except UnknownClass as problem:
            if not self.shared.is_complete:
                raise  # these are the newcomer's own classes
            raise DataError(
                f"{problem.reason} of the shared model in {self.shared.run.folder}; rename it with data.labels, or start "
                "from a run that shares only a part (model.part), where a newcomer has outputs of its own"
            ) from None
        for source in (self.shared, self.tuned):
            if source.is_complete:
                self._check_inputs(read, source)
        return read

    def _check_inputs(self, read: data.Prepared, source: SourceRun) -> None:
        """Raise ConfigError if the newcomer's inputs or classes do not fit a complete shared model."""
        takes, shape, place = source.takes, read.space.shape, f"the shared model of {source.run.folder}"
        if shape != takes.shape:
            images = len(shape) == len(takes.shape) == 3 and shape[0] == takes.shape[0]
            fix = f"set data.size = {list(takes.shape[1:])}" if images else "give it such examples"
            raise ConfigError(
                f"{self.file}: the examples have the shape {list(shape)} and {place} takes {list(takes.shape)}; {fix}"
            )
        if takes.columns is not None and read.space.columns != takes.columns:
            raise ConfigError(
                f"{self.file}: the columns are {list_names(read.space.columns or ())}, and {place} takes "
                f"{list_names(takes.columns)}; write the columns of the model into the file, in this order"
            )
        if read.space.classes != takes.classes and not read.space.numbers:
            raise ConfigError(
                f"{self.file}: the classes are {list_names(read.space.classes)}, and {place} has the outputs "
                f"{list_names(takes.classes)}; name these in data.classes, in this order"
            )
        for key, values in {"mean": list(read.scaled.mean), "std": list(read.scaled.std)}.items():
            if takes.agreed and values != takes.scaling[key]:
                settled = "remove data.mean and data.std, and the run's are used"
                fix = settled if self.shared.is_complete else "set both to that run's"
                raise ConfigError(f"{self.file}: key 'data.{key}' is {values}, and {place} has {takes.scaling[key]}; {fix}")


def name_newcomer(file: Path, overrides: Mapping[str, Any]) -> str:
    """Return the name of a newcomer: the key `name` of its file, else `NAME`.

    Raises:
        ConfigError: the file cannot be read.
    """
    return str(merge_overrides(read_tables(file), overrides).get("name", NAME))


def read_newcomer(file: Path, overrides: Mapping[str, Any], shared: SourceRun, tuned: SourceRun) -> Newcomer:
    """Return a newcomer's part of a configuration from its TOML file, with overrides by dotted key.

    Raises:
        ConfigError: the file cannot be read; or a key is wrong, is not the newcomer's to set, or contradicts a key that the
            run determines.
        RunError: environment.json of the run is missing or damaged.
    """
    tables, task = merge_overrides(read_tables(file), overrides), shared.run.config.training.task
    if task != "classification" and isinstance(training := tables.get("training", {}), dict):
        tables = {**tables, "training": {"task": task, **training}}
    for key, why in _NOT_ALLOWED.items():
        if key in tables:
            raise ConfigError(f"{file}: key {key!r} has no place here: {why}; remove it")
    model = table if isinstance(table := tables.get("model"), dict) else {}
    for key in ("start", "weights", "pretrained"):
        if key in model:
            raise ConfigError(f"{file}: key 'model.{key}' is set by each way to adapt; remove it")
    joined = merge_overrides({"model": shared.model}, {"model": tables.get("model", {})})
    parsed = parse_config({**tables, **joined}, str(file))  # says what is wrong with a key or its type
    check_scored(parsed, str(file))
    data_table = tables.get("data", {})
    if "name" not in data_table:
        raise ConfigError(f"{file}: the key 'data.name' is missing, the source of the newcomer's examples")
    algorithm = {"name": parsed.algorithm["name"], **tables.get("algorithm", {})}
    if find_adapt_rival(name := algorithm["name"]) is None:
        raise ConfigError(
            f"{file}: key 'algorithm.name': a newcomer cannot adapt by {name!r}, because its class does not declare "
            "`adapt_rival`; remove the key, and the newcomer adapts by FML"
        )
    if missing := {"global", "personal"} - {*make_algorithm(parsed).scores}:
        raise ConfigError(
            f"{file}: key 'algorithm.name': a newcomer cannot adapt by {name!r}, because its `scores` lack "
            f"{min(missing)!r}; add the model to `scores`, or remove `adapt_rival` from the class"
        )
    if (given_task := parsed.training.task) != task:
        raise ConfigError(
            f"{file}: key 'training.task' is {given_task!r}, and {shared.run.folder} learns {task!r}; remove the key"
        )
    for key in (k for k in _SHARES if k in model):
        settled = getattr(shared.run.config.model, key)
        if getattr(parsed.model, key) != settled:
            value = ", ".join(settled or ("unset",)) if key == "part" else settled
            raise ConfigError(
                f"{file}: key 'model.{key}' is {model[key]!r}, and {shared.run.folder} has {value}; remove the key"
            )
    return Newcomer(str(file), {**tables, "data": _complete_data(file, data_table, shared)}, algorithm, shared, tuned)


def _complete_data(file: Path, data_table: Table, shared: SourceRun) -> Table:
    """Return [data], completed by the classes, size and scaling of a complete shared model; a part fits any data."""
    takes = shared.takes
    if not shared.is_complete:
        return data_table
    settled: Table = {"classes": list(takes.classes)}
    if get_target_kind(shared.task) == "numbers":
        settled = {}
    if "classes" in data_table and tuple(data_table["classes"]) != takes.classes:
        raise ConfigError(
            f"{file}: key 'data.classes' is {data_table['classes']}, and the shared model of {shared.run.folder} has the "
            f"outputs {list_names(takes.classes)}; remove the key: a newcomer with some of the classes is matched by name"
        )
    if takes.agreed and FEDERATED in (data_table.get("mean"), data_table.get("std")):
        raise ConfigError(
            f"{file}: 'data.mean' and 'data.std' cannot be {FEDERATED!r}: a newcomer has no other clients to add its rows "
            f"to; remove both keys, and those of {shared.run.folder} are used"
        )
    if takes.scaling.get("columns"):
        steps = ("values", "fill", "mean", "std") if takes.agreed else ("values",)
        settled["columns"] = {c["name"]: _describe_column(c, steps) for c in takes.scaling["columns"]}
    elif takes.agreed and "mean" not in data_table and "std" not in data_table:
        settled |= {"mean": takes.scaling["mean"], "std": takes.scaling["std"]}
    if takes.scaling.get("size"):
        settled["size"] = takes.scaling["size"]
    return {**settled, **data_table}


def _describe_column(column: Table, steps: Sequence[str]) -> Table:
    """Return a column's entry of data.columns, with these of its steps where its kind has them."""
    kind = column["kind"]
    known = ("values",) if kind == "category" else ("fill", "mean", "std")
    return {"kind": kind, **{k: column[k] for k in steps if k in known}}
