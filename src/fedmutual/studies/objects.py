"""Federations of objects in memory: the caller's datasets, arrays, DataFrames and networks, without a file."""

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pandas as pd
from torch import nn

from fedmutual.config import Config, make_algorithm
from fedmutual.data.memory import make_memory_source
from fedmutual.errors import ConfigError
from fedmutual.in_memory import PREFIX, holding
from fedmutual.report.scale import MetricScale
from fedmutual.rundir.main_metric import read_metric
from fedmutual.studies.arguments import make_config, speaking_of_arguments
from fedmutual.studies.compare import check_folders, train_all
from fedmutual.studies.progress import ProgressBars
from fedmutual.studies.run import run
from fedmutual.studies.trained_run import Run

Model = nn.Module | str | Callable[..., nn.Module]


@dataclass(frozen=True, kw_only=True)
class Site:
    """One participant: its data and its network.

    train: a torch Dataset of (x, y); a pair (x, y) of arrays, tensors or DataFrames; or a DataFrame with `label`.
    test: test rows in one of these forms; None: a fifth of `train` is held out. label: the column of the targets of a
    DataFrame, or a list of columns of 0 and 1 (several labels of one example).
    model: the personal network of the participant: an nn.Module with its first weights, a name of `fedmutual list models`,
    or a function of (shape, classes) that makes a network; None: the shared architecture.
    settings: keys of this participant alone, for example {"optimizer.lr": 0.01}.
    """

    train: Any
    test: Any = None
    label: str | Sequence[str] | None = None
    model: Model | None = None
    settings: Mapping[str, Any] | None = None


class ObjectRun(Run):
    """A run of objects in memory: its models are rebuilt from the caller's networks."""

    def __init__(self, folder: Path, objects: Mapping[str, Any], keep: TemporaryDirectory[str] | None = None) -> None:
        """keep: a temporary folder that holds the run, and exists as long as this object."""
        super().__init__(folder)
        self._objects, self._keep = dict(objects), keep

    def _shared_net(self) -> nn.Module:
        with holding(self._objects):
            return super()._shared_net()

    def _net(self, name: str, state: dict[str, Any], client: str | None = None) -> nn.Module:
        with holding(self._objects):
            return super()._net(name, state, client)

    def meme(self, client: str) -> nn.Module:
        """Return a client's fork; see `Run.meme`."""
        with holding(self._objects):
            return super().meme(client)


@dataclass(frozen=True)
class Comparison:
    """Runs of several methods over several seeds on the same objects."""

    runs: Mapping[tuple[str, int], Run]  # (method, seed) -> run

    def history(self) -> pd.DataFrame:
        """Return all scores of all runs: method, seed, and the columns of `Run.history`."""
        frames = [run.history().assign(method=method, seed=seed) for (method, seed), run in self.runs.items()]
        table = pd.concat(frames, ignore_index=True)
        return table[["method", "seed", *(c for c in table if c not in ("method", "seed"))]]

    def report(self, path: str | Path) -> Path:
        """Write the page that shows whether federating pays, and return its path."""
        from fedmutual.report import read_runs, write_report

        write_report(read_runs([run.folder for run in self.runs.values()]), Path(path))
        return Path(path)

    def __repr__(self) -> str:
        """Return the mean of the main metric of each method after its last round, over seeds and clients."""
        metric = read_metric(next(iter(self.runs.values())).folder)
        scale = MetricScale(metric=metric)
        table = self.history()
        last = table[table["round"] == table.groupby(["method", "seed"])["round"].transform("max")]
        chosen = last[(last["metric"] == metric.name) & (last["data"] == "validation")]
        means = chosen.groupby(["method", "model"])["value"].mean()
        lines = "".join(
            f"\n  {method}, {model}: {scale.format_value(value)}{scale.mark}" for (method, model), value in means.items()
        )
        kind = f"{metric.title} on validation rows, mean over clients and seeds"
        return f"<Comparison of {len(self.runs)} runs; {kind}:{lines}>"


def federate(
    sites: Mapping[str, Site],
    method: Any = "fml",
    shared: Model | None = None,
    *,
    rounds: int | None = None,
    seed: int | None = None,
    batch_size: int | None = None,
    local_epochs: int | None = None,
    local_steps: int | None = None,
    task: str | None = None,
    lr: float | None = None,
    optimizer: str | None = None,
    engine: str | None = None,
    device: str | None = None,
    settings: Mapping[str, Any] | None = None,
    name: str | None = None,
    out: str | Path | None = None,
    resume: bool = False,
    in_place: bool = False,
    progress: bool = True,
) -> Run:
    """Train a federation of objects in memory, and return the run.

    sites: name -> participant. method: an algorithm's name, or an instance such as fedmutual.algorithms.FML(alpha=0.5).
    shared: the shared network, in a form of `Site.model`. settings: further keys of docs/configuration.md, for example
    "split.test". engine: "auto", "inprocess" or "stacked". out: the run's folder; None: a temporary folder that exists as
    long as the run. in_place: load the trained personal weights into the caller's nn.Modules, and the shared model's into
    `shared`; without it the caller's objects do not change.

    Raises:
        UserError: an argument cannot be used; one sentence names the argument and the fix.
        Diverged: a client's loss or weights are not finite.
    """
    config_arguments = {k: v for k, v in locals().items() if k in _CONFIG_ARGUMENTS}
    with speaking_of_arguments(), _collect(sites, shared, method) as (objects, tables), _folder(out) as (folder, keep):
        if in_place:
            _check_distinct(sites, shared)
        config = make_config(tables, method, config_arguments, _add_shared(settings, shared))
        _check_shared(config, shared)
        with ProgressBars(shown=progress) as bars:
            run(config, folder, resume, [bars.watch(config.name)] if progress else [])
        trained = ObjectRun(folder, objects, keep)
        if in_place:
            _load_in_place(trained, sites, shared)
    return trained


def compare(
    sites: Mapping[str, Site],
    methods: Sequence[Any] | Mapping[str, Any] = ("fml", "fedavg", "independent"),
    shared: Model | None = None,
    *,
    seeds: int = 3,
    rounds: int | None = None,
    seed: int | None = None,
    batch_size: int | None = None,
    local_epochs: int | None = None,
    local_steps: int | None = None,
    task: str | None = None,
    lr: float | None = None,
    optimizer: str | None = None,
    engine: str | None = None,
    device: str | None = None,
    settings: Mapping[str, Any] | None = None,
    name: str | None = None,
    out: str | Path | None = None,
    resume: bool = False,
    progress: bool = True,
) -> Comparison:
    """Train several methods with several seeds on equal objects, and return the runs.

    methods: names or instances of algorithms; or a mapping from titles of your choice. Networks that are given as nn.Module
    begin with equal weights under every seed. The other arguments are those of `federate`.

    Raises:
        UserError, Diverged: as `federate`.
    """
    config_arguments = {k: v for k, v in locals().items() if k in _CONFIG_ARGUMENTS}
    with speaking_of_arguments(), _folder(out) as (folder, keep):
        titled = _name_methods(methods)
        planned = []
        with _collect(sites, shared, *titled.values()) as (objects, tables):
            for title, method in titled.items():
                config = make_config(tables, method, config_arguments, _add_shared(settings, shared))
                _check_shared(config, shared)
                for number in range(config.seed, config.seed + seeds):
                    planned += [(title, config.model_copy(update={"seed": number}), folder / title / str(number))]
            check_folders(planned, resume)
            with ProgressBars(shown=progress) as bars:
                names = [(f"{title}, seed {config.seed}", config, place) for title, config, place in planned]
                train_all(names, resume, bars.watch if progress else None)
        return Comparison({(t, config.seed): ObjectRun(place, objects, keep) for t, config, place in planned})


_CONFIG_ARGUMENTS = (
    "rounds",
    "seed",
    "batch_size",
    "local_epochs",
    "local_steps",
    "task",
    "lr",
    "optimizer",
    "engine",
    "device",
    "name",
)


@contextmanager
def _collect(
    sites: Mapping[str, Site], shared: Model | None, *methods: Any
) -> Iterator[tuple[dict[str, Any], dict[str, dict[str, Any]]]]:
    """Keep the caller's objects during the block; yield the objects by name, and the table of each client."""
    if not isinstance(sites, Mapping) or not sites or not all(isinstance(site, Site) for site in sites.values()):
        raise ConfigError("argument 'sites' must be a dictionary of fedmutual.Site by name, as {'north': Site(train=...)}")
    objects: dict[str, Any] = {f"method.{type(m).__name__}": type(m) for m in methods if not isinstance(m, str)}
    tables: dict[str, dict[str, Any]] = {}
    for site_name, site in sites.items():
        table = _nest(site.settings or {})
        source = make_memory_source(site.train, site.test, site.label, f"site {site_name!r}")
        objects[f"data.{site_name}"] = lambda source=source: source
        table.setdefault("data", {})["name"] = f"{PREFIX}data.{site_name}"
        if site.model is not None:
            objects[f"model.{site_name}"] = _make_factory(site.model, f"model of site {site_name!r}")
            table.setdefault("model", {})["personal"] = _name_model(site.model, f"model.{site_name}")
        tables[str(site_name)] = table
    if shared is not None:
        objects["shared"] = _make_factory(shared, "argument 'shared'")
    with holding(objects):
        yield objects, tables


def _nest(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return dotted keys as nested tables."""
    tables: dict[str, Any] = {}
    for key, value in settings.items():
        table, _, name = key.partition(".")
        tables.setdefault(table, {})[name] = value
    return tables


def _make_factory(model: Model, place: str) -> Any:
    """Return a function that makes a new network at each call: copies of an nn.Module."""
    if isinstance(model, nn.Module):
        original = copy.deepcopy(model).cpu()
        return lambda: copy.deepcopy(original)
    if isinstance(model, str) or callable(model):
        return model
    raise ConfigError(f"{place} is {type(model).__name__}; give an nn.Module, a function that makes one, or a name")


def _name_model(model: Model, name: str) -> str:
    return model if isinstance(model, str) else f"{PREFIX}{name}"


def _add_shared(settings: Mapping[str, Any] | None, shared: Model | None) -> dict[str, Any]:
    return {**(settings or {}), **({} if shared is None else {"model.shared": _name_model(shared, "shared")})}


def _check_shared(config: Config, shared: Model | None) -> None:
    """Raise ConfigError if the method needs a shared network and none is given."""
    needed = {"global", "proxy"} & set(make_algorithm(config).scores)
    if needed and shared is None:
        raise ConfigError(
            f"method {config.algorithm['name']!r} shares a network; give it as the argument 'shared', as shared='mlp'"
        )


def _check_distinct(sites: Mapping[str, Site], shared: Model | None) -> None:
    """Raise ConfigError if one nn.Module would receive the weights of two participants."""
    owners: dict[int, str] = {}
    for owner, model in (*((f"site {n!r}", s.model) for n, s in sites.items()), ("shared", shared)):
        if isinstance(model, nn.Module) and owners.setdefault(id(model), owner) != owner:
            raise ConfigError(
                f"in_place=True: {owners[id(model)]} and {owner} share one nn.Module, which holds the weights of one; "
                "give each a copy: copy.deepcopy(net)"
            )


def _load_in_place(run: Run, sites: Mapping[str, Site], shared: Model | None) -> None:
    """Load the trained weights into the caller's modules."""
    from fedmutual.rundir.about import about

    personal = about(run.folder).models.personal
    for name, site in sites.items():
        if isinstance(site.model, nn.Module) and name in personal:
            site.model.load_state_dict(run.personal_model(name).state_dict())
    if isinstance(shared, nn.Module) and run.complete:
        shared.load_state_dict(run.global_model().state_dict())


def _name_methods(methods: Sequence[Any] | Mapping[str, Any]) -> dict[str, Any]:
    if isinstance(methods, Mapping):
        return dict(methods)
    names = [method if isinstance(method, str) else type(method).__name__.lower() for method in methods]
    twice = [n for k, n in enumerate(names) if n in names[:k]]
    if twice or not names:
        what = f"has {twice[0]!r} twice" if twice else "is empty"
        raise ConfigError(f"argument 'methods' {what}; give titles: methods={{'a': FML(alpha=0.3), 'b': FML(alpha=0.7)}}")
    return dict(zip(names, methods, strict=True))


@contextmanager
def _folder(out: str | Path | None) -> Iterator[tuple[Path, TemporaryDirectory[str] | None]]:
    """Yield the folder of a run or a comparison; a temporary folder is removed if training fails."""
    if out is not None:
        yield Path(out), None
        return
    keep = TemporaryDirectory(prefix="fedmutual-", ignore_cleanup_errors=True)
    try:
        yield Path(keep.name) / "run", keep
    except BaseException:
        keep.cleanup()
        raise
