"""The schema of the files in a run's folder, as far as fedmutual reads them."""

import math
from typing import Annotated, Any, Literal, NamedTuple, Self

from pydantic import AfterValidator, AliasPath, BaseModel, ConfigDict, Field, PositiveInt, model_validator

from fedmutual.metric import ACCURACY, Metric
from fedmutual.role import Role

Share = Annotated[float, Field(ge=0, le=1)]
Number = Annotated[int, Field(ge=0, lt=2**63)]
_MOST_VALUES = 2**27  # of one example; a folder from somebody else may declare any shape
_MOST_OUTPUTS = 2**16  # of a network whose outputs are not its classes


class Record(BaseModel):
    """The keys that a file must hold. Other keys are kept but not read, so that a later version may add keys."""

    model_config = ConfigDict(frozen=True, extra="allow", strict=True, populate_by_name=True)


class ClassScores(Record):
    """The scores of a classifier on a set of rows. Fractions in [0, 1]; None if a score is undefined or not shared."""

    examples: int | None = None
    accuracy: Share | None = None
    loss: float | None = None
    balanced_accuracy: Share | None = None
    auroc: Share | None = None
    majority: Share | None = None
    recall: Annotated[list[Share | None] | None, Field(strict=False)] = None  # one value per class


class ScoreRow(Record):
    """All scores of a model on a set of rows, by name; the task of the rows declares the names."""

    model: str  # "global", "personal", "ensemble", or "meme": a client's fork where no complete global model exists
    client: str | None = None  # None: the common test set; missing in the log of a client's own folder
    data: str  # "test", "validation" or "holdout"; for domains also "test.own", "test.others", "validation.all"

    @model_validator(mode="after")
    def _check_class_scores(self) -> Self:
        if self.has_accuracy:
            ClassScores.model_validate(self.values)
        return self

    @property
    def values(self) -> dict[str, Any]:
        """Return all scores by name, in the order of the file: numbers, lists with a number per class, or None."""
        return self.model_extra or {}

    @property
    def has_accuracy(self) -> bool:
        """Return whether these are the scores of a classifier."""
        return self.values.get("accuracy") is not None

    def find_number(self, name: str) -> float | None:
        """Return a score that is a number; None where the score is missing, undefined or no number."""
        value = self.values.get(name)
        return value if isinstance(value, int | float) else None


class LogLine(Record):
    """A line of metrics.jsonl or ledger.jsonl."""

    round: Number


class Evaluation(LogLine):
    """A line of metrics.jsonl: the scores after a round."""

    round: Annotated[int, Field(ge=1)]
    train: dict[str, dict[str, float]] = {}  # client -> loss term -> its mean over the round
    rows: tuple[ScoreRow, ...] = Field(default=(), alias="scores")

    def get_client_scores(self, model: str | None, data: str, metric: str = "accuracy") -> dict[str, float]:
        """Return a metric of a model on each client's rows, by client; clients without the metric are left out."""
        scores = {row.client: row.find_number(metric) for row in self.rows if (row.model, row.data) == (model, data)}
        return {i: value for i, value in scores.items() if i is not None and value is not None}


SEED = "seed"
"""The phase of round 0 in which clients send their public data once; reports and summaries keep its bytes apart."""

SHORT = {"personal": "personal", "ensemble": "ensemble", "global": "shared", "meme": "fork"}
"""`ScoreRow.model` -> its name in tables and in lines of text."""

TRANSFER_DATA = {"acc": "test", "bwt": "test.own", "fwt": "test.others"}
"""Measure -> test rows of the accuracy: of all nodes together, of the node's domain, of the other nodes together."""


class LedgerLine(LogLine):
    """A line of ledger.jsonl: bytes of the tensors sent down to a client and up from it in a phase, also in round 0."""

    phase: str
    client: str
    down: Number
    up: Number
    # Gradient steps; None for real sites, which do not send the number, and for earlier versions.
    steps: Number | None = None
    forwards: Number | None = None  # forward passes of these steps; None where they were not counted


class RecordedRows(Record):
    """A part of a client's rows: their numbers in the training part or in the test set of the data."""

    of: Literal["train", "test"] | None = None  # None: not recorded
    rows: tuple[Number, ...] = ()


class RecordedClient(Record):
    """The rows of a client, and their numbers per class."""

    private: RecordedRows | None = None
    public: RecordedRows | None = None
    validation: RecordedRows | None = None
    holdout: RecordedRows | None = None
    test: RecordedRows | None = None
    counts: dict[str, tuple[int, ...]]  # kind of rows -> examples per class, in the order of the classes
    source: str | None = None  # this and the next key: of a client with data of its own
    classes: tuple[str, ...] | None = None

    @model_validator(mode="after")
    def _check_counts(self) -> Self:
        if "private" not in self.counts:
            raise ValueError("counts has no key 'private'")
        return self

    @property
    def training(self) -> tuple[int, ...]:
        """Return the examples per class of the private and the public rows."""
        private = self.counts["private"]
        return tuple(map(sum, zip(private, self.counts.get("public", (0,) * len(private)), strict=True)))


class RecordedTestSet(Record):
    """The common test set."""

    examples: Number
    counts: tuple[int, ...]  # per class
    rows: tuple[Number, ...] | None = None  # in the training part; None: the test part of the data


class RecordedPartition(Record):
    """The content of partition.json: the rows of each client, with a fingerprint."""

    format: Literal[1] = 1
    source: str
    kind: str
    seed: int | None = None  # None: the server of real sites
    classes: tuple[str, ...]
    data: str | None = None  # the digest of the examples; None: the clients have data of their own
    fingerprint: str
    test: RecordedTestSet | None = None
    clients: dict[str, RecordedClient]


RecordedShape = tuple[PositiveInt, ...] | dict[str, tuple[PositiveInt, ...]]
"""The shape of one example, or of several inputs by name."""


class RecordedNetwork(Record):
    """A network of a run."""

    name: str
    parameters: int | None = None  # the number of parameters
    weights: str | None = None  # the source of the first weights


class RecordedNetworks(Record):
    """The networks of a run."""

    input: RecordedShape | None = None  # the shape of one example
    classes: int | None = None  # the number of classes
    shared: RecordedNetwork | None = None
    personal: dict[str, RecordedNetwork] = {}  # by client


class RecordedColumn(Record):
    """How the cells of a table's column become features.

    A category becomes one feature of 0 or 1 for each value. A missing number or date is replaced by `fill`, and then becomes
    (cell - `mean`) / `std`; a date is its days since 1970-01-01. With `indicator` a last feature is 1 where the cell is
    missing, else 0.
    """

    name: str
    kind: Literal["number", "category", "date"]
    values: tuple[str, ...] = ()  # of a category: one feature each; all are 0 for a missing or unknown value
    fill: float = 0.0  # replaces a missing number or date
    mean: float = 0.0
    std: Annotated[float, Field(gt=0)] = 1.0
    indicator: bool = False


class RecordedScaling(Record):
    """The scaling, resizing and augmentation of inputs: x / divisor, then (x - mean) / std for each channel."""

    divisor: Annotated[float, Field(gt=0)] = 1.0
    mean: tuple[float, ...] = ()
    std: tuple[float, ...] = ()
    size: tuple[PositiveInt, ...] | None = None
    augment: str = "none"
    dtype: Literal["int64", "bool"] | None = None  # of ids, which are not scaled
    inputs: dict[str, "RecordedScaling"] | None = None  # of several inputs
    columns: tuple[RecordedColumn, ...] | None = None


class Participant(Record):
    """The inputs and outputs of a client's networks."""

    input: RecordedShape  # the shape of one example
    outputs: PositiveInt
    classes: tuple[str, ...]
    scaling: RecordedScaling
    task: str
    columns: tuple[str, ...] | None = None

    @model_validator(mode="after")
    def _check_sizes(self) -> Self:
        shapes = [*self.input.values()] if isinstance(self.input, dict) else [self.input]
        if sum(map(math.prod, shapes)) > _MOST_VALUES:
            raise ValueError(f"an example of shape {shapes} has more than {_MOST_VALUES:,} values")
        if self.outputs > max(len(self.classes), _MOST_OUTPUTS):
            raise ValueError(f"{len(self.classes)} classes have {self.outputs:,} outputs")
        if self.scaling.size is not None and tuple(self.scaling.size) != shapes[0][1:]:
            raise ValueError(f"examples of shape {list(shapes[0])} are resized to {list(self.scaling.size)}")
        return self


class RecordedEngine(Record):
    """The engine that trains a run, and the reason for its choice."""

    name: str
    workers: int | None = None
    why: str | None = None


class MethodAbout(Record):
    """The description of a method. Folders of earlier versions lack this table, or its role."""

    title: str  # the name in tables
    preset: tuple[str, ...]  # the keys that the name of a preset method sets
    role: Role | None = None  # in comparisons
    shares: bool  # whether it has a shared model


class Environment(Record):
    """The content of environment.json: the machine, the versions, the networks and the clients of a run."""

    fedmutual: str | None = None
    torch: str | None = None
    torchvision: str | None = None
    python: str | None = None
    platform: str | None = None
    cpus: int | None = None
    threads: int | None = None
    products: Literal["blas", "onednn"] | None = None  # None: not on a CPU
    device: str | None = None
    command: str | None = None
    engine: RecordedEngine | None = None
    scaling: RecordedScaling | None = None  # None: the server of real sites
    statistics: dict[str, Any] | None = None  # of the training rows of all clients, if the clients have summed them
    algorithm: MethodAbout | None = None
    pooled: bool = False  # whether one network learns from all data in one place
    models: RecordedNetworks = RecordedNetworks()
    metric: Metric | None = None  # None: accuracy
    clients: dict[str, Participant] = {}
    modules: dict[str, str] | None = None  # the first part of the name of a user's module -> the digest of its code

    @property
    def main_metric(self) -> Metric:
        """Return the metric that all clients have in common; accuracy without a common metric."""
        return self.metric or ACCURACY


class GlobalSummary(Record):
    """The main metric of the shared model on the test set: after the last round, and after the best round."""

    last: float
    best: float
    best_round: int
    best_by: str


class ClientScores(Record):
    """The main metric of the clients after a round."""

    mean: float
    worst: float
    per_client: dict[str, float]
    best_round: int | None = None
    best_by: str | None = None


class Ends(Record):
    """A metric of the clients after the last round, and after the best round: of all clients, or of each domain."""

    last: ClientScores
    best: ClientScores


class GlobalPart(Record):
    """The part of a summary about the shared model."""

    test_accuracy: GlobalSummary | None = None
    test_metric: GlobalSummary | None = None  # of a run with another main metric

    @property
    def test(self) -> GlobalSummary | None:
        """Return the main metric on the test set; None without a score."""
        return self.test_accuracy or self.test_metric


class PersonalPart(Record):
    """The part of a summary about the clients."""

    model: str | None = None  # the model that a client would use; None: no client shares its scores
    val_accuracy: Ends | None = None
    val_metric: Ends | None = None  # of a run with another main metric
    other_tasks: dict[Literal["last"], dict[str, dict[str, Any]]] | None = None  # of clients without an accuracy

    @property
    def validation(self) -> Ends | None:
        """Return the main metric on validation data; None without a score."""
        return self.val_accuracy or self.val_metric


class NodeMeasures(Record):
    """The part of a summary on nodes that are domains: fractions in [0, 1].

    The measures are those of FedH2L (Li et al. 2021, https://arxiv.org/abs/2101.11296, Experiments).
    """

    acc: Ends | None = None
    bwt: Ends | None = None
    fwt: Ends | None = None  # None for a single node
    best_rounds: dict[str, int]
    best_by: str  # "validation.all", "validation", "holdout" or "test"


class ProjectedShare(Record):
    """The share of a node's mutual steps in which a gradient was projected."""

    mean: Share
    per_client: dict[str, Share]


class RecordedBudget(Record):
    """The privacy budget that a client spent."""

    epsilon: float | None  # None: infinite
    steps: int  # steps with noise
    rate: float  # the probability that a row is in the batch of a step


class RecordedGuarantee(Record):
    """The differential privacy of a run: the keys of [privacy], and the cost of each client."""

    nets: str  # the networks that train with noise
    sigma: float  # the noise in units of the clipping norm
    delta: float
    unit: str
    clients: dict[str, RecordedBudget]

    @property
    def epsilon(self) -> float | None:
        """The largest epsilon of any client; None: infinite."""
        spent = [client.epsilon for client in self.clients.values()]
        return None if None in spent else max((one for one in spent if one is not None), default=0.0)


class Summary(Record):
    """The content of summary.json, which is written at the end of a run."""

    name: str | None = None
    algorithm: str | None = None
    rounds: int
    seed: int | None = None
    global_: GlobalPart | None = Field(default=None, alias="global")
    personal: PersonalPart | None = None
    metric: str | None = None  # the main metric; None: accuracy
    transfer: NodeMeasures | None = None
    projected: ProjectedShare | None = None
    bytes: dict[str, int] | None = None  # of all clients: up, down, and seed, the public data; None: of a real site
    seconds: float | None = None
    leaves: dict[str, dict[str, tuple[str, tuple[int, ...]]]] | None = None  # phase -> name -> dtype, shape
    data: dict[str, Any] | None = None  # name, classes
    fingerprint: str | None = None  # of the data and their partition
    privacy: RecordedGuarantee | None = None  # None: no noise was added


class Saved(Record):
    """The content of checkpoint.json."""

    run: str  # the run's identity
    round: int  # the last round of which all state files are complete; 0: the start
    seconds: float  # spent on the run until then


def _refuse_nan(merit: float) -> float:
    if math.isnan(merit):
        raise ValueError("a merit is a number")  # every later round would replace the best one
    return merit


class BestHeader(Record):
    """The header of a file of best weights. Its numbers are texts in the file."""

    round: Annotated[int, Field(strict=False, ge=1)]
    merit: Annotated[float, Field(strict=False), AfterValidator(_refuse_nan)]  # how good the round is, greater is better


class PretrainedHeader(Record):
    """The header of a file of pretrained weights."""

    client: str  # "": all clients
    network: str
    weights: str  # their description


class TunedRecord(Record):
    """The content of tuned.json: the values that `compare --tune` chose."""

    set: dict[str, str]  # dotted key -> value
    chosen_by: str | None = None  # the rows of the score that chose the values
    tried: int | None = None  # the number of settings that were trained
    budget: int | None = None  # the most settings that could be trained
    sweep: str | None = None  # the folder of the trials


Measured = tuple[float, float, float]
"""A share of rows, and the ends of its 95 % interval."""


class Reliability(Record):
    """How far probabilities are from frequencies on some rows."""

    rows: str  # "test", "validation", or a file
    examples: int
    error: Measured  # the expected calibration error
    uncalibrated: float  # the error without the temperature
    bins: tuple[tuple[float, float, int], ...]  # of each bin its mean probability, its frequency, its number
    decisions: dict[str, tuple[Measured | None, Measured | None]]  # by threshold its sensitivity and its specificity


class ModelRecord(Record):
    """What was measured with a saved model after training."""

    client: str | None  # None: a shared model, on the rows of all clients
    role: str  # of the model, as in `ScoreRow.model`
    round: int  # of its weights

    @property
    def identity(self) -> tuple[str | None, str, int]:
        """Return what identifies the model."""
        return self.client, self.role, self.round


class Calibration(ModelRecord):
    """What was fitted to a model's probabilities after training, and what other rows show of it."""

    fitted_on: str  # "validation" or "holdout"
    examples: int
    temperature: Annotated[float, Field(gt=0)]  # the divisor of outputs
    loss: tuple[float, float]  # the cross-entropy of these rows, before and after
    sensitivity: float | None  # that each threshold reaches on these rows; None: no thresholds were fitted
    thresholds: dict[str, float | None] = {}  # by class or label ("3 or above"); None: all rows have it, or none
    seen: tuple[Reliability, ...] = ()


class Calibrations(Record):
    """The content of calibration.json."""

    models: tuple[Calibration, ...]


class GroupScore(NamedTuple):
    """The main metric of the rows of one group, and how much higher it is than that of all other rows."""

    examples: int
    value: float | None  # None where it is undefined
    interval: tuple[float, float] | None  # 95 %
    difference: float | None
    difference_interval: tuple[float, float] | None


class Subgroups(ModelRecord):
    """The scores of a model on groups of the run's test rows."""

    by: str  # the column whose values are the groups
    metric: Metric
    groups: dict[str, GroupScore]


class SubgroupsFile(Record):
    """The content of subgroups.json."""

    models: tuple[Subgroups, ...]


class RunSettings(Record):
    """The keys of config.toml that a report reads by name."""

    name: str
    seed: int
    rounds: int
    algorithm: str = Field(validation_alias=AliasPath("algorithm", "name"))
    local_steps: int | None = Field(None, validation_alias=AliasPath("training", "local_steps"))  # None: it counts epochs
    participants: Annotated[tuple[str, ...] | None, Field(strict=False)] = None  # None: all clients
