"""A contestant (peer.py): FedAvg in the user's clone of PFLlib, one process with a thread for each core.

PFLlib reads a client's file and draws its batches itself. It gets equal weights, the optimiser with a new momentum in each
round, and of its evaluation the part on test rows: each client scores the shared model on its part of them.
"""

import contextlib
import os
import tempfile
from argparse import Namespace
from pathlib import Path

import torch
from bare import BATCH, SGD
from other_library import make_server, save_rows
from peer import CORES, Contest


def main() -> None:
    contest = Contest("scikit-learn")
    torch.set_num_threads(CORES)
    work, system = contest.work, Path(contest.rest[0]).resolve() / "system"
    parts = {"train": work.clients, "test": list(zip(*(part.chunk(len(work.clients)) for part in work.test), strict=True))}
    with tempfile.TemporaryDirectory() as folder, open(os.devnull, "w") as devnull, contextlib.redirect_stdout(devnull):
        save_rows(Path(folder) / "dataset", parts)
        (Path(folder) / "system").mkdir()
        os.chdir(Path(folder) / "system")  # the library reads ../dataset
        args = Namespace(algorithm="fedavg", model=work.model, clients=len(work.clients), epochs=work.epochs)
        server = make_server("pflib", system, args)
        server.global_model = work.make_net()
        server.selected_clients = server.select_clients()
        server.send_models()
        contest.begin()
        while True:
            server.selected_clients = server.select_clients()
            for client in server.selected_clients:
                client.optimizer = torch.optim.SGD(client.model.parameters(), **SGD)
                client.train()
            server.receive_models()
            server.aggregate_parameters()
            server.send_models()
            _, tested, correct, _ = server.test_metrics()
            steps = sum(work.epochs * (client.train_samples // BATCH) for client in server.clients)
            contest.end_round(
                server.global_model.state_dict().values, steps=steps, correct=int(sum(correct)), tested=sum(tested)
            )


if __name__ == "__main__":
    main()
