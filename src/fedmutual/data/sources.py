"""Data sets by name: a reader a family."""

from difflib import get_close_matches

from fedmutual.config import Config, DataConfig
from fedmutual.data import arrays, domains, factory, folder, published
from fedmutual.data.examples import Source
from fedmutual.data.rotate import rotated
from fedmutual.errors import ConfigError

NAMES: dict[str, str] = {
    "digits": "1,797 handwritten digits of 8 x 8 pixels, inside scikit-learn: needs no file and no network",
    "mnist": "70,000 handwritten digits of 28 x 28 pixels, 10,000 of them for testing (torchvision)",
    "cifar10": "60,000 colour photographs of 32 x 32 pixels in 10 classes, 10,000 of them for testing (torchvision)",
    "cifar100": "60,000 colour photographs of 32 x 32 pixels in 100 classes, 10,000 of them for testing (torchvision)",
    "rotated-mnist": "1,000 training images of mnist, 100 a class, turned by 0, 20, 40 and 60 degrees: 4 domains",
    "pacs": "9,991 images of 7 classes in 4 domains (art painting, cartoon, photo, sketch), fetched by oneself",
    "office-home": "15,588 images of 65 classes in 4 domains (art, clipart, product, real world), fetched by oneself",
    "folder": "images of one's own in data.root: class/image, train and test above, or domain/class/image",
    "npz": "arrays of one's own in the file data.root: x, y; if wished x_test, y_test, classes, domain, and groups",
    "csv": "a table of one's own in the file data.root: a column of labels (data.label), numbers in the others",
    "module:factory": "one's own code: returns a torch Dataset, a (train, test) pair of them, or arrays",
}
"""What data.name may be, and what it is."""

OF_DOMAINS = ("domains", "file")
"""The partition kinds of data that are made as domains: by them, or as an earlier run divided them."""

FILES = ("folder", *domains.SETS)
"""Sets whose examples are image files, resized when they are read."""

_PUBLISHED = ("digits", "mnist", "cifar10", "cifar100", "pacs", "office-home")
_ROTATED: dict[str, tuple[str, tuple[float, ...], int]] = {"rotated-mnist": ("mnist", (0, 20, 40, 60), 100)}


def draws(config: DataConfig) -> bool:
    """Whether which examples there are is drawn by the seed."""
    return config.per_class is not None or config.name in _ROTATED


def read(config: Config, numbers: bool = False) -> Source:
    """The configured data set as its reader finds it. numbers: whether targets are numbers, not classes.

    Raises:
        UserError: there is no such set, it is missing, or it cannot be read; in one sentence.
    """
    about, kind = config.data, config.partition.kind
    name, angles, per_class = _ROTATED.get(about.name, (about.name, None, None))
    angles, per_class = about.angles or angles, about.per_class or per_class
    if name in domains.SETS and kind not in OF_DOMAINS:
        raise ConfigError(f"data.name = {name!r} is a set of domains; set partition.kind = 'domains'")
    if angles is None:
        if per_class is not None:
            raise ConfigError("key 'data.per_class' goes with 'data.angles'; give these, or take it out")
        return _read(about, kind == "domains", numbers)
    if kind not in OF_DOMAINS:
        asked = "key 'data.angles'" if about.angles else f"data.name = {about.name!r}"
        raise ConfigError(f"{asked} makes a domain of each angle; set partition.kind = 'domains'")
    if numbers and per_class is not None:
        raise ConfigError("key 'data.per_class' is for classes, and the task learns numbers; take it out")
    return rotated(_read(about.model_copy(update={"name": name}), False, numbers), config, angles, per_class)


def _read(config: DataConfig, by_domain: bool, numbers: bool) -> Source:
    """As stored. by_domain: whether the folders above the classes' are domains."""
    name = config.name
    if config.drop is not None and name != "csv":
        raise ConfigError(f"key 'data.drop' has no effect with data.name = {name!r}; take it out")
    if name in _PUBLISHED or ":" in name:
        for key in ("test", "group_by"):
            if getattr(config, key) is not None and (name in _PUBLISHED or key == "test"):
                raise ConfigError(f"key 'data.{key}' has no effect with data.name = {name!r}; take it out")
    if ":" in name:
        return factory.own(config)
    match name:
        case "digits":
            return published.digits(config)
        case "mnist" | "cifar10" | "cifar100":
            return published.through_torchvision(config)
        case "pacs" | "office-home":
            return domains.of_domains(config)
        case "folder":
            return folder.folder(config, by_domain)
        case "npz":
            return arrays.npz(config)
        case "csv":
            from fedmutual.data import table  # pandas takes a third of a second to import

            return table.csv(config, numbers)
    near = get_close_matches(name.lower(), NAMES, 1)
    mend = f"did you mean {near[0]!r}?" if near else f"there are {', '.join(NAMES)}"
    raise ConfigError(f"key 'data.name': there is no data set {name!r}; {mend}")
