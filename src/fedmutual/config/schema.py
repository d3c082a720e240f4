"""Every key of a configuration, its type, its default and its meaning. Keys of [algorithm] are the algorithm's own: see
methods.py. `fedmutual list keys` prints all of them."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Annotated, Any, ClassVar, Literal, get_type_hints

from pydantic import BeforeValidator, ConfigDict, Field, create_model, model_validator

from fedmutual.config import keys
from fedmutual.config.keys import OnlyIfs, Section, Table, key, list_effects, read_effect
from fedmutual.errors import join_words
from fedmutual.role import DEFAULT_ALGORITHM
from fedmutual.settings import COMMON_OPTIMIZERS, TRIM, Disclosure, OnlyIf, Products, Rule, Sum

OWN = "module:factory"  # in a condition: any name of a user's own code
LABELLED = ("classification", "segmentation", "multilabel")  # the tasks whose loss has weights of classes


def _if_algorithm(about: str, remark: str, *traits: str) -> OnlyIf:
    """Return the condition of a trait of the algorithm: "federated", "averaged", "public", or one of `Algorithm.scores`."""
    return OnlyIf("algorithm", traits, about=f"the algorithm {about}", remark=f"algorithm {{name!r}} {remark}")


def _if_engine(*names: str) -> tuple[OnlyIf]:
    """Return the condition that the engine of a run, or the value of `engine.name`, is one of these names."""
    about = f"the engine is {join_words(names, 'or')}"
    return (OnlyIf("engine", names, about=about, remark="engine {value!r} does the work"),)


_DIVIDED = OnlyIf("clients.ID.data", (None,))
_FROM_FILES = OnlyIf("data.name", ("folder", "npz", "csv", "parquet"))
_OF_TABLES = OnlyIf("data.name", ("csv", "parquet", OWN))
_WITH_TEXT = OnlyIf("data.name", ("csv", "parquet", "npz", "datasets", OWN))
_GROUPED = OnlyIf("data.name", ("folder", "npz", "csv", "parquet", OWN))
_UNFOLDED = (OnlyIf("partition.kind", ("pfllib",), negated=True), OnlyIf("split.folds", (None,)))
_BY_EPOCHS = OnlyIf("training.local_steps", (None,), remark="algorithm {name!r} counts a round in training.local_steps")
_SGD = OnlyIf("optimizer.name", ("sgd", "rmsprop", "muon", OWN))
_OF_CLASSES = OnlyIf("training.task", LABELLED)
_OWN_LOSS = OnlyIf("training.loss", (None,))
_NOISED = OnlyIf("privacy.nets", ("none",), negated=True, remark="privacy.nets is 'none'")
_FEDERATED = _if_algorithm("is not centralised", "trains one network on all data", "federated")
_PERSONAL = _if_algorithm("trains personal networks", "trains no personal networks", "personal")
_SHARED = _if_algorithm("shares a model", "shares no model", "global", "proxy")
_ON_SERVER = _if_algorithm("shares a model through the server", "shares no model", "global")
_PUBLIC = _if_algorithm("uses public data", "uses no public data", "public")
_AVERAGED = _if_algorithm("averages what clients send", "makes no mean of what clients send", "averaged")


class ColumnConfig(Section):
    """How one column of a table becomes features. Unset numbers and values are learned from each client's training rows."""

    kind: Literal["number", "category", "date"] = key("number")
    """the kind of the cells; dates have the form 2026-05-31, or this form with a time"""
    values: keys.ColumnValues | None = key()
    """category: the values, each of which becomes a feature; an empty cell has no value; unset, the values in the training
    rows"""
    fill: float | None = key()
    """number, date (days since 1970-01-01): replaces an empty cell; unset, the median of the training rows"""
    mean: float | None = key()
    """number, date: subtracted; unset, the mean of the training rows"""
    std: keys.Positive | None = key()
    """number, date: divided by; unset, the standard deviation of the training rows"""
    indicator: bool = key(False)
    """add a feature that is 1 where the cell is empty, else 0; then a client may lack the column, whose cells are all empty
    there: a number or a date needs `fill`"""

    @model_validator(mode="after")
    def _check_kind(self) -> "ColumnConfig":
        foreign = ("fill", "mean", "std") if self.kind == "category" else ("values",)
        if unfit := [k for k in foreign if getattr(self, k) is not None]:
            raise ValueError(f"a column of the kind {self.kind!r} has no {unfit[0]!r}")
        if (self.mean is None) != (self.std is None):
            raise ValueError("the mean and the std of a column must be set together")
        return self


def _make_column_table(value: object) -> object:
    """Return the table of a column that is given as text (the kind) or as a list (the values of a category)."""
    if isinstance(value, str):
        return {"kind": value}
    return {"kind": "category", "values": value} if isinstance(value, list | tuple) else value


class DataConfig(Section):
    """The source of the examples: files or a published data set, labels, features, and the scaling of inputs."""

    name: str = key("digits")
    """digits, mnist, cifar10, cifar100, rotated-mnist, pacs, office-home, tiny-imagenet, medmnist, femnist, folder, npz,
    csv, parquet, datasets; your own as "module:factory" """
    root: keys.PathSetting | None = key(affects="machine")
    """the file or folder, relative to the working folder; for a published set its cache folder"""
    test: keys.PathSetting | None = key(only_if=(_FROM_FILES,))
    """a separate test file or folder; unset, the fraction `split.test` of the rows is the test set"""
    inputs: keys.Names | None = key(only_if=(OnlyIf("data.name", ("npz", "datasets")),))
    """the names of the arrays that are the inputs of an example together; unset, the array x"""
    text: keys.Names | None = key(only_if=(_WITH_TEXT,))
    """the columns of text: joined, they are the inputs input_ids and attention_mask; other features are the input table"""
    tokenizer: str = key("hash", only_if=(_WITH_TEXT,))
    """hash: ids are digests of words; or a tokenizer.json, or a folder that transformers saved (the extra `text`)"""
    words: Annotated[int, Field(ge=2)] = key(30000, only_if=(OnlyIf("data.tokenizer", ("hash",)),))
    """the number of ids of the hashing tokenizer; 0 fills up short texts"""
    length: keys.Count | None = key(only_if=(_WITH_TEXT,))
    """the tokens of a text, 128 if unset, or the steps of a series, those of the longest if unset; longer ones are cut"""
    classes: keys.Names | None = key()
    """the federation's classes, in the order of the outputs; unset, the classes of the data"""
    labels: dict[str, str] = key({})
    """a table of label = class: renames the labels of the data"""
    label: keys.LabelColumns = key("label", only_if=(OnlyIf("data.name", ("csv", "parquet", "datasets", "folder", OWN)),))
    """csv, parquet, datasets: the column of the label; or a list of columns: of 0 and 1 (multilabel), of numbers
    (regression), of the time and the event (survival, cox); folder: columns of its metadata.csv, a row a file"""
    unlabelled: bool = key(False)
    """whether labels may be missing: blank cells, None, NaN, and values that `data.labels` renames to "". Examples without a
    label teach only by the other network's prediction, and are not scored"""
    uncertain: Literal["ignore", "0", "1"] | None = key()
    """multilabel: the value of labels that are -1, which marks an uncertain finding; "ignore": as a missing label"""
    times: keys.Times | None = key()
    """survival: the ends of the intervals of time, in the unit of the data; unset, the powers of 2 from 2^-10 to 2^20"""
    drop: keys.Names | None = key(only_if=(_OF_TABLES,))
    """columns that are not features, for example an identifier"""
    columns: dict[str, Annotated[ColumnConfig, BeforeValidator(_make_column_table)]] = key({}, only_if=(_OF_TABLES,))
    """the features by name, each with its kind; unset, all other columns are features, and are numbers"""
    replace: dict[str, dict[str, str]] = key({}, only_if=(_OF_TABLES,))
    """a table of cell = replacement for each column of features; the replacement "" is an empty cell"""
    date_format: keys.DateFormat | None = key(only_if=(_OF_TABLES,))
    """the form of dates, for example "%d.%m.%Y"; dates such as 2026-05-31 are read too, unless the form could read them as
    another day, as "%Y-%d-%m" does"""
    group_by: str | None = key(only_if=(_GROUPED,))
    """the column of groups (patient, account); no group appears in both training and evaluation"""
    angles: keys.Angles | None = key()
    """makes one domain for each angle: all images, rotated clockwise by the angle, in degrees"""
    per_class: keys.Count | None = key()
    """`data.angles`: the number of training images for each class, drawn at random; unset, all images"""
    size: keys.Sides | None = key()
    """resize images to [height, width], in pixels, and volumes in files to [depth, height, width]"""
    max: keys.Positive | None = key(only_if=(OnlyIf("data.name", ("folder",)),))
    """the greatest value that an image of the folder can hold, by which its values are divided; unset, 255 for images of 8
    bits, and no division of DICOM and NIfTI"""
    slices: bool = key(False, only_if=(OnlyIf("data.name", ("folder",)),))
    """read the DICOM slices in one folder, which are one series, as one volume with the folder's name"""
    mean: keys.Means | None = key()
    """subtracted from inputs (images: x / 255), a value for each channel or column; published sets have known values;
    "federated": the mean of the training rows of all clients"""
    std: keys.Spreads | None = key()
    """the divisor of inputs after the subtraction, a value for each channel or column; needs `data.mean`; "federated": the
    standard deviation of the training rows of all clients"""
    augment: Literal["none", "crop-flip"] = key("none")
    """the random augmentation of training images"""
    resident: bool | None = key(affects="machine")
    """keep all rows in memory; unset, true if the rows take less than 4 GiB"""
    workers: Annotated[int, Field(ge=0)] = key(0, affects="machine", only_if=_if_engine("inprocess", "stacked", "cluster"))
    """processes that read rows from disk if the rows are not in memory"""

    @property
    def label_columns(self) -> tuple[str, ...]:
        """The columns of a table that hold the labels."""
        return (self.label,) if isinstance(self.label, str) else self.label


_PFLLIB = {"clients": 20, "alpha": 0.1}  # its published tables'


class PartitionConfig(Section):
    """Which client has which training examples."""

    only_if: ClassVar[OnlyIfs] = (_DIVIDED,)
    kind: Literal["iid", "shards", "dirichlet", "pfllib", "domains", "file"] = key("iid")
    """how the examples are divided; pfllib: all rows by the Dirichlet rule of the library PFLlib, with a quarter of each
    client's rows for evaluation"""
    clients: keys.Count = key(5)
    """the number of participants, 20 with pfllib; domains and file set it themselves"""
    classes_per_client: keys.Count | None = key(only_if=(_DIVIDED, OnlyIf("partition.kind", ("shards",))))
    """required: the number of classes of a client"""
    alpha: keys.Positive | None = key(only_if=(_DIVIDED, OnlyIf("partition.kind", ("dirichlet", "pfllib"))))
    """small values give uneven class proportions, large values even ones; dirichlet: required; pfllib: 0.1 if unset"""
    min_size: keys.Count = key(10, only_if=(_DIVIDED, OnlyIf("partition.kind", ("dirichlet",))))
    """the least number of examples of a client; the division is drawn again until every client has this number"""
    examples: keys.Count | None = key(only_if=(OnlyIf("partition.kind", ("file",), negated=True),))
    """the most training examples of a client, drawn at random"""
    file: keys.PathSetting | None = key(only_if=(_DIVIDED, OnlyIf("partition.kind", ("file",))))
    """required: the partition.json of an earlier run"""

    @model_validator(mode="before")
    @classmethod
    def _fill_protocol(cls, table: Any) -> Any:
        """Set the numbers of PFLlib's protocol if the table leaves them unset."""
        protocol = isinstance(table, Mapping) and table.get("kind") == "pfllib"
        return {**_PFLLIB, **{k: v for k, v in table.items() if v is not None}} if protocol else table


class SplitConfig(Section):
    """Which rows are held out."""

    only_if: ClassVar[OnlyIfs] = (OnlyIf("partition.kind", ("pfllib",), negated=True),)
    preset: Literal["journal", "v1"] = key("journal", only_if=_UNFOLDED)
    """a client's validation data: one of K parts of the test set, in the class proportions of the client (journal), or a
    tenth of its training data (v1); K is the number of clients"""
    private: keys.Share | None = key(only_if=_UNFOLDED)
    """if set, private, public, validation and test are fractions of all rows of a client, with a sum of at most 1"""
    public: keys.Fraction = key(0.0, only_if=())
    """the fraction of each client's training data that it gives to the public seed set"""
    public_file: keys.PathSetting | None = key(only_if=(_PUBLIC,))
    """the public seed set in place of rows of the clients: a CSV, Parquet or npz file, or a folder, in the form of the
    clients' data, with or without labels"""
    validation: keys.Fraction | None = key(only_if=_UNFOLDED)
    """the fraction of a client's training data that is validation data; unset, by `split.preset`"""
    holdout: keys.Fraction = key(0.0, only_if=())
    """the fraction of each client's training data that is held out to choose a round or a setting"""
    test: keys.Fraction = key(0.2, only_if=_UNFOLDED)
    """the fraction of all rows that is the test set, if the data have no test set"""
    folds: Annotated[int, Field(ge=2)] | None = key(only_if=(OnlyIf("partition.kind", ("pfllib", "file"), negated=True),))
    """cross-validation: the rows of each client are divided into this number of folds, and as many runs, each with another
    fold as validation data (and as test data, if the data have no test set), score every row once"""
    fold: Annotated[int, Field(ge=0)] | None = key(only_if=(OnlyIf("split.folds", (None,), negated=True),))
    """the fold of this run, from 0; unset, all folds are trained"""
    shared: bool | None = key()
    """one split for all domains that have the same images (`data.angles`); unset, true for these domains; with false clients
    train on rotated test images"""


class ModelConfig(Section):
    """The shared network and the personal networks."""

    shared: str = key("mlp")
    """the shared network: a name of `fedmutual list models`, or your own as "module:factory" """
    personal: keys.Names | None = key(only_if=(_FEDERATED, _PERSONAL))
    """the personal networks, which never leave a client: one name, or one name for each client; unset, the architecture of
    the shared network"""
    part: keys.Parts | None = key(only_if=(_SHARED,))
    """the modules of the network that are shared, for example "features"; unset, all modules"""
    adaptor: str = key("linear", only_if=(OnlyIf("model.part", (None,), negated=True),))
    """the private layers after `model.part`: one layer; the network's other layers ("rest"); or "module:factory" """
    batchnorm: Literal["average", "local"] = key(
        "average", only_if=(_SHARED, OnlyIf("networks", about="the shared network has BatchNorm layers"))
    )
    """BatchNorm layers are averaged (average), or are not sent (local)"""
    start: Literal["own", "server"] = key("own", only_if=(_FEDERATED, _PERSONAL))
    """personal networks start from their own random weights (own), or from the server's weights (server)"""
    weights: keys.PathSetting | None = key(
        unused_on_sites="the server begins with random weights, or resumes with its own weights",
        only_if=(OnlyIf("networks", about="networks start from the server's weights"),),
    )
    """the folder of a run; the server starts with the shared model of that run"""
    pretrained: keys.Pretrained | None = key()
    """the initial weights of networks, except for the last layer: "imagenet", a file, or a folder of files; unset, random
    weights"""


class TrainingConfig(Section):
    """The local work of a round."""

    clip_norm: keys.Positive | None = key()
    """the largest norm of the gradient of each network in a step; larger gradients are scaled down to this norm"""
    clip_value: keys.Positive | None = key()
    """the largest absolute value of an element of a gradient; larger elements are set to this value, before `clip_norm`"""
    accumulate: keys.Count | None = key()
    """the number of batches of one gradient step, whose gradients are averaged; `local_steps` counts batches; unset, 1"""
    class_weights: keys.Weights | None = key(only_if=(_OF_CLASSES, _OWN_LOSS))
    """weights of the loss on labels: a number for each class, in their order, or "balanced": all classes count alike in the
    client's own training rows; multilabel: of the presence of each label"""
    label_smoothing: keys.Fraction | None = key(only_if=(_OF_CLASSES, _OWN_LOSS))
    """the part of each label that is spread over all classes; unset, 0"""
    focal: keys.Decay | None = key(only_if=(_OF_CLASSES, _OWN_LOSS))
    """gamma of the focal loss, which weighs rows that a network predicts well less; unset, 0"""
    patience: keys.Count | None = key()
    """early stopping: after so many rounds without a smaller loss on its own validation rows, a client takes no more steps,
    and sends its last trained copy of the shared model in each further round; unset, no client stops"""
    loss: str | None = key()
    """your own loss on targets in place of the task's, as "module:loss": a function of (output, target)"""
    local_epochs: keys.Count = key(5, only_if=(_BY_EPOCHS,))
    """passes over a client's training data in a round"""
    local_steps: keys.Count | None = key()
    """gradient steps in a round, on newly drawn batches, instead of epochs"""
    batch_size: keys.BatchSize = key(128)
    """examples in a minibatch"""
    task: str = key("classification")
    """the task: classification, regression, multilabel, segmentation, ordinal, survival, cox; your own as "module:Task" """


class OptimizerConfig(Section):
    """torch.optim by name, with its own arguments such as `betas`. If not sgd, adam or adamw, unset keys are torch's."""

    model_config = ConfigDict(extra="allow")
    name: str = key("sgd")
    """an optimiser of torch.optim, such as sgd, adam, adamw, rmsprop; your own as "module:factory", a function of the
    parameters, `lr` and the set keys"""
    lr: keys.Rate = key(0.01)
    """the learning rate, at least 0"""
    momentum: keys.Fraction | None = key(0.9, only_if=(_SGD,))
    """the momentum"""
    weight_decay: keys.Decay | None = key(5e-4)
    """the weight decay of torch.optim"""
    amsgrad: bool = key(False, only_if=(OnlyIf("optimizer.name", ("adam", "adamw")),))
    """the AMSGrad variant"""

    @model_validator(mode="before")
    @classmethod
    def _fill_defaults(cls, table: Any) -> Any:
        """Write the name in small letters; unset the defaults of an optimiser that has its own."""
        if not isinstance(table, Mapping):
            return table
        table = {k: v for k, v in table.items() if v is not None}  # unset, as in the file of a run, which has no word for it
        if not isinstance(name := table.get("name"), str):
            return table
        name = name if ":" in name else name.lower()
        unset = {} if name in COMMON_OPTIMIZERS else {"momentum": None, "weight_decay": None}
        return {**unset, **table, "name": name}


class ServerConfig(Section):
    """How the server aggregates the clients' models."""

    aggregate: Rule = key("mean", only_if=(_FEDERATED, _AVERAGED))
    """the mean, the median, or the mean without the smallest and largest values, coordinate by coordinate"""
    trim: Annotated[float, Field(ge=0, lt=0.5)] = key(TRIM, only_if=(OnlyIf("server.aggregate", ("trimmed-mean",)),))
    """the fraction of the clients left out at each end, rounded down"""
    sum: Sum = key("float", only_if=(OnlyIf("server.aggregate", ("mean",)), _FEDERATED, _AVERAGED))
    """how numbers are added; fixed: as 64-bit integers, so that the order of clients does not change the sum"""


class EngineConfig(Section):
    """Where the computations run."""

    affects: ClassVar[keys.Affects] = "machine"
    name: Literal["auto", "inprocess", "processes", "stacked", "cluster"] = key("auto", resumable=True)
    """the engine; auto chooses an engine, and prints its choice with the reason"""
    device: str = key("auto")
    """cpu, cuda, cuda:1, mps; auto takes a CUDA GPU, else Apple's, else the CPU"""
    threads: Annotated[int, Field(ge=1, le=4096)] = key(1)
    """threads of each process; results are bit-identical only with equal threads"""
    workers: keys.Count | None = key(resumable=True, only_if=_if_engine("auto", "processes", "cluster"))
    """the number of workers; unset, one for each core, at most one for each client"""
    resident: keys.Count | None = key(resumable=True, only_if=_if_engine("inprocess", "processes", "cluster"))
    """how many clients of a process stay in memory; the run folder stores the states of the others; unset, all clients, or
    as many as fit"""
    address: keys.ClusterAddress | None = key(resumable=True, only_if=_if_engine("cluster"))
    """the address of a running Ray cluster, "auto" or "HOST:PORT"; unset, the run starts a local Ray cluster"""
    gpus: Annotated[float, Field(ge=0, le=1)] = key(0.0, resumable=True, only_if=_if_engine("cluster"))
    """a worker's share of a GPU; 0: no GPU on a CPU, and equal shares of all GPUs on CUDA"""
    precision: Literal["float32", "tf32", "bf16", "fp16"] = key("float32", affects="result")
    """the precision of matrix products and convolutions; tf32 and fp16 need an NVIDIA GPU, bf16 and fp16 use autocast, and
    fp16 scales the loss. Weights and losses stay float32"""
    products: Products = key("auto")
    """the library that multiplies float32 matrices on a CPU: blas (torch's own choice, on x86 MKL) or onednn; auto takes
    onednn on AMD processors with AVX-512. The two round differently"""
    compile: bool = key(
        False,
        only_if=(  # no engine compiles
            OnlyIf("engine", ("none",), about="fedmutual is of an earlier version", remark="torch.compile saved no time"),
        ),
    )
    """no longer used: `engine.graphs` makes the steps of stacks faster"""
    graphs: bool = key(False, only_if=_if_engine("stacked"))
    """launch the step of a stack as one CUDA graph, which needs an NVIDIA GPU"""
    turns: bool = key(False, only_if=_if_engine("stacked"))
    """train clients one after the other, not as stacks"""
    participation: Annotated[float, Field(gt=0, le=1)] = key(1.0, affects="result", only_if=(_FEDERATED,))
    """the fraction of clients in a round, at least one"""


class RecordsConfig(Section):
    """What is written, and how often (in rounds)."""

    affects: ClassVar[keys.Affects] = "scores"
    evaluate_every: keys.Count = key(1)
    """rounds between evaluations; the last round is always evaluated"""
    evaluate_on: Literal["all", "holdout"] = key("all")
    """the evaluated rows: validation, test and hold-out rows, or hold-out rows only (the setting of `sweep`)"""
    checkpoint_every: keys.Count = key(1, affects="record", unused_on_sites="every round is saved there")
    """rounds between saved states; the last round is always saved"""
    best_by: Literal["holdout", "validation", "test"] | None = key()
    """the rows on which the best round is chosen; unset, hold-out rows if they exist, else validation rows for personal
    models and test rows for the shared model"""
    patience: keys.Count | None = key(affects="result", unused_on_sites="all rounds of a contract are trained")
    """early stopping: the run ends after so many evaluations without a better one, by the mean of the main metric on rows of
    `records.best_by`, of the personal models, or without them of the shared model; unset, it has all rounds"""
    keep_best: bool = key(False, affects="record", unused_on_sites="each site sets it in its own site.toml")
    """keep the weights of the best round of each client and of the shared model; `records.best_by` chooses the round"""
    copies: bool = key(False, only_if=(_ON_SERVER,))
    """also evaluate the clients' trained copies of the shared model before they are averaged"""
    ensemble: bool = key(False, only_if=(_FEDERATED, _PERSONAL, _ON_SERVER))
    """also evaluate the ensemble of each client's own model and the shared model, for algorithms with both (fml): the
    average of their probabilities, with a weight chosen on hold-out rows (`split.holdout`)"""
    tensorboard: bool = key(False, affects="record")
    """also write scores and losses for TensorBoard (the extra `tensorboard`)"""
    trackers: list[Literal["mlflow", "wandb"]] = key([], affects="record")
    """also log scores, losses and the run's folder to MLflow or Weights & Biases (the extras `mlflow` and `wandb`)"""


class ShareConfig(Section):
    """What a client discloses besides its messages."""

    affects: ClassVar[keys.Affects] = "scores"
    metrics: Disclosure = key("all")
    """which scores and training losses a client discloses: all; only accuracies, rounded to 1 %, of 50 rows or more; or
    none. Other scores stay in the client's folder"""


class PrivacyConfig(Section):
    """Differential privacy of what leaves a client. [docs/privacy.md](privacy.md) says what it promises, and what not."""

    only_if: ClassVar[OnlyIfs] = (_NOISED,)
    nets: Literal["none", "meme", "both"] = key("none", only_if=(_FEDERATED, replace(_SHARED, of=("meme",))))
    """which networks are trained by DP-SGD: none; the meme, which needs algorithm.beta = 1; or all networks of a client"""
    clip: keys.Positive = key(1.0)
    """the largest norm of the gradient of each unit, over all noised networks together; larger gradients are clipped"""
    sigma: keys.Positive | None = key()
    """the noise multiplier, needed unless nets is none: the noise has the standard deviation sigma x clip"""
    unit: Literal["example", "group"] = key("example")
    """the protected unit: a training example, or a group of `data.group_by` (a patient) with all its rows"""
    group_rows: keys.Count | None = key(only_if=(OnlyIf("privacy.unit", ("group",)), _NOISED))
    """the most rows of a group in a batch, drawn at random; unset, all rows"""
    epsilon: keys.Positive | None = key(affects="record", resumable=True)
    """the budget of each client: a run that would spend more is refused; real sites set it in their own files"""
    delta: Annotated[float, Field(gt=0, lt=1)] = key(1e-5, affects="record", resumable=True)
    """the delta of the guarantee (epsilon, delta)"""
    accountant: Literal["rdp", "prv"] = key("rdp", affects="record", resumable=True)
    """how epsilon is computed: by Renyi divergences, or by privacy random variables, which is tighter and slower"""


def make_optional_table(kind: type[Section], names: str = "", *only_if: OnlyIf) -> Any:
    """Return a subclass of a table in which all keys are unset, for the settings of one client.

    names: the keys that a client may set; "": all. only_if: further conditions of these keys.
    """
    types, unset = get_type_hints(kind, include_extras=True), Table()
    for name in names.split() or kind.model_fields:
        effect = read_effect(kind, name)
        # In the tables of the file, which several methods may share, a key without effect gives a remark. In the table of a
        # client, a key that another key makes useless is an error.
        conditions = (replace(c, remark="") if "." in c.key else c for c in effect.only_if or ())
        about, effect = kind.model_fields[name].description, replace(effect, only_if=(*conditions, *only_if))
        unset[name] = types[name] | None, key(None, about, **vars(effect))
    return create_model(f"Client{kind.__name__}", __base__=Section, **unset)


class ClientData(make_optional_table(DataConfig)):  # type: ignore[misc]
    """If one client has its own data, all clients must; then there is no [partition], and clients may have any names."""


class ClientModel(Section):
    """A client's own network."""

    only_if: ClassVar[OnlyIfs] = (_FEDERATED, _PERSONAL)
    personal: str | None = key()
    """its own network"""
    pretrained: keys.Pretrained | None = key(only_if=(OnlyIf("model.start", ("own",)), _FEDERATED, _PERSONAL))
    """the first weights of its own network, as `model.pretrained`"""
    frozen: bool = key(False)
    """its personal network is not trained (an untrained participant, for experiments)"""


class ClientTraining(make_optional_table(TrainingConfig, "", _FEDERATED)):  # type: ignore[misc]
    """A client's own local work."""

    shuffled: Annotated[float, Field(ge=0, le=1)] = key(0.0)
    """the fraction of its private labels that is shuffled (a bad participant, for experiments)"""


class ClientOptimizer(make_optional_table(OptimizerConfig, "lr momentum weight_decay", _FEDERATED)):  # type: ignore[misc]
    """A client's own optimiser settings."""


class ClientConfig(Section):
    """The settings of one participant: ID is its number, or the name of its domain. These settings are never sent."""

    data: ClientData = ClientData()
    algorithm: keys.Settings = {}
    model: ClientModel = ClientModel()
    training: ClientTraining = ClientTraining()
    optimizer: ClientOptimizer = ClientOptimizer()
    share: Annotated[ShareConfig | None, BeforeValidator(lambda table: None if table == {} else table)] = None


_UNSET = ClientConfig()


def _name_algorithm(table: object) -> object:
    """Return the table [algorithm] with a name: its own, or the default."""
    return {"name": DEFAULT_ALGORITHM, **table} if isinstance(table, dict) else table


class Config(Section):
    """The configuration of an experiment, as `load_config` returns it and `run` takes it."""

    name: keys.RunName = key("run", affects="record")
    """the name of the run; its folder is runs/NAME"""
    seed: Annotated[int, Field(ge=0)] = key(0)
    """the seed of all random numbers"""
    rounds: keys.Count = key(20, lead_may_change=True)
    """the number of exchanges between the server and the clients"""
    participants: keys.Participants | None = key()
    """the ids of the clients that take part; unset, all clients; a client has the same rows as if all took part"""
    data: DataConfig = DataConfig()
    partition: PartitionConfig = PartitionConfig()
    split: SplitConfig = SplitConfig()
    algorithm: Annotated[keys.Settings, BeforeValidator(_name_algorithm)] = {"name": DEFAULT_ALGORITHM}
    model: ModelConfig = ModelConfig()
    training: TrainingConfig = TrainingConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    server: ServerConfig = ServerConfig()
    engine: EngineConfig = EngineConfig()
    records: RecordsConfig = RecordsConfig()
    share: ShareConfig = ShareConfig()
    privacy: PrivacyConfig = PrivacyConfig()
    clients: dict[str, ClientConfig] = {}

    def get_client_config(self, client: str) -> ClientConfig:
        """Return the settings of one client. A key that is None is unset: the federation's value holds."""
        return self.clients.get(client, _UNSET)

    def takes_part(self, client: str) -> bool:
        """Return whether a client takes part in the federation (`participants`)."""
        return self.participants is None or client in self.participants

    def disclosure(self, client: str) -> Disclosure:
        """Return `share.metrics` of a client: the client's own value, or else that of the federation."""
        return (self.get_client_config(client).share or self.share).metrics


def has_own_data(config: Config) -> bool:
    """Return whether clients have data of their own, instead of shares of common data."""
    return any(client.data.model_dump(exclude_none=True) for client in config.clients.values())


def list_resumable_keys() -> frozenset[str]:
    """Return the dotted keys that may change when a run is resumed, besides `rounds`."""
    return frozenset(key for key, effect in list_effects(Config).items() if effect.resumable)
