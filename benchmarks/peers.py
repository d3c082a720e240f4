"""Section peers: a round of FedH2L, four LeNet5 and batches of 32, over a bare hand-written loop of the same work."""

import time
from functools import partial
from typing import Any

from common import Options, Spread, ratios, spread, verdict
from ours import FOREVER, train
from ours_peers import ready
from turns import Contestant, take_turns

from fedmutual.engines.base import evaluate_client
from fedmutual.events import RoundDone, Started
from fedmutual.rundir.checkpoint import Checkpoints

GOAL = 1.10  # times the bare loop's time, at most
ROUNDS = 20  # a turn: a round is short


def measure(options: Options) -> list[dict[str, Any]]:
    print(f"FedH2L, seconds a round over the bare loop's: median (quartiles) of {options.pairs} interleaved turns")
    starts = {"bare": partial(Contestant, "bare_peers.py"), "fedmutual": partial(Contestant, "ours_peers.py")}
    seconds = take_turns(starts, options.pairs, 1 if options.tiny else ROUNDS)
    found = ratios(seconds["fedmutual"], seconds["bare"])
    print(f"lenet5, four nodes  {found:.2f}, goal at most {GOAL:.2f}: {verdict(found.median <= GOAL)}")
    each = {name: spread([1e3 * s for s in v]) for name, v in seconds.items()}
    about = {"model": "lenet5", "nodes": 4, "rounds_a_turn": ROUNDS, "turns": options.pairs, "goal": GOAL}
    beside = apart(options.pairs)
    print(f"apart from that, milliseconds: scoring all nodes {beside['scoring']:.0f}, saving them {beside['saving']:.0f}")
    about |= {f"milliseconds_of_{name}": v for name, v in beside.items()}
    return [about | {"over_bare": found, "milliseconds_a_round": each}]


def apart(times: int) -> dict[str, Spread]:
    """What is done every so many rounds: scoring four nodes on their validation data and all test data, and saving them."""
    scoring, saving = [], []
    with ready() as (found, folder):
        train(found, 1, [])
        exams = found.experiment.plan({}).exams
        checkpoints = Checkpoints(folder, 1, "peers")
        checkpoints(Started(0, FOREVER, found.experiment.clients, ()))
        for round in range(1, times + 1):
            begun = time.perf_counter()
            list(found.engine.each(evaluate_client, {i: (exams[i], {}, round, None) for i in exams}))
            scored = time.perf_counter()
            checkpoints(RoundDone(round, FOREVER, found.experiment.server(), found.engine.each))
            scoring.append(1e3 * (scored - begun))
            saving.append(1e3 * (time.perf_counter() - scored))
    return {"scoring": spread(scoring), "saving": spread(saving)}
