"""Every algorithm is one file that reads like its paper's box, and one line here."""

from fedmutual.algorithms.aggregate import Aggregate
from fedmutual.algorithms.fedavg import FedAvg
from fedmutual.algorithms.fedh2l import FedH2L
from fedmutual.algorithms.fedmd import FedMD
from fedmutual.algorithms.fedprox import FedProx
from fedmutual.algorithms.fml import FML
from fedmutual.algorithms.independent import Independent

ALGORITHMS: dict[str, type] = {
    "fml": FML,
    "fedavg": FedAvg,
    "fedprox": FedProx,
    "fedh2l": FedH2L,
    "fedmd": FedMD,
    "aggregate": Aggregate,
    "independent": Independent,
    "centralised": Independent,  # on the pooled view of the data: the ceiling, which no federation may look at
}
"""name -> a frozen dataclass, whose fields are the keys that users set, with ``algorithm() -> core.Algorithm``."""
