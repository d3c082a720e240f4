"""Predictions for new examples: the model of a run that predicts, and its probability of each class."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd
import torch
from torch import Tensor, nn

from fedmutual.config import DataConfig, has_own_data, make_client_config
from fedmutual.data import arrays, folder, scaling, table
from fedmutual.data.encoding import parse_encoding
from fedmutual.data.examples import BadRows, convert_array, listed
from fedmutual.data.memory import convert_features
from fedmutual.data.rows import check_finite
from fedmutual.data.sources import FILES
from fedmutual.data.table_file import SUFFIXES
from fedmutual.errors import DataError, RunError
from fedmutual.federation.networks import POOLED
from fedmutual.rundir.about import about
from fedmutual.rundir.best import BEST
from fedmutual.rundir.checkpoint import committed, file_name
from fedmutual.rundir.file_names import CONFIG
from fedmutual.rundir.interface import Interface, interface
from fedmutual.studies.trained_run import Run

_AT_ONCE = 512  # rows of a table in a forward
Learned = tuple[Sequence[str], Tensor]  # examples: what they are called, unscaled x [B, *shape]


@dataclass(frozen=True)
class Prediction:
    """The prediction of a model for one example."""

    example: str  # the image's path; of a table or of arrays "line 3 of rows.csv"
    model: str  # the model that predicted: "personal model of client '3' (cnn1), round 20"
    ranked: tuple[tuple[str, float], ...]  # every class with its probability, the most probable first

    @property
    def label(self) -> str:
        """The most probable class."""
        return self.ranked[0][0]

    @property
    def probability(self) -> float:
        """The probability of the most probable class."""
        return self.ranked[0][1]


class AnsweringModel(NamedTuple):
    """A model that predicts."""

    net: nn.Module  # in eval mode
    description: str  # "personal model of client '3' (cnn1), round 20"
    takes: Interface
    data: DataConfig  # of the client
    role: str  # in scores: "personal", "global", "ensemble", or "meme", a client's fork of the shared model
    network: str  # the name of its architecture
    client: str | None  # the client; None: all clients
    round: int  # the weights are those after this round

    @property
    def files(self) -> bool:
        """Whether its data were image files, which are resized when they are read."""
        return self.data.name in FILES


@torch.no_grad()
def predict_arrays(run: Run, x: Any, client: str | None = None, best: bool = False) -> pd.DataFrame:
    """Return the probabilities of examples in memory: one row for each example [n], one column for each class.

    x: an array, tensor or DataFrame `[n, *shape]` of unscaled values; columns of a DataFrame are matched by name.

    Raises:
        UserError: the run has no such model, or the examples do not fit it.
    """
    answering = choose_model_of_run(run, client, best)
    takes = answering.takes
    raw = convert_array(convert_features(x, "x", takes.columns), "x")
    scaled = make_scaler(takes)
    parts = [
        scale_examples(part, lambda k, start=n * _AT_ONCE: f"row {start + k} of x", takes, scaled)  # type: ignore[misc]
        for n, part in enumerate(torch.split(raw, _AT_ONCE))
    ]
    probabilities = [answering.net(part).double().softmax(1) for part in parts]
    return pd.DataFrame(torch.cat(probabilities).numpy(), columns=list(takes.classes))


@torch.no_grad()
def predict(
    run_or_model: str | Path,
    files: str | Path | Sequence[str | Path],
    client: str | None = None,
    best: bool = False,
    trust_code: bool = False,
    ensemble: bool = False,
) -> list[Prediction]:
    """Return a prediction for each image, each row of a CSV file, or each `x` of an npz file, scaled as in training.

    run_or_model: a run's folder, or a model file in a run's folder.
    files: one file or several files.
    client: the client whose personal model answers; the shared model answers if it is None or has no personal model.
    best: whether the model of the best round answers, if the run has `records.keep_best`; else the last saved model answers.
    trust_code: whether to import the code that the run's folder names, as `Run` does.
    ensemble: whether the client's personal model and the shared model answer together, of a run with `records.ensemble`.

    Raises:
        UserError: there is no such model, or its code may not be imported; a file cannot be read or is not of the kind that
            the model learned from.
    """
    answering = choose_model(Path(run_or_model), client, best, trust_code, ensemble)
    takes, predictions = answering.takes, list[Prediction]()
    scaled = make_scaler(takes)
    paths = [Path(files)] if isinstance(files, str | Path) else [Path(f) for f in files]
    for names, raw in _read(paths, answering):
        answers = answering.net(scale_examples(raw, names.__getitem__, takes, scaled)).double().softmax(1)
        for name, p in zip(names, answers, strict=True):
            order = p.argsort(descending=True, stable=True).tolist()
            predictions.append(
                Prediction(name, answering.description, tuple((takes.classes[c], float(p[c])) for c in order))
            )
    return predictions


def make_scaler(takes: Interface) -> Callable[[Tensor], Tensor]:
    """Return the function from raw examples to a network's inputs: a scaling, or the encoding of a table's columns."""
    columns = takes.scaling.get("columns")
    return scaling.parse_scaling(takes.scaling) if columns is None else parse_encoding(columns)


def raw_shape(takes: Interface) -> tuple[int, ...]:
    """Return the shape of one raw example: of an encoded table one value for each column."""
    columns = takes.scaling.get("columns")
    return takes.shape if columns is None else (len(columns),)


def list_columns(takes: Interface) -> list[str] | None:
    """Return the columns of the table that a model learned from, in the order of the raw example; None if the data were no "
    "table."""
    columns = takes.scaling.get("columns")
    return [column["name"] for column in columns] if columns else None if takes.columns is None else list(takes.columns)


def scale_examples(raw: Tensor, where: Callable[[int], str], takes: Interface, scaled: Callable[[Tensor], Tensor]) -> Tensor:
    """Return raw examples [B, *shape] as a network takes them. where: the name of an example in messages.

    Raises:
        BadRows: the examples do not have the model's shape, or hold NaN or infinite values.
    """
    x = scaled(raw)
    if tuple(x.shape[1:]) != takes.shape:
        raise BadRows(_describe_misfit(where(0), raw, takes))
    return check_finite(x, range(len(x)), where)


def choose_model(
    path: Path, client: str | None = None, best: bool = False, trust_code: bool = False, ensemble: bool = False
) -> AnsweringModel:
    """The model that answers.

    Raises:
        RunError: the path is no run and no model of one, or the run has no such model, or keeps none of its best round.
    """
    place, client = _place(path, client)
    return choose_model_of_run(Run(place, trust_code), client, best or path.name == BEST, ensemble)


def choose_model_of_run(run: Run, client: str | None = None, best: bool = False, ensemble: bool = False) -> AnsweringModel:
    """The model of a run that answers.

    Raises:
        RunError: the run has no such model, or keeps none of its best round.
    """
    place = run.folder
    known = about(place)
    if client is not None and client not in known.clients:
        raise RunError(
            f"{place}: there is no client {client!r}; there are {', '.join(known.clients)}, and without --client the "
            "shared model answers"
        )
    if ensemble:
        return _choose_ensemble(run, client, best)
    shared, own = run.config.model.shared, known.models.personal.get(client) if client is not None else None
    if client is not None and own:
        description = f"personal model of client {client!r} ({own.name})"
        when = run.best_round(client) if best else None
        return _answering(run, run.personal_model(client, best), description, "personal", own.name, client, when)
    if client is not None and not known.pooled and not run.complete:
        if best:
            raise RunError(
                f"{place}: of client {client!r}'s fork no best is kept; without --best the last saved one answers"
            )
        description = f"client {client!r}'s fork of the shared model ({shared})"
        return _answering(run, run.meme(client), description, "meme", shared, client)
    kind = "model of all data in one place" if known.pooled else "shared model"
    served = f", for client {client!r}, who has none of its own" if client is not None else ""
    when = run.best_round() if best else None
    return _answering(run, run.global_model(best), f"{kind} ({shared})", "global", shared, client, when, served)


def find_run_folder(run_or_model: Path) -> Path:
    """The run's folder that a path names: itself, or the one of a model file.

    Raises:
        RunError: the path is no run and no model of one.
    """
    return _place(run_or_model, None)[0]


def _choose_ensemble(run: Run, client: str | None, best: bool) -> AnsweringModel:
    """The ensemble of a client. Raises RunError where no client is named, or a best round is asked for."""
    if client is None or best:
        why = "no best ensemble is kept; take --best out" if best else "an ensemble is a client's; name one with --client"
        raise RunError(f"{run.folder}: {why}")
    net = run.ensemble(client)
    description = f"ensemble of client {client!r}'s personal model, with the weight {net.weight:g}, and the shared model"
    networks = f"{about(run.folder).models.personal[client].name} and {run.config.model.shared}"
    return _answering(run, net, description, "ensemble", networks, client)


def _answering(
    run: Run,
    net: nn.Module,
    description: str,
    role: str,
    network: str,
    client: str | None,
    best: int | None = None,
    served: str = "",
) -> AnsweringModel:
    """Return the model with its inputs. best: the best round, if the model is that of the best round."""
    takes = interface(run.folder, client)
    if takes.task != "classification":
        learner = "its clients learn" if client is None else f"client {client!r} learns"
        raise RunError(
            f"{run.folder}: {learner} {takes.task!r}, and only classes can be predicted; load the model in Python"
        )
    if not takes.agreed:
        raise RunError(
            f"{run.folder}: each client scales its inputs differently, and the scaling of these files is unknown; name a "
            "client with --client"
        )
    config = (
        make_client_config(run.config, client or next(iter(run.config.clients))) if has_own_data(run.config) else run.config
    )
    when = f"round {run.round}" if best is None else f"its best round, {best}"
    return AnsweringModel(
        net,
        f"{description}, {when}{served}",
        takes,
        data=config.data,
        role=role,
        network=network,
        client=client,
        round=run.round if best is None else best,
    )


def _place(path: Path, client: str | None) -> tuple[Path, str | None]:
    """Return the run's folder and the client whose model is meant."""
    if path.suffix != ".safetensors":
        if not (path / CONFIG).is_file():
            raise RunError(f"{path}: is neither a run's folder nor a model file in a run's folder")
        return path, client
    if client is not None:
        raise RunError(f"{path}: the file says whose model it is; take --client out, or name the run's folder")
    home = path.absolute().parent
    folder, owner = (home.parent, None) if home.name == "server" else (home.parent.parent, home.name)
    if not path.is_file() or not (folder / CONFIG).is_file() or (owner is not None and home.parent.name != "clients"):
        raise RunError(f"{path}: is no model file in a run's folder, as RUN/server/round-7.safetensors is")
    saved = committed(folder)
    if saved is None or path.name not in (file_name(saved.round), BEST):
        raise RunError(f"{path}: is not the saved round of {folder}; name the run's folder, and its saved model answers")
    return folder, None if owner == POOLED else owner


def _read(files: Sequence[Path], answering: AnsweringModel) -> Iterator[Learned]:
    for file in files:
        if file.suffix.lower() not in (*SUFFIXES, ".npz"):
            yield [str(file)], _image(file, answering)
            continue
        if file.suffix.lower() in SUFFIXES:
            if answering.takes.columns is None:
                raise DataError(
                    f"{file}: the model learned from no table of named columns; give it {_describe_wanted(answering)}"
                )
            encoded = answering.takes.scaling.get("columns")
            rows, called = table.read_features(file, answering.takes.columns, encoded and parse_encoding(encoded))
            x = torch.from_numpy(rows)
        elif answering.takes.scaling.get("columns"):
            raise DataError(
                f"{file}: the model learned from a table with data.columns; give it {_describe_wanted(answering)}"
            )
        else:
            x, called = (
                convert_array(arrays.read_array(file, "x"), f"{file}: array 'x'"),
                partial("row {1} of 'x' in {0}".format, file),
            )
        if not len(x):
            raise DataError(f"{file}: there are no rows in it")
        for start in range(0, len(x), _AT_ONCE):
            part = x[start : start + _AT_ONCE]
            yield [called(start + k) for k in range(len(part))], part


def _image(file: Path, answering: AnsweringModel) -> Tensor:
    """One image [1, C, H, W] of uint8, read as the run's own are."""
    takes, shape = answering.takes, answering.takes.shape
    most = takes.scaling["divisor"]
    if not takes_pixels(takes) or shape[0] not in (1, 3):
        raise DataError(f"{file}: the model did not learn from pixels of 8 bits; give it {_describe_wanted(answering)}")
    x = torch.tensor(folder.decode_image(file, shape[0] == 1, takes.scaling.get("size") if answering.files else None)[None])
    if x.max() > most:
        raise BadRows(
            f"{file} has pixels up to {int(x.max())}, and those that the model learned from go up to {most:g}; scale it so"
        )
    return x


def takes_pixels(takes: Interface) -> bool:
    """Return whether a model learned from images of whole numbers, as image files hold them."""
    return len(takes.shape) == 3 and takes.scaling["divisor"] != 1


def _describe_wanted(answering: AnsweringModel) -> str:
    """What a model can be asked about."""
    takes = answering.takes
    if takes.columns is not None:
        return f"a CSV file with the columns {listed(list_columns(takes) or ())}"
    return (
        "images"
        if takes_pixels(takes)
        else f"an npz file with an array 'x' of shape [n, {', '.join(map(str, takes.shape))}]"
    )


def _describe_misfit(where: str, x: Tensor, takes: Interface) -> str:
    got, wanted = list(x.shape[1:]), list(takes.shape)
    if len(got) == len(wanted) == 3 and got[0] == wanted[0]:
        size = f"{got[1]} x {got[2]} pixels and the model takes {wanted[1]} x {wanted[2]}"
        return f"{where} is {size}; resize it, or train with data.size = [{wanted[1]}, {wanted[2]}], which resizes all"
    return f"{where} has the shape {got}, and the model takes {wanted}"
