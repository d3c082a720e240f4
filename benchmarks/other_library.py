"""A contestant (turns.py): FML in the user's clone of PFLlib or HtFLlib, on the noise and networks of bare.py.

The server and client classes are the library's own, and a round calls the methods of their training loop in that loop's
order. Settings that bare.py does not give are the defaults of the library's command line. The file imports nothing of
fedmutual.
"""

import argparse
import ast
import contextlib
import importlib
import os
import sys
import tempfile
import time
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import torch
from bare import ALPHA, BATCH, BETA, CLASSES, NETS, SGD, SHAPES, noise
from torch import Tensor
from turns import Stage

LIBRARIES = ("pflib", "htfl")
ALGORITHMS = {"fml": "FML", "fedavg": "FedAvg"}
DATASET = "noise"


def read_defaults(main: Path) -> dict[str, Any]:
    """Return the options of the library's command line with their defaults, read from its main.py without running it."""
    calls = [node for node in ast.walk(ast.parse(main.read_text())) if isinstance(node, ast.Call)]
    options = {}
    for call in calls:
        if getattr(call.func, "attr", None) == "add_argument":
            name = next(a.value for a in call.args if a.value.startswith("--")).removeprefix("--")
            options[name] = next((ast.literal_eval(k.value) for k in call.keywords if k.arg == "default"), None)
    return options


def save_rows(folder: Path, parts: Mapping[str, Sequence[tuple[Tensor, Tensor]]]) -> None:
    """Write the training and test files of all clients as the library reads them. parts: "train", "test" -> their rows."""
    for part, clients in parts.items():
        (folder / DATASET / part).mkdir(parents=True)
        for client, (x, y) in enumerate(clients):
            arrays = {"x": x.numpy(), "y": y.numpy()}
            np.savez(folder / DATASET / part / f"{client}.npz", data=np.array(arrays, dtype=object))


def make_server(library: str, system: Path, args: argparse.Namespace) -> Any:
    """Return the library's server with its clients."""
    sys.path.insert(0, str(system))
    sys.modules.setdefault("h5py", ModuleType("h5py"))  # only the library's file of results needs it, which is not written
    settings = read_defaults(system / "main.py") | {
        "dataset": DATASET,
        "device": "cpu",
        "num_classes": CLASSES,
        "num_clients": args.clients,
        "batch_size": BATCH,
        "local_epochs": args.epochs,
        "local_learning_rate": SGD["lr"],
        "alpha": ALPHA,
        "beta": BETA,
        "algorithm": ALGORITHMS[args.algorithm],
    }
    if library == "htfl":
        os.environ["TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD"] = "1"  # it loads networks that it pickled itself a moment ago
        # networks are expressions that the library evaluates; they are built here instead
        models = importlib.import_module("flcore.trainmodel.models")
        models.BaseHeadSplit = lambda *_, **__: NETS[args.model]()
        settings["models"] = [args.model]
    else:
        settings["model"] = NETS[args.model]()
    module = importlib.import_module(f"flcore.servers.server{args.algorithm.removeprefix('fed')}")
    return getattr(module, ALGORITHMS[args.algorithm])(SimpleNamespace(**settings), 0)


def run_round(server: Any, evaluates: bool) -> None:
    """Run one round, as the library's own training loop does."""
    server.selected_clients = server.select_clients()
    if hasattr(server, "send_models"):
        server.send_models()
    if evaluates:
        server.evaluate()
    for client in server.selected_clients:
        client.train()
    (server.receive_models if hasattr(server, "receive_models") else server.receive_ids)()
    server.aggregate_parameters()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--library", choices=LIBRARIES, required=True)
    parser.add_argument("--path", type=Path, required=True)
    parser.add_argument("--model", choices=NETS, required=True)
    parser.add_argument("--clients", type=int, required=True)
    parser.add_argument("--rows", type=int, required=True)
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--test-rows", type=int, required=True)
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--evaluate", action="store_true")
    args = parser.parse_args(namespace=argparse.Namespace(algorithm="fml"))
    torch.set_num_threads(args.threads)
    stage = Stage()
    warnings.simplefilter("ignore")
    with tempfile.TemporaryDirectory() as folder, open(os.devnull, "w") as devnull, contextlib.redirect_stdout(devnull):
        shape = SHAPES[args.model]
        parts = {part: noise(args.clients, n, shape) for part, n in (("train", args.rows), ("test", args.test_rows))}
        save_rows(Path(folder) / "dataset", parts)
        system = (args.path / "system").resolve()
        (Path(folder) / "system").mkdir()
        os.chdir(Path(folder) / "system")  # the library reads ../dataset
        server = make_server(args.library, system, args)
        stage.tell("ready")
        while rounds := stage.wait():
            begun = time.perf_counter()
            for _ in range(rounds):
                run_round(server, args.evaluate)
            stage.tell(time.perf_counter() - begun)


if __name__ == "__main__":
    main()
