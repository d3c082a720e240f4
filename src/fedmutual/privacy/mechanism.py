"""Differentially private steps on a client's private rows: Poisson sampling, clipping, Gaussian noise (DP-SGD).

Abadi et al., Deep Learning with Differential Privacy, 2016, https://arxiv.org/abs/1607.00133, Algorithm 1, over one network
or over two whose gradients are clipped together. docs/privacy-theory.md has the statement and its proof sketch.
"""

import hashlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import fields
from typing import NamedTuple

import torch
from torch import Tensor

from fedmutual.core import At, Batch, Client, Data, Message, Net, Phase, Schedule
from fedmutual.privacy.clipping import ClippingJob, clipped_sum
from fedmutual.privacy.sampling import PrivateRows, Units, closed
from fedmutual.privacy.secret import Stream, derive_key
from fedmutual.rundir.checkpoint import client_state
from fedmutual.stepping import gradients, seed_torch, trainable


class Release(NamedTuple):
    """What the steps of one phase cost."""

    label: str  # of all that the answer is computed from; an equal label means an equal answer, which costs nothing again
    sigma: float
    rate: float
    steps: int
    round: int
    phase: int


class Mechanism:
    """Clips and noises one client's steps on private rows. This is the `Privacy` of the core.

    `spend` is called before the first private row of a phase is read; what it raises ends the phase.
    """

    def __init__(
        self, client: str, rows: Data, units: Units, nets: frozenset[str], clip: float, sigma: float, secret: bytes
    ) -> None:
        """nets: whose gradients are clipped, together, to the norm `clip`, and noised with sigma * clip."""
        self.rows, self.units, self.nets = PrivateRows(client, rows), units, nets
        self.clip, self.sigma, self.secret = clip, sigma, secret
        self.spend: Callable[[Release], None] = _count
        self.steps = 0  # on private rows, since the run began
        self._key = b""  # of the phase
        self._step = 0  # in the phase
        self._drawn: deque[tuple[int, Tensor | None]] = deque()  # rows and units of the batches that were not stepped yet
        self._digest: str | None = None  # of the private rows

    @property
    def reading(self) -> bool:
        """Whether the batches of the current phase hold private rows."""
        return bool(self._key)

    def batches(self, phase: Phase, client: Client, inbox: Message, at: At) -> Iterator[Batch]:
        """The phase's batches; of private rows, Poisson samples, as many as the phase plans."""
        self._key, self._step = b"", 0
        self._drawn.clear()
        self.rows.read = lambda count: self._read(count, phase, client, inbox, at)
        try:
            yield from phase.batches(client, inbox, at)
        finally:
            self.rows.read = closed

    def gradients(self, phase: Phase, client: Client, batch: Batch, const: Message) -> tuple[Message, Message]:
        """The step's gradients: of noised networks (sum of clipped + noise) / expected rows, of others as without privacy.

        -> ("net.name" -> gradient, loss terms: sums over the batch over the expected rows).
        """
        count, units = self._drawn.popleft()
        if len(batch[0]) != count:
            raise RuntimeError(f"a batch of {len(batch[0])} rows is stepped on, and {count} rows were sampled for it")
        noised = {n: net for n, net in client.nets.items() if n in self.nets}
        others = tuple(n for n in client.nets if n not in self.nets)
        nets = {n: Net(net, trainable(net)) for n, net in client.nets.items()}
        sums, terms = clipped_sum(ClippingJob(phase, noised, others, const, self.clip), batch, units) if count else ({}, {})
        grads = self._noised({f"{n}.{k}": p for n in noised for k, p in nets[n].params.items()}, sums)
        moved = {f"{n}.{k}": p for n in others for k, p in nets[n].params.items()}
        if moved and count:
            own, means = gradients(phase, nets, moved, batch, const)
            grads |= own
            terms = {k: v.detach() * count for k, v in means.items()}
        self._step += 1
        self.steps += 1
        return grads, {k: v / self.units.expected for k, v in terms.items()}

    def _noised(self, params: Message, sums: Message) -> Message:
        """(sum + noise) / expected rows, of these parameters; a sum that is missing is zero."""
        device = next(iter(params.values())).device
        sizes = [p.numel() for p in params.values()]
        noise = torch.zeros(sum(sizes), dtype=torch.float64)
        if self.sigma:
            noise = Stream(derive_key(self._key, "noise", str(self._step))).normals(sum(sizes), device)
            noise = noise.mul_(self.sigma * self.clip)
        found: Message = {}
        for (name, p), z in zip(params.items(), torch.split(noise, sizes), strict=True):
            value = z.view(p.shape).to(sums[name].device) + sums[name] if name in sums else z.view(p.shape)
            found[name] = value.div(self.units.expected).to(p)
        return found

    def _read(self, count: int, phase: Phase, client: Client, inbox: Message, at: At) -> Iterable[Batch]:
        """So many Poisson batches, paid for before the first row is read."""
        if not count:
            return ()
        context = self._context(phase, client, inbox, at)
        label = derive_key(self.secret, "label", context, str(self._step)).hex()[:32]
        self.spend(Release(label, self.sigma, self.units.rate, count, at.round, at.phase))
        self._key = derive_key(self.secret, "phase", context, str(self._step))
        seed_torch(Stream(derive_key(self._key, "dropout")).generator().initial_seed())
        return self._sampled(count, self._key)

    def _sampled(self, count: int, key: bytes) -> Iterator[Batch]:
        stream, source = Stream(derive_key(key, "sampling")), self.rows.source
        drawn = [self.units.sample(stream) for _ in range(count)]
        augment = Stream(derive_key(key, "augment")).generator()
        filled = iter(source.rows([rows for rows, _ in drawn if len(rows)], augment))
        for rows, units in drawn:
            self._drawn.append((len(rows), units))
            yield next(filled) if len(rows) else _empty(source)

    def _context(self, phase: Phase, client: Client, inbox: Message, at: At) -> str:
        """A digest of all that the phase's answer is computed from: two answers with equal noise must be equal.

        Else their difference would be free of noise: the same round asked again with another model, with other settings,
        from another state or on other rows is another context, with noise of its own.
        """
        if self._digest is None:
            self._digest = _rows_digest(self.rows.source, self.units)
        groups = {n: [{k: v for k, v in g.items() if k != "params"} for g in o.param_groups]
                  for n, o in client.optimizers.items()}  # fmt: skip
        kind = type(phase)
        about = (
            (kind.__module__, kind.__qualname__, _settings(phase, at), at.seed, at.round, at.phase, client.id, groups),
            (sorted(self.nets), self.clip, self.sigma, self.units.rate, self.units.expected, self._digest),
        )
        digest = hashlib.sha256(repr(about).encode())
        state = {k: v for k, v in client_state(client).items() if not k.startswith("privacy.")}
        for name, tensors in (("inbox", inbox), ("state", state)):
            _add_tensors(digest, name, tensors)
        return digest.hexdigest()


def _count(release: Release) -> None:
    """In one process nothing is withheld: the steps are counted, and epsilon is told at the end."""


def _settings(phase: Phase, at: At) -> list[tuple[str, str]]:
    """A phase's settings in this round, whatever the number of rounds is, which may grow; of objects the type alone."""
    found = {f.name: getattr(phase, f.name) for f in fields(phase)}  # type: ignore[arg-type]
    values = {k: at.number(v) if isinstance(v, Schedule) else v for k, v in found.items()}
    plain = (int, float, str, bool, tuple, type(None))
    return [(k, repr(v) if isinstance(v, plain) else type(v).__qualname__) for k, v in sorted(values.items())]


def _rows_digest(rows: Data, units: Units) -> str:
    """A digest of all rows, and of their groups. Hex."""
    digest = hashlib.sha256(b"" if units.codes is None else units.codes.tobytes())
    for batch in rows.rows(torch.split(torch.arange(len(rows)), 1024)):
        _add_tensors(digest, "rows", {str(k): t for k, t in enumerate(batch)})
    return digest.hexdigest()


def _add_tensors(digest: "hashlib._Hash", title: str, tensors: Mapping[str, Tensor]) -> None:
    for name, tensor in sorted(tensors.items()):
        plain = tensor.detach().to("cpu").contiguous().reshape(-1)
        digest.update(repr((title, name, plain.dtype, tuple(tensor.shape))).encode())
        digest.update(plain.view(torch.uint8).numpy().data)


def _empty(rows: Data) -> Batch:
    """A batch of no rows."""
    (batch,) = rows.rows([torch.zeros(1, dtype=torch.int64)])
    return tuple(t[:0] for t in batch)
