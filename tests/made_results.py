"""Build results of runs with artificial numbers, and read what `fedmutual reproduce` says."""

import re

from fedmutual_papers.store import ClientResult, Cloud, NodeAnalysis, Origin, Result

MADE = Origin(
    command="fedmutual reproduce table9",
    python="3.11",
    torch="2",
    torchvision="0",
    platform="Linux",
    cpus=2,
    device="cpu",
    threads=1,
    engine="inprocess",
)


def closeup(client="0", validation=(0.5, 0.7), losses=None, silhouette=0.25, points=((0, 0, 0.0, 1.5), (1, 1, -2.0, 0.5))):
    """Return the analysis of one node in a run of two domains and two classes, with artificial numbers."""
    cloud = Cloud(domains=("0", "90"), classes=("1", "7"), explained=(0.4, 0.2), silhouette=silhouette, points=points)
    return NodeAnalysis(client=client, validation=validation, losses=losses or {"personal": (0.9, 0.8)}, cloud=cloud)


def result(arm="fml", seed=0, curve=(0.5, 0.7), own_curve=None, clients=None, **further_fields):
    """Return a finished run with artificial numbers."""
    fields = {
        "fingerprint": f"{arm}-{seed}",
        "version": "0",
        "rounds": len(curve),
        "every": 1,
        "seconds": 1.0,
        "model": "personal" if arm in ("fml", "independent") else "global",
        "curves": {"global_test": tuple(curve), "own": tuple(own_curve or curve)},
        "clients": {
            i: ClientResult(network="mlp", examples=n, last=last, best=last) for i, (n, last) in (clients or {}).items()
        },
        "made": MADE,
    }
    return Result(arm=arm, seed=seed, **{**fields, **further_fields})


def count_trained(output):
    """Return how many runs the command has trained, by its output."""
    return int(re.search(r"^(\d+) runs? trained", output, re.MULTILINE)[1])
