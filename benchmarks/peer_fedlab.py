"""A contestant (peer.py): FedAvg by FedLab's standalone pipeline, one process with a thread for each core."""

import logging

import torch
from bare import BATCH, SGD
from fedlab.contrib.algorithm.basic_client import SGDSerialClientTrainer
from fedlab.contrib.algorithm.basic_server import SyncServerHandler
from fedlab.contrib.dataset.basic_dataset import FedDataset
from fedlab.core.standalone import StandalonePipeline
from fedlab.utils.functional import evaluate
from peer import CORES, FOREVER, TEST_BATCH, Batches, Contest


class Clients(FedDataset):
    """The batches of all clients in the current round."""

    def __init__(self, contest: Contest) -> None:
        self._contest, self.taken = contest, list[Batches]()

    def get_dataloader(self, id, batch_size=None):
        self.taken.append(self._contest.work.get_batches(self._contest.round, id))
        return self.taken[-1]


class Trainer(SGDSerialClientTrainer):
    """FedLab's loop, with momentum that starts anew at each client."""

    def train(self, model_parameters, train_loader):
        self.optimizer = torch.optim.SGD(self.model.parameters(), **SGD)
        return super().train(model_parameters, train_loader)


class Pipeline(StandalonePipeline):
    """FedLab's rounds, with an evaluation of the shared model after each."""

    def __init__(self, handler, trainer, contest: Contest) -> None:
        super().__init__(handler, trainer)
        self._contest = contest
        self._test = list(zip(*(part.split(TEST_BATCH) for part in contest.work.test), strict=True))

    def evaluate(self):
        model, clients = self.handler.model, self.trainer.dataset
        _, accuracy = evaluate(model, torch.nn.CrossEntropyLoss(), self._test)
        tested = sum(len(y) for _, y in self._test)
        counts = [batches.count() for batches in clients.taken]
        clients.taken.clear()
        done = {name: sum(count[name] for count in counts) for name in ("steps", "examples")}
        self._contest.end_round(model.state_dict().values, correct=round(accuracy * tested), tested=tested, **done)


if __name__ == "__main__":
    contest = Contest("fedlab")
    torch.set_num_threads(CORES)
    logging.disable(logging.INFO)
    net = contest.work.make_net()
    trainer = Trainer(net, len(contest.work.clients))
    trainer.setup_dataset(Clients(contest))
    trainer.setup_optim(contest.work.epochs, BATCH, SGD["lr"])
    contest.begin()
    Pipeline(SyncServerHandler(net, FOREVER, sample_ratio=1.0), trainer, contest).main()
