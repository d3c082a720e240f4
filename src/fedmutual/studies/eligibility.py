"""Which methods a configuration's networks and data allow, and why the other methods are left out."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from fedmutual import data
from fedmutual.algorithms import ALGORITHMS
from fedmutual.config import Config, replace_algorithm
from fedmutual.errors import ConfigError, UserError
from fedmutual.federation import build

ALL = "all"  # in the place of a method's name: every method of the package


@dataclass(frozen=True)
class Eligibility:
    """The methods that can be trained on one configuration."""

    methods: tuple[str, ...]
    left_out: Mapping[str, str]  # method -> the reason, in one sentence


def expand_methods(names: Sequence[str] | None, algorithm: str | None, default: Sequence[str]) -> tuple[str, ...]:
    """Return the names of `--methods`, with every method of the package in the place of "all".

    names: None where `--methods` is unset; then the methods are the configuration's algorithm and the default methods.
    algorithm: the algorithm that the configuration names, None where the configuration names no algorithm. With "all" it
    is one of the methods.
    """
    named = () if algorithm is None else (algorithm,)
    if names is None:
        return tuple(dict.fromkeys((*named, *default)))
    if ALL not in names:
        return tuple(names)
    return tuple(dict.fromkeys((*named, *(name for name in names if name != ALL), *ALGORITHMS)))


def find_eligible_methods(
    config: Config, methods: Sequence[str], required: Sequence[str], settings: Mapping[str, Any] | None = None
) -> Eligibility:
    """Return which methods can be trained: the experiment of each is built once, untrained, with data that are read once.

    required: methods that the user named, which are not left out. settings: as `compare` takes them.

    Raises:
        UserError: a required method does not fit the configuration; the data cannot be read.
    """
    prepared = data.prepare(config)
    left_out: dict[str, str] = {}
    for method in methods:
        try:
            _check_method(config, method, settings, prepared)
        except UserError as problem:
            if method in required:
                raise
            left_out[method] = str(problem)
    return Eligibility(tuple(method for method in methods if method not in left_out), left_out)


def _check_method(
    config: Config, method: str, settings: Mapping[str, Any] | None, prepared: Mapping[str, data.Prepared]
) -> None:
    """Raise UserError, in one sentence, unless the method's networks can be made and trained."""
    variant, _ = replace_algorithm(config, method, settings)
    with torch.random.fork_rng(devices=[]):
        experiment = build.build(variant, prepared=prepared)
        for client in experiment.clients:
            experiment.build_networks(client)
    if variant.model.batchnorm != config.model.batchnorm and experiment.nets.notes:  # the method would be FedAvg
        raise ConfigError(experiment.nets.notes[0])
    if (variant.training.local_steps is None) != (config.training.local_steps is None):
        raise ConfigError(
            "a round is counted in gradient steps, and under the other methods in passes over the data; set "
            "training.local_steps, which then holds for all methods"
        )
