"""Section peers: a round of FML and FedAvg here and in other libraries, each side with two cores.

    uv run python benchmarks/run.py peers --pflib PATH --htfl PATH --peer flower=PYTHON --peer fedlab=PYTHON

FML: PATH is a clone of PFLlib or HtFLlib, whose work is more and other than bare.py's. FedAvg: all contestants do equal work
(peer.py). PYTHON is a Python that has the library; the contestant is peer_NAME.py.
"""

import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import torch
from bare import BATCH, SHAPES
from common import Options, figure, ratios, spread
from ours import save_noise
from peer_fedmutual import DATA, make_config
from turns import HERE, WARM, Contestant, take_turns

from fedmutual.batches import epochs
from fedmutual.core import At
from fedmutual.federation.build import build

SETTINGS = (  # network, clients, full batches of a client in a round, as many as make a round last seconds; 94: MNIST's
    ("mlp", 5, 94),
    ("mlp", 20, 23),
    ("lenet5", 5, 20),
    ("lenet5", 20, 5),
)
TEST_PART = 6  # training rows for each test row, as in MNIST
SIGNAL = 0.1  # the share of an image that tells its class in FedAvg, so that accuracies can differ
MOST_APART = 0.01  # the distance of the weights after one round of equal batches / the length of its update; due to rounding
MOST_ACCURACY_APART = 0.02  # after the last turn; a library may draw its own batches


def measure(options: Options) -> list[dict[str, Any]] | None:
    clones = {name: path for name, path in (("pflib", options.pflib), ("htfl", options.htfl)) if path}
    for name, path in clones.items():
        if not (path / "system" / "main.py").is_file():
            raise SystemExit(f"--{name} {path}: no clone of the library, because system/main.py is missing")
    for name, python in options.peers.items():
        names = {path.stem.removeprefix("peer_") for path in HERE.glob("peer_*.py")} - {"fedmutual", "pflib"}
        if name not in names:
            raise SystemExit(f"--peer {name}={python}: there is no such contestant; there are {', '.join(sorted(names))}")
        if not python.is_file():
            raise SystemExit(f"--peer {name}={python}: there is no such file; give the Python that has the library")
    if not clones and not options.peers:
        print("not measured: give clones of other libraries with --pflib PATH or --htfl PATH, or --peer NAME=PYTHON")
        return None
    settings = {f"{model}-{clients}": (model, clients, batches) for model, clients, batches in SETTINGS}
    if options.setting and options.setting not in settings:
        raise SystemExit(f"--setting {options.setting}: there is no such setting; there are {', '.join(settings)}")
    chosen = [settings[options.setting]] if options.setting else SETTINGS
    print(f"times as fast as other libraries: median (quartiles) of {options.pairs} interleaved turns")
    results = []
    for model, clients, batches in chosen[:1] if options.tiny else chosen:
        size = (model, clients, BATCH * (1 if options.tiny else batches))
        if clones:
            results += [_compare_fml(*size, evaluates, clones, options) for evaluates in (False, True)]
        results.append(_compare_fedavg(*size, options))
    return results


def _compare_fml(
    model: str, clients: int, rows: int, evaluates: bool, clones: dict[str, Path], options: Options
) -> dict[str, Any]:
    work: tuple[object, ...] = ("--model", model, "--clients", clients, "--rows", rows, "--epochs", options.epochs)
    scored = ("--evaluate",) if evaluates else ()
    test = ("--test-rows", rows // TEST_PART)
    starts = {"fedmutual": partial(Contestant, "ours.py", *work, "--engine", "processes", "--workers", 2, *test, *scored)}
    if not evaluates:
        starts["bare"] = partial(Contestant, "bare.py", *work, "--threads", 2)
    for name, path in clones.items():
        theirs = ("--library", name, "--path", path.resolve(), "--threads", 2)
        starts[name] = partial(Contestant, "other_library.py", *work, *theirs, *test, *scored)
    seconds = take_turns(starts, options.pairs)
    return _tell(model, clients, rows, "fml", evaluates, seconds, options)


def _compare_fedavg(model: str, clients: int, rows: int, options: Options) -> dict[str, Any]:
    pythons = {"fedmutual": {}, **{name: {"python": python} for name, python in options.peers.items()}}
    rest = {}
    if options.pflib:
        pythons["pflib"], rest["pflib"] = {}, (options.pflib.resolve(),)
    reports: dict[str, list[dict[str, Any]]] = {name: [] for name in pythons}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        expected = _write_work(folder, model, clients, rows, options)
        starts = {
            name: partial(Contestant, f"peer_{name}.py", folder, *rest.get(name, ()), report=reports[name].append, **python)
            for name, python in pythons.items()
        }
        seconds = take_turns(starts, options.pairs)
        equality = {name: _check_work(name, answers[1:], expected, folder) for name, answers in reports.items()}
    accuracies = {name: answers[-1]["correct"] / answers[-1]["tested"] for name, answers in reports.items()}
    for name, accuracy in accuracies.items():
        if abs(accuracy - accuracies["fedmutual"]) > MOST_ACCURACY_APART:
            raise SystemExit(f"{name}: accuracy {accuracy:.3f} after the last turn, fedmutual {accuracies['fedmutual']:.3f}")
    result = _tell(model, clients, rows, "fedavg", True, seconds, options)
    work = {name: {**equality[name], "accuracy": figure(accuracies[name]), "versions": reports[name][0]} for name in reports}
    return result | {"work_of_a_round": expected, "contestants": work}


def _write_work(folder: Path, model: str, clients: int, rows: int, options: Options) -> dict[str, int]:
    """Write FOLDER/work.pt and the data of our contestant; return what a round consists of."""
    save_noise(folder / DATA, SHAPES[model], clients * rows, clients * (rows // TEST_PART), SIGNAL)
    config = make_config(folder, model, clients, options.epochs)
    experiment = build(config)
    ids = experiment.clients

    def draw(round: int, id: str) -> torch.Tensor:
        """Return a client's batches as our engine draws them: int [epochs, rows]."""
        rng = At(config.seed, round, config.rounds).rng(id, "batches")
        return torch.cat(list(epochs(rows, options.epochs, BATCH, rng))).view(options.epochs, rows)

    def read(part: Any) -> tuple[torch.Tensor, torch.Tensor]:
        (batch,) = part.rows([torch.arange(len(part))])
        return tuple(tensor.contiguous().clone() for tensor in batch)

    work = {
        "model": model,
        "epochs": options.epochs,
        "start": [tensor.clone() for tensor in experiment.make_server_state().values()],
        "clients": [read(experiment.data.clients[id].private) for id in ids],
        "orders": torch.stack([torch.stack([draw(round, id) for id in ids]) for round in range(WARM + options.pairs)]),
        "test": read(experiment.data.test),
    }
    torch.save(work, folder / "work.pt")
    steps = clients * options.epochs * rows // BATCH
    return {"steps": steps, "examples": steps * BATCH, "tested": len(experiment.data.test)}


def _check_work(name: str, answers: list[dict[str, Any]], expected: dict[str, int], folder: Path) -> dict[str, Any]:
    """Stop if a turn had other work; return the distance of the weights after the first round."""

    def join(tensors: list[torch.Tensor]) -> torch.Tensor:
        return torch.cat([tensor.flatten() for tensor in tensors])

    for turn, answer in enumerate(answers):
        for unit, number in expected.items():
            if answer.get(unit, number) != number:
                raise SystemExit(f"{name}: {answer[unit]} {unit} in turn {turn}, and not {number}")
    ours, theirs = (join(torch.load(folder / f"peer_{n}-0.pt")) for n in ("fedmutual", name))
    apart = ((ours - theirs).norm() / (ours - join(torch.load(folder / "work.pt")["start"])).norm()).item()
    if apart > MOST_APART and name != "pflib":  # it draws its own batches
        raise SystemExit(
            f"{name}: after the first round the weights differ from fedmutual's by {apart:.1e} of the length of the update"
        )
    return {"distance_of_weights_over_update": figure(apart)}


def _tell(
    model: str, clients: int, rows: int, algorithm: str, evaluates: bool, seconds: dict[str, list[float]], options: Options
) -> dict[str, Any]:
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
