"""A contestant (peer.py): FedAvg by BlazeFL, a thread for each core. Its users write a client's loop.

Its pool of threads is the recommended one. Its pool of processes, started anew in each round, was slower in each trial.
"""

import os
from types import SimpleNamespace

os.environ["TQDM_DISABLE"] = "1"

import torch
from bare import BATCH, SGD
from blazefl.contrib.fedavg import FedAvgBaseServerHandler, FedAvgThreadPoolClientTrainer, FedAvgUplinkPackage
from blazefl.core import deserialize_model, serialize_model
from peer import CORES, FOREVER, TEST_BATCH, Contest, train


class Trainer(FedAvgThreadPoolClientTrainer):
    """BlazeFL's pool, with the momentum of bare.py."""

    def worker(self, cid, device, payload, stop_event):
        contest = self.dataset.contest
        net, batches = contest.work.make_net(), contest.work.get_batches(contest.round, cid)
        deserialize_model(net, payload.model_parameters)
        train(net, batches, self.epochs)
        return FedAvgUplinkPackage(cid, serialize_model(net), len(batches), batches.count())


def main() -> None:
    contest = Contest("blazefl")
    work, tested = contest.work, len(contest.work.test[1])
    torch.set_num_threads(1)  # of each client
    test = list(zip(*(part.split(TEST_BATCH) for part in work.test), strict=True))
    shared = {
        "model_selector": SimpleNamespace(select_model=lambda name: work.make_net()),
        "model_name": work.model,
        "dataset": SimpleNamespace(get_dataloader=lambda **_: test, contest=contest),
        "device": "cpu",
        "num_clients": len(work.clients),
        "batch_size": BATCH,
        "seed": 0,
    }
    server = FedAvgBaseServerHandler(global_round=FOREVER, sample_ratio=1.0, **shared)
    trainer = Trainer(epochs=work.epochs, lr=SGD["lr"], num_parallels=CORES, **shared)
    contest.begin()
    while True:
        trainer.local_process(server.downlink_package(), server.sample_clients())
        replies = trainer.uplink_package()
        for reply in replies:
            server.load(reply)
        done = {name: sum(reply.metadata[name] for reply in replies) for name in ("steps", "examples")}
        correct = round(server.get_summary()["server_acc"] * tested)
        contest.end_round(server.model.state_dict().values, correct=correct, tested=tested, **done)


if __name__ == "__main__":
    main()
