"""Every key of a configuration, its type and its default. Keys of [algorithm] are the algorithm's own: see methods.py."""

import math
import unicodedata
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field

from fedmutual.core import Schedule, Setting, within

Table = dict[str, Any]


class Section(BaseModel):
    """A table of the configuration: no unknown keys, no coercion ("true" is no boolean, 1.5 no integer), no change."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, arbitrary_types_allowed=True, allow_inf_nan=False)


def _path(value: object) -> object:
    try:
        return Path(value).expanduser() if isinstance(value, str) else value
    except RuntimeError:
        raise ValueError(f"there is no home folder for {value!r}") from None


def _folder(value: str) -> str:
    if value in ("", ".", "..") or "/" in value or "\\" in value:
        raise ValueError(f"a run's name is that of its folder, so it cannot be {value!r}")
    if any(unicodedata.category(c) in ("Cc", "Cs") for c in value):  # control characters, halves of characters
        raise ValueError(f"a run's name is that of its folder, so it cannot hold control characters, as {value!r} does")
    return value


def _listed(value: object) -> object:
    return (value,) if isinstance(value, str) else tuple(value) if isinstance(value, list) else value


def _schedule(value: object) -> object:
    """A table { start, end, shape } becomes a Schedule; its own message says what is wrong with it."""
    if not isinstance(value, dict):
        return value
    unknown = [k for k in value if k not in ("start", "end", "shape", "at")]
    if unknown or not {"start", "end"} <= value.keys():
        raise ValueError(
            f'a schedule is {{ start = 0.9, end = 0.3, shape = "linear" }}, not {value}'
            + (f"; it has no {unknown[0]!r}" if unknown else "")
        )
    if not all(_finite(value.get(k, 0.0)) for k in ("start", "end", "at")):
        raise ValueError(f"the start, end and at of a schedule are finite numbers, not {value}")
    within("the at of a schedule", value.get("at", 0.0), 0, 1)
    return Schedule(**value)


def _finite(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _not_negative(value: Setting) -> Setting:
    within("a learning rate", value, 0, math.inf)
    return value


def _settings(value: object) -> object:
    """The table of an algorithm's settings as TOML has it: schedules as tables."""
    if not isinstance(value, dict):
        return value
    return {k: asdict(v) if isinstance(v, Schedule) else v for k, v in value.items()}


def _named(value: object) -> object:
    return {"name": "fml", **value} if isinstance(value, dict) else value


PathSetting = Annotated[Path, BeforeValidator(_path)]
Names = Annotated[tuple[str, ...], BeforeValidator(_listed)]
Floats = Annotated[tuple[float, ...], BeforeValidator(_listed)]
Spreads = Annotated[tuple[Annotated[float, Field(gt=0)], ...], BeforeValidator(_listed)]
Sides = Annotated[tuple[Annotated[int, Field(ge=1)], ...], BeforeValidator(_listed)]
BatchSize = Annotated[int, Field(ge=1, le=1_000_000_000)]
Fraction = Annotated[float, Field(ge=0, lt=1)]
Moving = Annotated[float | Schedule, BeforeValidator(_schedule)]
Rate = Annotated[Moving, AfterValidator(_not_negative)]
Settings = Annotated[Table, BeforeValidator(_settings)]


class DataConfig(Section):
    """Where the examples come from, and what their labels are called."""

    name: str = "digits"  # digits, mnist, cifar10, cifar100, folder, npz, csv, or "module:factory"
    root: PathSetting | None = None  # the file or folder; of a published set: its cache ($FEDMUTUAL_DATA, else ~/.cache)
    test: PathSetting | None = None  # a test file or folder of one's own; else `split.test` of the rows is held out
    classes: Names | None = None  # the federation's classes, in the order of the outputs
    labels: dict[str, str] = {}  # own label -> the federation's name for it
    label: str = "label"  # csv: the column of the label
    group_by: str | None = None  # patient, account: validation never shares a group with training
    size: Sides | None = None  # resize images to [height, width]
    mean: Floats | None = None  # after x / 255, a value a channel; published sets have theirs
    std: Spreads | None = None
    augment: Literal["none", "crop-flip"] = "none"
    resident: bool | None = None  # keep all rows in memory; unset: if they take less than 4 GiB
    workers: Annotated[int, Field(ge=0)] = 0  # processes that read rows which are not kept in memory


class PartitionConfig(Section):
    """Who has which training examples."""

    kind: Literal["iid", "shards", "dirichlet", "domains", "file"] = "iid"
    clients: Annotated[int, Field(ge=1)] = 5
    classes_per_client: Annotated[int, Field(ge=1)] | None = None  # shards
    alpha: Annotated[float, Field(gt=0)] | None = None  # dirichlet
    min_size: Annotated[int, Field(ge=1)] = 10  # dirichlet: draw again until every client has as many examples
    examples: Annotated[int, Field(ge=1)] | None = None  # at most as many training examples a client, drawn at random
    file: PathSetting | None = None  # kind = "file": a partition.json of an earlier run


class SplitConfig(Section):
    """What is held out, and of what."""

    preset: Literal["journal", "v1"] = (
        "journal"  # validation: 1/K of the test set, own class mix | 10 % of own training data
    )
    validation: Fraction | None = None  # this fraction of a client's training data instead of the preset's choice
    holdout: Fraction = 0.0  # of each client's training data, to choose anything (a round, a learning rate) with
    test: Fraction = 0.2  # of all rows, where the data have no test set of their own


class ModelConfig(Section):
    """The shared network and the clients' own."""

    shared: str = "mlp"
    personal: Names | None = None  # one for all, or one a client; unset: the shared architecture
    batchnorm: Literal["average", "local"] = "average"
    start: Literal["own", "server"] = "own"


class TrainingConfig(Section):
    """The local work of a round."""

    local_epochs: Annotated[int, Field(ge=1)] = 5
    batch_size: BatchSize = 128


class OptimizerConfig(Section):
    """torch.optim by name."""

    name: Literal["sgd", "adam", "adamw"] = "sgd"
    lr: Rate = 0.01
    momentum: Fraction = 0.9  # sgd
    weight_decay: Annotated[float, Field(ge=0)] = 5e-4
    amsgrad: bool = False  # adam, adamw


class EngineConfig(Section):
    """Where the work runs."""

    name: Literal["auto", "inprocess"] = "auto"
    device: str = "auto"
    threads: Annotated[int, Field(ge=1, le=4096)] | None = None  # unset: torch's own choice, recorded and kept on resume
    participation: Annotated[float, Field(gt=0, le=1)] = 1.0  # the fraction of clients in a round, at least one


class RecordsConfig(Section):
    """What is written, and how often (in rounds)."""

    evaluate_every: Annotated[int, Field(ge=1)] = 1
    checkpoint_every: Annotated[int, Field(ge=1)] = 1
    best_by: Literal["holdout", "validation", "test"] | None = None  # unset: holdout if there is one, else test
    tensorboard: bool = False


class ShareConfig(Section):
    """What a client tells beside its messages."""

    metrics: Literal["all", "none"] = "all"


class ClientModel(Section):
    """A client's own network."""

    personal: str | None = None


class ClientTraining(Section):
    """A client's own local work."""

    local_epochs: Annotated[int, Field(ge=1)] | None = None
    batch_size: BatchSize | None = None


class ClientOptimizer(Section):
    """A client's own optimiser settings."""

    lr: Rate | None = None
    momentum: Fraction | None = None
    weight_decay: Annotated[float, Field(ge=0)] | None = None


class ClientConfig(Section):
    """[clients.ID]: what one participant does its own way. Nothing here crosses."""

    algorithm: Settings = {}
    model: ClientModel = ClientModel()
    training: ClientTraining = ClientTraining()
    optimizer: ClientOptimizer = ClientOptimizer()
    share: ShareConfig | None = None


class Config(Section):
    """A whole experiment, as `load_config` returns it and `run` takes it."""

    name: Annotated[str, AfterValidator(_folder)] = "run"
    seed: Annotated[int, Field(ge=0)] = 0
    rounds: Annotated[int, Field(ge=1)] = 20
    data: DataConfig = DataConfig()
    partition: PartitionConfig = PartitionConfig()
    split: SplitConfig = SplitConfig()
    algorithm: Annotated[Settings, BeforeValidator(_named)] = {"name": "fml"}
    model: ModelConfig = ModelConfig()
    training: TrainingConfig = TrainingConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    engine: EngineConfig = EngineConfig()
    records: RecordsConfig = RecordsConfig()
    share: ShareConfig = ShareConfig()
    clients: dict[str, ClientConfig] = {}
