"""The kinds of a client's shares, and the fraction of rows that is held out for each kind."""

from fedmutual.config import SplitConfig
from fedmutual.data.splits import LEFT, REST
from fedmutual.errors import ConfigError

PRIVATE, VALIDATION, HOLDOUT, PUBLIC, TEST = REST, "validation", "holdout", "public", "test"
ROW_KINDS = (PRIVATE, PUBLIC, VALIDATION, HOLDOUT, TEST)  # in the order of files and tables
_V1_VALIDATION = 0.1  # fraction of validation rows under the preset "v1"
_ROUNDING = 1e-9  # tolerance for fractions that sum to 1


def list_held_out_fractions(split: SplitConfig) -> dict[str, float]:
    """Return kind -> the fraction that is held out of each client's training data.

    Validation rows are included unless they come out of the test set. With split.private the fractions are of all rows of a
    client, and unused rows are a kind, too.

    Raises:
        ConfigError: a fraction is missing, or the sum of the fractions is too large.
    """
    if split.validation == 0:
        raise ConfigError("key 'split.validation' must be above 0; omit it to use the preset's value")
    if split.private is not None:
        return _list_fractions_of_all(split, split.private)
    fractions = (
        {VALIDATION: split.validation}
        if split.validation is not None
        else {VALIDATION: _V1_VALIDATION}
        if split.preset == "v1"
        else {}
    )
    fractions |= {kind: fraction for kind, fraction in ((HOLDOUT, split.holdout), (PUBLIC, split.public)) if fraction}
    if sum(fractions.values()) >= 1:
        keys = "keys 'split.validation' and 'split.holdout'"
        if split.public:
            keys = "keys 'split.validation', 'split.holdout' and 'split.public'"
        raise ConfigError(f"{keys} must leave training data: their sum must be below 1")
    return fractions


def _list_fractions_of_all(split: SplitConfig, private: float) -> dict[str, float]:
    """Return the fractions of all rows of a client; hold-out rows are a fraction of its private rows."""
    if split.validation is None:
        raise ConfigError("key 'split.private' needs the key 'split.validation': the fraction of each client's rows")
    if not split.test:
        raise ConfigError("key 'split.test' must be above 0: with 'split.private' each client has its own test rows")
    unused = 1 - (private + split.public + split.validation + split.test)
    if unused < -_ROUNDING:
        raise ConfigError(
            "keys 'split.private', 'split.public', 'split.validation' and 'split.test' are fractions of a client's rows, "
            f"but their sum is {1 - unused:g}; it must be at most 1"
        )
    fractions = {TEST: split.test, VALIDATION: split.validation, PUBLIC: split.public, HOLDOUT: split.holdout * private}
    return {kind: f for kind, f in {**fractions, LEFT: unused if unused > _ROUNDING else 0.0}.items() if f}
