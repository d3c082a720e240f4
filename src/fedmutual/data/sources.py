"""Data sets by name: a reader a family."""

from difflib import get_close_matches

from fedmutual.config import DataConfig
from fedmutual.data import arrays, factory, folder, published, table
from fedmutual.data.examples import Source
from fedmutual.errors import ConfigError

NAMES: dict[str, str] = {
    "digits": "1,797 handwritten digits of 8 x 8 pixels, inside scikit-learn: needs no file and no network",
    "mnist": "70,000 handwritten digits of 28 x 28 pixels, 10,000 of them for testing (torchvision)",
    "cifar10": "60,000 colour photographs of 32 x 32 pixels in 10 classes, 10,000 of them for testing (torchvision)",
    "cifar100": "60,000 colour photographs of 32 x 32 pixels in 100 classes, 10,000 of them for testing (torchvision)",
    "folder": "images of one's own in data.root: class/image, train and test above, or domain/class/image",
    "npz": "arrays of one's own in the file data.root: x, y; if wished x_test, y_test, classes, domain, and groups",
    "csv": "a table of one's own in the file data.root: a column of labels (data.label), numbers in the others",
    "module:factory": "one's own code: returns a torch Dataset, a (train, test) pair of them, or arrays",
}
"""What data.name may be, and what it is."""

_PUBLISHED = ("digits", "mnist", "cifar10", "cifar100")


def read(config: DataConfig, domains: bool, numbers: bool = False) -> Source:
    """The configured data set as its reader finds it. domains: whether clients are domains, folders above the classes'.
    numbers: whether targets are numbers, not classes.

    Raises:
        UserError: there is no such set, it is missing, or it cannot be read; in one sentence.
    """
    name = config.name
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
        case "folder":
            return folder.folder(config, domains)
        case "npz":
            return arrays.npz(config)
        case "csv":
            return table.csv(config, numbers)
    near = get_close_matches(name.lower(), NAMES, 1)
    mend = f"did you mean {near[0]!r}?" if near else f"there are {', '.join(NAMES)}"
    raise ConfigError(f"key 'data.name': there is no data set {name!r}; {mend}")
