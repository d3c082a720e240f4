"""The model of a run that answers, with the shapes, columns and scaling of its inputs, and the run's own rows."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from fedmutual import data
from fedmutual.calling import MASKS, Inputs, Shape, Shapes, format_shape, get_shape, list_tensors, map_inputs
from fedmutual.config import Config, DataConfig
from fedmutual.core import Task, get_target_kind
from fedmutual.data.convert import convert_array, convert_input, list_rows, name_inputs
from fedmutual.data.encoding import Encoding, make_encoding
from fedmutual.data.examples import Examples, Part, Source, list_names
from fedmutual.data.federation import Federation
from fedmutual.data.objects import convert_inputs, is_frame
from fedmutual.data.prepared import Prepared
from fedmutual.data.rows import Rows, merge_rows
from fedmutual.data.scaling import find_form
from fedmutual.data.sources import FILES
from fedmutual.data.space import Space
from fedmutual.data.stores import check_finite
from fedmutual.data.text import encode_texts
from fedmutual.errors import BadRows, DataError, RunError, warn_user
from fedmutual.federation.evaluation import forward_in_parts
from fedmutual.metric import KINDS, TargetKind
from fedmutual.rundir.file_names import PARTITION
from fedmutual.rundir.record_files import read_record
from fedmutual.rundir.schema import Calibration, RecordedPartition
from fedmutual.scores import find_finite_answers
from fedmutual.tasks import compute_answers

if TYPE_CHECKING:
    import pandas as pd

ROWS_AT_ONCE = 512  # rows of a forward pass

OwnRows = Mapping[str, Rows]
"""The run's rows of one kind, by the key of their data in what `data.prepare` returns."""


class AnsweringModel(NamedTuple):
    """A model that predicts."""

    folder: Path  # of the run
    config: Config  # of the run
    use_code: Callable[[], AbstractContextManager[None]]  # within, what the run names can be imported
    net: nn.Module  # in eval mode
    description: str  # "personal model of client '3' (cnn1), round 20"
    takes: Space
    data: DataConfig  # of the client
    role: str  # in scores: "personal", "global", "ensemble", or "meme", a client's fork of the shared model
    network: str  # the name of its architecture
    client: str | None  # the client; None: all clients
    round: int  # the weights are those after this round
    task: Task  # that the model learned
    calibration: Calibration | None = None  # what `score --calibrate` fitted to these weights

    @property
    def owner(self) -> str | None:
        """The client whose model this is; None for a model of all clients."""
        return None if self.role == "global" else self.client

    @property
    def is_guaranteed(self) -> bool:
        """Whether differential privacy covers this model; not a client's own network that trained without noise."""
        nets = self.config.privacy.nets
        return nets != "none" and (self.role != "personal" or nets == "both")

    @property
    def kind(self) -> TargetKind:
        """The kind of targets that the model learned."""
        return get_target_kind(self.task)

    @property
    def states_probabilities(self) -> bool:
        """Whether the answers are probabilities of classes or labels that a temperature can change."""
        return KINDS[self.kind].is_named and not hasattr(self.task, "answer")

    @property
    def output(self) -> tuple[str, str]:
        """The name of the answers in exported programs, and what an answer is, for users."""
        rule = KINDS[self.kind]
        return "probabilities" if rule.is_named else "numbers", getattr(self.task, "answers", rule.answer)

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the answers, in their order; () for a single number, which has none."""
        return self.takes.classes if KINDS[self.kind].is_named or len(self.takes.classes) > 1 else ()

    @property
    def files(self) -> bool:
        """Whether its data were image files, which are resized when they are read."""
        return self.data.name in FILES

    @property
    def encoding(self) -> Encoding | None:
        """The encoding of a table's columns; None for other data."""
        columns = self.takes.scaling.columns
        return None if columns is None else make_encoding(columns)

    @property
    def raw_shape(self) -> Shape:
        """The shape of one raw example: of an encoded table one value for each column."""
        columns = self.takes.scaling.columns
        return self.takes.shape if columns is None else (len(columns),)

    @property
    def columns(self) -> list[str] | None:
        """The columns of the table that the model learned from, in the order of the raw example; None without a table."""
        columns = self.takes.scaling.columns
        return [c.name for c in columns] if columns else None if self.takes.columns is None else [*self.takes.columns]

    @property
    def takes_files(self) -> bool:
        """Whether the model learned from files of images or volumes, or from images of whole numbers, as such files hold."""
        shape = self.takes.shape
        is_image = isinstance(shape, tuple) and len(shape) == 3 and shape[0] in (1, 3)
        return self.files or (is_image and self.takes.scaling.divisor != 1)

    def is_image(self, path: Path, labelled: bool) -> bool:
        """Return whether a path is an image that the model takes; if labelled, a folder with a folder of images by class."""
        from fedmutual.data.table_file import SUFFIXES  # imports pandas, which takes 0.3 s

        is_saved, is_array = self.data.name == "datasets" and path.is_dir(), path.suffix.lower() in (*SUFFIXES, ".npz")
        return self.takes_files and not is_saved and (path.is_dir() if labelled else not is_array)

    def read_file(self, path: Path, data: DataConfig, labelled: bool) -> Source:
        """Return the rows of a table, of arrays, or of a folder that the library datasets saved, unscaled.

        data: how the files of the training are read.

        Raises:
            DataError: the path is of no such kind, or the rows do not fit the model.
        """
        from fedmutual.data.space_files import read_file  # imports pandas

        with self.use_code():
            read = read_file(path, self.takes, data, labelled)
        if read is None:
            unlabelled = "contains no labelled examples for this model"
            why = unlabelled if labelled else "the model learned from data of another kind"
            wanted = self.describe_inputs(self.data.label_columns if labelled else None)
            raise DataError(f"{path}: {why}; give it {wanted}")
        return read[0]

    def read_frame(self, frame: Any, place: str) -> Part:
        """Return the columns of a DataFrame that the model learned from as its rows, without labels, as those of a file.

        Raises:
            DataError: a column is missing, or cells cannot be used.
        """
        from fedmutual.data import table  # imports pandas, which takes 0.3 s

        return table.read_rows(place, self.takes, self.data, frame=frame)[0]

    def make_scaler(self) -> Callable[[Inputs], Inputs]:
        """Return the function from raw examples [B, *raw_shape] to the network's inputs [B, *shape]."""
        encoding = self.encoding
        return self.takes.scaling if encoding is None else lambda x: encoding(list_tensors(x)[0])

    def compute_answers(self, outputs: Tensor) -> Tensor:
        """Return the answers for the network's outputs, of the same shape, as float64.

        Probabilities of classes [B, C], of labels [B, L], of each pixel's classes [B, C, *sides], or numbers [B, outputs];
        with a calibration those of outputs / temperature.
        """
        return compute_answers(self.task, self.apply_temperature(outputs))

    def apply_temperature(self, outputs: Tensor) -> Tensor:
        """Return outputs / temperature; without a calibration the outputs."""
        return outputs if self.calibration is None else outputs.double() / self.calibration.temperature

    def compute_outputs(self, raw: Inputs, where: Callable[[int], str]) -> Tensor:
        """Return the network's outputs [B, C, ...] for raw examples [B, *raw_shape].

        where: position in the batch -> the name of the example in messages.

        Raises:
            BadRows: the examples do not have the model's shape, or hold NaN or infinite values.
            RunError: the outputs of an example are not finite, so that they predict nothing.
        """
        x = self.make_scaler()(map_inputs(torch.clone, raw))  # the scaling writes into its argument, which is the caller's
        if get_shape(x) != self.takes.shape:
            raise BadRows(_describe_misfit(where(0), raw, self.takes.shape))
        outputs = forward_in_parts(self.net, check_finite(x, range(len(list_tensors(x)[0])), where))
        unanswered = (~find_finite_answers(outputs)).reshape(len(outputs), -1).any(1)
        if unanswered.any():
            row = int(unanswered.nonzero()[0])
            raise RunError(
                f"{where(row)}: the {self.description} gives outputs that are not finite, so there is no prediction; look "
                "at what the network computes in eval mode"
            )
        return outputs

    @torch.no_grad()
    def compute_row_outputs(self, examples: Examples, rows: Sequence[int], where: Callable[[int], str]) -> Tensor:
        """Return the network's outputs [N, C, ...] for rows of stored examples. where: row -> its name in messages."""
        parts = split_rows(rows)
        return torch.cat([self.compute_outputs(examples.take(part), [*map(where, part)].__getitem__) for part in parts])

    def read_run_data(self) -> tuple[Mapping[str, Prepared], Federation]:
        """Return the data of the run, read again: as they are stored, and divided.

        Raises:
            UserError: the data cannot be read here, or differ from those of the run.
        """
        recorded = read_record(self.folder / PARTITION, RecordedPartition)
        if recorded.kind == "sites" and not recorded.clients:
            raise DataError(
                f"{self.folder}: the rows are at the sites; a site can name its own folder of the federation: "
                "fedmutual score STATE/NAME --client SITE"
            )
        with self.use_code():
            prepared = data.prepare(self.config)
            federation = data.load(self.config, prepared)
        if federation.partition["fingerprint"] != recorded.fingerprint:
            raise DataError(f"{self.folder}: the data of the run have changed; restore them, or name a file to score")
        return prepared, federation

    def list_own_rows(self, federation: Federation, prepared: Mapping[str, Prepared]) -> dict[str, OwnRows]:
        """Return the run's rows that train nothing, by kind: those of the client, or of all clients of a shared model."""
        kinds: dict[str, dict[str, list[Rows]]] = {}
        for client in federation.clients if self.client is None else [self.client]:
            shares = federation.clients[client]
            common = federation.test if isinstance(federation.test, Rows) else None
            held = {"holdout": shares.holdout, "validation": shares.validation, "test": shares.test or common}
            for kind, rows in held.items():
                if rows is not None and len(rows):
                    kinds.setdefault(kind, {}).setdefault(client if client in prepared else "", []).append(rows)
        return {kind: {key: merge_rows(rows) for key, rows in parts.items()} for kind, parts in kinds.items()}

    def compute_own_outputs(self, rows: OwnRows, prepared: Mapping[str, Prepared]) -> tuple[Tensor, Tensor]:
        """Return the network's outputs [N, C, ...] for own rows of the run, and their targets [N, ...]."""
        outputs = [
            self.compute_row_outputs(prepared[key].examples, part.index.tolist(), prepared[key].source.name_row)
            for key, part in rows.items()
        ]
        return torch.cat(outputs), torch.from_numpy(np.concatenate([part.labels for part in rows.values()]))

    def split_arrays(self, x: Any) -> Iterator[tuple[list[str], Inputs]]:
        """Return examples in memory in batches: their names, and unscaled inputs.

        x: an array, tensor or DataFrame `[n, *shape]` of unscaled values; columns of a DataFrame are matched by name. Of a
            model with several inputs a dictionary of arrays; of a model of padded series also a list of series.

        Raises:
            UserError: the examples do not fit the model.
        """
        raw: Inputs
        if is_frame(x) and self.takes.columns is not None:
            part = self.read_frame(x, "x")
            raw = part.x.take(range(len(part.x)))
        else:
            raw = self.convert(self.arrange(x, "x"), "x")
        return split_inputs(raw, "row {} of x".format)

    @torch.no_grad()
    def make_table(self, batches: Iterable[tuple[Sequence[str], Inputs]]) -> "pd.DataFrame":
        """Return the answers for batches of examples, one row for each example [n], as `Run.predict`.

        Raises:
            UserError: the examples do not fit the model, or an output is not finite.
        """
        import pandas as pd  # takes 0.3 s

        classes = self.takes.classes
        answers = torch.cat([self.compute_answers(self.compute_outputs(rows, names.__getitem__)) for names, rows in batches])
        if self.kind == "masks":
            return pd.DataFrame({name: list(answers[:, k].numpy()) for k, name in enumerate(classes)})
        is_named = answers.shape[1] == len(classes)
        return pd.DataFrame(answers.numpy(), columns=[*classes] if is_named else [*map(str, range(answers.shape[1]))])

    def arrange(self, x: Any, name: str) -> Any:
        """Return inputs in memory as an array [n, ...], or as several by name, with series as long as those of the training.

        Raises:
            DataError: as `objects.convert_features`.
        """
        shape, steps = self.takes.shape, self.steps or 0
        if steps and isinstance(x, np.ndarray | Tensor) and x.ndim:
            x = [*x]  # series of one length
        named, shapes = name_inputs(x), shape if isinstance(shape, Shapes) else Shapes()
        series = {k: list_rows(named[k]) for k, one in shapes.items() if k in named and one[:1] == (steps,)}
        longest = max((len(row) for rows in series.values() for row in rows), default=0)
        if longest > steps:
            warn_user(f"{name}: series are cut to the {steps} steps of the training; the longest has {longest}")
        return convert_inputs(x, name, {k: steps for k, rows in series.items() if rows})

    @property
    def steps(self) -> int | None:
        """The length to which series were filled up in training; None without a mask."""
        shape = self.takes.shape
        return next((shape[mask][0] for mask in MASKS if mask in shape), None) if isinstance(shape, Shapes) else None

    def convert(self, x: Any, name: str) -> Inputs:
        """Return an array [n, ...], or several by name, as unscaled inputs. name: of the array in messages.

        Raises:
            DataError: an input is missing, or is no array of numbers that the network can take.
        """
        x, shape = encode_texts(x, self.data), self.takes.shape
        if not isinstance(shape, Shapes):
            if isinstance(x, Mapping):
                raise DataError(f"{name} has the inputs {list_names(list(x))}, and the model takes one array")
            return convert_array(x, name, find_form(self.takes.scaling, shape))
        if not isinstance(x, Mapping) or not shape.keys() <= x.keys():
            raise DataError(
                f"{name}: the model takes the inputs {list_names(list(shape))}; give an array for each by its name"
            )
        return {key: convert_input(x[key], f"{name}: input {key!r}") for key in shape}

    def describe_inputs(self, labels: Sequence[str] | None = None) -> str:
        """Return in words which files the model takes. labels: the columns of labels, of files that have them."""
        columns = [*(self.columns or ()), *(self.data.text or ()), *(labels or ())]
        if self.takes.columns is not None:
            return f"a CSV file with the columns {list_names(columns)}"
        if self.takes_files and labels is None:
            return "images" if len(self.takes.shape) == 3 else "volumes"
        shape = self.takes.shape
        shapes = shape if isinstance(shape, Shapes) else {"x": shape}
        array = " and ".join(f"{key!r} of shape [n, {', '.join(map(str, one))}]" for key, one in shapes.items())
        saved = ", or a folder that datasets saved" if self.data.name == "datasets" else ""
        if labels is None:
            return f"an npz file with an array {array}{saved}"
        folder = ", or a folder as those of the training" if self.takes_files else saved
        return f"an npz file with the arrays {array} and 'y'{folder}"


def split_rows(rows: Sequence[int]) -> Iterator[Sequence[int]]:
    """Yield the rows in parts that are computed at once."""
    return (rows[start : start + ROWS_AT_ONCE] for start in range(0, len(rows), ROWS_AT_ONCE))


def split_inputs(x: Inputs, where: Callable[[int], str]) -> Iterator[tuple[list[str], Inputs]]:
    """Yield batches of inputs: the names of the rows, and the rows. where: position -> the name of the row in messages."""
    for rows in split_rows(range(len(list_tensors(x)[0]))):
        yield [*map(where, rows)], map_inputs(itemgetter(slice(rows[0], rows[-1] + 1)), x)


def _describe_misfit(where: str, x: Inputs, shape: Shape) -> str:
    if isinstance(shape, Shapes) or not isinstance(x, Tensor):
        return f"{where} has the inputs {format_shape(get_shape(x))}, and the model takes {format_shape(shape)}"
    got, wanted = list(x.shape[1:]), list(shape)
    if len(got) == len(wanted) == 3 and got[0] == wanted[0]:
        size = f"{got[1]} x {got[2]} pixels and the model takes {wanted[1]} x {wanted[2]}"
        return f"{where} is {size}; resize it, or train with data.size = [{wanted[1]}, {wanted[2]}], which resizes all"
    return f"{where} has the shape {got}, and the model takes {wanted}"
