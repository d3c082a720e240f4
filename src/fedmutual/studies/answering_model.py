"""The model of a run that answers, with the shapes, columns and scaling of its inputs."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from torch import Tensor, nn

from fedmutual.config import DataConfig, has_own_data, make_client_config
from fedmutual.core import Task, get_target_kind
from fedmutual.data import scaling
from fedmutual.data.encoding import parse_encoding
from fedmutual.data.examples import BadRows
from fedmutual.data.sources import FILES
from fedmutual.data.stores import check_finite
from fedmutual.errors import RunError
from fedmutual.federation.networks import POOLED
from fedmutual.metric import TargetKind
from fedmutual.rundir.best import BEST
from fedmutual.rundir.checkpoint import make_file_name, read_checkpoint
from fedmutual.rundir.file_names import CONFIG
from fedmutual.rundir.record_files import Interface, read_interface, read_model_environment
from fedmutual.scores import find_finite_answers
from fedmutual.studies.trained_run import Run

ROWS_AT_ONCE = 512  # rows of a forward pass


@dataclass(frozen=True)
class AnswerForm:
    """How a network's outputs become answers, for one kind of targets. `description` says what an answer is, for users."""

    name: str  # of the output of an exported program
    description: str
    compute: Callable[[Tensor], Tensor]  # a network's outputs -> answers of the same shape, float64


_DISTRIBUTION = AnswerForm("probabilities", "the probability of each class", lambda outputs: outputs.double().softmax(1))

ANSWER_FORMS: dict[TargetKind, AnswerForm] = {
    "classes": _DISTRIBUTION,
    "numbers": AnswerForm("numbers", "the predicted number, in the unit of the targets", lambda outputs: outputs.double()),
    "labels": AnswerForm("probabilities", "the probability of each label", lambda outputs: outputs.double().sigmoid()),
    "masks": _DISTRIBUTION,
}
"""Classes [B, C], numbers [B, outputs], labels [B, L], and of each pixel the classes [B, C, H, W]."""


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
    task: Task  # that the model learned

    @property
    def owner(self) -> str | None:
        """The client whose model this is; None for a model of all clients."""
        return None if self.role == "global" else self.client

    @property
    def kind(self) -> TargetKind:
        """The kind of targets that the model learned."""
        return get_target_kind(self.task)

    @property
    def form(self) -> AnswerForm:
        """The form of the model's answers."""
        return ANSWER_FORMS[self.kind]

    @property
    def files(self) -> bool:
        """Whether its data were image files, which are resized when they are read."""
        return self.data.name in FILES


def choose_model(
    path: Path, client: str | None = None, best: bool = False, trust_code: bool = False, ensemble: bool = False
) -> AnsweringModel:
    """Return the model that answers, by the path of a run's folder or of a model file in a run's folder.

    client, best, ensemble: as for `choose_model_of_run`; a model file names its client itself.

    Raises:
        RunError: the path is neither a run's folder nor a model file in one; or `client` is given with a model file; or as
            `choose_model_of_run`.
        ConfigError: config.toml is missing or damaged, or the code of the model may not be imported.
    """
    place, client = _locate_model(path, client)
    return choose_model_of_run(Run(place, trust_code), client, best or path.name == BEST, ensemble)


def choose_model_of_run(run: Run, client: str | None = None, best: bool = False, ensemble: bool = False) -> AnsweringModel:
    """Return the model of a run that answers.

    client: its personal model answers. None, or a client without a personal model: the shared model answers.
    best: whether the model of the best round answers; else the last saved model answers.
    ensemble: whether the client's personal model and the shared model answer together.

    Raises:
        RunError: the run has no such model, or keeps none of its best round; or `client` is None, and the clients scale
            their inputs differently.
        ConfigError: the code of the model may not be imported.
    """
    place = run.folder
    known = read_model_environment(place)
    if client is not None and client not in known.clients:
        raise RunError(
            f"{place}: there is no client {client!r}; there are {', '.join(known.clients)}, and without --client the "
            "shared model answers"
        )
    if ensemble:
        return _choose_ensemble(run, client, best)
    shared, personal = run.config.model.shared, known.models.personal.get(client) if client is not None else None
    if client is not None and personal:
        description = f"personal model of client {client!r} ({personal.name})"
        when = run.best_round(client) if best else None
        return _make_answering_model(
            run, run.personal_model(client, best), description, "personal", personal.name, client, when
        )
    if client is not None and not known.pooled and not run.complete:
        if best:
            raise RunError(f"{place}: client {client!r} has no best fork; without --best the last saved fork answers")
        description = f"client {client!r}'s fork of the shared model ({shared})"
        return _make_answering_model(run, run.meme(client), description, "meme", shared, client)
    kind = "model of all data in one place" if known.pooled else "shared model"
    served = f", for client {client!r}, which has no personal model" if client is not None else ""
    when = run.best_round() if best else None
    return _make_answering_model(run, run.global_model(best), f"{kind} ({shared})", "global", shared, client, when, served)


def find_run_folder(run_or_model: Path) -> Path:
    """Return the run's folder: the path, or the folder of the run that has this model file.

    Raises:
        RunError: the path is no run and no model of one.
    """
    return _locate_model(run_or_model, None)[0]


def _choose_ensemble(run: Run, client: str | None, best: bool) -> AnsweringModel:
    """The ensemble of a client. Raises RunError where no client is named, or a best round is asked for."""
    if client is None or best:
        why = (
            "no best ensemble is stored; remove --best"
            if best
            else "an ensemble belongs to a client; name the client with --client"
        )
        raise RunError(f"{run.folder}: {why}")
    net = run.ensemble(client)
    description = f"ensemble of client {client!r}'s personal model, with the weight {net.weight:g}, and the shared model"
    networks = f"{read_model_environment(run.folder).models.personal[client].name} and {run.config.model.shared}"
    return _make_answering_model(run, net, description, "ensemble", networks, client)


def _make_answering_model(
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
    takes = read_interface(run.folder, client)
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
        task=run.task(client),
    )


def _locate_model(path: Path, client: str | None) -> tuple[Path, str | None]:
    """Return the run's folder and the client whose model is meant."""
    if path.suffix != ".safetensors":
        if not (path / CONFIG).is_file():
            raise RunError(f"{path}: is neither a run's folder nor a model file in a run's folder")
        return path, client
    if client is not None:
        raise RunError(f"{path}: the file already names the client; remove --client, or name the run's folder")
    home = path.absolute().parent
    folder, owner = (home.parent, None) if home.name == "server" else (home.parent.parent, home.name)
    if not path.is_file() or not (folder / CONFIG).is_file() or (owner is not None and home.parent.name != "clients"):
        raise RunError(f"{path}: is no model file in a run's folder, as RUN/server/round-7.safetensors is")
    saved = read_checkpoint(folder)
    if saved is None or path.name not in (make_file_name(saved.round), BEST):
        raise RunError(f"{path}: is not the saved round of {folder}; name the run's folder, and its saved model answers")
    return folder, None if owner == POOLED else owner


def make_scaler(takes: Interface) -> Callable[[Tensor], Tensor]:
    """Return the function from raw examples [B, *raw shape] to a network's inputs [B, *shape].

    The function scales, or encodes the columns of a table.
    """
    columns = takes.scaling.get("columns")
    return scaling.parse_scaling(takes.scaling) if columns is None else parse_encoding(columns)


def find_raw_shape(takes: Interface) -> tuple[int, ...]:
    """Return the shape of one raw example: of an encoded table one value for each column."""
    columns = takes.scaling.get("columns")
    return takes.shape if columns is None else (len(columns),)


def list_columns(takes: Interface) -> list[str] | None:
    """Return the columns of the table that a model learned from, in the order of the raw example; None without a table."""
    columns = takes.scaling.get("columns")
    return [column["name"] for column in columns] if columns else None if takes.columns is None else list(takes.columns)


def scale_examples(raw: Tensor, where: Callable[[int], str], takes: Interface, scaled: Callable[[Tensor], Tensor]) -> Tensor:
    """Return a network's inputs [B, *takes.shape] for raw examples [B, *raw shape].

    where: position in the batch -> the name of the example in messages. scaled: the function of `make_scaler`.

    Raises:
        BadRows: the examples do not have the model's shape, or hold NaN or infinite values.
    """
    x = scaled(raw)
    if tuple(x.shape[1:]) != takes.shape:
        raise BadRows(_describe_misfit(where(0), raw, takes))
    return check_finite(x, range(len(x)), where)


def check_outputs(outputs: Tensor, where: Callable[[int], str], answering: AnsweringModel) -> Tensor:
    """Return a network's outputs [B, C, ...] unchanged. where: position in the batch -> the name of the example.

    Raises:
        RunError: the outputs of an example are not finite, so that they predict nothing.
    """
    unanswered = (~find_finite_answers(outputs)).reshape(len(outputs), -1).any(1)
    if unanswered.any():
        row = int(unanswered.nonzero()[0])
        raise RunError(
            f"{where(row)}: the {answering.description} gives outputs that are not finite, so there is no prediction; look "
            "at what the network computes in eval mode"
        )
    return outputs


def is_pixel_input(takes: Interface) -> bool:
    """Return whether a model learned from images of whole numbers, as image files hold them."""
    return len(takes.shape) == 3 and takes.scaling["divisor"] != 1


def _describe_misfit(where: str, x: Tensor, takes: Interface) -> str:
    got, wanted = list(x.shape[1:]), list(takes.shape)
    if len(got) == len(wanted) == 3 and got[0] == wanted[0]:
        size = f"{got[1]} x {got[2]} pixels and the model takes {wanted[1]} x {wanted[2]}"
        return f"{where} is {size}; resize it, or train with data.size = [{wanted[1]}, {wanted[2]}], which resizes all"
    return f"{where} has the shape {got}, and the model takes {wanted}"
