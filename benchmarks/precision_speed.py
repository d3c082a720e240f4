"""Section precision-speed: the seconds of a round in bfloat16 over float32, in one process with one thread."""

from functools import partial
from typing import Any

from bare import BATCH, NETS
from common import Options, ratios
from turns import Contestant, take_turns

from engines import BATCHES, CLIENTS


def measure(options: Options) -> list[dict[str, Any]]:
    print(f"float32 over bf16, times as fast: median (quartiles) of {options.pairs} interleaved turns")
    return [_compare(model, options) for model in NETS]


def _compare(model: str, options: Options) -> dict[str, Any]:
    batches = 1 if options.tiny else max(1, BATCHES[model] // 5)
    words = ("--engine", "inprocess", "--model", model, "--clients", CLIENTS, "--rows", batches * BATCH)
    starts = {name: partial(Contestant, "ours.py", *words, "--precision", name) for name in ("float32", "bf16")}
    seconds = take_turns(starts, options.pairs)
    faster = ratios(seconds["float32"], seconds["bf16"])
    print(f"{model:7} {faster:.2f}", flush=True)
    return {
        "model": model,
        "clients": CLIENTS,
        "batches_per_client": batches,
        "turns": options.pairs,
        "times_as_fast": faster,
    }
