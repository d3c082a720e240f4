"""A run in its folder: its configuration, its summary, and its models."""

from collections.abc import Callable, Collection
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from fedmutual import models
from fedmutual.config import Config, read_dumped
from fedmutual.core import At, Message, Task, format_tensor
from fedmutual.errors import RunError
from fedmutual.federation.ensemble import WEIGHT, Ensemble
from fedmutual.federation.networks import POOLED
from fedmutual.files import read_json
from fedmutual.models.splice import build_meme
from fedmutual.results.frame import read_scores
from fedmutual.results.scale import MetricScale
from fedmutual.rundir import best as bests
from fedmutual.rundir.checkpoint import make_file_name, read_checkpoint, read_shared_state, read_state
from fedmutual.rundir.file_names import CONFIG, SUMMARY, client_folder, server_folder
from fedmutual.rundir.record_files import (
    find_participant,
    is_finished,
    read_interface,
    read_metric,
    read_model_environment,
    read_summary,
)
from fedmutual.rundir.schema import Saved
from fedmutual.tasks import make_task
from fedmutual.user_code import plugins
from fedmutual.user_code.recorded_code import RecordedCode

if TYPE_CHECKING:
    import pandas as pd

_FindState = Callable[[Collection[str]], Message]  # names of a network's tensors -> the saved tensors


class Run:
    """A run in a folder, finished or stopped.

    Code that the folder names is imported when a model needs the code. Without `trust_code` only code in the working folder
    is imported, if the code is equal to the code that the run recorded.
    """

    def __init__(self, folder: str | Path, trust_code: bool = False) -> None:
        """trust_code: import all code that the folder names. This code has all your rights: read the code first.

        Raises:
            ConfigError: config.toml is missing or damaged.
        """
        self.folder = Path(folder)
        self.config = read_dumped(self.folder / CONFIG)
        self._code: plugins.Rule = RecordedCode(self.folder, trust_code)

    def __repr__(self) -> str:
        """Return the run's method, state, and the last scores that clients share."""
        last = read_scores(self.folder)
        state = "finished" if self.finished else "not finished"
        clients = read_model_environment(self.folder).clients
        text = f"<Run {self.config.name!r}: {self.config.algorithm['name']}, {len(clients)} clients, {state}"
        if last.empty:
            return f"{text}, in {self.folder}>"
        last = last[last["round"] == last["round"].max()]
        metric = read_metric(self.folder)
        scale, chosen = MetricScale(metric=metric), last[(last["metric"] == metric.name) & (last["data"] != "holdout")]
        means = chosen.groupby(["model", "data"])["value"].mean()
        scores = ", ".join(
            f"{model} {scale.format_value(value)}{scale.mark} on {data}" for (model, data), value in means.items()
        )
        shown = f", {metric.title}: {scores}" if scores else ""
        return f"{text}, round {last['round'].max()} of {self.config.rounds}{shown}, in {self.folder}>"

    def history(self) -> "pd.DataFrame":
        """Return all scores over the rounds, one row for each number; no rows before the first evaluation.

        Columns: round (from 1), model ("global", "personal", "ensemble" or "meme"), client (None: the common test set), data
        ("validation", "test" or "holdout"; of domains also "test.own", "test.others" and "validation.all"), metric,
        value (accuracies are fractions in [0, 1]).

        Raises:
            RunError: metrics.jsonl is damaged.
        """
        return read_scores(self.folder)

    def plot(self, metric: str | None = None, data: str = "validation") -> Any:
        """Draw a metric over the rounds, one line for each model and client, and return the matplotlib Axes.

        metric: a metric of `history`; None: the main metric of the run, which is the accuracy for classification.

        Raises:
            ValueError: the run has no such metric on these data; the message lists the existing metrics.
            RunError: metrics.jsonl or environment.json is damaged.
        """
        import matplotlib.pyplot as plt  # a second to import, and only plots need it

        metric, history = metric or read_metric(self.folder).name, self.history()
        chosen = history[(history["metric"] == metric) & (history["data"] == data)]
        if chosen.empty:
            known = history[["metric", "data"]].drop_duplicates().itertuples(index=False)
            listed = ", ".join(f"{m} on {d}" for m, d in known) or "none"
            raise ValueError(f"there is no metric {metric!r} on the data {data!r}; there are: {listed}")
        _, axes = plt.subplots()
        for (model, client), line in chosen.groupby(["model", "client"], dropna=False):
            label = model if client is None or client != client else f"{model}, {client}"
            axes.plot(line["round"], line["value"], label=label, linestyle="--" if model == "global" else "-", marker=".")
        axes.set(xlabel="round", ylabel=f"{metric} on {data}", title=self.config.name)
        axes.legend()
        return axes

    def predict(self, x: Any, client: str | None = None, best: bool = False) -> "pd.DataFrame":
        """Return answers for examples in memory: a row for each example [n], a column for each class with its probability.

        For several labels: one column for each label with its probability; for numbers: the predicted number.

        x: an array, tensor or DataFrame `[n, *shape]` of unscaled values; columns of a DataFrame are matched by name.
        client: the client whose personal model answers; without it, the shared model answers.
        best: whether the model of the best round answers (records.keep_best).

        Raises:
            UserError: the run has no such model, it segments images, or the examples do not fit it.
        """
        from fedmutual.studies.predict import predict_arrays  # which imports this module

        return predict_arrays(self, x, client, best)

    @property
    def finished(self) -> bool:
        """Whether all rounds are complete and summary.json is written. Raises RunError if summary.json is damaged."""
        return is_finished(read_summary(self.folder), self.config.rounds)

    @property
    def summary(self) -> dict[str, Any]:
        """The content of summary.json. Raises RunError if the file is missing or damaged."""
        return read_json(self.folder / SUMMARY)

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
        pooled = read_model_environment(self.folder).pooled
        owner = POOLED if pooled else client
        state_folder = server_folder(self.folder) if owner is None else client_folder(self.folder, owner)
        return bests.find_best(state_folder, self._find_saved().round)[0]

    @property
    def complete(self) -> bool:
        """Whether the server saved a complete model.

        Raises:
            RunError: nothing was saved, or a file is damaged.
            ConfigError: the code of the network may not be imported.
        """
        return self._read_state(server_folder(self.folder)).keys() >= self._build_shared_net().state_dict().keys()

    def global_model(self, best: bool = False) -> nn.Module:
        """Return the shared model in eval mode, after the last saved round or after the best round.

        Raises:
            RunError: nothing was saved, no complete shared model exists, or no best round was stored.
            ConfigError: the code of the network may not be imported.
        """
        known = read_model_environment(self.folder)
        if known.pooled:
            state = self._read_client_state(POOLED, best=best)
            return self._build_net(self.config.model.shared, lambda _: state)
        state = self._read_state(server_folder(self.folder))
        if not self.complete:
            names = ", ".join(known.clients)
            part = state.keys() & self._build_shared_net().state_dict().keys()
            reason = "a part of the model stays with each client" if part else "nothing is shared"
            raise RunError(
                f"{self.folder}: this run has no complete global model, because {reason}; use the model of one client "
                f"(`fedmutual predict --client ID`): {names}"
            )
        saved = self._read_state(server_folder(self.folder), best)
        return self._build_net(self.config.model.shared, lambda names: {k: saved[k] for k in names if k in saved})

    def personal_model(self, client: str, best: bool = False) -> nn.Module:
        """Return a client's personal model in eval mode, after the last saved round or after the best round.

        Raises:
            RunError: nothing was saved, there is no such client or model, or no best round was stored.
            ConfigError: the code of the network may not be imported.
        """
        names = read_model_environment(self.folder).models.personal
        if client not in names:
            known = ", ".join(names) or "none: its algorithm trains no personal models"
            raise RunError(f"{self.folder}: there is no personal model of client {client!r}; there are {known}")
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
            return meme_state if set(names) <= meme_state.keys() else read_shared_state(self.folder) | meme_state

        rng, model, sizes = At(0, -1, 1).rng("any"), self.config.model, self._find_sizes(client)

        def make() -> nn.Module:
            examples = self._make_examples(client)
            return build_meme(model, *sizes, rng, rng, of_pixels=None, examples=examples, check=False)

        return self._restore_net(make, (model.shared, model.adaptor), find_state)

    def ensemble(self, client: str) -> nn.Module:
        """Return the ensemble of a client's personal and shared model in eval mode: inputs -> log-probabilities [B, C].

        Its weight is that of the last scoring up to the last saved round (`records.ensemble`).

        Raises:
            RunError: as `personal_model` and `meme`; the run has no ensemble.
            ConfigError: the code of a network may not be imported.
        """
        personal = self.personal_model(client)
        weight = self._read_client_state(client, "memory.").get(WEIGHT)
        if weight is None:
            raise RunError(f"{self.folder}: this run has no ensembles; train one with records.ensemble = true")
        return Ensemble(personal, self.global_model() if self.complete else self.meme(client), float(weight)).eval()

    def _find_sizes(self, client: str | None = None) -> tuple[tuple[int, ...], int]:
        """Return the inputs and outputs of one client's networks, or of all clients' networks."""
        space = find_participant(self.folder, read_model_environment(self.folder).clients, client)
        return space.input, space.outputs

    def _make_examples(self, client: str | None = None) -> torch.Tensor:
        """Return constant inputs for one client's networks, or for networks of all clients."""
        takes = read_interface(self.folder, client)
        return models.make_example_inputs(takes.shape, getattr(torch, takes.dtype))

    def task(self, client: str | None = None) -> Task:
        """Return the task that a client learns; without a client, the task of the shared model.

        Raises:
            UserError: there is no such client, or the code of an own task is missing or may not be imported.
        """
        with plugins.use_rule(self._code):
            return make_task(read_interface(self.folder, client).task)

    def _build_shared_net(self) -> nn.Module:
        """Return the shared network; its tensors may have no values, only names and shapes."""
        with plugins.use_rule(self._code):
            make = self._make_factory(self.config.model.shared)
            return models.make_outline(make, self.config.model.shared) or make()

    def _find_saved(self) -> Saved:
        saved = read_checkpoint(self.folder)
        if saved is None:
            raise RunError(f"{self.folder}: nothing was saved yet, so there is no model")
        return saved

    def _read_state(self, state_folder: Path, best: bool = False) -> dict[str, torch.Tensor]:
        saved = self._find_saved()
        if best:
            return bests.read_best_state(state_folder, saved.round, saved.run)
        return read_state(state_folder / make_file_name(saved.round), saved.run, saved.round)

    def _read_client_state(self, client: str, prefix: str = "personal.", best: bool = False) -> dict[str, torch.Tensor]:
        state = self._read_state(client_folder(self.folder, client), best)
        return {k.removeprefix(prefix): v for k, v in state.items() if k.startswith(prefix)}

    def _make_factory(self, name: str, client: str | None = None) -> Callable[[], nn.Module]:
        """Return the function that makes a network. Raises RunError if the run has no such client."""
        sizes, rng = self._find_sizes(client), At(0, -1, 1).rng("any")
        return partial(models.build, name, *sizes, rng, of_pixels=None, check=False)

    def _build_net(self, name: str, find_state: _FindState, client: str | None = None) -> nn.Module:
        return self._restore_net(self._make_factory(name, client), (name,), find_state)

    def _restore_net(self, make: Callable[[], nn.Module], names: tuple[str, ...], find_state: _FindState) -> nn.Module:
        """Return the network of `make` in eval mode with its saved tensors.

        The shapes are compared before memory is allocated: a folder from somebody else may declare any shape.

        names: of the network and its adaptor.

        Raises:
            RunError: the saved tensors are of another network.
            ConfigError: the network cannot be made, or its code may not be imported.
        """
        with plugins.use_rule(self._code):
            outline = models.make_outline(make, *names)
            if outline is not None:
                self._find_fitting_state(outline, names[0], find_state)
            net = make()
        net.load_state_dict(self._find_fitting_state(net, names[0], find_state))
        return net.eval()

    def _find_fitting_state(self, net: nn.Module, name: str, find_state: _FindState) -> Message:
        """Return the saved tensors for a network. Raises RunError if names, shapes or dtypes differ."""
        wanted = net.state_dict()
        state = find_state(wanted.keys())
        unequal = [
            k for k, v in wanted.items() if k not in state or not (is_lazy(v) or format_tensor(state[k]) == format_tensor(v))
        ]
        unequal += [k for k in state if k not in wanted]
        if unequal:
            described = (
                format_tensor(tensors[unequal[0]]) if unequal[0] in tensors else "none" for tensors in (state, wanted)
            )
            raise RunError(
                f"{self.folder}: the saved tensor {unequal[0]!r} is {next(described)}, and network {name!r} has "
                f"{next(described)} by environment.json; restore the folder as the run wrote it"
            )
        return state


def open_trained_run(folder: Path, config: Config) -> Run:
    """Return a run that the user's own configuration has just trained, whose code the user chose."""
    run = Run(folder)
    run._code = RecordedCode(folder, granted=config.model_dump())
    return run
