"""`compare --methods`: which methods are trained, and one line for each method of `all` that does not fit."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fedmutual.cli.arguments import parse_names
from fedmutual.cli.terminal import print_text
from fedmutual.config import Config, load_compared, read_algorithm_name
from fedmutual.studies.compare import METHODS
from fedmutual.studies.eligibility import ALL, expand_methods, find_eligible_methods


def choose_methods(
    file: Path, methods: str | None, overrides: Mapping[str, Any]
) -> tuple[Config, tuple[str, ...], dict[str, Any]]:
    """Read `--methods` -> (configuration, methods, the settings that other methods than the file's have).

    methods: as on the command line; None: the file's algorithm with the default methods.

    Raises:
        UserError: the file, or a method that the file or `--methods` names, cannot be used.
    """
    names = None if methods is None else parse_names(methods)
    algorithm = read_algorithm_name(file, overrides)
    expanded = expand_methods(names, algorithm, METHODS)
    config, own = load_compared(file, expanded, overrides)
    if names is None or ALL not in names:
        return config, expanded, own
    eligible = find_eligible_methods(config, expanded, [*names, config.algorithm["name"]], own)
    for method, reason in eligible.left_out.items():
        print_text(f"left out: {method}: {reason}", soft_wrap=True)
    config, own = load_compared(file, eligible.methods, overrides)
    return config, eligible.methods, own
