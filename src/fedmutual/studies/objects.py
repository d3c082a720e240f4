"""Federations of objects in memory: the caller's datasets, arrays, DataFrames and networks, without a file."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pandas as pd
from rich.console import Console
from torch import nn

from fedmutual.config.grid import make_folder_name
from fedmutual.core import Setting as Rate
from fedmutual.errors import TRACE_IN_LOG, ConfigError
from fedmutual.events import Observer
from fedmutual.results.scale import MetricScale
from fedmutual.role import DEFAULT_ALGORITHM, LOCAL_ONLY
from fedmutual.rundir.record_files import read_metric, read_model_environment
from fedmutual.studies.observers import ProgressDisplay, Watch, make_warning_observers
from fedmutual.studies.site_objects import KEYS, Model, Site, hold_sites, make_config
from fedmutual.studies.study import RunKey, Setting, Study, list_runs, list_seeds, train_runs
from fedmutual.studies.trained_run import Run, open_object_run, take_last_round

Function = str | Callable[..., Any]
"""A name, or a function or another callable object of the caller."""


@dataclass(frozen=True)
class Comparison:
    """Runs of several methods over several seeds on the same objects, as `fedmutual.compare` returns them."""

    runs: Mapping[RunKey, Run]  # by (method, seed) or, with split.folds, (method, seed, fold)

    def history(self) -> pd.DataFrame:
        """Return all scores of all runs, one row for each number; columns: method, seed, fold, those of `Run.history`.

        Raises:
            RunError: metrics.jsonl of a run is damaged.
        """
        names = ("method", "seed", "fold")
        frames = [run.history().assign(**dict(zip(names, key, strict=False))) for key, run in self.runs.items()]
        table = pd.concat(frames, ignore_index=True)
        return table[[*(c for c in names if c in table), *(c for c in table if c not in names)]]

    def report(self, path: str | Path) -> Path:
        """Write the HTML page that compares the methods, with a verdict on federated training, and return its path.

        Raises:
            RunError: a run's folder is damaged, or the path cannot be written or is another file than a page.
        """
        from fedmutual.report.html import write_report
        from fedmutual.results.frame import read_runs

        write_report(read_runs([run.folder for run in self.runs.values()]), Path(path))
        return Path(path)

    def __repr__(self) -> str:
        """Return the mean of the main metric of each method after its last round, over seeds and clients."""
        metric = read_metric(next(iter(self.runs.values())).folder)
        scale = MetricScale(metric=metric)
        last = pd.concat([take_last_round(run) for _, run in self.history().groupby(["method", "seed"])])
        chosen = last[(last["metric"] == metric.name) & (last["data"] == "validation")]
        means = chosen.groupby(["method", "model"])["value"].mean()
        lines = "".join(
            f"\n  {method}, {model}: {scale.format_value(value)}{scale.mark}" for (method, model), value in means.items()
        )
        kind = f"{metric.title} on validation rows, mean over clients and seeds"
        return f"<Comparison of {len(self.runs)} runs; {kind}:{lines}>"


def federate(
    sites: Mapping[str, Site],
    method: Any = DEFAULT_ALGORITHM,
    shared: Model | None = None,
    *,
    rounds: int | None = None,
    seed: int | None = None,
    batch_size: int | None = None,
    local_epochs: int | None = None,
    local_steps: int | None = None,
    task: Any = None,
    lr: Rate | None = None,
    loss: Function | None = None,
    optimizer: Function | None = None,
    engine: str | None = None,
    device: str | None = None,
    settings: Mapping[str, Any] | None = None,
    name: str | None = None,
    out: str | Path | None = None,
    resume: bool = False,
    in_place: bool = False,
    progress: bool = True,
    observers: Sequence[Observer] | Observer = (),
) -> Run:
    """Train a federation of objects in memory, and return the run; with "split.folds" in `settings` all folds (`Run.folds`).

    sites: name -> participant. method: an algorithm's name, or an instance such as fedmutual.algorithms.FML(alpha=0.5).
    shared: the shared network, in a form of `Site.model`. lr, optimizer, engine ("auto", "inprocess" or "stacked"), device
    and others: the keys optimizer.lr, optimizer.name, engine.name, engine.device, training.batch_size, ... of
    docs/configuration.md, as messages name them. loss: also a function of (output, target). task: also a class or an object
    of your own. optimizer: also a function of the parameters and lr, such as torch.optim.RMSprop. observers: one or several
    functions that get each event of `fedmutual.events`. settings: further keys, for example "split.test". out: the run's
    folder; None: a temporary folder that exists as long as the run. in_place: load the trained personal weights into the
    caller's nn.Modules, and the shared model's into `shared`; without it the caller's objects do not change. Each remark is
    a `RemarkWarning`.

    Raises:
        UserError: an argument cannot be used; one sentence names the argument or its key, and the fix.
        Diverged: a client's loss or weights are not finite.
        Refused: a reply of a client holds something that must not leave the client.
    """
    config_arguments = {k: v for k, v in locals().items() if k in KEYS}
    functions = {"loss": loss, "optimizer": optimizer, "task": task}
    held = hold_sites(sites, shared, method, settings=settings, batch_size=batch_size, **functions)
    with held as (objects, tables), _open_folder(out) as (folder, keep):
        if in_place:
            _check_distinct_networks(sites, shared)
        config = make_config(tables, method, shared, config_arguments, settings)
        runs = list_runs(config, folder)
        if in_place and len(runs) > 1:
            raise ConfigError("in_place=True: split.folds trains several networks, and yours can hold one; set split.fold")
        with _watch(progress) as watch:
            train_runs(runs, resume, lambda name: watch(name or config.name), observers=_list_observers(observers))
        trained = open_object_run(folder, objects, keep)
        if in_place:
            _load_in_place(trained, sites, shared)
    return trained


def compare(
    sites: Mapping[str, Site],
    methods: Sequence[Any] | Mapping[str, Any] = (DEFAULT_ALGORITHM, "fedavg", LOCAL_ONLY),
    shared: Model | None = None,
    *,
    seeds: int = 3,
    rounds: int | None = None,
    seed: int | None = None,
    batch_size: int | None = None,
    local_epochs: int | None = None,
    local_steps: int | None = None,
    task: Any = None,
    lr: Rate | None = None,
    loss: Function | None = None,
    optimizer: Function | None = None,
    engine: str | None = None,
    device: str | None = None,
    settings: Mapping[str, Any] | None = None,
    name: str | None = None,
    out: str | Path | None = None,
    resume: bool = False,
    progress: bool = True,
    observers: Sequence[Observer] | Observer = (),
) -> Comparison:
    """Train several methods with several seeds on equal objects, and return the runs.

    methods: names or instances of algorithms; or a mapping from titles of your choice. Networks that are given as nn.Module
    begin with equal weights under every seed. The other arguments are those of `federate`; observers get the events of
    every run.

    Raises:
        UserError, Diverged, Refused: as `federate`.
    """
    config_arguments = {k: v for k, v in locals().items() if k in KEYS}
    titled = _name_methods(methods)
    functions = {"loss": loss, "optimizer": optimizer, "task": task}
    held = hold_sites(sites, shared, *titled.values(), settings=settings, batch_size=batch_size, **functions)
    with _open_folder(out) as (folder, keep), held as (objects, tables):
        configs = {t: make_config(tables, method, shared, config_arguments, settings) for t, method in titled.items()}
        variants = [Setting(title, config, _name_folder(title)) for title, config in configs.items()]
        runs = Study(variants, list_seeds(variants[0].config, seeds), folder).runs
        with _watch(progress) as watch:
            train_runs(runs, resume, watch, observers=_list_observers(observers))
    return Comparison({key: open_object_run(place, objects, keep) for place, (key, _) in runs.items()})


@contextmanager
def _watch(progress: bool) -> Iterator[Watch]:
    """Yield the function that makes observers: warnings for remarks, and a bar or a few lines if they are wanted."""
    # without ipywidgets rich warns in a notebook and shows no bar: then the lines of a terminal that is none
    console = Console(stderr=True, force_jupyter=None if find_spec("ipywidgets") else False, quiet=not progress)
    with ProgressDisplay(console, lines=10, has_notes=False) as display:
        yield make_warning_observers(display.observe)


@contextmanager
def _open_folder(out: str | Path | None) -> Iterator[tuple[Path, TemporaryDirectory[str] | None]]:
    """Yield the folder of a run or a comparison; a temporary folder is removed if training fails, and with it log.txt."""
    if out is not None:
        yield Path(out), None
        return
    keep = TemporaryDirectory(prefix="fedmutual-", ignore_cleanup_errors=True)
    try:
        yield Path(keep.name) / "run", keep
    except BaseException as problem:
        keep.cleanup()
        problem.args = tuple(a.removesuffix(TRACE_IN_LOG) if isinstance(a, str) else a for a in problem.args)
        raise


def _list_observers(observers: Any) -> Sequence[Observer]:
    """Return the observers; raise ConfigError if one cannot be called."""
    listed = [*observers] if isinstance(observers, Iterable) and not callable(observers) else [observers]
    for one in (one for one in listed if not callable(one)):
        raise ConfigError(f"argument 'observers' has {type(one).__name__}; give functions of an event (fedmutual.events)")
    return listed


def _name_methods(methods: Sequence[Any] | Mapping[str, Any]) -> dict[str, Any]:
    """Return the methods by title: by the given titles, or by the names of the algorithms."""
    if isinstance(methods, str):
        raise ConfigError(f"argument 'methods' is the text {methods!r}; give a list: methods=[{methods!r}]")
    if isinstance(methods, Mapping) and methods:
        return {str(title): method for title, method in methods.items()}
    names = [method if isinstance(method, str) else type(method).__name__.lower() for method in methods]
    if not names or len({*names}) < len(names):
        raise ConfigError(
            f"argument 'methods' names {', '.join(names) or 'nothing'}, and needs methods of different names; give titles: "
            "methods={'a': FML(alpha=0.3), 'b': FML(alpha=0.7)}"
        )
    return dict(zip(names, methods, strict=True))


def _name_folder(title: str) -> str:
    """Return the name of a folder for a method's title: the title, if a folder can have this name."""
    return title if title.strip(". ") and not {*title} & {*"/\\\0"} else make_folder_name(title or " ")


def _check_distinct_networks(sites: Mapping[str, Site], shared: Model | None) -> None:
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
    personal = read_model_environment(run.folder).models.personal
    for name, site in sites.items():
        if isinstance(site.model, nn.Module) and name in personal:
            site.model.load_state_dict(run.personal_model(name).state_dict())
    if isinstance(shared, nn.Module) and run.complete:
        shared.load_state_dict(run.global_model().state_dict())
