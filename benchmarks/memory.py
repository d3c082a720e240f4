"""Section memory: the peak memory of a process over what its clients hold. As a script: for one number of clients."""

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from common import Options, figure, verdict

CLIENTS, ROWS = (5, 50, 200), 60_000  # as many examples as MNIST has for training, over all clients
ROUNDS = 3  # in later rounds the heap has holes that the first one left
GOAL, OF = 1.5, 200  # of the first round
MIB = 2**20


def measure(options: Options) -> list[dict[str, Any]] | None:
    """Return the results; None without /proc."""
    if not Path("/proc/self/clear_refs").exists():
        print("the peak of a part of a process can be asked on Linux only")
        return None
    print("MLP, FML, one process: its peak above that before there are clients, data loaded, over clients' own states")
    results = []
    for clients in (5, 20) if options.tiny else CLIENTS:
        peaks = json.loads(_child(clients))
        ratio, later = (peaks[key] / peaks["own"] for key in ("peak_of_first_round", "peak_of_all"))
        print(
            f"K = {clients:>3}: {ratio:.2f} in the first round, {later:.2f} in {ROUNDS}; "
            f"of {peaks['own'] / MIB:.1f} MiB" + (f", goal {GOAL}: {verdict(ratio <= GOAL)}" if clients == OF else ""),
            flush=True,
        )
        mib = {f"{k}_mib": figure(v / MIB) for k, v in peaks.items()}
        results.append({"K": clients, **mib, "rounds": ROUNDS, "peak_over_own": [figure(ratio), figure(later)]})
    return results


def _child(clients: int) -> str:
    words = [sys.executable, __file__, "--clients", str(clients)]
    return subprocess.run(words, check=True, stdout=subprocess.PIPE, text=True).stdout


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--clients", type=int, required=True)
    args = parser.parse_args()
    print(json.dumps(one(args.clients)))


def one(clients: int) -> dict[str, int]:
    """Return bytes: the process without clients; the increase with clients, and at its peaks; the clients' states."""
    from contextlib import closing

    import torch
    from ours import noisy, train

    from fedmutual.engines import allocator
    from fedmutual.engines.inprocess import InProcess
    from fedmutual.events import Event, RoundDone
    from fedmutual.federation.build import build
    from fedmutual.studies.run import EngineHandle

    peaks = []

    def look(event: Event) -> None:
        if isinstance(event, RoundDone):
            peaks.append(_status("VmHWM"))

    allocator.keep_freed_memory()
    torch.set_num_threads(1)
    with noisy("mlp", clients, ROWS // clients) as config:
        experiment = build(config)
        experiment.estimate_work()
        Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here
        before = _status("VmRSS")
        with closing(EngineHandle(experiment, None)) as hosted:
            assert isinstance(hosted.engine, InProcess)
            made = _status("VmRSS")
            train(hosted, ROUNDS, [look])
            client_bytes = sum(size for _, size in hosted.engine.visit(_own, dict.fromkeys(experiment.clients, ())))
    sizes = {"with_clients": made, "peak_of_first_round": peaks[0], "peak_of_all": peaks[-1]}
    return {"before": before, **{k: v - before for k, v in sizes.items()}, "own": client_bytes}


def _own(client: Any) -> int:
    """Return the bytes of a client's networks and optimiser states."""
    states = [t for net in client.nets.values() for t in net.state_dict().values()]
    states += [t for o in client.optimizers.values() for s in o.state.values() for t in s.values()]
    return sum(t.numel() * t.element_size() for t in states)


def _status(key: str) -> int:
    """Return a line of /proc/self/status, in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{key}:"))


if __name__ == "__main__":
    main()
