"""Data: where examples come from, who has which of them, and what is held out."""

from fedmutual.data import partition
from fedmutual.data.check import findings
from fedmutual.data.federation import Federation, Prepared, Shares, load, prepare
from fedmutual.data.show import draw
from fedmutual.data.sources import NAMES

__all__ = ["NAMES", "Federation", "Prepared", "Shares", "draw", "findings", "load", "partition", "prepare"]
