"""A contestant (peer.py): FedAvg by Flower's simulation, an actor of Ray for each core. Its users write a client's loop."""

import logging
import os
import traceback
from pathlib import Path

os.environ |= {"FLWR_TELEMETRY_ENABLED": "0", "RAY_USAGE_STATS_ENABLED": "0", "RAY_worker_niceness": "0"}

import torch
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from flwr.simulation import run_simulation
from peer import CORES, FOREVER, Contest, count_correct, load_work, train

# "local": not another Ray of this machine
BACKEND = {"init_args": {"address": "local", "num_cpus": CORES}, "client_resources": {"num_cpus": 1, "num_gpus": 0}}


def make_client_app(folder: Path) -> ClientApp:
    """Return the application of a client, whose process reads the work once."""
    app = ClientApp()

    @app.train()
    def train_client(message: Message, context: Context) -> Message:
        torch.set_num_threads(1)
        work = load_work(folder)
        net = work.make_net()
        net.load_state_dict(message.content["arrays"].to_torch_state_dict())
        batches = work.get_batches(message.content["config"]["server-round"] - 1, context.node_config["partition-id"])
        train(net, batches, work.epochs)
        metrics = MetricRecord({"num-examples": len(batches), **batches.count()})
        reply = {"arrays": ArrayRecord(net.state_dict()), "metrics": metrics}
        return Message(content=RecordDict(reply), reply_to=message)

    return app


class Strategy(FedAvg):
    """FedAvg that keeps the counts of a round."""

    done: dict[str, int]

    def aggregate_train(self, server_round, replies):
        replies = list(replies)
        counts = [reply.content["metrics"] for reply in replies]
        self.done = {name: sum(int(c[name]) for c in counts) for name in ("steps", "examples")}
        return super().aggregate_train(server_round, replies)


def make_server_app(contest: Contest) -> ServerApp:
    """Return the application of the server, which scores the shared model after each round."""
    app, work = ServerApp(), contest.work
    net, clients = work.make_net(), len(work.clients)
    strategy = Strategy(fraction_evaluate=0.0, min_train_nodes=clients, min_available_nodes=clients)

    def evaluate(server_round: int, arrays: ArrayRecord) -> MetricRecord:
        if not server_round:
            contest.begin()
            return MetricRecord({})
        net.load_state_dict(arrays.to_torch_state_dict())
        correct, tested = count_correct(net, work.test), len(work.test[1])
        contest.end_round(net.state_dict().values, correct=correct, tested=tested, **strategy.done)
        return MetricRecord({"accuracy": correct / tested})

    @app.main()
    def main(grid: Grid, context: Context) -> None:
        strategy.start(grid, ArrayRecord(net.state_dict()), num_rounds=FOREVER, evaluate_fn=evaluate)

    return app


if __name__ == "__main__":
    contest = Contest("flwr")
    torch.set_num_threads(CORES)
    logging.disable(logging.WARNING)
    apps = make_server_app(contest), make_client_app(contest.folder)
    try:
        run_simulation(*apps, len(contest.work.clients), backend_config=BACKEND)
    except BaseException:
        traceback.print_exc()
        os._exit(1)  # the thread of the server would wait for clients for ever
