"""What a client's rows are for, and which fraction of them is held out for it."""

from fedmutual.config import SplitConfig
from fedmutual.data.splits import LEFT, REST
from fedmutual.errors import ConfigError

PRIVATE, VALIDATION, HOLDOUT, PUBLIC, TEST = REST, "validation", "holdout", "public", "test"
KINDS = (PRIVATE, PUBLIC, VALIDATION, HOLDOUT, TEST)  # in the order in which they are written and shown
_V1 = 0.1  # of a client's training data are its validation data under the preset "v1"
_ROUNDING = 1e-9  # of fractions that sum to 1


def of_training(split: SplitConfig) -> dict[str, float]:
    """What is held out of each client's training data; its validation rows too, unless they come out of the test set.

    With split.private of all its rows, and what is left over is a share, too.
    """
    if split.validation == 0:
        raise ConfigError("key 'split.validation' must be above 0; leave it out for the preset's choice")
    if split.private is not None:
        return _of_all(split, split.private)
    found = (
        {VALIDATION: split.validation} if split.validation is not None else {VALIDATION: _V1} if split.preset == "v1" else {}
    )
    found |= {kind: fraction for kind, fraction in ((HOLDOUT, split.holdout), (PUBLIC, split.public)) if fraction}
    if sum(found.values()) >= 1:
        keys = "keys 'split.validation' and 'split.holdout'"
        if split.public:
            keys = "keys 'split.validation', 'split.holdout' and 'split.public'"
        raise ConfigError(f"{keys} must leave training data: their sum must be below 1")
    return found


def _of_all(split: SplitConfig, private: float) -> dict[str, float]:
    """The fractions of all rows of a client; what is held out for choosing is of its private ones."""
    if split.validation is None:
        raise ConfigError("key 'split.private' needs the key 'split.validation': the fraction of each client's rows")
    if not split.test:
        raise ConfigError("key 'split.test' must be above 0: with 'split.private' each client holds its own test rows out")
    left = 1 - (private + split.public + split.validation + split.test)
    if left < -_ROUNDING:
        raise ConfigError(
            "keys 'split.private', 'split.public', 'split.validation' and 'split.test' are fractions of a client's rows, "
            f"and their sum is {1 - left:g}; it must be 1 at most"
        )
    found = {TEST: split.test, VALIDATION: split.validation, PUBLIC: split.public, HOLDOUT: split.holdout * private}
    return {kind: f for kind, f in {**found, LEFT: left if left > _ROUNDING else 0.0}.items() if f}
