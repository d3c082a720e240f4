"""Data: where examples come from, who has which of them, and what is held out."""

from fedmutual.data import partition
from fedmutual.data.check import findings
from fedmutual.data.federation import Federation, Prepared, Shares, load, prepare
from fedmutual.data.public import PublicSet
from fedmutual.data.show import draw
from fedmutual.data.sources import NAMES, OF_DOMAINS, draws

__all__ = [
    "NAMES",
    "OF_DOMAINS",
    "Federation",
    "Prepared",
    "PublicSet",
    "Shares",
    "draw",
    "draws",
    "findings",
    "load",
    "partition",
    "prepare",
]
