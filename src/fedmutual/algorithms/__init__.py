"""The algorithms: each file reads like its paper's algorithm box and has one line here."""

from fedmutual.algorithms.aggregate import Aggregate
from fedmutual.algorithms.apfl import APFL
from fedmutual.algorithms.ditto import Ditto
from fedmutual.algorithms.fedavg import FedAvg
from fedmutual.algorithms.fedavg_ft import FedAvgFT
from fedmutual.algorithms.feddf import FedDF
from fedmutual.algorithms.fedh2l import FedH2L
from fedmutual.algorithms.fedkd import FedKD
from fedmutual.algorithms.fedmd import FedMD
from fedmutual.algorithms.fedproto import FedProto
from fedmutual.algorithms.fedprox import FedProx
from fedmutual.algorithms.fedrep import FedRep
from fedmutual.algorithms.fedtgp import FedTGP
from fedmutual.algorithms.fml import FML
from fedmutual.algorithms.independent import Independent
from fedmutual.algorithms.proxyfl import ProxyFL

ALGORITHMS: dict[str, type] = {
    "fml": FML,
    "fedavg": FedAvg,
    "fedprox": FedProx,
    "fedh2l": FedH2L,
    "fedmd": FedMD,
    "aggregate": Aggregate,
    "independent": Independent,
    "centralised": Independent,  # on the pooled view of the data: the ceiling, which no federation may look at
    "fedavg-ft": FedAvgFT,
    "ditto": Ditto,
    "apfl": APFL,
    "fedper": FedAvg,  # with keys of [model], as `presets.PRESETS` has it
    "fedrep": FedRep,
    "lg-fedavg": FedAvg,
    "fedbn": FedAvg,
    "fedproto": FedProto,
    "fedtgp": FedTGP,
    "fedkd": FedKD,
    "proxyfl": ProxyFL,
    "feddf": FedDF,
}
"""name -> a frozen dataclass, whose fields are the keys that users set, with ``algorithm() -> core.Algorithm``."""
