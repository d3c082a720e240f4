"""AGG: each participant trains alone, on its private data and on all public data.

The baseline of Li et al., FedH2L, 2021, https://arxiv.org/abs/2101.11296: it shows the value of the public seed set alone.
"""

from dataclasses import dataclass, replace
from typing import ClassVar

from fedmutual.algorithms.agree import Agree, Compare
from fedmutual.algorithms.independent import Independent
from fedmutual.core import Algorithm, Public


@dataclass(frozen=True, kw_only=True)
class Aggregate(Independent):
    """Each participant alone, on its private data and everybody's public data; nothing is sent after the public data."""

    dp_ready: ClassVar[bool] = True

    def algorithm(self) -> Algorithm:
        """Return independent training whose private data include all public rows."""
        return replace(super().algorithm(), start=(Agree(), Compare()), public=Public(), trains_on=("private", "public"))
