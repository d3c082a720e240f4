"""The methods by name: the class of each method, and what comparisons, tuning and [model] need to know of the method."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from fedmutual.core import Role


@dataclass(frozen=True)
class Method:
    """A name of `algorithm.name`. Several names may have one class, with other keys of [model]."""

    where: str  # the class, as "module:Class" in this package; for a user's own method, the name of the method
    title: str  # in tables and plots
    role: Role = field(default_factory=Role)  # in comparisons
    tune: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)  # setting -> the values that `compare --tune` tries
    # key of [model] -> a value other than the default; it holds where the configuration leaves the key at its default
    model: Mapping[str, Any] = field(default_factory=dict)
    about: str | None = None  # one line; None: the first line of the docstring of the class
    paper: str | None = None  # authors, title, year, address; None: those in the docstring of the module of the class
    pooled: bool = False  # whether one network learns from all participants' data in one place


_FEATURES = {"part": ("features",), "adaptor": "rest"}
_SAME_START = {"start": "server"}
_MUTUAL = {"alpha": (0.25, 0.5, 0.75), "beta": (0.25, 0.5, 0.75)}

METHODS = {
    "fml": Method("fml:FML", "FML", Role(position=1, colour=1, reference=True), _MUTUAL),
    "fedavg": Method("fedavg:FedAvg", "FedAvg", Role(position=5, colour=2)),
    "fedprox": Method("fedprox:FedProx", "FedProx", Role(position=6, colour=3), {"mu": (0.001, 0.01, 0.1, 1.0)}),
    "fedh2l": Method("fedh2l:FedH2L", "FedH2L", Role(position=2, colour=6, reference=True)),
    "fedmd": Method("fedmd:FedMD", "FedMD", Role(position=3, colour=7), {"digest_steps": (1, 5)}),
    "aggregate": Method("aggregate:Aggregate", "AGG", Role(position=4, colour=8)),
    "independent": Method("independent:Independent", "Local-only", Role(colour=4, federates=False)),
    "centralised": Method(
        "independent:Independent",
        "Centralised",
        Role(colour=5, federates=False),
        about="One model, trained on all participants' data in one place: an upper bound; nothing is private.",
        pooled=True,
    ),
    "fedavg-ft": Method("fedavg_ft:FedAvgFT", "FedAvg + fine-tuning", tune={"tune_epochs": (1, 3, 5)}),
    "ditto": Method("ditto:Ditto", "Ditto", tune={"lam": (0.1, 0.5, 1.0, 2.0)}, model=_SAME_START),
    "apfl": Method("apfl:APFL", "APFL", tune={"mix": (0.25, 0.5, 0.75)}, model=_SAME_START),
    "fedper": Method(
        "fedavg:FedAvg",
        "FedPer",
        model=_FEATURES,
        about="FedAvg of the features; each client keeps its classifier, and trains both together.",
        paper="Arivazhagan et al., Federated Learning with Personalization Layers, 2019, https://arxiv.org/abs/1912.00818",
    ),
    "fedrep": Method("fedrep:FedRep", "FedRep", tune={"head_epochs": (1, 5, 10)}, model=_FEATURES),
    "lg-fedavg": Method(
        "fedavg:FedAvg",
        "LG-FedAvg",
        model={"part": ("classifier",), "adaptor": "rest"},
        about="FedAvg of the classifier; each client keeps its features, and trains both together.",
        paper="Liang et al., Think Locally, Act Globally, 2020, https://arxiv.org/abs/2001.01523",
    ),
    "fedbn": Method(
        "fedavg:FedAvg",
        "FedBN",
        model={"batchnorm": "local"},
        about="FedAvg of all but the BatchNorm layers, which each client keeps.",
        paper="Li et al., Federated Learning on Non-IID Features via Local Batch Normalization, 2021, https://arxiv.org/abs/2102.07623",
    ),
    "fedproto": Method("fedproto:FedProto", "FedProto", tune={"proto_lam": (0.1, 1.0, 10.0)}),
    "fedtgp": Method("fedtgp:FedTGP", "FedTGP"),
    "fedkd": Method("fedkd:FedKD", "FedKD"),
    "proxyfl": Method("proxyfl:ProxyFL", "ProxyFL"),
    "fedopt": Method(
        "fedopt:FedOpt", "FedOpt", tune={"server_rate": (0.001, 0.01, 0.1), "kind": ("adam", "yogi", "adagrad")}
    ),
    "scaffold": Method("scaffold:SCAFFOLD", "SCAFFOLD", tune={"server_step": (0.5, 1.0, 1.5)}),
    "moon": Method("moon:MOON", "MOON", tune={"contrast": (0.1, 1.0, 5.0)}),
    "fedala": Method("fedala:FedALA", "FedALA", tune={"layers": (1, 2), "rows_share": (0.4, 0.8)}, model=_SAME_START),
    "pfedme": Method("pfedme:PFedMe", "pFedMe", tune={"moreau_lam": (1.0, 15.0, 30.0), "outer_rate": (0.001, 0.005, 0.02)}),
    "fd": Method("fd:FD", "FD", tune={"fd_weight": (0.1, 1.0, 10.0)}),
    "fedgh": Method("fedgh:FedGH", "FedGH", tune={"head_lr": (0.01, 0.1, 1.0)}),
    "fedgen": Method("fedgen:FedGen", "FedGen", tune={"gen_alpha": (0.1, 1.0, 10.0), "gen_beta": (0.1, 1.0, 10.0)}),
    "fedapen": Method("fedapen:FedAPEN", "FedAPEN", tune={"adapt_rate": (0.001, 0.01, 0.1)}),
    "kt-pfl": Method("ktpfl:KTpFL", "KT-pFL", tune={"kt_temperature": (1.0, 10.0), "match_steps": (1, 5)}),
    "feddf": Method("feddf:FedDF", "FedDF", tune={"distill_steps": (30, 100, 300)}),
}
