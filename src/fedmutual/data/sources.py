"""Data sets by name, and the choice of the reader."""

from dataclasses import replace
from difflib import get_close_matches

from fedmutual.config import Config, DataConfig
from fedmutual.config.checks import check_data_effects
from fedmutual.config.keys import FEDERATED
from fedmutual.data import arrays, domains, factory, folder, leaf, published, tiny_imagenet
from fedmutual.data.examples import Source, merge_parts
from fedmutual.data.rotate import make_rotated_domains
from fedmutual.errors import ConfigError

NAMES: dict[str, str] = {
    "digits": "1,797 handwritten digits of 8 x 8 pixels, inside scikit-learn: needs no file and no network",
    "mnist": "70,000 handwritten digits of 28 x 28 pixels, 10,000 of them for testing (torchvision)",
    "cifar10": "60,000 colour photographs of 32 x 32 pixels in 10 classes, 10,000 of them for testing (torchvision)",
    "cifar100": "60,000 colour photographs of 32 x 32 pixels in 100 classes, 10,000 of them for testing (torchvision)",
    "rotated-mnist": "1,000 training images of mnist, 100 a class, turned by 0, 20, 40 and 60 degrees: 4 domains",
    "pacs": "9,991 images of 7 classes in 4 domains (art painting, cartoon, photo, sketch); download it yourself",
    "office-home": "15,588 images of 65 classes in 4 domains (art, clipart, product, real world); download it yourself",
    "tiny-imagenet": "110,000 images of 64 x 64 pixels in 200 classes, in the published folder; download it yourself",
    "medmnist": "a data set of MedMNIST: its npz file in data.root; download it yourself",
    "femnist": "handwritten characters of 62 classes, a domain for each writer: LEAF's json files, made by you",
    "folder": "your own images in data.root: class/image, train and test above, or domain/class/image",
    "npz": "your own arrays in the file data.root: x, y; optional: x_test, y_test, classes, domain, and groups",
    "csv": "your own table in the file data.root: a column of labels (data.label), and columns of features",
    "parquet": "a table as csv, in a Parquet file (the extra `parquet`)",
    "module:factory": "your own code: it returns a torch Dataset, a (train, test) pair of them, or arrays",
}
"""The values of data.name, each with a description."""

OF_DOMAINS = ("domains", "file")
"""The partition kinds for data with domains: by domain, or from an earlier run's file."""

FILES = ("folder", "tiny-imagenet", *domains.SETS)
"""Data sets of image files; the files are resized when they are read."""

TABLES = ("csv", "parquet")
"""Data sets that are tables in files."""

_ROTATED: dict[str, tuple[str, tuple[float, ...], int]] = {"rotated-mnist": ("mnist", (0, 20, 40, 60), 100)}


def is_drawn_by_seed(config: DataConfig) -> bool:
    """Return whether the seed decides which examples the data set has."""
    return config.per_class is not None or config.name in _ROTATED


def read_source(config: Config, numbers: bool = False) -> Source:
    """Return the configured data set. numbers: whether targets are numbers, not classes.

    Raises:
        UserError: the data set is unknown, missing or unreadable; one sentence says why.
    """
    data_config, kind = config.data, config.partition.kind
    name, angles, per_class = _ROTATED.get(data_config.name, (data_config.name, None, None))
    angles, per_class = data_config.angles or angles, data_config.per_class or per_class
    if name in domains.SETS and kind not in OF_DOMAINS:
        raise ConfigError(f"data.name = {name!r} is a set of domains; set partition.kind = 'domains'")
    if angles is None:
        if per_class is not None:
            raise ConfigError("key 'data.per_class' needs the key 'data.angles'; set it, or remove data.per_class")
        source = _read_by_name(data_config, kind == "domains", numbers)
        if kind == "pfllib" and source.test is not None:  # PFLlib divides all rows
            return replace(source, train=merge_parts(source.train, source.test), test=None)
        return source
    if kind not in OF_DOMAINS:
        setting = "key 'data.angles'" if data_config.angles else f"data.name = {data_config.name!r}"
        raise ConfigError(f"{setting} makes a domain of each angle; set partition.kind = 'domains'")
    if numbers and per_class is not None:
        raise ConfigError("key 'data.per_class' is for classes, but the task learns numbers; remove the key")
    return make_rotated_domains(
        _read_by_name(data_config.model_copy(update={"name": name}), False, numbers), config, angles, per_class
    )


def _read_by_name(config: DataConfig, by_domain: bool, numbers: bool) -> Source:
    """Return the data set without rotation. by_domain: the folders above the class folders are domains."""
    name = config.name
    if name not in NAMES and ":" not in name:
        similar = get_close_matches(name.lower(), NAMES, 1)
        fix = f"did you mean {similar[0]!r}?" if similar else f"there are {', '.join(NAMES)}"
        raise ConfigError(f"key 'data.name': there is no data set {name!r}; {fix}")
    check_data_effects(config)
    if config.columns and not {config.mean, config.std} <= {None, FEDERATED}:
        raise ConfigError(
            "keys 'data.mean' and 'data.std' have no effect with data.columns, which standardises each column; "
            "remove them, or set both to 'federated'"
        )
    columns_elsewhere = dict.fromkeys(config.label_columns, "data.label") | dict.fromkeys(config.drop or (), "data.drop")
    if config.group_by is not None:
        columns_elsewhere[config.group_by] = "data.group_by"
    for key, column in (*(("columns", c) for c in config.columns), *(("replace", c) for c in config.replace)):
        if column in columns_elsewhere:
            fix = "rename labels by data.labels" if column in config.label_columns and key == "replace" else "remove one"
            raise ConfigError(f"key 'data.{key}' has {column!r}, which {columns_elsewhere[column]} names; {fix}")
    if ":" in name:
        return factory.read_from_factory(config)
    match name:
        case "digits":
            return published.read_digits(config)
        case "mnist" | "cifar10" | "cifar100":
            return published.read_torchvision(config)
        case "pacs" | "office-home":
            return domains.read_domains(config)
        case "tiny-imagenet":
            return tiny_imagenet.read_tiny_imagenet(config)
        case "medmnist":
            return arrays.read_medmnist(config)
        case "femnist":
            return leaf.read_femnist(config)
        case "folder":
            return folder.read_folder(config, by_domain)
        case "npz":
            return arrays.read_npz(config)
        case _:  # csv, parquet
            from fedmutual.data import table  # imports pandas, which takes 0.3 s

            return table.read_table(config, numbers)
