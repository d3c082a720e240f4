"""Results of runs, made up."""

from fedmutual.reproduce.kept import ClientResult, Made, Result

MADE = Made(
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


def result(arm="fml", seed=0, curve=(0.5, 0.7), own=None, clients=None, **more):
    """A finished run, made up."""
    given = {
        "fingerprint": f"{arm}-{seed}",
        "version": "0",
        "rounds": len(curve),
        "every": 1,
        "seconds": 1.0,
        "model": "personal" if arm in ("fml", "independent") else "global",
        "curves": {"global_test": tuple(curve), "own": tuple(own or curve)},
        "clients": {
            i: ClientResult(network="mlp", examples=n, last=last, best=last) for i, (n, last) in (clients or {}).items()
        },
        "made": MADE,
    }
    return Result(arm=arm, seed=seed, **{**given, **more})
