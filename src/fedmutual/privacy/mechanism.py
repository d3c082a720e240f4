"""Differentially private steps on a client's private rows: Poisson sampling, clipping, Gaussian noise (DP-SGD).

Abadi et al., Deep Learning with Differential Privacy, 2016, https://arxiv.org/abs/1607.00133, Algorithm 1, over one network
or over two whose gradients are clipped together. docs/privacy-theory.md has the statement and its proof sketch.
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from fedmutual.calling import list_tensors
from fedmutual.core import At, Batch, Client, Data, Message, Net, Phase
from fedmutual.privacy.clipping import compute_clipped_sum
from fedmutual.privacy.context import digest_phase, digest_rows
from fedmutual.privacy.sampling import PrivateRows, Units, refuse_batch
from fedmutual.privacy.secret import Stream, derive_key
from fedmutual.stepping import gradients, seed_torch, trainable


class Release(NamedTuple):
    """The privacy cost of the noised steps of one phase of one client.

    `sigma` is the noise multiplier, `rate` is the probability with which a unit is in a batch, and `steps` is the number of
    steps. `round` and `phase` count from 0; round -1 is the start.
    """

    label: str  # digest of all inputs of the answer; an equal label means an equal answer, without a second cost
    sigma: float
    rate: float
    steps: int
    round: int
    phase: int


class Mechanism:
    """Clips and noises one client's steps on private rows. This is the `Privacy` of the core.

    `spend` is called before the first private row of a phase is read; an error in `spend` ends the phase.

    Source: Abadi et al., 2016, https://arxiv.org/abs/1607.00133, Algorithm 1.
    """

    def __init__(
        self, client: str, rows: Data, units: Units, nets: frozenset[str], clip: float, sigma: float, secret: bytes
    ) -> None:
        """nets: names of the networks whose gradients are clipped together to the norm `clip`, with noise sigma * clip."""
        self.rows, self.units, self.nets = PrivateRows(client, rows), units, nets
        self.clip, self.sigma, self.secret = clip, sigma, secret
        self.spend: Callable[[Release], None] = _accept
        self.steps = 0  # on private rows, since the start of the run
        self._key = b""  # of the phase
        self._step = 0  # in the phase
        self._asked = 0  # batches that the phase has asked for, of which it may have taken fewer
        self._drawn: deque[tuple[int, Tensor | None]] = deque()  # (number of rows, units) of each batch without a step
        self._digest: str | None = None  # of the private rows

    @property
    def reading(self) -> bool:
        """Whether the batches of the current phase contain private rows."""
        return bool(self._key)

    def batches(self, phase: Phase, client: Client, inbox: Message, at: At) -> Iterator[Batch]:
        """Yield the phase's batches. Batches of private rows are Poisson samples; their number is the phase's plan.

        Raises:
            RunError: `spend` refuses the phase, as the budget of a real site does.
            DataError: a row cannot be read.
        """
        self._key, self._step, self._asked = b"", 0, 0
        self._drawn.clear()
        self.rows.read = lambda count: self._read_batches(count, phase, client, inbox, at)
        try:
            yield from phase.batches(client, inbox, at)
        finally:
            self.rows.read = refuse_batch

    def gradients(self, phase: Phase, client: Client, batch: Batch, const: Message) -> tuple[Message, Message]:
        """Return ("net.name" -> gradient, loss term -> sum over the batch divided by the expected rows) of one step.

        Noised networks: (sum of clipped gradients + noise) / expected rows. Other networks: the gradient without privacy.

        Raises:
            RuntimeError: the batch has another number of rows than the sample.
        """
        count, units = self._drawn.popleft()
        if (rows := len(list_tensors(batch[0])[0])) != count:
            raise RuntimeError(f"a step has a batch of {rows} rows, and the sample has {count} rows")
        noised = {n: net for n, net in client.nets.items() if n in self.nets}
        exact_nets = tuple(n for n in client.nets if n not in self.nets)
        nets = {n: Net(net, trainable(net)) for n, net in client.nets.items()}
        sums, terms = compute_clipped_sum(phase, noised, exact_nets, const, self.clip, batch, units) if count else ({}, {})
        grads = self._add_noise({f"{n}.{k}": p for n in noised for k, p in nets[n].params.items()}, sums)
        other_params = {f"{n}.{k}": p for n in exact_nets for k, p in nets[n].params.items()}
        if other_params and count:
            other_grads, means = gradients(phase, nets, other_params, batch, const)
            grads |= other_grads
            terms = {k: v.detach() * count for k, v in means.items()}
        self._step += 1
        self.steps += 1
        return grads, {k: v / self.units.expected for k, v in terms.items()}

    def _add_noise(self, params: Message, sums: Message) -> Message:
        """Return (sum + noise) / expected rows for each parameter; a missing sum is zero."""
        device = next(iter(params.values())).device
        sizes = [p.numel() for p in params.values()]
        noise = torch.zeros(sum(sizes), dtype=torch.float64)
        if self.sigma:
            noise = Stream(derive_key(self._key, "noise", str(self._step))).draw_normals(sum(sizes), device)
            noise = noise.mul_(self.sigma * self.clip)
        grads: Message = {}
        for (name, p), z in zip(params.items(), torch.split(noise, sizes), strict=True):
            value = z.view(p.shape).to(sums[name].device) + sums[name] if name in sums else z.view(p.shape)
            grads[name] = value.div(self.units.expected).to(p)
        return grads

    def _read_batches(self, count: int, phase: Phase, client: Client, inbox: Message, at: At) -> Iterable[Batch]:
        """Return `count` Poisson batches; the cost is recorded before the first row is read."""
        if not count:
            return ()
        if self._digest is None:
            self._digest = digest_rows(self.rows.source, self.units)
        noise = (sorted(self.nets), self.clip, self.sigma, self.units.rate, self.units.expected, self._digest)
        context = digest_phase(phase, client, inbox, at, noise)
        label = derive_key(self.secret, "label", context, str(self._asked)).hex()[:32]
        self.spend(Release(label, self.sigma, self.units.rate, count, at.round, at.phase))
        self._key = derive_key(self.secret, "phase", context, str(self._asked))
        self._asked += count
        seed_torch(Stream(derive_key(self._key, "dropout")).make_generator().initial_seed())
        return self._sample_batches(count, self._key)

    def _sample_batches(self, count: int, key: bytes) -> Iterator[Batch]:
        stream, source = Stream(derive_key(key, "sampling")), self.rows.source
        samples = [self.units.sample(stream) for _ in range(count)]
        augment = Stream(derive_key(key, "augment")).make_generator()
        batches = iter(source.rows([rows for rows, _ in samples if len(rows)], augment))
        for rows, units in samples:
            self._drawn.append((len(rows), units))
            yield next(batches) if len(rows) else _make_empty_batch(source)


def _accept(release: Release) -> None:
    """Do nothing: a run in one process has no budget, and epsilon is computed from the number of steps at the end."""


def _make_empty_batch(rows: Data) -> Batch:
    """Return a batch with 0 rows."""
    (batch,) = rows.rows([torch.zeros(1, dtype=torch.int64)])
    return tree_map(lambda t: t[:0], batch)  # type: ignore[no-any-return]
