"""Data: reading and scaling examples, dividing them among clients, and holding out validation and test rows."""

from fedmutual.data import partition
from fedmutual.data.check import find_problems
from fedmutual.data.federation import Federation, Shares, load
from fedmutual.data.prepared import Prepared, prepare
from fedmutual.data.public import PublicSet
from fedmutual.data.show import draw
from fedmutual.data.sources import NAMES, OF_DOMAINS, is_drawn_by_seed
from fedmutual.errors import list_problems

__all__ = [
    "NAMES",
    "OF_DOMAINS",
    "Federation",
    "Prepared",
    "PublicSet",
    "Shares",
    "draw",
    "find_problems",
    "is_drawn_by_seed",
    "list_problems",
    "load",
    "partition",
    "prepare",
]
