"""Section secure-sum-sites: seconds of a round of real FLARE processes on one machine, under masks and without.

Three sites train FML on the digits, with a shared model of 0.8 MB. Two federations run one after the other: the server adds
floats, or the sites mask their updates. Seconds are from one saved round to the next.
"""

import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from common import Options, spread

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))

from loopback import loopback
from wards import COMMON, SITES

ROUNDS = 8
NETS = """
from torch import nn

def Net(shape, classes):
    first, second = nn.Linear(64, 400), nn.Linear(400, 420)
    return nn.Sequential(nn.Flatten(), first, nn.ReLU(), second, nn.ReLU(), nn.Linear(420, classes))
"""
MLPS = {i: {**tables, "model": {"personal": "mlp"}} for i, tables in SITES.items()}


def measure(options: Options) -> list[dict[str, Any]]:
    print("seconds a round of three real sites with a shared model of 0.8 MB, over TLS on one machine")
    results = []
    with tempfile.TemporaryDirectory() as work:
        for kind in ("float", "masked"):
            results.append(line := {"sum": kind, **_measure_rounds(Path(work) / kind, kind, 3 if options.tiny else ROUNDS)})
            print(f"server.sum = {kind!r}: {line['seconds']:.2f} s a round; notes: {line['notes']}", flush=True)
    return results


def _measure_rounds(folder: Path, kind: str, rounds: int) -> dict[str, Any]:
    """Return the seconds of each round after the first one, and the remarks of the federation."""
    folder.mkdir(parents=True)
    common = {**COMMON, "rounds": rounds, "model": {"shared": "nets:Net"}}
    with loopback(folder / "fed", common, MLPS, modules={"nets": NETS}, server={"sum": kind}) as federation:
        federation.start("server", *MLPS)
        federation.submit()
        federation.round(1, 300)
        first, seconds = federation.progress()["round"], []
        for number in range(first + 1, rounds + 1):
            began = time.monotonic()
            federation.round(number, 300)
            seconds.append(time.monotonic() - began)
        federation.done()
        return {"rounds": len(seconds), "seconds": spread(seconds), "notes": federation.progress()["notes"]}
