"""Train methods here and in the user's clone of PFLlib, from equal weights on equal batches; print the largest difference.

    uv run python benchmarks/equality.py --pflib PATH

Three clients of 24, 40 and 32 rows of noise, a network of two layers in float64, plain SGD, three rounds of two epochs.
The server and client classes of the other side are the library's own, and a round calls the methods of its training loop
in that loop's order. Only the batches are given to the library. The script contains no code of the library.
"""

import argparse
import contextlib
import importlib
import os
import random
import subprocess
import sys
import tempfile
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping
from copy import deepcopy
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import torch
from other_library import read_defaults
from torch import Tensor, nn

from fedmutual.algorithms import MOON, SCAFFOLD, Ditto, FedALA, FedAvg, FedGH, FedProto, FedProx, FedRep, PFedMe
from fedmutual.core import Batch, Client, Message, Phase
from fedmutual.engines.inprocess import InProcess
from fedmutual.engines.loop import federate
from fedmutual.federation.experiment import RoundPlan

SIZES = {"0": 24, "1": 40, "2": 32}  # multiples of the batch size, because PFLlib drops a last batch that is not full
BATCH, EPOCHS, HEAD_EPOCHS, ROUNDS, RATE, PULL = 8, 2, 2, 3, 0.1, 0.5
FEATURES, HIDDEN, CLASSES = 6, 8, 3
DATASET = "noise"


@dataclass(frozen=True)
class Method:
    """A method of both sides."""

    phase: Phase  # ours
    server: str  # the module of PFLlib's server
    name: str  # PFLlib's class of the server
    stays: str | None = None  # tensors with this text in their names stay with the client
    norm: bool = False  # whether the network has a BatchNorm layer
    settings: Mapping[str, float] = field(default_factory=dict)  # options of PFLlib's command line
    decay: float = 0.0  # the weight decay of personal networks, which PFLlib does not let its users set


_WORK: dict[str, Any] = {"local_epochs": EPOCHS, "batch_size": BATCH}
METHODS = {
    "fedavg": Method(FedAvg(**_WORK), "serveravg", "FedAvg"),
    "fedprox": Method(FedProx(mu=PULL, **_WORK), "serverprox", "FedProx", settings={"mu": PULL}),
    "ditto": Method(Ditto(lam=PULL, **_WORK), "serverditto", "Ditto", settings={"mu": PULL}),
    "fedper": Method(FedAvg(**_WORK), "serverper", "FedPer", stays="head."),
    "fedrep": Method(FedRep(head_epochs=HEAD_EPOCHS, **_WORK), "serverrep", "FedRep", stays="head."),
    "lg-fedavg": Method(FedAvg(**_WORK), "serverlg", "LG_FedAvg", stays="base."),
    "fedbn": Method(FedAvg(**_WORK), "serverbn", "FedBN", stays="bn", norm=True),
    "scaffold": Method(SCAFFOLD(**_WORK), "serverscaffold", "SCAFFOLD", settings={"server_learning_rate": 1.0}),
    "moon": Method(MOON(contrast=PULL, **_WORK), "servermoon", "MOON", settings={"mu": PULL, "tau": 0.5}),
    "fedala": Method(
        FedALA(rows_share=1, **_WORK), "serverala", "FedALA", settings={"eta": 1.0, "rand_percent": 100, "layer_idx": 2}
    ),
    "pfedme": Method(
        PFedMe(moreau_lam=PULL, inner_steps=3, outer_rate=0.2, **_WORK),
        "serverpFedMe",
        "pFedMe",
        settings={"lamda": PULL, "K": 3, "local_learning_rate": 0.2, "p_learning_rate": RATE, "beta": 1.0},
        decay=0.001,
    ),
    "fedgh": Method(FedGH(head_lr=0.2, **_WORK), "servergh", "FedGH", settings={"server_learning_rate": 0.2}),
    "fedproto": Method(FedProto(proto_lam=PULL, **_WORK), "serverproto", "FedProto", settings={"lamda": PULL}),
}


class RecordedRows:
    """Rows of a client that record the batches on which a method trains."""

    def __init__(self, x: Tensor, y: Tensor) -> None:
        self.x, self.y = x, y
        self.batches: list[Batch] = []

    def __len__(self) -> int:
        return len(self.x)

    def rows(self, plan: Iterable[Tensor], rng: torch.Generator | None = None) -> Iterator[Batch]:
        for index in plan:
            batch = (self.x[index], self.y[index])
            if rng is not None:  # training; without a stream the rows are only read
                self.batches.append(batch)
            yield batch

    def select_round(self, round: int) -> "RoundBatches":
        """Return the recorded batches of a round."""
        size = len(self.batches) // ROUNDS
        return RoundBatches(self.batches[round * size : (round + 1) * size], len(self))

    def select_all(self) -> list[Batch]:
        """Return all rows as one batch."""
        return [(self.x, self.y)]


class RoundBatches:
    """The batches of a client in a round, an epoch in each iteration, in the place of PFLlib's DataLoader."""

    def __init__(self, batches: list[Batch], rows: int) -> None:
        self._batches, self._size, self._epoch = batches, rows // BATCH, 0

    def __len__(self) -> int:
        return self._size

    def __iter__(self) -> Iterator[Batch]:
        begin = self._epoch * self._size
        self._epoch += 1
        return iter(self._batches[begin : begin + self._size])


def make_network(norm: bool) -> nn.Module:
    """Return a network with the names of PFLlib's split networks: x [B, 6] float64 -> logits [B, 3]."""
    torch.manual_seed(0)
    middle = [("bn1", nn.BatchNorm1d(HIDDEN))] if norm else []
    base = nn.Sequential(OrderedDict([("fc1", nn.Linear(FEATURES, HIDDEN)), *middle, ("relu", nn.ReLU())]))
    return nn.Sequential(OrderedDict(base=base, head=nn.Linear(HIDDEN, CLASSES))).double()


def make_rows() -> dict[str, RecordedRows]:
    """Return each client's rows; the largest of three inputs is the class."""
    stream = torch.Generator().manual_seed(1)
    inputs = {id: torch.randn(n, FEATURES, generator=stream, dtype=torch.float64) for id, n in SIZES.items()}
    return {id: RecordedRows(x, x[:, :CLASSES].argmax(1)) for id, x in inputs.items()}


def train_here(method: Method, rows: Mapping[str, RecordedRows]) -> tuple[list[Client], Message]:
    """Return (our clients, the server's state) after the last round."""
    algorithm = method.phase.algorithm()
    shared = make_network(method.norm)
    crosses = tuple(k for k in shared.state_dict() if method.stays is None or method.stays not in k)
    clients = []
    for id, data in rows.items():
        names = [n for n, scores in (("personal", {"personal"}), ("meme", {"global"})) if scores & set(algorithm.scores)]
        nets = {name: deepcopy(shared) for name in names}
        decays = {"personal": method.decay}
        optimizers = {k: torch.optim.SGD(n.parameters(), lr=0.0, weight_decay=decays.get(k, 0.0)) for k, n in nets.items()}
        sent = crosses if "meme" in nets else ()
        clients.append(Client(id, nets, optimizers, {"private": data}, rate=RATE, shared=sent))
    plan = RoundPlan(algorithm, 0, ROUNDS, tuple(SIZES), (), 1.0, ROUNDS, {}, {}, {})
    state = algorithm.begins(shared, CLASSES) if algorithm.begins else {k: shared.state_dict()[k].clone() for k in crosses}
    engine = InProcess({client.id: client for client in clients}.__getitem__, [client.id for client in clients])
    try:
        return clients, federate(plan, engine, state, None, [], None)
    finally:
        engine.close()


def make_server(method: Method, system: Path) -> Any:
    """Return PFLlib's server with its clients."""
    settings = read_defaults(system / "main.py") | {
        "dataset": DATASET,
        "device": "cpu",
        "num_classes": CLASSES,
        "num_clients": len(SIZES),
        "batch_size": BATCH,
        "local_epochs": EPOCHS,
        "plocal_epochs": HEAD_EPOCHS,
        "local_learning_rate": RATE,
        "model": make_network(method.norm),
        "algorithm": method.name,
        **method.settings,
    }
    module = importlib.import_module(f"flcore.servers.{method.server}")
    return getattr(module, method.name)(SimpleNamespace(**settings), 0)


def train_there(method: Method, system: Path, rows: Mapping[str, RecordedRows]) -> Any:
    """Return PFLlib's server after the last round, trained on the batches that were recorded here."""
    server = make_server(method, system)
    server.selected_clients = server.clients
    for client in server.clients if method.name == "FedALA" else ():
        client.ALA.train_data = list(zip(*rows[str(client.id)].select_all()[0], strict=True))
    if method.name == "FedGH":
        server.batch_size = len(SIZES) * CLASSES  # the last mean joins the batch before it here
        server.head = deepcopy(server.head)  # it is the first client's own, which that client trains
        server.opt_h = torch.optim.SGD(server.head.parameters(), lr=server.server_learning_rate)
    for round in range(ROUNDS):
        if hasattr(server, "send_models") and method.name != "FedProto":
            server.send_models()
        for client in server.clients:
            data = rows[str(client.id)]
            client.load_train_data = partial(data.select_round, round)
            if hasattr(client, "ptrain"):
                client.ptrain()
            client.train()
            if method.name in ("FedProto", "FedGH"):  # of FedProto PFLlib has the call as a comment
                client.load_train_data = data.select_all
                client.collect_protos()
        if method.name == "FedProto":
            server.receive_protos()
            aggregation = importlib.import_module("flcore.servers.serverproto").proto_aggregation
            server.global_protos = aggregation(server.uploaded_protos)
            server.send_protos()
        elif method.name == "FedGH":
            server.receive_protos()
            server.train_head()
        else:
            server.previous_global_model = deepcopy(list(server.global_model.parameters()))
            server.receive_models()
            server.aggregate_parameters()
            if method.name == "pFedMe":
                server.beta_aggregate_parameters()
    return server


def find_difference(method: Method, clients: list[Client], state: Message, server: Any) -> float:
    """Return the largest absolute difference of a weight of a client's network or of the shared one."""
    differences = []
    for ours, other in zip(clients, server.clients, strict=True):
        for name, net in ours.nets.items():
            if name == "personal" and method.name == "pFedMe":  # PFLlib overwrites it by the client's copy
                continue
            theirs = getattr(other, "model_per", other.model) if name == "personal" else other.model
            reference = theirs.state_dict()
            differences += [(tensor - reference[k]).abs().max().item() for k, tensor in net.state_dict().items()]
    if method.name == "FedGH":
        differences += [(state[f"head {k}"] - p).abs().max().item() for k, p in server.head.named_parameters()]
    elif method.name != "FedProto":
        part = {"FedPer": "base.", "FedRep": "base.", "LG_FedAvg": "head."}.get(method.name, "")
        reference = {part + k: p for k, p in server.global_model.named_parameters() if part + k in state}
        differences += [(state[k] - p).abs().max().item() for k, p in reference.items()]
    return max(differences)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pflib", type=Path, required=True, metavar="PATH", help="a clone of PFLlib")
    system = (parser.parse_args().pflib / "system").resolve()
    if not (system / "main.py").is_file():
        parser.error(f"--pflib {system.parent}: no clone of PFLlib, because system/main.py is missing")
    sys.path.insert(0, str(system))
    sys.modules.setdefault("h5py", ModuleType("h5py"))  # only the library's file of results needs it
    commit = subprocess.run(["git", "-C", system, "rev-parse", "HEAD"], capture_output=True, text=True).stdout.strip()
    print(f"PFLlib {commit or 'of unknown commit'}: the largest difference of a weight after {ROUNDS} rounds")
    with tempfile.TemporaryDirectory() as folder:
        for part in ("train", "test"):
            (Path(folder) / "dataset" / DATASET / part).mkdir(parents=True)
            for id, data in make_rows().items():
                arrays = {"x": data.x.numpy(), "y": data.y.numpy()}
                np.savez(Path(folder) / "dataset" / DATASET / part / f"{id}.npz", data=np.array(arrays, dtype=object))
        (Path(folder) / "system").mkdir()
        os.chdir(Path(folder) / "system")  # the library reads ../dataset
        for name, method in METHODS.items():
            random.seed(0)  # PFLlib draws the order of clients
            rows = make_rows()
            clients, state = train_here(method, rows)
            with open(os.devnull, "w") as devnull, contextlib.redirect_stdout(devnull):
                server = train_there(method, system, rows)
            print(f"{name:10} {find_difference(method, clients, state, server):.0e}", flush=True)


if __name__ == "__main__":
    main()
