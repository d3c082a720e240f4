"""The algorithms: each file reads like its paper's algorithm box, and has one line in `registry.METHODS`."""

import pkgutil
from typing import TYPE_CHECKING

from fedmutual.algorithms.registry import METHODS

if TYPE_CHECKING:  # the types of the names that the last line of this file defines
    from fedmutual.algorithms.aggregate import Aggregate as Aggregate
    from fedmutual.algorithms.apfl import APFL as APFL
    from fedmutual.algorithms.ditto import Ditto as Ditto
    from fedmutual.algorithms.fd import FD as FD
    from fedmutual.algorithms.fedala import FedALA as FedALA
    from fedmutual.algorithms.fedapen import FedAPEN as FedAPEN
    from fedmutual.algorithms.fedavg import FedAvg as FedAvg
    from fedmutual.algorithms.fedavg_ft import FedAvgFT as FedAvgFT
    from fedmutual.algorithms.feddf import FedDF as FedDF
    from fedmutual.algorithms.fedgh import FedGH as FedGH
    from fedmutual.algorithms.fedh2l import FedH2L as FedH2L
    from fedmutual.algorithms.fedkd import FedKD as FedKD
    from fedmutual.algorithms.fedmd import FedMD as FedMD
    from fedmutual.algorithms.fedopt import FedOpt as FedOpt
    from fedmutual.algorithms.fedproto import FedProto as FedProto
    from fedmutual.algorithms.fedprox import FedProx as FedProx
    from fedmutual.algorithms.fedrep import FedRep as FedRep
    from fedmutual.algorithms.fedtgp import FedTGP as FedTGP
    from fedmutual.algorithms.fml import FML as FML
    from fedmutual.algorithms.independent import Independent as Independent
    from fedmutual.algorithms.ktpfl import KTpFL as KTpFL
    from fedmutual.algorithms.moon import MOON as MOON
    from fedmutual.algorithms.pfedme import PFedMe as PFedMe
    from fedmutual.algorithms.proxyfl import ProxyFL as ProxyFL
    from fedmutual.algorithms.scaffold import SCAFFOLD as SCAFFOLD


ALGORITHMS: dict[str, type] = {name: pkgutil.resolve_name(f"{__name__}.{method.where}") for name, method in METHODS.items()}
"""name -> a frozen dataclass, whose fields are the keys that users set, with ``algorithm() -> core.Algorithm``."""
globals().update({kind.__name__: kind for kind in ALGORITHMS.values()})
