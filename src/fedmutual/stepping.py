"""The client's part of a phase: its local steps, with the same code in every engine."""

import math
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import partial
from itertools import groupby, islice
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.func import vmap
from torch.optim import Optimizer

from fedmutual.calling import Inputs, call_network, list_tensors
from fedmutual.core import At, Batch, Client, Diverged, Message, Net, Phase, Recipe, Work, find_head
from fedmutual.optimizers import COMMON, make_optimizer_alike, take_optimizer_step

T = TypeVar("T")
PhaseResult = tuple[Message, dict[str, float]]
"""The reply of a client, and the mean of each loss term over its steps."""


@dataclass
class Progress:
    """The progress of a client's phase between two steps."""

    const: Message  # the constants of the loss
    work: Work
    losses: list[Message] = field(default_factory=list)  # the loss terms of each step
    # for another process that continues:
    state: Message = field(default_factory=dict)  # of the client
    stream: Tensor | None = None  # the state of torch's random stream


def work(phase: Phase, client: Client, inbox: Message, at: At, progress: Progress | None = None) -> PhaseResult:
    """Run the client's part of a phase; return (reply, the mean of each loss term over the steps).

    progress: as `steps` takes it.

    Raises:
        Diverged: a loss or a weight is not finite; the client's nets must not be used afterwards.
        Disagreed: the client's public seed set differs from the other participants' sets.
        DataError: a row cannot be read.
        Refused: the client has `privacy`, and the algorithm reads private rows outside of its gradient steps.
        RunError: the privacy budget of a real site does not allow the phase.
    """
    stepping = steps(phase, client, inbox, at, progress)
    while True:
        try:
            next(stepping)
        except StopIteration as done:
            return done.value  # type: ignore[no-any-return]


def steps(
    phase: Phase, client: Client, inbox: Message, at: At, progress: Progress | None = None
) -> Generator[Progress, None, PhaseResult]:
    """Run `work` as a generator that yields its progress after each step and returns the result.

    So clients can take turns, and another process can continue a phase.

    progress: where the phase continues; the client is as after these steps. None: the phase begins.

    Raises:
        Diverged, Disagreed, DataError, Refused, RunError: as `work`.
    """
    phase = with_client_settings(phase, client)
    ready(phase, client, at)
    if progress is None:
        const = phase.begin(client, inbox, at)
        progress = Progress(const, Work(forwards=0 if client.privacy is None else None))
        if client.recipe.patience is not None and client.optimizers and at.round > 0 and at.phase == 0:
            _judge_progress(phase, client, at, client.recipe.patience)
    elif progress.stream is not None:
        torch.set_rng_state(progress.stream)
    client.work = progress.work
    calls = {n: count_calls(lowered(make_call(m), client), client.work) for n, m in client.nets.items()}
    nets = {n: Net(calls[n], trainable(m), find_head(m)) for n, m in client.nets.items()}
    params = {f"{n}.{k}": p for n, net in nets.items() for k, p in net.params.items()}
    losses, optimizers = progress.losses, merge_optimizers(list(client.optimizers.values()))
    draw = phase.batches if client.privacy is None else partial(client.privacy.batches, phase)
    stopped = "stopped" in client.recipe_state
    drawn = draw(client, inbox, at) if params and not stopped else ()  # nothing to train: nothing is drawn
    for batches in islice(group_batches(drawn, client.recipe.accumulate), len(losses), None):
        losses.append(_step(phase, client, nets, params, batches, progress.const, optimizers))
        client.work.steps += 1
        yield progress
    for p in params.values():
        p.grad = None
    if client.recipe.patience is not None and "meme" in client.nets and not client.proxy:
        _keep_meme(client, stopped)
    names = dict.fromkeys(name for terms in losses for name in terms)  # a sampled batch without rows has no loss
    curves = {name: torch.stack([terms[name] for terms in losses if name in terms]) for name in names}
    train = means(curves, client, at)  # first: no reply is made of weights that are not finite
    return phase.end(client, at), train


def _judge_progress(phase: Phase, client: Client, at: At, patience: int) -> None:
    """Record whether a client stops training, by the loss on its own validation rows before the steps of a round.

    The loss is that of the personal network, or without one of the received shared model.
    """
    net, rows = client.nets["personal" if "personal" in client.optimizers else "meme"], client.data["validation"]
    task, was_training, total = client.task or phase.task, net.training, 0.0  # type: ignore[attr-defined]  # of a method's
    with torch.no_grad():
        net.eval()
        for x, y, *_ in rows.rows(torch.split(torch.arange(len(rows)), 512)):
            total += task.fit(call_network(net, x), y).item() * len(y)
        net.train(was_training)
    loss = torch.tensor(math.inf if math.isnan(total) else total / len(rows), dtype=torch.float64)
    # -1: the first loss stops no client, which may not have trained a meme yet
    state = client.recipe_state
    best, waited = state.get("best", torch.tensor(math.inf)), state.get("waited", torch.tensor(-1))
    client.recipe_state = state | {"best": torch.minimum(best, loss), "waited": (waited + 1) * (loss >= best)}
    if client.recipe_state["waited"] >= patience:
        client.recipe_state.setdefault("stopped", torch.tensor(at.round))


def describe_stop(client: Client) -> tuple[str, ...]:
    """Return a sentence for the user about a client that has stopped training; () for another."""
    if "stopped" not in client.recipe_state:
        return ()
    begun, rounds = int(client.recipe_state["stopped"]) + 1, client.recipe.patience
    why = f"its loss on validation rows was not smaller for {rounds} rounds (training.patience)"
    return (f"client {client.id!r} takes no steps from round {begun} on, and sends its last trained meme: {why}",)


def _keep_meme(client: Client, stopped: bool) -> None:
    """Keep the trained meme of a client; of a client that has stopped, load the kept one in place of the received model."""
    meme = client.nets["meme"]
    if stopped:
        meme.load_state_dict(meme.state_dict() | {k: client.recipe_state[f"meme.{k}"] for k in client.shared})
    else:
        client.recipe_state |= {f"meme.{k}": v.clone() for k, v in meme.state_dict().items() if k in client.shared}


def run_one_step(phase: Phase, client: Client, inbox: Message, at: At) -> Message:
    """Run the client's part of a phase with one step at most, and return the reply.

    Raises:
        Diverged, Disagreed, DataError, Refused, RunError: as `work`.
    """
    phase = with_client_settings(phase, client)
    ready(phase, client, at)
    begun = Progress(phase.begin(client, inbox, at), Work())
    next(steps(phase, client, inbox, at, begun), None)
    return phase.end(client, at)


def _step(
    phase: Phase,
    client: Client,
    nets: Mapping[str, Net],
    params: Message,
    batches: Sequence[Batch],
    const: Message,
    optimizers: Sequence[Optimizer],
) -> Message:
    """Take one local step of a client and return its loss terms. params: of all nets, "net.name" -> parameter."""

    scale = client.recipe_state.setdefault("scale", torch.tensor(2.0**16)) if client.precision == torch.float16 else None
    skipped = False

    def compute_gradients(batch: Batch) -> tuple[Message, Message]:
        if client.privacy is not None and client.privacy.reading:  # the batch holds private rows: clip and noise
            return client.privacy.gradients(phase, client, batch, const)
        return gradients(phase, nets, params, batch, const, scale)

    def update(grads: Message) -> None:
        nonlocal skipped
        skipped = scale is not None and not _rescale(client.recipe_state, grads)
        if skipped:
            return
        set_gradients(params, grads)
        for optimizer in optimizers:
            take_optimizer_step(optimizer)

    terms, memory = take_step(phase, client.recipe, client.memory, batches, compute_gradients, update)
    client.memory = client.memory if skipped else memory
    return terms


def _rescale(kept: Message, grads: Message) -> bool:
    """Return whether all gradients are finite. If not, halve the loss scale; double it after 2,000 steps with finite ones.

    The numbers are those of torch.amp.GradScaler. kept: holds the scale, and the steps since it was changed.
    """
    finite = bool(torch.stack([grad.isfinite().all() for grad in grads.values()]).all()) if grads else True
    grown = kept.get("grown", torch.tensor(0)) + 1 if finite else torch.tensor(0)
    is_due = int(grown) == 2000
    kept["grown"] = torch.tensor(0) if is_due else grown
    kept["scale"] = kept["scale"] * (0.5 if not finite else 2.0 if is_due else 1.0)
    return finite


def take_step(
    phase: Phase,
    recipe: Recipe,
    memory: Message,
    batches: Sequence[Batch],
    compute_gradients: Callable[[Batch], tuple[Message, Message]],
    update: Callable[[Message], None],
    stacked: bool = False,
) -> tuple[Message, Message]:
    """Take one local step of one client, or of k stacked clients together; return (the loss terms, the next memory).

    batches: of the step (`Recipe.accumulate`). compute_gradients: returns (name -> gradient, the loss terms) of one of them.
    update: moves the parameters by the edited gradients. stacked: whether all tensors have a first dimension of k clients.
    """
    grads, terms = compute_gradients(batches[0])
    if len(batches) > 1:
        grads, terms = _average([(grads, terms), *map(compute_gradients, batches[1:])])
    if type(phase).edit is not Phase.edit:
        grads, memory = (vmap(phase.edit) if stacked else phase.edit)(grads, memory)
    if recipe.clip_norm is not None or recipe.clip_value is not None:
        clip = partial(clip_gradients, recipe=recipe)
        grads = (vmap(clip) if stacked else clip)(grads)
    update(grads)
    logged = {k: memory[k] for k in phase.terms if k in memory}
    return {k: v.detach() for k, v in terms.items()} | logged, memory


def _average(of_batches: Sequence[tuple[Message, Message]]) -> tuple[Message, Message]:
    """Return the mean gradients, and the mean of each loss term over the batches that have it: a batch may have no row."""
    grads: Message = {}
    values: dict[str, list[Tensor]] = {}
    for of_batch, terms in of_batches:
        for name, grad in of_batch.items():
            grads[name] = grads[name] + grad if name in grads else grad
        for name, term in terms.items():
            values.setdefault(name, []).append(term.detach())
    means = {name: torch.stack(of_term).mean(0) for name, of_term in values.items()}
    return {name: grad / len(of_batches) for name, grad in grads.items()}, means


def clip_gradients(grads: Message, recipe: Recipe) -> Message:
    """Return gradients with elements of at most `clip_value`, and then each network's with a norm of at most `clip_norm`.

    grads: "net.name" -> gradient. Pure, for vmap; the numbers are those of `torch.nn.utils.clip_grad_value_` and
    `clip_grad_norm_`.
    """
    if recipe.clip_value is not None:
        grads = {name: grad.clamp(-recipe.clip_value, recipe.clip_value) for name, grad in grads.items()}
    if recipe.clip_norm is None:
        return grads
    norms: dict[str, list[Tensor]] = {}
    for name, grad in grads.items():
        norms.setdefault(name.partition(".")[0], []).append(torch.linalg.vector_norm(grad))
    factors = {
        net: (recipe.clip_norm / (torch.linalg.vector_norm(torch.stack(of_net)) + 1e-6)).clamp(max=1.0)
        for net, of_net in norms.items()
    }
    return {name: grad * factors[name.partition(".")[0]].to(grad.device) for name, grad in grads.items()}


class _SharedState:
    """The state of several optimisers, by parameter, as one optimiser reads and writes it."""

    def __init__(self, owners: Mapping[Tensor, Optimizer]) -> None:
        self._owners = owners

    def __getitem__(self, parameter: Tensor) -> Any:
        return self._owners[parameter].state[parameter]


def group_batches(batches: Iterable[T], size: int) -> Iterator[list[T]]:
    """Yield lists of `size` batches in a row; a list is shorter at the end, and before batches of another number of tensors.

    Such batches have another loss: in FedRep's steps of the head a batch has one tensor more than in those of the features.
    """
    for _, alike in groupby(batches, lambda batch: len(batch) if isinstance(batch, tuple) else 0):
        while group := list(islice(alike, size)):
            yield group


def merge_optimizers(optimizers: Sequence[Optimizer]) -> Sequence[Optimizer]:
    """Return one optimiser that steps the parameters of all, if their types and settings are equal; else the optimisers.

    One call takes less time than one for each network. The state of a parameter stays in the optimiser that it came from,
    where checkpoints and algorithms read it. Parameters with and without a state are not merged: one call of torch's SGD
    begins the momentum of all its parameters or of none.
    """
    if len(optimizers) < 2 or len(kinds := set(map(type, optimizers))) > 1 or not kinds <= {*COMMON}:
        return optimizers
    owners = {p: optimizer for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]}
    settings = [{k: v for k, v in group.items() if k != "params"} for o in optimizers for group in o.param_groups]
    have_state = {bool(optimizer.state.get(p)) for p, optimizer in owners.items()}
    if any(group != settings[0] for group in settings) or len(have_state) > 1:
        return optimizers
    merged = make_optimizer_alike(optimizers[0], list(owners))
    merged.param_groups[0].update(settings[0])
    merged.state = _SharedState(owners)  # type: ignore[assignment]
    return [merged]


def gradients(
    phase: Phase, nets: Mapping[str, Net], params: Message, batch: Batch, const: Message, scale: Tensor | None = None
) -> tuple[Message, Message]:
    """Return (name -> gradient of the sum of the loss terms, in the parameter's shape; name -> loss term []).

    params: "net.name" -> parameter. A parameter that the loss does not use has no gradient. scale: a factor [] of the terms
    while gradients are computed, so that small ones do not become 0 in float16.
    """
    terms = phase.loss(nets, batch, const)
    if scale is None:
        return differentiate(terms, params), terms
    scaled = differentiate({k: v * scale.to(v.device) for k, v in terms.items()}, params)
    return {k: grad / scale.to(grad.device) for k, grad in scaled.items()}, terms


def differentiate(terms: Message, params: Message, stacked: bool = False) -> Message:
    """Return name -> gradient of the sum of the loss terms, for each parameter that the terms depend on.

    terms: [] of one client; with `stacked`, [k] of k clients, of which each depends on its own client's parameters only.

    Raises:
        RuntimeError: a loss term of one client is not a scalar.
    """
    moving = [term for term in terms.values() if term.requires_grad]  # not the loss of a net that is frozen
    ones = [torch.ones_like(term) for term in moving] if stacked else None
    grads = torch.autograd.grad(moving, list(params.values()), ones, allow_unused=True)
    return {k: g for k, g in zip(params, grads, strict=True) if g is not None}


def set_gradients(params: Message, grads: Message) -> None:
    """Give each parameter its gradient, or None if it has no gradient."""
    for name, p in params.items():
        p.grad = laid_as(p, grads[name]) if name in grads else None


def with_client_settings(phase: Phase, client: Client) -> Phase:
    """Return the phase with the client's own settings and task."""
    names = {f.name for f in fields(phase)}  # type: ignore[arg-type]
    settings = client.settings if client.task is None else {**client.settings, "task": client.task}
    return replace(phase, **{k: v for k, v in settings.items() if k in names})  # type: ignore[type-var]


def ready(phase: Phase, client: Client, at: At) -> None:
    """Prepare the client for a phase: seed its dropout stream, set its learning rate, put its nets in training mode."""
    seed_torch(at.rng(client.id, "nets").initial_seed())
    for optimizer in client.optimizers.values():
        for group in optimizer.param_groups:
            group["lr"] = rate(phase, client, at)
    for net in client.nets.values():
        moves = any(p.requires_grad for p in net.parameters())  # a frozen one keeps its running statistics too
        if net.training != moves:
            net.train(moves)


def seed_torch(seed: int) -> None:
    """Seed torch as torch.manual_seed does, without the half millisecond that it takes to seed a GPU that is not used."""
    if torch.cuda.is_initialized() or torch.backends.mps.is_available():  # type: ignore[no-untyped-call]
        torch.manual_seed(seed)
    else:
        torch.default_generator.manual_seed(seed)


def rate(phase: Phase, client: Client, at: At) -> float:
    """Return the learning rate of a client's optimisers in a phase."""
    return at.number(client.rate if phase.rate is None else phase.rate)


def make_call(net: nn.Module, replaced: Message | None = None) -> Callable[..., Tensor]:
    """Return a function (x [B, ...], weights or nothing) -> output [B, ...] of a net.

    replaced: tensors in place of the module's tensors of these names.
    """

    def call(x: Inputs, weights: Message | None = None) -> Tensor:
        is_plain = replaced is None and weights is None
        return call_network(net, x, None if is_plain else {**(replaced or {}), **(weights or {})})

    return call


def count_calls(call: Callable[..., Tensor], work: Work) -> Callable[..., Tensor]:
    """Return `call` with a counter: each call adds 1 to `work.forwards`, unless that is None."""

    def counted(x: Inputs, *weights: Message) -> Tensor:
        if work.forwards is not None:
            work.forwards += 1
        return call(x, *weights)

    return counted


def lowered(call: Callable[..., Tensor], client: Client) -> Callable[..., Tensor]:
    """Return `call` in the client's precision: matrices and convolutions in the lower one, the output in the type of x."""
    if client.precision is None:
        return call

    def lower(x: Inputs, *weights: Message) -> Tensor:
        one = list_tensors(x)[0]
        with torch.autocast(one.device.type, client.precision, cache_enabled=False):  # a cache keeps the last step's weights
            return call(x, *weights).to(one.dtype if one.is_floating_point() else torch.float32)

    return lower


def trainable(net: nn.Module) -> Message:
    """Return name -> parameter of a net, without frozen parameters."""
    return {k: p for k, p in net.named_parameters() if p.requires_grad}


def laid_as(p: Tensor, value: Tensor) -> Tensor:
    """Return `value` [...] in the memory layout of p [...]: a fused optimiser reads both in memory order."""
    return value if value.stride() == p.stride() else torch.empty_like(p).copy_(value)


def means(curves: Mapping[str, Tensor], client: Client, at: At) -> dict[str, float]:
    """Return the mean of each loss term over the steps; {} without steps. curves: loss term -> values [S].

    Losses and weights are checked for finite values here, once a phase, because a check at every step would stall a GPU.
    For a client with `privacy` only the weights of the noised networks are checked: whether the client stops must not
    depend on values without noise.

    Raises:
        Diverged: a loss or a weight is not finite.
    """
    if not curves:
        return {}
    noised = None if client.privacy is None else client.privacy.nets
    for name, curve in curves.items() if noised is None else ():
        bad = (~curve.isfinite()).nonzero()
        if len(bad):
            raise Diverged(client.id, at.round, int(bad[0]), f"its {name} loss is {curve[bad[0]].item()}")
    named = {f"{net}.{k}": t for net, module in client.nets.items() for k, t in module.state_dict().items()}
    if noised is not None:
        named = {k: t for k, t in named.items() if k.partition(".")[0] in noised}
    floats = {k: t for k, t in named.items() if t.is_floating_point()}
    # one call for all tensors: if their norms are finite, so are all elements; a norm may overflow although each is finite
    if not torch.stack(torch._foreach_norm(list(floats.values()))).isfinite().all():
        steps = len(next(iter(curves.values())))
        for name in (k for k, t in floats.items() if not t.isfinite().all()):
            raise Diverged(client.id, at.round, steps - 1, f"its weight {name} is no longer finite")
    return {name: curve.mean().item() for name, curve in curves.items()}
