"""Section peers: a round of FedH2L, four LeNet5 and batches of 32, over a bare hand-written loop of the same work."""

from functools import partial
from typing import Any

from common import Options, ratios, spread, verdict
from turns import Contestant, take_turns

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
    return [about | {"over_bare": found, "milliseconds_a_round": each}]
