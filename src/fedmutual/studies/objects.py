"""Federations of objects in memory: the caller's datasets, arrays, DataFrames and networks, without a file."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pandas as pd
from torch import nn

from fedmutual.in_memory import hold_objects
from fedmutual.results.scale import MetricScale
from fedmutual.role import DEFAULT_ALGORITHM, LOCAL_ONLY
from fedmutual.rundir.record_files import read_metric
from fedmutual.studies.arguments import KEYS, make_config, translate, translate_errors
from fedmutual.studies.progress import ProgressBars
from fedmutual.studies.remarks import make_warning_observers
from fedmutual.studies.run import train_run
from fedmutual.studies.site_objects import (
    Model,
    Site,
    add_shared_network,
    check_distinct_networks,
    check_shared_network,
    hold_sites,
    load_in_place,
    name_methods,
)
from fedmutual.studies.study import Setting, Study, list_seeds
from fedmutual.studies.trained_run import Run


class ObjectRun(Run):
    """A run of objects in memory: its models are rebuilt from the caller's networks."""

    def __init__(self, folder: Path, objects: Mapping[str, Any], keep: TemporaryDirectory[str] | None = None) -> None:
        """objects: name -> object, as `hold_sites` yields them.

        keep: a temporary folder that holds the run, and exists as long as this object.

        Raises:
            ConfigError: as `Run`.
        """
        super().__init__(folder)
        self._objects, self._keep = dict(objects), keep

    def _build_shared_net(self) -> nn.Module:
        with hold_objects(self._objects):
            return super()._build_shared_net()

    def _build_net(self, name: str, find_state: Callable[[Any], Any], client: str | None = None) -> nn.Module:
        with hold_objects(self._objects):
            return super()._build_net(name, find_state, client)

    def meme(self, client: str) -> nn.Module:
        """Return a client's fork of the shared model in eval mode, as `Run.meme`.

        Raises:
            RunError: as `Run.meme`.
        """
        with hold_objects(self._objects):
            return super().meme(client)


@dataclass(frozen=True)
class Comparison:
    """Runs of several methods over several seeds on the same objects, as `fedmutual.compare` returns them."""

    runs: Mapping[tuple[str, int], Run]  # (method, seed) -> run

    def history(self) -> pd.DataFrame:
        """Return all scores of all runs, one row for each number; columns: method, seed, and those of `Run.history`.

        Raises:
            RunError: metrics.jsonl of a run is damaged.
        """
        frames = [run.history().assign(method=method, seed=seed) for (method, seed), run in self.runs.items()]
        table = pd.concat(frames, ignore_index=True)
        return table[["method", "seed", *(c for c in table if c not in ("method", "seed"))]]

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
    method: Any = DEFAULT_ALGORITHM,
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
    `shared`; without it the caller's objects do not change. Each remark is a `RemarkWarning`.

    Raises:
        UserError: an argument cannot be used; one sentence names the argument and the fix.
        Diverged: a client's loss or weights are not finite.
    """
    config_arguments = {k: v for k, v in locals().items() if k in KEYS}
    with (
        translate_errors(),
        hold_sites(sites, shared, method) as (objects, tables),
        _open_folder(out) as (folder, keep),
    ):
        if in_place:
            check_distinct_networks(sites, shared)
        config = make_config(tables, method, config_arguments, add_shared_network(settings, shared))
        check_shared_network(config, shared)
        with ProgressBars(shown=progress) as bars:
            watch = make_warning_observers(bars.watch if progress else None, translate)
            train_run(config, folder, resume, [watch(config.name)])
        trained = ObjectRun(folder, objects, keep)
        if in_place:
            load_in_place(trained, sites, shared)
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
    config_arguments = {k: v for k, v in locals().items() if k in KEYS}
    with translate_errors(), _open_folder(out) as (folder, keep):
        titled = name_methods(methods)
        variants = []
        with hold_sites(sites, shared, *titled.values()) as (objects, tables):
            for title, method in titled.items():
                config = make_config(tables, method, config_arguments, add_shared_network(settings, shared))
                check_shared_network(config, shared)
                variants.append(Setting(title, config, title))
            study = Study(variants, list_seeds(config, seeds), folder)
            study.check_folders(resume)
            with ProgressBars(shown=progress) as bars:
                study.train(resume, make_warning_observers(bars.watch if progress else None, translate))
        folders = {(variant.label, n): path for variant in variants for n, path in study.find_folders(variant).items()}
        return Comparison({key: ObjectRun(path, objects, keep) for key, path in folders.items()})


@contextmanager
def _open_folder(out: str | Path | None) -> Iterator[tuple[Path, TemporaryDirectory[str] | None]]:
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
