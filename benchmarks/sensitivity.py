"""Section sensitivity: how far one record moves the sum of clipped gradients, in ProxyFL's loop and in ours.

Two worlds train on the same batches of MNIST; one holds a record more. What is released, the clipped sum with noise, is
the same in both so far, as the proof of DP-SGD assumes. ProxyFL's settings: an MLP as proxy and as private model, batches of
250 of 1,000 images, 800 of which are of one class, sigma 1, C 1, Adam. docs/privacy-theory.md has the numbers.
"""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from common import Options, figure
from torch import Tensor, nn
from torchvision.datasets import MNIST

from fedmutual.algorithms import FML
from fedmutual.core import Message
from fedmutual.errors import DataError
from fedmutual.models.networks import mlp
from fedmutual.privacy.clipping import compute_clipped_sum

ROWS, MAJOR, BATCH, SIGMA, CLIP, LAMBDA = 1000, 800, 250, 1.0, 1.0, 0.5
STEPS, SEEDS = 400, 3
KINDS = ("ordinary", "mislabelled")


class Taught(NamedTuple):
    """The loss of a proxy that a private model teaches; the teacher's probabilities [B, C] are a part of the batch."""

    def loss(self, nets: Any, batch: tuple[Tensor, ...], const: Message) -> Message:
        x, y, teacher = batch
        z = nets["meme"](x)
        divergence = nn.functional.kl_div(z.log_softmax(-1), teacher, reduction="batchmean")
        return {"meme": (1 - LAMBDA) * nn.functional.cross_entropy(z, y) + LAMBDA * divergence}


class World(NamedTuple):
    """The networks and the private optimiser of one world."""

    nets: dict[str, nn.Module]
    private: torch.optim.Optimizer
    x: Tensor
    y: Tensor


def measure(options: Options) -> list[dict[str, Any]]:
    print("largest and median change of the sum of clipped gradients by one record, in units of C")
    root = Path(os.environ.get("FEDMUTUAL_DATA", "data"))
    try:
        images = MNIST(str(root), train=True)
    except RuntimeError:
        raise DataError(f"{root}: has no MNIST; set $FEDMUTUAL_DATA to a folder that has torchvision's files") from None
    x, y = images.data.float().div(255).unsqueeze(1), images.targets
    steps, seeds = (20, 1) if options.tiny else (STEPS, SEEDS)
    results = []
    for loop in ("proxyfl", "meme", "both"):
        for kind in KINDS:
            moved = [m for seed in range(seeds) for m in _train(loop, kind, seed, steps, x, y)]
            without, holding = (torch.tensor([d for is_held, d in moved if is_held is wanted]) for wanted in (False, True))
            line = {"loop": loop, "record": kind, "steps": steps, "seeds": seeds}
            for name, values in (("without", without), ("holding", holding)):
                line |= {
                    f"{name}_median": figure(float(values.median()), 3),
                    f"{name}_largest": figure(float(values.max()), 4),
                }
            print(
                f"{loop:8} {kind:12} batches without the record: median {line['without_median']:g}, largest "
                f"{line['without_largest']:g}; batches with it: largest {line['holding_largest']:g}"
            )
            results.append(line)
    return results


def _train(loop: str, kind: str, seed: int, steps: int, x: Tensor, y: Tensor) -> Iterator[tuple[bool, float]]:
    """Yield for each step (whether the batch holds the record, the distance of the two worlds' sums over C)."""
    rng = torch.Generator().manual_seed(seed)
    major = int(torch.randint(10, (), generator=rng))
    of_class, others = ((y == major).nonzero()[:, 0], (y != major).nonzero()[:, 0])
    of_class, others = (rows[torch.randperm(len(rows), generator=rng)] for rows in (of_class, others))
    rows = torch.cat([of_class[:MAJOR], others[: ROWS - MAJOR]])
    record = of_class[MAJOR + 100] if kind == "mislabelled" else others[ROWS - MAJOR + 100]
    label = (major + 1) % 10 if kind == "mislabelled" else int(y[record])
    worlds = [_make_world(seed, x[rows], y[rows])]
    worlds.append(_make_world(seed, torch.cat([x[rows], x[record][None]]), torch.cat([y[rows], torch.tensor([label])])))
    noised = {"proxyfl": ("meme",), "meme": ("meme",), "both": ("personal", "meme")}[loop]
    beta = 1.0 if loop == "meme" else 1 - LAMBDA
    const = {"alpha": torch.tensor(1 - LAMBDA), "beta": torch.tensor(beta)}
    shared = [
        torch.optim.Adam([p for n in noised for p in w.nets[n].parameters()], lr=1e-3, weight_decay=1e-4) for w in worlds
    ]
    for _ in range(steps):
        drawn = torch.rand(ROWS + 1, generator=rng) < BATCH / ROWS
        held = bool(drawn[-1])
        batches = [(w.x[drawn[: len(w.x)]], w.y[drawn[: len(w.x)]]) for w in worlds]
        sums = [_sum_gradients(loop, w, b, noised, const) for w, b in zip(worlds, batches, strict=True)]
        yield held, float(torch.sqrt(sum((sums[0][k] - sums[1][k]).square().sum() for k in sums[0]))) / CLIP
        noise = {k: SIGMA * CLIP * torch.randn(g.shape, generator=rng, dtype=g.dtype) for k, g in sums[0].items()}
        for world, batch, optimizer in zip(worlds, batches, shared, strict=True):
            if loop != "both":
                _step_private(world, batch)
            for n in noised:
                for k, p in world.nets[n].named_parameters():
                    p.grad = ((sums[0][f"{n}.{k}"] + noise[f"{n}.{k}"]) / BATCH).to(p)
            optimizer.step()


def _make_world(seed: int, x: Tensor, y: Tensor) -> World:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        nets: dict[str, nn.Module] = {name: mlp((1, 28, 28), 10) for name in ("personal", "meme")}
    return World(nets, torch.optim.Adam(nets["personal"].parameters(), lr=1e-3, weight_decay=1e-4), x, y)


def _sum_gradients(
    loop: str, world: World, batch: tuple[Tensor, Tensor], noised: tuple[str, ...], const: Message
) -> Message:
    """Return the sum of clipped gradients that a world releases."""
    nets = {n: world.nets[n] for n in noised}
    if loop == "proxyfl":
        with torch.no_grad():
            teacher = world.nets["personal"](batch[0]).softmax(-1)
        return compute_clipped_sum(Taught(), nets, (), {}, CLIP, (*batch, teacher), None)[0]  # type: ignore[arg-type]
    silent = tuple(n for n in world.nets if n not in noised)
    return compute_clipped_sum(FML(), nets, silent, const, CLIP, batch, None)[0]


def _step_private(world: World, batch: tuple[Tensor, Tensor]) -> None:
    """Train the private model without noise, taught by the proxy, as ProxyFL does."""
    x, y = batch
    with torch.no_grad():
        teacher = world.nets["meme"](x).softmax(-1)
    z = world.nets["personal"](x)
    divergence = nn.functional.kl_div(z.log_softmax(-1), teacher, reduction="batchmean")
    loss = (1 - LAMBDA) * nn.functional.cross_entropy(z, y) + LAMBDA * divergence
    world.private.zero_grad()
    loss.backward()  # type: ignore[no-untyped-call]
    world.private.step()
