"""Every key of a configuration, its type, its default and its meaning. Keys of [algorithm] are the algorithm's own: see
methods.py. `fedmutual list keys` prints all of them."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Annotated, Any, ClassVar, Literal, get_type_hints

from pydantic import BeforeValidator, Field, create_model, model_validator

from fedmutual.config.keys import OnlyIfs, Section, Table, key, list_effects, read_effect
from fedmutual.config.values import (
    Angles,
    BatchSize,
    ClusterAddress,
    ColumnValues,
    Count,
    DateFormat,
    Decay,
    Fraction,
    LabelColumns,
    Means,
    Names,
    Parts,
    PathSetting,
    Positive,
    Pretrained,
    Rate,
    RunName,
    Settings,
    Share,
    Sides,
    Spreads,
    Trim,
    drop_empty_table,
    make_column_table,
    name_default_algorithm,
)
from fedmutual.errors import join_words
from fedmutual.role import DEFAULT_ALGORITHM
from fedmutual.settings import TRIM, Disclosure, OnlyIf, Products, Rule, Sum

OWN = "module:factory"  # in a condition: any name of a user's own code


def _if_algorithm(about: str, remark: str, *traits: str) -> OnlyIf:
    """Return the condition that an algorithm has a trait: "federated", "averaged", or one of `Algorithm.scores`."""
    return OnlyIf("algorithm", traits, about=f"the algorithm {about}", remark=f"algorithm {{name!r}} {remark}")


def _if_engine(*names: str) -> tuple[OnlyIf]:
    """Return the condition that the engine of a run, or the value of `engine.name`, is one of these names."""
    about = f"the engine is {join_words(names, 'or')}"
    return (OnlyIf("engine", names, about=about, remark="engine {value!r} does the work"),)


_DIVIDED = OnlyIf("clients.ID.data", (None,))
_FROM_FILES = OnlyIf("data.name", ("folder", "npz", "csv", "parquet"))
_FROM_TABLES = OnlyIf("data.name", ("csv", "parquet"))
_GROUPED = OnlyIf("data.name", ("folder", "npz", "csv", "parquet", OWN))
_BY_EPOCHS = OnlyIf("training.local_steps", (None,), remark="algorithm {name!r} counts a round in training.local_steps")
_SGD = OnlyIf("optimizer.name", ("sgd",))
_NOISED = OnlyIf("privacy.nets", ("none",), negated=True, remark="privacy.nets is 'none'")
_FEDERATED = _if_algorithm("is not centralised", "trains one network on all data", "federated")
_PERSONAL = _if_algorithm("trains personal networks", "trains no personal networks", "personal")
_SHARED = _if_algorithm("shares a model", "shares no model", "global", "proxy")
_ON_SERVER = _if_algorithm("shares a model through the server", "shares no model", "global")
_AVERAGED = _if_algorithm("averages what clients send", "makes no mean of what clients send", "averaged")


class ColumnConfig(Section):
    """How one column of a table becomes features. Unset numbers and values are learned from each client's training rows."""

    kind: Literal["number", "category", "date"] = key(
        "number", "the kind of the cells; dates have the form 2026-05-31, or this form with a time"
    )
    values: ColumnValues | None = key(
        None,
        "category: the values, each of which becomes a feature; an empty cell has no value; unset, the values "
        "in the training rows",
    )
    fill: float | None = key(
        None, "number, date (days since 1970-01-01): replaces an empty cell; unset, the median of the training rows"
    )
    mean: float | None = key(None, "number, date: subtracted; unset, the mean of the training rows")
    std: Positive | None = key(None, "number, date: divided by; unset, the standard deviation of the training rows")

    @model_validator(mode="after")
    def _check_kind(self) -> "ColumnConfig":
        if self.kind == "category":
            foreign = [k for k in ("fill", "mean", "std") if getattr(self, k) is not None]
        else:
            foreign = ["values"] if self.values is not None else []
        if foreign:
            raise ValueError(f"a column of the kind {self.kind!r} has no {foreign[0]!r}")
        if (self.mean is None) != (self.std is None):
            raise ValueError("the mean and the std of a column must be set together")
        return self


class DataConfig(Section):
    """The source of the examples: files or a published data set, labels, features, and the scaling of inputs."""

    name: str = key(
        "digits",
        "digits, mnist, cifar10, cifar100, rotated-mnist, pacs, office-home, tiny-imagenet, medmnist, femnist, folder, npz, "
        'csv, parquet; your own as "module:factory"',
    )
    root: PathSetting | None = key(
        None, "the file or folder, relative to the working folder; for a published set its cache folder", affects="machine"
    )
    test: PathSetting | None = key(
        None,
        "a separate test file or folder; unset, the fraction `split.test` of the rows is the test set",
        only_if=(_FROM_FILES,),
    )
    classes: Names | None = key(
        None, "the federation's classes, in the order of the outputs; unset, the classes of the data"
    )
    labels: dict[str, str] = key({}, "a table of label = class: renames the labels of the data")
    label: LabelColumns = key("label", "csv, parquet: the column of the label; multilabel: a list of columns of 0 and 1")
    drop: Names | None = key(None, "columns that are not features, for example an identifier", only_if=(_FROM_TABLES,))
    columns: dict[str, Annotated[ColumnConfig, BeforeValidator(make_column_table)]] = key(
        {},
        "the features by name, each with its kind; unset, all other columns are features, and are numbers",
        only_if=(_FROM_TABLES,),
    )
    replace: dict[str, dict[str, str]] = key(
        {},
        'a table of cell = replacement for each column of features; the replacement "" is an empty cell',
        only_if=(_FROM_TABLES,),
    )
    date_format: DateFormat | None = key(
        None, 'the form of dates that are not written as 2026-05-31, for example "%d.%m.%Y"', only_if=(_FROM_TABLES,)
    )
    group_by: str | None = key(
        None,
        "the column of groups (patient, account); no group appears in both training and evaluation",
        only_if=(_GROUPED,),
    )
    angles: Angles | None = key(
        None, "makes one domain for each angle: all images, rotated clockwise by the angle, in degrees"
    )
    per_class: Count | None = key(
        None, "`data.angles`: the number of training images for each class, drawn at random; unset, all images"
    )
    size: Sides | None = key(None, "resize images to [height, width], in pixels")
    mean: Means | None = key(
        None,
        "subtracted from inputs (images: x / 255), a value for each channel or column; published sets have known values; "
        '"federated": the mean of the training rows of all clients',
    )
    std: Spreads | None = key(
        None,
        "the divisor of inputs after the subtraction, a value for each channel or column; needs `data.mean`; "
        '"federated": the standard deviation of the training rows of all clients',
    )
    augment: Literal["none", "crop-flip"] = key("none", "the random augmentation of training images")
    resident: bool | None = key(
        None, "keep all rows in memory; unset, true if the rows take less than 4 GiB", affects="machine"
    )
    workers: Annotated[int, Field(ge=0)] = key(
        0,
        "processes that read rows from disk if the rows are not in memory",
        affects="machine",
        only_if=_if_engine("inprocess", "stacked", "cluster"),
    )

    @property
    def label_columns(self) -> tuple[str, ...]:
        """The columns of a table that hold the labels."""
        return (self.label,) if isinstance(self.label, str) else self.label


_PFLLIB = {"clients": 20, "alpha": 0.1}  # its published tables'


class PartitionConfig(Section):
    """Which client has which training examples."""

    only_if: ClassVar[OnlyIfs] = (_DIVIDED,)
    kind: Literal["iid", "shards", "dirichlet", "pfllib", "domains", "file"] = key(
        "iid",
        "how the examples are divided; pfllib: all rows by the Dirichlet rule of the library PFLlib, with a quarter "
        "of each client's rows for evaluation",
    )
    clients: Count = key(5, "the number of participants, 20 with pfllib; domains and file set it themselves")
    classes_per_client: Count | None = key(
        None, "required: the number of classes of a client", only_if=(_DIVIDED, OnlyIf("partition.kind", ("shards",)))
    )
    alpha: Positive | None = key(
        None,
        "small values give uneven class proportions, large values even ones; dirichlet: required; pfllib: 0.1 if unset",
        only_if=(_DIVIDED, OnlyIf("partition.kind", ("dirichlet", "pfllib"))),
    )
    min_size: Count = key(
        10,
        "the least number of examples of a client; the division is drawn again until every client has this number",
        only_if=(_DIVIDED, OnlyIf("partition.kind", ("dirichlet",))),
    )
    examples: Count | None = key(
        None,
        "the most training examples of a client, drawn at random",
        only_if=(OnlyIf("partition.kind", ("file",), negated=True),),
    )
    file: PathSetting | None = key(
        None, "required: the partition.json of an earlier run", only_if=(_DIVIDED, OnlyIf("partition.kind", ("file",)))
    )

    @model_validator(mode="before")
    @classmethod
    def _fill_protocol(cls, table: Any) -> Any:
        """Set the numbers of PFLlib's protocol if the table leaves them unset."""
        protocol = isinstance(table, Mapping) and table.get("kind") == "pfllib"
        return {**_PFLLIB, **{k: v for k, v in table.items() if v is not None}} if protocol else table


class SplitConfig(Section):
    """Which rows are held out."""

    only_if: ClassVar[OnlyIfs] = (OnlyIf("partition.kind", ("pfllib",), negated=True),)
    preset: Literal["journal", "v1"] = key(
        "journal",
        "a client's validation data: one of K parts of the test set, in the class proportions of the client "
        "(journal), or a tenth of its training data (v1); K is the number of clients",
    )
    private: Share | None = key(
        None, "if set, private, public, validation and test are fractions of all rows of a client, with a sum of at most 1"
    )
    public: Fraction = key(
        0.0, "the fraction of each client's training data that it gives to the public seed set", only_if=()
    )
    validation: Fraction | None = key(
        None, "the fraction of a client's training data that is validation data; unset, by `split.preset`"
    )
    holdout: Fraction = key(
        0.0, "the fraction of each client's training data that is held out to choose a round or a setting", only_if=()
    )
    test: Fraction = key(0.2, "the fraction of all rows that is the test set, if the data have no test set")
    shared: bool | None = key(
        None,
        "one split for all domains that have the same images (`data.angles`); unset, true for these domains; with "
        "false clients train on rotated test images",
    )


class ModelConfig(Section):
    """The shared network and the personal networks."""

    shared: str = key("mlp", 'the shared network: a name of `fedmutual list models`, or your own as "module:factory"')
    personal: Names | None = key(
        None,
        "the personal networks, which never leave a client: one name, or one name for each client; unset, the "
        "architecture of the shared network",
        only_if=(_FEDERATED, _PERSONAL),
    )
    part: Parts | None = key(
        None, 'the modules of the network that are shared, for example "features"; unset, all modules', only_if=(_SHARED,)
    )
    adaptor: str = key(
        "linear",
        'the private layers after `model.part`: one layer; the network\'s other layers ("rest"); or "module:factory"',
        only_if=(OnlyIf("model.part", (None,), negated=True),),
    )
    batchnorm: Literal["average", "local"] = key(
        "average",
        "BatchNorm layers are averaged (average), or are not sent (local)",
        only_if=(_SHARED, OnlyIf("networks", about="the shared network has BatchNorm layers")),
    )
    start: Literal["own", "server"] = key(
        "own", "personal networks start from their own random weights (own), or from the server's weights (server)"
    )
    weights: PathSetting | None = key(
        None,
        "the folder of a run; the server starts with the shared model of that run",
        unused_on_sites="the server begins with random weights, or resumes with its own weights",
        only_if=(OnlyIf("networks", about="networks start from the server's weights"),),
    )
    pretrained: Pretrained | None = key(
        None,
        'the initial weights of networks, except for the last layer: "imagenet", a file, or a folder of files; unset, '
        "random weights",
    )


class TrainingConfig(Section):
    """The local work of a round."""

    local_epochs: Count = key(5, "passes over a client's training data in a round", only_if=(_BY_EPOCHS,))
    local_steps: Count | None = key(None, "gradient steps in a round, on newly drawn batches, instead of epochs")
    batch_size: BatchSize = key(128, "examples in a minibatch")
    task: str = key(
        "classification", 'the task: classification, regression, multilabel, segmentation, or your own as "module:Task"'
    )


class OptimizerConfig(Section):
    """torch.optim by name."""

    name: Literal["sgd", "adam", "adamw"] = key("sgd", "the optimiser")
    lr: Rate = key(0.01, "the learning rate, at least 0")
    momentum: Fraction = key(0.9, "the momentum", only_if=(_SGD,))
    weight_decay: Decay = key(5e-4, "the weight decay of torch.optim")
    amsgrad: bool = key(False, "the AMSGrad variant", only_if=(OnlyIf("optimizer.name", ("adam", "adamw")),))


class ServerConfig(Section):
    """How the server aggregates the clients' models."""

    aggregate: Rule = key(
        "mean",
        "the mean, the median, or the mean without the smallest and largest values, coordinate by coordinate",
        only_if=(_FEDERATED, _AVERAGED),
    )
    trim: Trim = key(
        TRIM,
        "the fraction of the clients left out at each end, rounded down",
        only_if=(OnlyIf("server.aggregate", ("trimmed-mean",)),),
    )
    sum: Sum = key(
        "float",
        "how numbers are added; fixed: as 64-bit integers, so that the order of clients does not change the sum",
        only_if=(OnlyIf("server.aggregate", ("mean",)), _FEDERATED, _AVERAGED),
    )


class EngineConfig(Section):
    """Where the computations run."""

    name: Literal["auto", "inprocess", "processes", "stacked", "cluster"] = key(
        "auto",
        "the engine; auto chooses an engine, and prints its choice with the reason",
        affects="machine",
        resumable=True,
    )
    device: str = key("auto", "cpu, cuda, cuda:1, mps; auto takes a CUDA GPU, else Apple's, else the CPU", affects="machine")
    threads: Annotated[int, Field(ge=1, le=4096)] = key(
        1, "threads of each process; results are bit-identical only with equal threads", affects="machine"
    )
    workers: Count | None = key(
        None,
        "the number of workers; unset, one for each core, at most one for each client",
        affects="machine",
        resumable=True,
        only_if=_if_engine("auto", "processes", "cluster"),
    )
    resident: Count | None = key(
        None,
        "how many clients of a process stay in memory; the run folder stores the states of "
        "the others; unset, all clients, or as many as fit",
        affects="machine",
        resumable=True,
        only_if=_if_engine("inprocess", "processes", "cluster"),
    )
    address: ClusterAddress | None = key(
        None,
        'the address of a running Ray cluster, "auto" or "HOST:PORT"; unset, the run starts a local Ray cluster',
        affects="machine",
        resumable=True,
        only_if=_if_engine("cluster"),
    )
    gpus: Annotated[float, Field(ge=0, le=1)] = key(
        0.0,
        "a worker's share of a GPU; 0: no GPU on a CPU, and equal shares of all GPUs on CUDA",
        affects="machine",
        resumable=True,
        only_if=_if_engine("cluster"),
    )
    precision: Literal["float32", "tf32", "bf16"] = key(
        "float32",
        "the precision of matrix products and convolutions; tf32 needs an NVIDIA GPU, bf16 uses autocast. Weights and "
        "losses stay float32",
    )
    products: Products = key(
        "auto",
        "the library that multiplies float32 matrices on a CPU: blas (torch's own choice, on x86 MKL) or onednn; auto takes "
        "onednn on AMD processors with AVX-512. The two round differently",
        affects="machine",
    )
    compile: bool = key(
        False,
        "use torch.compile, which needs a C++ compiler and half a minute at the start",
        affects="machine",
        only_if=_if_engine("stacked"),
    )
    turns: bool = key(
        False,
        "train clients in turns, each on its own CUDA stream, instead of as one stack; the log says if turns are faster",
        affects="machine",
        only_if=_if_engine("stacked"),
    )
    participation: Annotated[float, Field(gt=0, le=1)] = key(
        1.0, "the fraction of clients in a round, at least one", only_if=(_FEDERATED,)
    )


class RecordsConfig(Section):
    """What is written, and how often (in rounds)."""

    evaluate_every: Count = key(1, "rounds between evaluations; the last round is always evaluated", affects="scores")
    evaluate_on: Literal["all", "holdout"] = key(
        "all",
        "the evaluated rows: validation, test and hold-out rows, or hold-out rows only (the setting of `sweep`)",
        affects="scores",
    )
    checkpoint_every: Count = key(
        1,
        "rounds between saved states; the last round is always saved",
        affects="record",
        unused_on_sites="every round is saved there",
    )
    best_by: Literal["holdout", "validation", "test"] | None = key(
        None,
        "the rows on which the best round is chosen; unset, hold-out rows if they exist, else validation rows for personal "
        "models and test rows for the shared model",
        affects="scores",
    )
    keep_best: bool = key(
        False,
        "keep the weights of the best round of each client and of the shared model; `records.best_by` chooses the round",
        affects="record",
        unused_on_sites="best rounds' weights are not kept there",
    )
    copies: bool = key(
        False,
        "also evaluate the clients' trained copies of the shared model before they are averaged",
        affects="scores",
        only_if=(_ON_SERVER,),
    )
    ensemble: bool = key(
        False,
        "also evaluate the ensemble of each client's own model and the shared model, for algorithms with both (fml): "
        "the average of their probabilities, with a weight chosen on hold-out rows (`split.holdout`)",
        affects="scores",
        only_if=(_FEDERATED, _PERSONAL, _ON_SERVER),
    )
    tensorboard: bool = key(
        False,
        "also write scores and losses for TensorBoard (the extra `tensorboard`)",
        affects="record",
        unused_on_sites="it is not written there",
    )
    trackers: list[Literal["mlflow", "wandb"]] = key(
        [],
        "also log scores, losses and the run's folder to MLflow or Weights & Biases (the extras `mlflow` and `wandb`)",
        affects="record",
        unused_on_sites="nothing is logged there",
    )


class ShareConfig(Section):
    """What a client discloses besides its messages."""

    metrics: Disclosure = key(
        "all",
        "which scores and training losses a client discloses: all; only accuracies, rounded to 1 %, of 50 rows or more; or "
        "none. Other scores stay in the client's folder",
        affects="scores",
    )


class PrivacyConfig(Section):
    """Differential privacy of what leaves a client. [docs/privacy.md](privacy.md) says what it promises, and what not."""

    only_if: ClassVar[OnlyIfs] = (_NOISED,)
    nets: Literal["none", "meme", "both"] = key(
        "none",
        "which networks are trained by DP-SGD: none; the meme, which needs algorithm.beta = 1; or all networks of a client",
        only_if=(_FEDERATED, replace(_SHARED, of=("meme",))),
    )
    clip: Positive = key(
        1.0, "the largest norm of the gradient of each unit, over all noised networks together; larger gradients are clipped"
    )
    sigma: Positive | None = key(
        None, "the noise multiplier, needed unless nets is none: the noise has the standard deviation sigma x clip"
    )
    unit: Literal["example", "group"] = key(
        "example", "the protected unit: a training example, or a group of `data.group_by` (a patient) with all its rows"
    )
    group_rows: Count | None = key(
        None,
        "the most rows of a group in a batch, drawn at random; unset, all rows",
        only_if=(OnlyIf("privacy.unit", ("group",)), _NOISED),
    )
    epsilon: Positive | None = key(
        None,
        "the budget of each client: a run that would spend more is refused; real sites set it in their own files",
        affects="record",
        resumable=True,
    )
    delta: Annotated[float, Field(gt=0, lt=1)] = key(
        1e-5, "the delta of the guarantee (epsilon, delta)", affects="record", resumable=True
    )
    accountant: Literal["rdp", "prv"] = key(
        "rdp",
        "how epsilon is computed: by Renyi divergences, or by privacy random variables, which is tighter and slower",
        affects="record",
        resumable=True,
    )


def make_optional_table(kind: type[Section]) -> Any:
    """Return a subclass of a table in which all keys are unset, for the settings of one client."""
    types = get_type_hints(kind, include_extras=True)
    unset: Table = {
        name: (types[name] | None, key(None, spec.description or "", **vars(read_effect(kind, name))))
        for name, spec in kind.model_fields.items()
    }
    return create_model(f"Client{kind.__name__}", __base__=Section, **unset)


class ClientData(make_optional_table(DataConfig)):  # type: ignore[misc]
    """If one client has its own data, all clients must; then there is no [partition], and clients may have any names."""


class ClientModel(Section):
    """A client's own network."""

    only_if: ClassVar[OnlyIfs] = (_FEDERATED, _PERSONAL)
    personal: str | None = key(None, "its own network")
    pretrained: Pretrained | None = key(
        None,
        "the first weights of its own network, as `model.pretrained`",
        only_if=(OnlyIf("model.start", ("own",)), _FEDERATED, _PERSONAL),
    )
    frozen: bool = key(False, "its personal network is not trained (an untrained participant, for experiments)")


class ClientTraining(Section):
    """A client's own local work."""

    only_if: ClassVar[OnlyIfs] = (_FEDERATED,)
    local_epochs: Count | None = key(
        None, "its own passes over its training data in a round", only_if=(replace(_BY_EPOCHS, remark=""), _FEDERATED)
    )
    local_steps: Count | None = key(None, "its own gradient steps in a round")
    batch_size: BatchSize | None = key(None, "examples in its own minibatches")
    task: str | None = key(None, "its own task")
    shuffled: Annotated[float, Field(ge=0, le=1)] = key(
        0.0, "the fraction of its private labels that is shuffled (a bad participant, for experiments)", only_if=()
    )


class ClientOptimizer(Section):
    """A client's own optimiser settings."""

    only_if: ClassVar[OnlyIfs] = (_FEDERATED,)
    lr: Rate | None = key(None, "its own learning rate, at least 0")
    momentum: Fraction | None = key(None, "its own momentum", only_if=(_SGD, _FEDERATED))
    weight_decay: Decay | None = key(None, "its own weight decay")


class ClientConfig(Section):
    """The settings of one participant: ID is its number, or the name of its domain. These settings are never sent."""

    data: ClientData = ClientData()
    algorithm: Settings = {}
    model: ClientModel = ClientModel()
    training: ClientTraining = ClientTraining()
    optimizer: ClientOptimizer = ClientOptimizer()
    share: Annotated[ShareConfig | None, BeforeValidator(drop_empty_table)] = None


class Config(Section):
    """The configuration of an experiment, as `load_config` returns it and `run` takes it."""

    name: RunName = key("run", "the name of the run; its folder is runs/NAME", affects="record")
    seed: Annotated[int, Field(ge=0)] = key(0, "the seed of all random numbers")
    rounds: Count = key(20, "the number of exchanges between the server and the clients", lead_may_change=True)
    data: DataConfig = DataConfig()
    partition: PartitionConfig = PartitionConfig()
    split: SplitConfig = SplitConfig()
    algorithm: Annotated[Settings, BeforeValidator(name_default_algorithm)] = {"name": DEFAULT_ALGORITHM}
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
        return self.clients.get(client, ClientConfig())

    def disclosure(self, client: str) -> Disclosure:
        """Return `share.metrics` of a client: the client's own value, or else that of the federation."""
        return (self.get_client_config(client).share or self.share).metrics


def list_resumable_keys() -> frozenset[str]:
    """Return the dotted keys that may change when a run is resumed, besides `rounds`."""
    return frozenset(key for key, effect in list_effects(Config).items() if effect.resumable)
