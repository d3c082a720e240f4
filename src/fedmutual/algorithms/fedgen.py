"""FedGen: the server trains a generator of features on the clients' last layers, and clients learn from its features.

Zhu et al., Data-Free Knowledge Distillation for Heterogeneous Federated Learning, 2021, https://arxiv.org/abs/2105.10056,
Algorithm 1; losses, decay and defaults of https://github.com/zhuangdizhu/FedGen. C classes, D features, N numbers of noise.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedmutual.algorithms.fedavg import N_K
from fedmutual.algorithms.fork import Fork
from fedmutual.core import (
    Algorithm,
    At,
    Batch,
    Client,
    Message,
    Net,
    Spec,
    Unusable,
    above_zero,
    find_head,
    get_target_kind,
    match_inputs,
    setting,
    within,
)
from fedmutual.losses import kl
from fedmutual.optimizers import descend

HEAD = "head "  # begins a key of the state whose end is the name of the shared network's last layer
LABELS = "rows by class"  # [C] int64: of a client in its reply, of all clients in the state
GENERATOR = "generator "  # begins the names of the generator's tensors
ADAM = "adam "  # begins the names of its optimiser's state: "adam exp_avg generator hidden.weight"
DECAY = 0.98  # of both weights and of the server's learning rate, in each round
_ROWS = 512  # of which labels are counted at once


@dataclass(frozen=True, kw_only=True)
class FedGen(Fork):
    """FedAvg without public data in which clients also learn from features that a generator makes of a label and noise.

    For a batch (x, y), generated features z of the labels y, and z' of labels y' that are drawn from those of all clients,
    a client minimises `CE(f(x), y) + beta KL(h(z) || f(x)) + alpha CE(h(z'), y')`; h is its last layer. The generator
    minimises the sum over clients of CE(h(z), y), weighted by their shares of the rows of y, plus a loss of diversity.
    """

    gen_alpha: float = setting(10.0, "alpha, the weight of the labels of generated features; 2 % less in each round")
    gen_beta: float = setting(10.0, "beta, the weight of the answers to generated features; 2 % less in each round")
    gen_steps: int = setting(50, "gradient steps of the server's generator in each round")
    gen_lr: float = setting(3e-4, "the generator's first learning rate (Adam), above 0; 2 % less in each round")
    gen_noise: int = setting(32, "N, how many random numbers the generator takes for an example")
    gen_hidden: int = setting(256, "the units of the generator's hidden layer")
    scores: ClassVar[tuple[str, ...]] = ("global",)
    terms: ClassVar[tuple[str, ...]] = ("meme", "generated", "latent")

    def __post_init__(self) -> None:
        for name in ("gen_alpha", "gen_beta"):
            within(name, getattr(self, name), 0, float("inf"))
        for name in ("gen_steps", "gen_noise", "gen_hidden"):
            within(name, getattr(self, name), 1, float("inf"))
        above_zero("gen_lr", self.gen_lr)
        if get_target_kind(self.task) != "classes":
            raise ValueError("fedgen generates features of a class, so training.task must be a task with classes")

    def algorithm(self) -> Algorithm:
        """Return Fork's phase with the features of the copy; the server counts the labels of each class."""
        return replace(super().algorithm(), begins=self.begins, features=("meme",), needs_labels=True)

    def begins(self, shared: nn.Module, classes: int) -> Message:
        """Return the server's state beside the model: no labels [C], the name of the last layer as a key, and zeros.

        The zeros are the optimiser's first state, and have the shapes of the generator, which round 1 makes: real sites
        limit messages by the first state.

        Raises:
            ValueError: the shared network has no linear layer, or a batch has one row.
        """
        head = find_head(shared)
        if head is None:
            raise ValueError("the shared network has no linear layer, whose input is generated; choose another network")
        if self.batch_size == 1:
            raise ValueError("BatchNorm of the generator cannot train on one row; set training.batch_size to 2 or more")
        (name,) = (name for name, module in shared.named_modules() if module is head)
        untrained = {k: torch.zeros_like(v) for k, v in self.make_generator(head.weight.detach().cpu()).items()}
        first = {f"{ADAM}step {k}": torch.zeros(()) for k in untrained if is_learned(k)}
        first |= {f"{ADAM}{m} {k}": v for m in ("exp_avg", "exp_avg_sq") for k, v in untrained.items() if is_learned(k)}
        return {LABELS: torch.zeros(classes, dtype=torch.int64), HEAD + name: torch.zeros(()), **untrained, **first}

    def leaves(self, server: Message) -> Spec:
        """Return the declared reply: the shared tensors, n_k int64 [], and the client's rows of each class int64 [C].

        Raises:
            ValueError: the last layer is not shared.
        """
        if find_head_name(server) + "weight" not in server:
            raise ValueError("the server learns from the clients' last layers; share them too (model.part)")
        counts: Spec = {N_K: (torch.int64, ()), LABELS: (torch.int64, tuple(server[LABELS].shape))}
        return {**super().leaves(take_model(server)), **counts}

    def send(self, server: Message, to: str, at: At) -> Message:
        """Return the state without the last layer's key, the optimiser, and a generator before the first is trained."""
        kept_back: tuple[str, ...] = (HEAD, ADAM) if server[LABELS].any() else (HEAD, ADAM, GENERATOR)
        return {k: v for k, v in server.items() if not k.startswith(kept_back)}

    def begin(self, client: Client, inbox: Message, at: At) -> Message:
        """Load the shared model. Return the generator, and the weights alpha and beta []; without one nothing."""
        super().begin(client, inbox, at)
        place = next(client.nets["meme"].parameters())
        generator = {k: v.to(place) for k, v in inbox.items() if k.startswith(GENERATOR)}
        weights = {"alpha": self.gen_alpha, "beta": self.gen_beta} if generator else {}
        least = {k: 1e-4 if v else 0.0 for k, v in weights.items()}
        return generator | {k: torch.tensor(max(least[k], v * DECAY**at.round)).to(place) for k, v in weights.items()}

    def batches(self, client: Client, inbox: Message, at: At) -> Iterable[Batch]:
        """Yield batches of private data with drawn labels int64 [B], and noise [B, 2 N] for both labels of a row."""
        rng, known = at.rng(client.id, "generator"), inbox[LABELS].nonzero()[:, 0]
        for x, y, *_ in super().batches(client, inbox, at):
            drawn = torch.randint(max(len(known), 1), (len(y),), generator=rng)
            noise = torch.rand(len(y), 2 * self.gen_noise, generator=rng)
            yield x, y, (known[drawn] if len(known) else drawn).to(y), match_inputs(noise, x)

    def loss(self, nets: Mapping[str, Net], batch: Batch, const: Message) -> Message:
        """Return the loss terms, scalars; generated features go beside those of the batch through the last layer."""
        x, y, drawn, noise = batch
        if "alpha" not in const:
            fit = self.task.fit(nets["meme"](x), y)
            return {"meme": fit, "generated": fit * 0, "latent": fit * 0}
        made = generate(const, torch.cat((y, drawn)), torch.cat(noise.chunk(2, 1)))
        _, output = nets["meme"].features(x, beside=made)
        own, of_own, of_drawn = output.chunk(3)
        latent = kl(of_own.detach().log_softmax(-1), own.log_softmax(-1)).mean()
        generated = F.cross_entropy(of_drawn, drawn)
        return {"meme": self.task.fit(own, y), "generated": const["alpha"] * generated, "latent": const["beta"] * latent}

    def end(self, client: Client, at: At) -> Message:
        """Return the shared tensors of the trained copy, n_k (rows), and the client's rows of each class."""
        data, classes = client.data["private"], find_classes(client)
        counts = torch.zeros(classes, dtype=torch.int64)
        for _, y, *_ in data.rows(torch.split(torch.arange(len(data)), _ROWS)):
            counts += torch.bincount(y.cpu(), minlength=classes)
        return super().end(client, at) | {N_K: counts.sum(), LABELS: counts}

    def receive(self, server: Message, replies: Mapping[str, Message], at: At) -> Message:
        """Return the mean of the models weighted by rows, the trained generator, its optimiser's state, and rows by class.

        Raises:
            Unusable: as `FedAvg.receive`, or the rows of the classes are not n_k rows.
        """
        if not replies:
            return server
        wrong = [i for i, r in replies.items() if int(r[LABELS].min()) < 0 or int(r[LABELS].sum()) != int(r[N_K])]
        if wrong:  # at real sites n_k has bounds
            raise Unusable(dict.fromkeys(wrong, "its rows of each class are negative, or do not add up to its n_k"))
        models, counts = {i: take_model(reply) for i, reply in replies.items()}, {i: r[LABELS] for i, r in replies.items()}
        weights = {i: float(reply[N_K]) for i, reply in replies.items()} if self.aggregate.weighs else None
        model = self.aggregate(models, weights, base=take_model(server))
        generator = {k: v for k, v in server.items() if k.startswith(GENERATOR)} if server[LABELS].any() else None
        moments = {k: v for k, v in server.items() if k.startswith(ADAM)}
        name, ids = find_head_name(server), sorted(models)
        heads = [(models[i][name + "weight"], models[i].get(name + "bias")) for i in ids]
        rows = torch.stack([counts[i] for i in ids])
        generator = generator or self.make_generator(heads[0][0], at.rng("generator").initial_seed())
        trained = self.train_generator(generator, moments, heads, rows, at)
        name_of_head = {k: v for k, v in server.items() if k.startswith(HEAD)}
        return {**model, **name_of_head, **trained, LABELS: rows.sum(0)}

    def make_generator(self, weight: Tensor, seed: int = 0) -> Message:
        """Return a generator with random weights, for a last layer with a weight [C, D]."""
        classes, size = weight.shape
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(seed)
            layers = {
                "hidden": nn.Linear(self.gen_noise + classes, self.gen_hidden),
                "norm": nn.BatchNorm1d(self.gen_hidden),
                "output": nn.Linear(self.gen_hidden, size),
            }
        state = {f"{GENERATOR}{name}.{k}": v for name, one in layers.items() for k, v in one.state_dict().items()}
        return {k: v.to(weight) for k, v in state.items() if v.is_floating_point()}

    def train_generator(
        self, generator: Message, moments: Message, heads: list[tuple[Tensor, Tensor | None]], rows: Tensor, at: At
    ) -> Message:
        """Return the generator after its steps, and the new state of its optimiser.

        moments: the state of the optimiser after the last round. heads: weight and bias of each client. rows: [K, C], the
        rows of each client by class.
        """
        rng, known = at.rng("generator", "steps"), rows.sum(0).nonzero()[:, 0]
        shares = rows / rows.sum(0).clamp(min=1)
        state = {k: v.clone() for k, v in generator.items()}
        learned = {k: v.requires_grad_() for k, v in state.items() if is_learned(k)}
        place = next(iter(learned.values()))

        def compute_losses() -> Iterable[Tensor]:
            for _ in range(self.gen_steps):
                y = known[torch.randint(len(known), (self.batch_size,), generator=rng)]
                noise = torch.rand(self.batch_size, self.gen_noise, generator=rng)
                made = generate(state, y, noise.to(place), training=True)
                fits = (F.cross_entropy(F.linear(made, w.to(made), b), y, reduction="none") for w, b in heads)
                taught = sum((share[y] * fit).mean() for share, fit in zip(shares, fits, strict=True))
                yield taught + measure_likeness(noise.to(made), made)

        optimizer = torch.optim.Adam(learned.values(), lr=self.gen_lr * DECAY**at.round, weight_decay=0.01)
        for key, v in moments.items():
            field, k = key.removeprefix(ADAM).split(" ", 1)
            optimizer.state[learned[k]][field] = v.clone()
        descend(optimizer, compute_losses())
        new_moments = {f"{ADAM}{field} {k}": v for k, p in learned.items() for field, v in optimizer.state[p].items()}
        return {k: v.detach() for k, v in state.items()} | new_moments


def take_model(state: Message) -> Message:
    """Return the tensors of the network in a state or a reply."""
    return {k: v for k, v in state.items() if k not in (N_K, LABELS) and not k.startswith((HEAD, GENERATOR, ADAM))}


def is_learned(key: str) -> bool:
    """Return whether a tensor of the generator is learned: not a running statistic of its BatchNorm."""
    return "running" not in key


def find_head_name(server: Message) -> str:
    """Return the beginning of the names of the last layer's tensors."""
    name = next(k.removeprefix(HEAD) for k in server if k.startswith(HEAD))
    return f"{name}." if name else ""


def find_classes(client: Client) -> int:
    """Return the number of classes of a client's copy."""
    head = find_head(client.nets["meme"])
    assert head is not None  # as `Algorithm.features` has it
    return head.out_features


def generate(generator: Message, y: Tensor, noise: Tensor, training: bool = False) -> Tensor:
    """Return features [B, D] of labels y int64 [B] and noise [B, N]: a hidden layer with BatchNorm and ReLU, and an output.

    training: normalise by the batch, and update the running statistics in place; else use these.
    """
    layer = {k.removeprefix(GENERATOR): v for k, v in generator.items()}
    classes = layer["hidden.weight"].shape[1] - noise.shape[1]
    one_hot = torch.eye(classes, dtype=noise.dtype, device=noise.device)[y]
    hidden = F.linear(torch.cat((noise, one_hot), 1), layer["hidden.weight"], layer["hidden.bias"])
    mean, variance, weight, bias = (layer[f"norm.{k}"] for k in ("running_mean", "running_var", "weight", "bias"))
    hidden = F.batch_norm(hidden, mean, variance, weight, bias, training)
    return F.linear(hidden.relu(), layer["output.weight"], layer["output.bias"])


def measure_likeness(noise: Tensor, made: Tensor) -> Tensor:
    """Return how alike features [B, D] of different noise [B, N] are, a scalar in (0, 1]: the published loss of diversity.

    exp(-mean of the product of both distances of two rows): mean squares of their noise, mean differences of their features.
    """
    exact = "donot_use_mm_for_euclid_dist"  # by matrix products, small distances lose digits
    of_noise = torch.cdist(noise, noise, compute_mode=exact).square() / noise.shape[1]
    return (-(torch.cdist(made, made, p=1) / made.shape[1] * of_noise).mean()).exp()
