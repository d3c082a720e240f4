"""Section peers: a round of FML and FedAvg here, in the bare loop, and in the user's clones of PFLlib and HtFLlib.

    uv run python benchmarks/run.py peers --pflib PATH --htfl PATH

All contestants have the noise, networks and batch size of bare.py, an equal number of local epochs, and two cores.
"""

from functools import partial
from pathlib import Path
from typing import Any

from bare import BATCH
from common import Options, ratios, spread
from turns import Contestant, take_turns

SETTINGS = (  # network, clients, full batches of a client in a round, as many as make a round last seconds; 94: MNIST's
    ("mlp", 5, 94),
    ("mlp", 20, 23),
    ("lenet5", 5, 20),
    ("lenet5", 20, 5),
)
ALGORITHMS = ("fml", "fedavg")
TEST_PART = 6  # training rows for each test row, as in MNIST


def measure(options: Options) -> list[dict[str, Any]] | None:
    clones = {name: path for name, path in (("pflib", options.pflib), ("htfl", options.htfl)) if path}
    for name, path in clones.items():
        if not (path / "system" / "main.py").is_file():
            raise SystemExit(f"--{name} {path}: no clone of the library, because system/main.py is missing")
    if not clones:
        print("not measured: give clones of other libraries with --pflib PATH or --htfl PATH")
        return None
    settings = {f"{model}-{clients}": (model, clients, batches) for model, clients, batches in SETTINGS}
    if options.setting and options.setting not in settings:
        raise SystemExit(f"--setting {options.setting}: there is no such setting; there are {', '.join(settings)}")
    chosen = [settings[options.setting]] if options.setting else SETTINGS
    print(f"times as fast as other libraries: median (quartiles) of {options.pairs} interleaved turns")
    return [
        _setting(*setting, algorithm, evaluates, clones, options)
        for setting in (chosen[:1] if options.tiny else chosen)
        for algorithm in ALGORITHMS
        for evaluates in (False, True)
    ]


def _setting(
    model: str, clients: int, batches: int, algorithm: str, evaluates: bool, clones: dict[str, Path], options: Options
) -> dict[str, Any]:
    rows = BATCH * (1 if options.tiny else batches)
    work: tuple[object, ...] = ("--model", model, "--clients", clients, "--rows", rows, "--epochs", options.epochs)
    scored = ("--evaluate",) if evaluates else ()
    ours = ("--engine", "processes", "--workers", 2, "--algorithm", algorithm, "--test-rows", rows // TEST_PART)
    starts = {"fedmutual": partial(Contestant, "ours.py", *work, *ours, *scored)}
    if algorithm == "fml" and not evaluates:
        starts["bare"] = partial(Contestant, "bare.py", *work, "--threads", 2)
    for name, path in clones.items():
        if name == "htfl" and algorithm != "fml":
            continue  # it has no FedAvg
        theirs = ("--library", name, "--path", path.resolve(), "--algorithm", algorithm, "--threads", 2)
        test = ("--test-rows", rows // TEST_PART)
        starts[name] = partial(Contestant, "other_library.py", *work, *theirs, *test, *scored)
    seconds = take_turns(starts, options.pairs)
    faster = {name: ratios(values, seconds["fedmutual"]) for name, values in seconds.items() if name != "fedmutual"}
    label = f"{model:7} K = {clients:2} {algorithm:7}{' with evaluation' if evaluates else ''}"
    print(f"{label:40}" + "  ".join(f"over {name} {ratio:.2f}" for name, ratio in faster.items()), flush=True)
    return {
        "model": model,
        "clients": clients,
        "batches_per_client": rows // BATCH,
        "epochs": options.epochs,
        "algorithm": algorithm,
        "evaluation": evaluates,
        "turns": options.pairs,
        "times_as_fast_as": faster,
        "seconds_a_round": {name: spread(values) for name, values in seconds.items()},
    }
