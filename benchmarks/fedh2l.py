"""Section fedh2l: a round of FedH2L, four LeNet5 and batches of 32, over a hand-written loop of equal work."""

import time
from functools import partial
from typing import Any

from common import Options, Spread, ratios, spread, verdict
from ours import FOREVER, train
from ours_fedh2l import ready
from turns import Contestant, take_turns

from fedmutual.engines.base import ScoreOrder
from fedmutual.events import RoundDone, Started
from fedmutual.rundir.checkpoint import Checkpoints

GOAL = 1.10  # times the bare loop's time, at most
ROUNDS = 20  # a turn: a round is short


def measure(options: Options) -> list[dict[str, Any]]:
    print(f"FedH2L, seconds a round over the bare loop's: median (quartiles) of {options.pairs} interleaved turns")
    starts = {"bare": partial(Contestant, "bare_fedh2l.py"), "fedmutual": partial(Contestant, "ours_fedh2l.py")}
    seconds = take_turns(starts, options.pairs, 1 if options.tiny else ROUNDS)
    ratio = ratios(seconds["fedmutual"], seconds["bare"])
    print(f"lenet5, four nodes  {ratio:.2f}, goal at most {GOAL:.2f}: {verdict(ratio.median <= GOAL)}")
    each = {name: spread([1e3 * s for s in v]) for name, v in seconds.items()}
    about = {"model": "lenet5", "nodes": 4, "rounds_a_turn": ROUNDS, "turns": options.pairs, "goal": GOAL}
    beside = apart(options.pairs)
    print(f"apart from that, milliseconds: scoring all nodes {beside['scoring']:.0f}, saving them {beside['saving']:.0f}")
    about |= {f"milliseconds_of_{name}": v for name, v in beside.items()}
    return [about | {"over_bare": ratio, "milliseconds_a_round": each}]


def apart(times: int) -> dict[str, Spread]:
    """Measure the work of every few rounds: scoring four nodes on validation and test data, and saving them."""
    scoring, saving = [], []
    with ready() as (handle, folder):
        train(handle, 1, [])
        evaluations = handle.experiment.make_plan({}).evaluations
        checkpoints = Checkpoints(folder, 1, "fedh2l")
        checkpoints(Started(0, FOREVER, handle.experiment.clients, ()))
        for round in range(1, times + 1):
            begun = time.perf_counter()
            list(handle.engine.score({i: ScoreOrder(specs, {}, round, None) for i, specs in evaluations.items()}))
            scored = time.perf_counter()
            checkpoints(RoundDone(round, FOREVER, handle.experiment.make_server_state(), handle.engine.visit))
            scoring.append(1e3 * (scored - begun))
            saving.append(1e3 * (time.perf_counter() - scored))
    return {"scoring": spread(scoring), "saving": spread(saving)}
