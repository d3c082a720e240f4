"""Time of a step of FML in the in-process engine over a bare hand-written PyTorch loop of the same work.

    uv run python benchmarks/step.py [--pairs 15] [--threads 1] [--json benchmarks/results/step.json]

The work: two networks, noise in the shape of MNIST in memory, batch 128, SGD with momentum 0.9 and weight decay 5e-4,
one forward each, detached teachers, one epoch of 94 batches (a fifth of MNIST) a measurement. Engine and loop take turns in
one process (A B, B A, ...), so that a machine that drifts drifts for both; printed: median and quartiles of the ratio
pair by pair. The engine's time holds the whole of a client's part: fork, steps, finiteness, the privacy boundary, the copy
that leaves. Both start from the same weights and take the same batches; their weights after the first pair are compared, so
that what is timed is the same work. What a round costs beside its steps (evaluation, checkpoint) is printed apart.
"""

import argparse
import copy
import json
import platform
import statistics
import tempfile
import time
from pathlib import Path

import torch
import torch.nn.functional as F

from fedmutual import models
from fedmutual.algorithms import FML
from fedmutual.batches import epochs
from fedmutual.boundary import release
from fedmutual.core import At, Client, work
from fedmutual.engines.base import score
from fedmutual.losses import Classification
from fedmutual.records.checkpoint import save_client

BATCHES, BATCH, LR = 94, 128, 0.01  # 94 x 128: the epoch of a client with a fifth of MNIST


class Resident:
    """Rows in memory."""

    def __init__(self, x, y):
        self.x, self.y = x, y

    def __len__(self):
        return len(self.x)

    def rows(self, plan, rng=None):
        return ((self.x[i], self.y[i]) for i in plan)


def nets(name):
    return {n: models.build(name, (1, 28, 28), 10, At(0, -1, 1).rng(n)) for n in ("personal", "meme")}


def optimizers(made):
    return {n: torch.optim.SGD(m.parameters(), lr=LR, momentum=0.9, weight_decay=5e-4) for n, m in made.items()}


def bare(made, opts, data, at, client):
    """The loop that a careful person writes by hand."""
    personal, meme = made["personal"].train(), made["meme"].train()
    opts["meme"].state.clear()
    for i in epochs(len(data), 1, BATCH, at.rng(client, "batches")):
        x, y = data.x[i], data.y[i]
        zp, zm = personal(x), meme(x)
        lp, lm = F.log_softmax(zp, 1), F.log_softmax(zm, 1)
        loss_p = 0.5 * F.nll_loss(lp, y) + 0.5 * F.kl_div(lp, lm.detach(), reduction="batchmean", log_target=True)
        loss_m = 0.5 * F.nll_loss(lm, y) + 0.5 * F.kl_div(lm, lp.detach(), reduction="batchmean", log_target=True)
        for opt in opts.values():
            opt.zero_grad()
        (loss_p + loss_m).backward()
        for opt in opts.values():
            opt.step()


def engine(client, phase, inbox, at):
    """The engine's whole part of the client: fork, steps, the privacy boundary, the copy that leaves."""
    message, _ = work(phase, client, inbox, at)
    return release(message, phase.leaves(inbox), client, inbox)


def seconds(do):
    begun = time.perf_counter()
    do()
    return time.perf_counter() - begun


def measure(name, pairs):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(BATCHES * BATCH, 1, 28, 28, generator=generator)
    data = Resident(x, torch.randint(10, (len(x),), generator=generator))
    by_hand = nets(name)
    by_hand_opts = optimizers(by_hand)
    ours = copy.deepcopy(by_hand)
    client = Client("0", ours, optimizers(ours), {"private": data}, rate=LR, shared=tuple(ours["meme"].state_dict()))
    phase = FML(local_epochs=1, batch_size=BATCH)
    loop, eng = [], []
    apart = 0.0
    for pair in range(pairs + 2):
        at = At(0, pair, pairs + 2)
        inbox = {k: v.clone() for k, v in ours["meme"].state_dict().items()}
        turns = [
            (loop, lambda at=at: bare(by_hand, by_hand_opts, data, at, "0")),
            (eng, lambda at=at, inbox=inbox: engine(client, phase, inbox, at)),
        ]
        for times, do in turns[:: 1 if pair % 2 else -1]:
            times.append(seconds(do))
        if pair == 0:
            apart = max(
                (a - b).abs().max().item()
                for n in ours
                for a, b in zip(ours[n].state_dict().values(), by_hand[n].state_dict().values(), strict=True)
            )
    ratios = [e / b for b, e in list(zip(loop, eng, strict=True))[2:]]
    q1, median, q3 = statistics.quantiles(ratios, n=4)
    with tempfile.TemporaryDirectory() as folder:
        saving = [seconds(lambda: save_client(client, Path(folder) / "state.safetensors", {})) for _ in range(7)]
    rows = Resident(x[:2000], data.y[:2000])
    scoring = [seconds(lambda: score(ours["personal"], rows, Classification())) for _ in range(7)]
    return {
        "model": name,
        "ratio": {"median": round(median, 3), "quartiles": [round(q1, 3), round(q3, 3)], "pairs": pairs},
        "step_ms": {k: 1e3 * statistics.median(v[2:]) / BATCHES for k, v in (("loop", loop), ("engine", eng))},
        "apart": {
            "checkpoint_ms": 1e3 * statistics.median(saving),
            "evaluation_ms_2000_rows": 1e3 * statistics.median(scoring),
        },
        "largest_difference_after_one_epoch": apart,
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=15)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--models", nargs="+", default=["mlp", "lenet5"])
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    results = []
    for name in args.models:
        result = measure(name, args.pairs)
        results.append(result)
        ratio, step, apart = result["ratio"], result["step_ms"], result["apart"]
        print(
            f"{name:8} engine / bare loop: {ratio['median']:.3f} (quartiles {ratio['quartiles'][0]:.3f} to "
            f"{ratio['quartiles'][1]:.3f}, {args.pairs} pairs); a step {step['engine']:.2f} ms / {step['loop']:.2f} ms"
        )
        print(
            f"         apart: checkpoint {apart['checkpoint_ms']:.1f} ms, evaluation of 2,000 rows "
            f"{apart['evaluation_ms_2000_rows']:.1f} ms; largest difference of weights after an epoch "
            f"{result['largest_difference_after_one_epoch']:.1e}"
        )
    if args.json:
        about = {"torch": torch.__version__, "python": platform.python_version(), "machine": platform.machine()}
        args.json.write_text(json.dumps({**about, "threads": args.threads, "results": results}, indent=1) + "\n")


if __name__ == "__main__":
    main()
