"""Section clients: the cost of a client's step as the number of clients and the networks grow. One process, one thread."""

from collections.abc import Iterable
from functools import partial
from typing import Any

import wide
from bare import BATCH, CLASSES, SHAPES
from common import Options, figure, ratios, spread, verdict
from turns import Contestant, take_turns

COUNTS, BASE = (2, 5, 20, 50, 100, 200), 5
BATCHES, EPOCHS = 5, 2  # of a client
TURN = 50  # clients' rounds that make a turn at least: a round of two clients alone is too short to time
FLAT = 0.1
WIDTHS = (50, 100, 200, 400, 800, 1600)


def measure(options: Options) -> dict[str, Any]:
    return {"clients": _clients(options), "model_size": _sizes(options)}


def _clients(options: Options) -> dict[str, Any]:
    """Return the time of a client's step over the time with five clients."""
    counts = COUNTS[:3] if options.tiny else COUNTS
    starts = {str(k): _start("mlp", k) for k in counts}
    rounds = {str(k): 1 if options.tiny else -(-TURN // k) for k in counts}
    seconds = take_turns(starts, options.pairs, rounds)
    steps = {k: [s / (int(k) * BATCHES * EPOCHS) for s in v] for k, v in seconds.items()}
    print(f"MLP, {BATCHES * EPOCHS} steps a client: a client's step over that of K = {BASE}, of {options.pairs} turns")
    rows = []
    for k, times in steps.items():
        ratio = ratios(times, steps[str(BASE)])
        print(f"K = {k:>3}: {ratio:.3f}, {1e3 * spread(times).median:.2f} ms a step", flush=True)
        rows.append({"K": int(k), "over_base": ratio, "milliseconds_per_step": spread([1e3 * t for t in times])})
    beyond = max(abs(r["over_base"].median - 1) for r in rows if r["K"] >= BASE)
    print(f"from K = {BASE} to {counts[-1]} it differs by {beyond:.1%} at most, goal {FLAT:.0%}: {verdict(beyond <= FLAT)}")
    return {"batches": BATCHES, "epochs": EPOCHS, "turns": options.pairs, "rows": rows, "largest_deviation": figure(beyond)}


def _sizes(options: Options) -> list[dict[str, Any]]:
    """Return the time of a round of five clients by the number of hidden units."""
    widths = WIDTHS[:2] if options.tiny else WIDTHS
    seconds = take_turns({str(h): _start(f"wide:h{h}", BASE) for h in widths}, options.pairs)
    print(f"MLP of h hidden units, K = {BASE}, {BATCHES * EPOCHS} steps a client, two networks each")
    rows = []
    for h in widths:
        weights = sum(p.numel() for p in getattr(wide, f"h{h}")(SHAPES["mlp"], CLASSES).parameters())
        time = spread(seconds[str(h)])
        # a forward is 2 operations a weight and example; with the backward, three times as many; two networks
        rate = 2 * 6 * weights * BATCH * BASE * BATCHES * EPOCHS / time.median / 1e9
        print(f"h = {h:>4}: {weights:>9,} weights a network, {time:.3f} s a round, {rate:.0f} GFLOP/s", flush=True)
        rows.append({"hidden": h, "weights": weights, "seconds_per_round": time, "gflops": figure(rate, 3)})
    return rows


def _start(model: str, clients: int) -> partial[Contestant]:
    words: Iterable[object] = ("--rows", BATCHES * BATCH, "--epochs", EPOCHS, "--engine", "inprocess", "--threads", 1)
    return partial(Contestant, "ours.py", "--model", model, "--clients", clients, *words)
