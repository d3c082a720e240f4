"""Real sites on one machine: the cost of a round over mutual TLS, and whether the models equal those of one process.

    uv run python benchmarks/sites.py

Three federations: FML on the digits with three architectures, one of which is a site's own; FedH2L from site to site; FML
with a shared model of 50 MB. For each, one after the other in one run: seconds a round over the network, from the first
saved round to the last, and in one process. Writes benchmarks/results/sites.json.
"""

import json
import shutil
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from common import command, machine, versions

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests"))

import fedmutual  # noqa: E402
from fedmutual.config import parse_config  # noqa: E402
from loopback import loopback  # noqa: E402
from wards import COMMON, SEEDED, SITES, together, with_data  # noqa: E402

RESULTS = ROOT / "benchmarks" / "results" / "sites.json"
MLPS = {i: {**tables, "model": {"personal": "mlp"}} for i, tables in SITES.items()}
NETS = """
from torch import nn

def Own(shape, classes):
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, classes))


def Big(shape, classes):
    wide = nn.Linear(3400, 3600)
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 3400), nn.ReLU(), wide, nn.ReLU(), nn.Linear(3600, classes))
"""


def a_round(name: str, work: Path, common: dict[str, Any], sites: dict[str, Any], **given: Any) -> dict[str, Any]:
    """Return the seconds of a round over the network and in one process, both measured in one run of this script."""
    folder, rounds = work / name.replace(" ", "-"), common["rounds"]
    alone = {
        i: {k: v for k, v in tables.items() if k != "public"} for i, tables in sites.items()
    }  # one process makes the set
    run = fedmutual.run(parse_config(together(common, alone)), folder / "one")
    with loopback(folder / "fed", common, sites, modules={"nets": NETS}, **given) as fed:
        if "public" in given:
            for i in sites:
                fed.cli("data", "give", fed.file, "--site", fed.configs[i], "-o", fed.folder / "public")
        fed.start("server", *sites)
        fed.submit()
        fed.round(1, 900)
        first, began = fed.progress()["round"], time.monotonic()
        fed.round(rounds, 3600)
        took = time.monotonic() - began
        fed.done()
        notes, equal = fed.progress()["notes"], fed.alike(run)
    each, here = took / (rounds - first), run.summary["seconds"] / rounds
    about = {"what": name, "rounds": rounds, "notes": notes, "all models bit for bit those of one process": equal}
    return about | {"seconds a round": round(each, 3), "in one process": round(here, 3)}


def rounds(work: Path) -> list[dict[str, Any]]:
    """Measure FML on the digits with three architectures, one of them a site's own; FedH2L; a shared model of 50 MB."""
    (work / "nets.py").write_text(NETS)
    sys.path.insert(0, str(work))
    three = {**SITES, "west": {**SITES["west"], "model": {"personal": "nets:Own"}}}
    results = [a_round("FML, three architectures", work, {**COMMON, "rounds": 10}, three)]
    sites = with_data(work)
    public = {"public": {"folder": str(work / "FedH2L" / "fed" / "public")}}
    h2l = {**SEEDED, "rounds": 200, "records": {"evaluate_every": 50}}
    results.append(a_round("FedH2L", work, h2l, {i: tables | public for i, tables in sites.items()}, public="public"))
    big = {**COMMON, "rounds": 3, "model": {"shared": "nets:Big"}, "records": {"evaluate_every": 3}}
    results.append(a_round("FML, 50 MB shared", work, big, MLPS))
    return results


def main() -> None:
    """Measure all three federations."""
    torch.set_num_threads(1)
    work = Path(tempfile.mkdtemp())
    results = {
        "command": command("sites.py"),
        "machine": machine(),
        "versions": versions("nvflare"),
        "rounds": rounds(work),
    }
    print(*results["rounds"], sep="\n")
    RESULTS.write_text(json.dumps(results, indent=1) + "\n")
    shutil.rmtree(work, ignore_errors=True)


if __name__ == "__main__":
    main()
