"""A run in its folder: its configuration, scores and summary, and its models, rebuilt with their saved weights."""

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from copy import copy
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from fedmutual import models
from fedmutual.calling import Shapes
from fedmutual.config import Config, has_own_data, make_client_config, read_dumped
from fedmutual.core import At, Message, Task, format_tensor
from fedmutual.data.scaling import Scaling
from fedmutual.data.space import Space
from fedmutual.errors import RunError
from fedmutual.federation.evaluation import WEIGHT, Ensemble
from fedmutual.federation.networks import POOLED
from fedmutual.files import read_json
from fedmutual.in_memory import hold_objects
from fedmutual.models.own import restore_complex
from fedmutual.models.splice import build_meme
from fedmutual.results.frame import read_scores
from fedmutual.results.scale import MetricScale
from fedmutual.rundir import best as bests
from fedmutual.rundir.checkpoint import make_file_name, read_checkpoint, read_shared_state, read_state
from fedmutual.rundir.file_names import CONFIG, SUMMARY, client_folder, server_folder
from fedmutual.rundir.record_files import (
    is_finished,
    read_calibrations,
    read_metric,
    read_model_environment,
    read_summary,
)
from fedmutual.rundir.schema import Saved
from fedmutual.studies.answering_model import AnsweringModel
from fedmutual.tasks import make_task
from fedmutual.user_code import plugins
from fedmutual.user_code.recorded_code import RecordedCode

if TYPE_CHECKING:
    import pandas as pd

    from fedmutual.data.objects import Label
    from fedmutual.rundir.schema import Calibration
    from fedmutual.studies.export import Exported
    from fedmutual.studies.score import FileScore

_FindState = Callable[[Collection[str]], Message]  # names of a network's tensors -> the saved tensors


class Run:
    """A run in a folder, finished or stopped.

    Code that the folder names is imported when a model needs the code. Without `trust_code` only code in the working folder
    is imported, if the code is equal to the code that the run recorded.
    """

    def __init__(
        self, folder: str | Path, trust_code: bool = False, models: Mapping[str, Callable[..., nn.Module]] | None = None
    ) -> None:
        """trust_code: import all code that the folder names. This code has all your rights: read the code first.

        models: of a run of objects that another process trained, the functions that make its networks, for example
            {"shared": Net, "north": Other}: by the name of the site, and "shared".

        Raises:
            ConfigError: config.toml is missing or damaged.
        """
        self.folder = self._first = Path(folder)  # of folds the folder of the first one
        self._fold_folders: tuple[Path, ...] = ()
        if not (self.folder / CONFIG).exists() and (self.folder / "0" / CONFIG).is_file():
            self._first = self.folder / "0"
        self.config = config = read_dumped(self._first / CONFIG)
        if self._first != self.folder:
            self.config = config.model_copy(update={"split": config.split.model_copy(update={"fold": None})})
            folders = (self.folder / str(fold) for fold in range(config.split.folds or 0))
            self._fold_folders = tuple(place for place in folders if (place / CONFIG).is_file())
        self._code = RecordedCode(self.folder, trust_code)
        named = {name if name == "shared" else f"model.{name}": make for name, make in (models or {}).items()}
        self._objects: Mapping[str, Any] | None = named or None  # the caller's, of a run of objects in memory

    def __repr__(self) -> str:
        """Return the run's method, state, and the last scores that clients share."""
        last = self.history()
        state = "finished" if self.finished else "not finished"
        clients = len(read_model_environment(self._first).clients)
        folds = f", {len(self._fold_folders)} folds" if self._fold_folders else ""
        text = f"<Run {self.config.name!r}: {self.config.algorithm['name']}, {clients} clients{folds}, {state}"
        if last.empty:
            return f"{text}, in {self.folder}>"
        last = take_last_round(last)
        metric = read_metric(self._first)
        scale, chosen = MetricScale(metric=metric), last[(last["metric"] == metric.name) & (last["data"] != "holdout")]
        means = chosen.groupby(["model", "data"])["value"].mean()
        scores = ", ".join(
            f"{model} {scale.format_value(value)}{scale.mark} on {data}" for (model, data), value in means.items()
        )
        shown = f", {metric.title}: {scores}" if scores else ""
        return f"{text}, round {last['round'].max()} of {self.config.rounds}{shown}, in {self.folder}>"

    @property
    def finished(self) -> bool:
        """Whether all rounds are complete and summary.json is written. Raises RunError if summary.json is damaged."""
        if self._fold_folders:
            return len(self._fold_folders) == self.config.split.folds and all(fold.finished for fold in self.folds)
        return is_finished(read_summary(self.folder), self.config.rounds)

    @property
    def folds(self) -> tuple["Run", ...]:
        """With `split.folds` the runs of the folds, in their order, each with models of its own; () for a single run."""
        return tuple(map(self._open_fold, self._fold_folders))

    def _open_fold(self, folder: Path) -> "Run":
        fold = copy(self)
        fold.folder, fold._first, fold._fold_folders = folder, folder, ()
        fold.config, fold._code = read_dumped(folder / CONFIG), self._code.move(folder)
        return fold

    @property
    def _single(self) -> Path:
        """The folder. Raises RunError if the run has folds."""
        if self._fold_folders:
            raise RunError(
                f"{self.folder}: has {len(self._fold_folders)} folds, each with models and a summary of its own; use one of "
                f"them: {self._first} (in Python: run.folds[0])"
            )
        return self.folder

    @property
    def summary(self) -> dict[str, Any]:
        """The content of summary.json. Raises RunError if the file is missing or damaged."""
        return read_json(self._single / SUMMARY)

    def history(self) -> "pd.DataFrame":
        """Return all scores over the rounds, one row for each number; no rows before the first evaluation.

        Columns: round (from 1), model ("global", "personal", "ensemble" or "meme"), client (None: the common test set), data
        ("validation", "test" or "holdout"; of domains also "test.own", "test.others" and "validation.all"), metric,
        value (accuracies are fractions in [0, 1]); of a run with folds first the fold.

        Raises:
            RunError: metrics.jsonl is damaged.
        """
        if not self._fold_folders:
            return read_scores(self.folder)
        import pandas as pd  # takes 0.3 s

        tables = {int(folder.name): read_scores(folder) for folder in self._fold_folders}
        return pd.concat(tables, names=["fold"]).reset_index("fold").reset_index(drop=True)

    def plot(self, metric: str | None = None, data: str = "validation") -> Any:
        """Draw a metric over the rounds, one line for each model and client, and return the matplotlib Axes.

        Of folds the line is the mean.

        metric: a metric of `history`; None: the main metric of the run, which is the accuracy for classification.

        Raises:
            ValueError: the run has no such metric on these data; the message lists the existing metrics.
            RunError: metrics.jsonl or environment.json is damaged.
        """
        import matplotlib.pyplot as plt  # a second to import, and only plots need it

        metric, history = metric or read_metric(self._first).name, self.history()
        chosen = history[(history["metric"] == metric) & (history["data"] == data)]
        if chosen.empty:
            known = history[["metric", "data"]].drop_duplicates().itertuples(index=False)
            listed = ", ".join(f"{m} on {d}" for m, d in known) or "none"
            raise ValueError(f"there is no metric {metric!r} on the data {data!r}; there are: {listed}")
        _, axes = plt.subplots()
        for (model, client), line in chosen.groupby(["model", "client"], dropna=False):
            label = model if client is None or client != client else f"{model}, {client}"
            means = line.groupby("round")["value"].mean()
            axes.plot(means.index, means, label=label, linestyle="--" if model == "global" else "-", marker=".")
        axes.set(xlabel="round", ylabel=f"{metric} on {data}", title=self.config.name)
        axes.legend()
        return axes

    def predict(self, x: Any, client: str | None = None, best: bool = False) -> "pd.DataFrame":
        """Return answers for examples in memory: a row for each example [n], a column for each class with its probability.

        For several labels: one column for each label with its probability; for numbers: the predicted number; for masks: an
        array `[*sides]` in each cell, the probability of the class in each pixel.

        x: an array, tensor or DataFrame `[n, *shape]` of unscaled values (columns are matched by name), or a file's path.
        client: the client whose personal model answers; without it, the shared model answers.
        best: whether the model of the best round answers (records.keep_best).

        Raises:
            UserError: the run has no such model, or the examples do not fit it.
        """
        answering = self._choose_model(client, best)
        if not isinstance(x, str | Path):
            return answering.make_table(answering.split_arrays(x))
        from fedmutual.studies.example_files import read_examples  # imports pandas

        return answering.make_table(read_examples(Path(x), answering))

    def calibrate(self, client: str | None = None, best: bool = False, sensitivity: float | None = None) -> "Calibration":
        """Fit a temperature to a model's probabilities on rows that trained nothing; `predict`, `score` and `export` use it.

        The rows are hold-out rows, or validation rows that are no test rows: of the client, or of all clients of a shared
        model. sensitivity: for each class or label also a threshold that finds this share of its rows, in (0, 1]. client,
        best: the model, as for `predict`. The result is also in the run's calibration.json.

        Raises:
            UserError: there is no such model, it states no probabilities, differential privacy covers it, or no row can fit.
        """
        from fedmutual.studies.calibration import calibrate  # imports pandas

        return calibrate(self._choose_model(client, best), sensitivity)

    def score(
        self,
        data: Any = None,
        client: str | None = None,
        best: bool = False,
        label: "Label" = None,
        by: str | None = None,
        keep: bool = False,
    ) -> "FileScore":
        """Return the scores of a model on labelled examples, with a 95 % interval of the main metric.

        data: a file or folder as `fedmutual score` takes it; a form of `Site.train`, with unscaled values; None: the run's
        own test rows. label: the column of the targets of a DataFrame or of a table in a file, or a list of columns. by: a
        column whose values are groups, each scored apart; keep: with `by` and without `data`, in the run's subgroups.json,
        for model card and page. client, best: the model, as for `predict`. A `RemarkWarning` says
        how many rows the model was trained on, if the run's data can be read again.

        Raises:
            UserError: there is no such model, an output of it is not finite, or the examples do not fit it.
        """
        from fedmutual.studies.score import score  # imports pandas

        return score(self._choose_model(client, best), data, label, by, keep)

    def export(self, folder: str | Path, client: str | None = None, best: bool = False) -> "Exported":
        """Write a model into a new folder for use without fedmutual; return which model, and the files.

        The folder has the weights, programs that take raw inputs, and a model card. client, best: as for `predict`.

        Raises:
            UserError: there is no such model, its code may not be imported, or the folder exists or cannot be written.
        """
        from fedmutual.studies.export import export  # imports torch.export

        return export(self._choose_model(client, best), folder)

    @property
    def round(self) -> int:
        """The last saved round, from 1; 0 if only the start is saved.

        Raises:
            RunError: nothing was saved, or checkpoint.json is damaged.
        """
        return self._find_saved().round

    def best_round(self, client: str | None = None) -> int:
        """Return the best round, from 1 up to the last saved round, whose weights are stored.

        client: the client of a personal model; None: the shared model.

        Raises:
            RunError: nothing was saved, or the run has no `records.keep_best`.
        """
        owner = POOLED if read_model_environment(self._single).pooled else client
        state_folder = server_folder(self._single) if owner is None else client_folder(self._single, owner)
        return bests.find_best(state_folder, self._find_saved().round)[0]

    @property
    def complete(self) -> bool:
        """Whether the server saved a complete model.

        Raises:
            RunError: nothing was saved, or a file is damaged.
            ConfigError: the code of the network may not be imported.
        """
        return self._read_state(server_folder(self._single)).keys() >= self._list_shared_names()

    def global_model(self, best: bool = False) -> nn.Module:
        """Return the shared model in eval mode, after the last saved round or after the best round.

        Raises:
            RunError: nothing was saved, no complete shared model exists, or no best round was stored.
            ConfigError: the code of the network may not be imported.
        """
        known, shared = read_model_environment(self._single), self.config.model.shared
        if known.pooled:
            state = self._read_client_state(POOLED, best=best)
            return self._build_net(shared, lambda _: state)
        state = self._read_state(server_folder(self._single))
        if not self.complete:
            is_part = state.keys() & self._list_shared_names()
            reason = "a part of the model stays with each client" if is_part else "nothing is shared"
            raise RunError(
                f"{self._single}: this run has no complete global model, because {reason}; use the model of one client "
                f"(`fedmutual predict --client ID`): {', '.join(known.clients)}"
            )
        saved = self._read_state(server_folder(self._single), best)
        return self._build_net(shared, lambda names: {k: saved[k] for k in names if k in saved})

    def personal_model(self, client: str, best: bool = False) -> nn.Module:
        """Return a client's personal model in eval mode, after the last saved round or after the best round.

        Raises:
            RunError: nothing was saved, there is no such client or model, or no best round was stored.
            ConfigError: the code of the network may not be imported.
        """
        names = read_model_environment(self._single).models.personal
        if client not in names:
            known = ", ".join(names) or "none: its algorithm trains no personal models"
            raise RunError(f"{self._single}: there is no personal model of client {client!r}; there are {known}")
        state = self._read_client_state(client, best=best)
        return self._build_net(names[client].name, lambda _: state, client)

    def meme(self, client: str) -> nn.Module:
        """Return a client's fork of the shared model in eval mode, after the last saved round, with the client's adaptor.

        Raises:
            RunError: nothing was saved, or there is no such client or fork.
            ConfigError: the code of the network may not be imported.
        """
        meme_state = self._read_client_state(client, "meme.")  # of a proxy all of it

        def find_state(names: Collection[str]) -> Message:
            return meme_state if set(names) <= meme_state.keys() else read_shared_state(self._single) | meme_state

        rng, model, takes = At(0, -1, 1).rng("any"), self.config.model, read_space(self._single, client)

        def make() -> nn.Module:
            examples = takes.make_examples()
            return build_meme(model, takes.shape, takes.outputs, rng, rng, of_pixels=None, examples=examples, check=False)

        return self._restore_net(make, (model.shared, model.adaptor), find_state)

    def ensemble(self, client: str) -> Ensemble:
        """Return the ensemble of a client's personal and shared model in eval mode: inputs -> log-probabilities [B, C].

        Its weight is that of the last scoring up to the last saved round (`records.ensemble`).

        Raises:
            RunError: as `personal_model` and `meme`; the run has no ensemble.
            ConfigError: the code of a network may not be imported.
        """
        personal = self.personal_model(client)
        weight = self._read_client_state(client, "memory.").get(WEIGHT)
        if weight is None:
            raise RunError(f"{self._single}: this run has no ensembles; train one with records.ensemble = true")
        return Ensemble(personal, self.global_model() if self.complete else self.meme(client), float(weight)).eval()

    def task(self, client: str | None = None) -> Task:
        """Return the task that a client learns; without a client, the task of the shared model.

        Raises:
            UserError: there is no such client, or the code of an own task is missing or may not be imported.
        """
        with self._use_code():
            takes = read_space(self._single, client)
            return make_task(takes.task, outputs=takes.classes)

    def _choose_model(self, client: str | None, best: bool = False, ensemble: bool = False) -> AnsweringModel:
        """Return the model that answers. The arguments and the errors are those of `choose_model`."""
        place, shared = self._single, self.config.model.shared
        known = read_model_environment(place)
        if client is not None and client not in known.clients:
            raise RunError(f"{place}: there is no client {client!r}; there are {', '.join(known.clients)}")
        if ensemble and (client is None or best):
            fix = "no best ensemble is stored; remove --best" if best else "name the client of the ensemble with --client"
            raise RunError(f"{place}: {fix}")
        personal = known.models.personal.get(client) if client is not None else None
        served = ""
        net: nn.Module
        if client is not None and personal and ensemble:
            role, network, net = "ensemble", f"{personal.name} and {shared}", (mixed := self.ensemble(client))
            what = f"ensemble of client {client!r}'s personal model, with the weight {mixed.weight:g}, and the shared model"
        elif client is not None and (personal or ensemble):
            role, net = "personal", self.personal_model(client, best)
            network = personal.name if personal else ""
            what = f"personal model of client {client!r} ({network})"
        elif client is not None and not known.pooled and not self.complete:
            if best:
                raise RunError(f"{place}: client {client!r} has no best fork; without --best the last saved fork answers")
            role, network, net = "meme", shared, self.meme(client)
            what = f"client {client!r}'s fork of the shared model ({shared})"
        else:
            role, network, net = "global", shared, self.global_model(best)
            what = f"{'model of all data in one place' if known.pooled else 'shared model'} ({shared})"
            served = f", for client {client!r}, which has no personal model" if client is not None else ""
        if client is None and not has_one_scaling(place):
            raise RunError(f"{place}: each client scales its inputs differently; name a client with --client")
        config = self.config
        if has_own_data(config):
            config = make_client_config(config, client or next(iter(config.clients)))
        round = self.best_round(client if role == "personal" else None) if best else self.round
        when = f"its best round, {round}" if best else f"round {round}"
        calibrations = {c.identity: c for c in read_calibrations(place)}
        calibration = calibrations.get((client, role, round), calibrations.get((None, role, round)))
        if calibration is not None:
            when += f", calibrated with temperature {calibration.temperature:.3g}"
        return AnsweringModel(
            place,
            self.config,
            self._use_code,
            net=net,
            description=f"{what}, {when}{served}",
            takes=read_space(place, client),
            data=config.data,
            role=role,
            network=network,
            client=client,
            round=round,
            task=self.task(client),
            calibration=calibration,
        )

    @contextmanager
    def _use_code(self) -> Iterator[None]:
        """Within, the code and the objects that the run names can be imported, as far as the caller trusts them."""
        with plugins.use_rule(self._code):
            if self._objects is None:
                yield
            else:
                with hold_objects(self._objects):
                    yield

    def _list_shared_names(self) -> set[str]:
        """Return the names of the shared network's tensors."""
        name = self.config.model.shared
        with self._use_code():
            make = self._make_factory(name)
            return {*(models.make_outline(make, name) or make()).state_dict()}

    def _find_saved(self) -> Saved:
        saved = read_checkpoint(self._single)
        if saved is None:
            raise RunError(f"{self._single}: nothing was saved yet, so there is no model")
        return saved

    def _read_state(self, state_folder: Path, best: bool = False) -> dict[str, torch.Tensor]:
        saved = self._find_saved()
        if best:
            return bests.read_best_state(state_folder, saved.round, saved.run)
        return read_state(state_folder / make_file_name(saved.round), saved.run, saved.round)

    def _read_client_state(self, client: str, prefix: str = "personal.", best: bool = False) -> dict[str, torch.Tensor]:
        state = self._read_state(client_folder(self._single, client), best)
        return {k.removeprefix(prefix): v for k, v in state.items() if k.startswith(prefix)}

    def _make_factory(self, name: str, client: str | None = None) -> Callable[[], nn.Module]:
        takes, rng = read_space(self._single, client), At(0, -1, 1).rng("any")
        return partial(models.build, name, takes.shape, takes.outputs, rng, of_pixels=None, check=False)

    def _build_net(self, name: str, find_state: _FindState, client: str | None = None) -> nn.Module:
        return self._restore_net(self._make_factory(name, client), (name,), find_state)

    def _restore_net(self, make: Callable[[], nn.Module], names: tuple[str, ...], find_state: _FindState) -> nn.Module:
        """Return the network of `make` in eval mode with its saved tensors.

        The shapes are compared before memory is allocated: a folder from somebody else may declare any shape.

        names: of the network and its adaptor.
        """
        with self._use_code():
            outline = models.make_outline(make, *names)
            if outline is not None:
                self._find_fitting_state(outline, names[0], find_state)
            net = make()
        net.load_state_dict(self._find_fitting_state(net, names[0], find_state))
        return restore_complex(net).eval()

    def _find_fitting_state(self, net: nn.Module, name: str, find_state: _FindState) -> Message:
        """Return the saved tensors for a network. Raises RunError if names, shapes or dtypes differ."""
        wanted = net.state_dict()
        state = find_state(wanted.keys())
        for key in {**wanted, **state}:
            if key in wanted and key in state and is_lazy(wanted[key]):
                continue
            saved, needed = (format_tensor(tensors[key]) if key in tensors else "none" for tensors in (state, wanted))
            if saved != needed:
                raise RunError(
                    f"{self._single}: the saved tensor {key!r} is {saved}, and network {name!r} has {needed} by "
                    "environment.json; restore the folder as the run wrote it"
                )
        return state


def read_space(folder: Path, client: str | None = None) -> Space:
    """Return the inputs and outputs of a client's model; without a client, of the shared model.

    Raises:
        RunError: a file of the folder is missing or damaged, or the run has no such client.
    """
    clients = read_model_environment(folder).clients
    if client is not None and client not in clients:
        raise RunError(f"{folder}: there is no client {client!r}; there are {', '.join(clients)}")
    recorded = clients[client] if client is not None else next(iter(clients.values()))
    return Space(
        shape=Shapes(recorded.input) if isinstance(recorded.input, dict) else recorded.input,
        classes=recorded.classes,
        outputs=recorded.outputs,
        task=recorded.task,
        scaling=Scaling.model_validate(recorded.scaling.model_dump()),
        columns=recorded.columns,
    )


def has_one_scaling(folder: Path) -> bool:
    """Return whether all clients of a run scale their inputs equally. Augmentation, which only training uses, may differ."""
    scalings = [client.scaling.model_dump(exclude={"augment"}) for client in read_model_environment(folder).clients.values()]
    return all(scaling == scalings[0] for scaling in scalings)


def open_trained_run(folder: Path, config: Config) -> Run:
    """Return a run that the user's own configuration has just trained, whose code the user chose."""
    run = Run(folder)
    run._code = RecordedCode(run.folder, granted=config.model_dump())
    return run


def open_object_run(folder: Path, objects: Mapping[str, Any], keep: object) -> Run:
    """Return a run of objects in memory, whose models are rebuilt from the caller's networks.

    objects: name -> object, as `hold_sites` yields them. keep: a temporary folder that exists as long as the run.
    """
    run = Run(folder)
    run._objects, run._keep = objects, keep  # type: ignore[attr-defined]
    return run


def choose_model(
    path: Path, client: str | None = None, best: bool = False, trust_code: bool = False, ensemble: bool = False
) -> AnsweringModel:
    """Return the model that answers, by the path of a run's folder or of a model file in a run's folder.

    client: its personal model answers. None, or a client without a personal model: the shared model answers. A model file
    names its client itself. best: whether the model of the best round answers; else the last saved model answers.
    ensemble: whether the client's personal model and the shared model answer together.

    Raises:
        RunError: the path is neither a run's folder nor a model file in one; `client` is given with a model file; the run
            has no such model, or keeps none of its best round; or `client` is None, and the clients scale their inputs
            differently.
        ConfigError: config.toml is missing or damaged, or the code of the model may not be imported.
    """
    place, client = _locate_model(path, client)
    return Run(place, trust_code)._choose_model(client, best or path.name == bests.BEST, ensemble)


def _locate_model(path: Path, client: str | None) -> tuple[Path, str | None]:
    """Return the run's folder and the client whose model is meant."""
    if path.suffix != ".safetensors":
        if not any((place / CONFIG).is_file() for place in (path, path / "0")):
            raise RunError(f"{path}: is neither a run's folder nor a model file in a run's folder")
        return path, client
    if client is not None:
        raise RunError(f"{path}: the file already names the client; remove --client, or name the run's folder")
    home = path.absolute().parent
    folder, owner = (home.parent, None) if home.name == "server" else (home.parent.parent, home.name)
    if not path.is_file() or not (folder / CONFIG).is_file() or (owner is not None and home.parent.name != "clients"):
        raise RunError(f"{path}: is no model file in a run's folder, as RUN/server/round-7.safetensors is")
    saved = read_checkpoint(folder)
    if saved is None or path.name not in (make_file_name(saved.round), bests.BEST):
        raise RunError(f"{path}: is not the saved round of {folder}; name the run's folder, and its saved model answers")
    return folder, None if owner == POOLED else owner


def take_last_round(history: "pd.DataFrame") -> "pd.DataFrame":
    """Return a run's scores of its last round; with folds of the last round that all folds have, as the page takes it."""
    rounds = history["round"]
    last = rounds.groupby(history["fold"]).max().min() if "fold" in history else rounds.max()
    return history[rounds == last]
