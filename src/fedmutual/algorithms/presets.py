"""Presets: method names that set keys of the [model] table, for FedAvg or in addition to the method's settings.

A preset's key holds only if the configuration leaves the key at its default.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from fedmutual.core import Role

_ANY_ROLE = Role()


@dataclass(frozen=True)
class Preset:
    """The keys that a name of `algorithm.name` sets in addition to the settings of the algorithm."""

    model: Mapping[str, Any]  # keys of [model] with their values, none of which is the key's default
    title: str | None = None  # what tables call the method; None: as its class does
    about: str | None = None  # in one line; None: as its class says
    source: str = ""  # the paper, where no file of an algorithm names it
    role: Role = _ANY_ROLE  # in comparisons, of a preset with a title; without a title the role of its class holds
    pooled: bool = False  # whether one network learns from all participants' data in one place


_FEATURES = {"part": ("features",), "adaptor": "rest"}
_SAME_START = {"start": "server"}

PRESETS: dict[str, Preset] = {
    "fedper": Preset(
        _FEATURES,
        "FedPer",
        "FedAvg of the features; each client keeps its classifier, and trains both together.",
        "Arivazhagan et al., Federated Learning with Personalization Layers, 2019, https://arxiv.org/abs/1912.00818",
    ),
    "lg-fedavg": Preset(
        {"part": ("classifier",), "adaptor": "rest"},
        "LG-FedAvg",
        "FedAvg of the classifier; each client keeps its features, and trains both together.",
        "Liang et al., Think Locally, Act Globally, 2020, https://arxiv.org/abs/2001.01523",
    ),
    "fedbn": Preset(
        {"batchnorm": "local"},
        "FedBN",
        "FedAvg of all but the BatchNorm layers, which each client keeps.",
        "Li et al., FedBN: Federated Learning on Non-IID Features via Local Batch Normalization, 2021, "
        "https://arxiv.org/abs/2102.07623",
    ),
    "centralised": Preset(
        {},
        "Centralised",
        "One model, trained on all participants' data in one place: an upper bound; nothing is private.",
        role=Role(colour=5, federates=False),
        pooled=True,
    ),
    "fedrep": Preset(_FEATURES),
    "ditto": Preset(_SAME_START),
    "apfl": Preset(_SAME_START),
}
