"""Section short: a whole run of three rounds with the engine `auto`, from its data to its last round, over the bare loop.

Worker processes are started anew for each run; the fork server is ready, as after the imports of the command line.
"""

from functools import partial
from typing import Any

from bare import BATCH
from common import Options, ratios, spread, verdict
from turns import Contestant, take_turns

ROUNDS = 3
# model, clients, batches of a client in an epoch, epochs of a round, the most of the bare loop's time
SETTINGS = (("mlp", 5, 94, 5, 0.72), ("lenet5", 5, 60, 1, 0.80), ("mlp", 20, 24, 5, 0.72), ("lenet5", 20, 15, 1, 0.80))


def measure(options: Options) -> list[dict[str, Any]]:
    print(
        f"seconds of a run of {ROUNDS} rounds over the bare loop's: median (quartiles) of {options.pairs} interleaved turns"
    )
    return [_compare(*setting, options) for setting in SETTINGS]


def _compare(model: str, clients: int, batches: int, epochs: int, goal: float, options: Options) -> dict[str, Any]:
    work = ("--model", model, "--clients", clients, "--rows", (1 if options.tiny else batches) * BATCH, "--epochs", epochs)
    starts = {
        "bare, 2 threads": partial(Contestant, "bare.py", "--threads", 2, *work),
        "fedmutual, auto": partial(Contestant, "ours.py", "--engine", "auto", "--rounds", ROUNDS, *work),
    }
    rounds = {"bare, 2 threads": ROUNDS, "fedmutual, auto": 1}  # our contestant's round is a run
    seconds = take_turns(starts, options.pairs, rounds)
    seconds["bare, 2 threads"] = [ROUNDS * s for s in seconds["bare, 2 threads"]]
    ratio = ratios(seconds["fedmutual, auto"], seconds["bare, 2 threads"])
    print(f"{model:7} K = {clients:2}  {ratio:.2f}, goal at most {goal:.2f}: {verdict(ratio.median <= goal)}", flush=True)
    return {
        "model": model,
        "clients": clients,
        "batches_per_client": batches,
        "epochs": epochs,
        "rounds": ROUNDS,
        "turns": options.pairs,
        "over_bare": ratio,
        "goal": goal,
        "seconds_of_a_run": {name: spread(values) for name, values in seconds.items()},
    }
