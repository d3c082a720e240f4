"""What is wrong with one's data, or worth knowing before one trains on them, in plain sentences."""

import hashlib
import json
import unicodedata
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedmutual.config import ALONE, Config, alone, brings_data
from fedmutual.config.grid import toml_key
from fedmutual.data.draws import Index, many
from fedmutual.data.examples import listed
from fedmutual.data.federation import Federation, Prepared, examples_of, load, prepare
from fedmutual.data.notes import NOBODY, training
from fedmutual.data.rows import Rows

_UNEVEN = 10  # the ratio of sizes from which on one speaks of imbalance
_FEW = 30  # examples, of which one is more than 3 % of a score
_VALUES = 200  # more means and standard deviations are not for a line
_CLIENTS = 10  # so many are described one by one
_SHARES = {"training": "private", "public": "public", "validation": "validation", "hold-out": "holdout", "test": "test"}
_CHUNK = 1024


def findings(config: Config, prepared: Mapping[str, Prepared] | None = None) -> list[str]:
    """One sentence a finding. Reads every row, also of data that are not kept in memory. prepared: as `load` takes it.

    Raises:
        UserError: the data cannot be used; in one sentence, why.
    """
    read = prepare(config) if prepared is None else prepared
    if not brings_data(config):
        federation = load(config, read)
        return _of_one(config, federation, _look(federation))
    seen, found = {}, []
    for i, own_data in read.items():
        federation = load(alone(config, i), {"": own_data})
        seen[i] = _look(federation)
        own = [s for s in _of_one(alone(config, i), federation, seen[i]) if not s.startswith((_ALONE, NOBODY))]
        found += [f"client {i!r}: {said.replace(f'client {ALONE!r} ', 'it ')}" for said in own]
        seen[i] = replace(seen[i], digests=_stored(own_data, seen[i].rows.index))  # each may scale its rows its own way
    return [*found, *_across(seen)]


_ALONE = "there is one client only"


def _of_one(config: Config, federation: Federation, seen: "_Seen") -> list[str]:
    """About one data set."""
    alike = () if config.data.classes else _alike(federation)  # the classes that a user lists are meant
    found = [*federation.notes, *_sizes(federation), *_classes(federation), *alike, *_twins(federation, seen)]
    return [*found, *_values(federation, seen)]


def _test(federation: Federation) -> Rows:
    """The test set of one data set."""
    assert isinstance(federation.test, Rows)  # several have Chained
    return federation.test


def _sizes(federation: Federation) -> Iterator[str]:
    """Clients that differ much, or have too little."""
    sizes = {i: sum(training(c)) for i, c in federation.partition["clients"].items()}
    small, large = min(sizes, key=sizes.__getitem__), max(sizes, key=sizes.__getitem__)
    if sizes[large] >= _UNEVEN * sizes[small]:
        yield (
            f"clients differ much in size: {large!r} has {many(sizes[large], 'training example')} and {small!r} has "
            f"{sizes[small]}; FML counts them alike, FedAvg by their examples"
        )
    for what, kind in _SHARES.items():
        shares: dict[str, Rows | None] = {i: getattr(s, kind) for i, s in federation.clients.items()}
        few = {i: len(rows) for i, rows in shares.items() if rows is not None and len(rows) < _FEW}
        if few:
            least = min(few.values())
            score = f"; one of {least} is {100 / least:.0f} % of a score" if kind not in ("private", "public") else ""
            yield f"{'client' if len(few) == 1 else 'clients'} {listed(list(few))}: fewer than {_FEW} {what} examples{score}"


def _classes(federation: Federation) -> Iterator[str]:
    """Classes that clients lack, and classes of very different size."""
    names = federation.space.classes
    clients: dict[str, Any] = federation.partition["clients"]
    short = {i: training(c) for i, c in clients.items() if 0 in training(c)}
    if len(short) > _CLIENTS:
        yield f"{len(short)} of {len(clients)} clients lack training examples of some class"
    else:
        for i, counts in short.items():
            has, lacks = ([n for n, k in zip(names, counts, strict=True) if bool(k) == held] for held in (True, False))
            if len(has) < len(lacks):
                yield f"client {i!r} has training examples of {len(has)} of {len(names)} classes only: {listed(has)}"
            else:
                yield f"client {i!r} has no training examples of {len(lacks)} of {len(names)} classes: {listed(lacks)}"
    held = _held(federation)
    most, least = int(held.argmax()), int(np.where(held > 0, held, held.max() + 1).argmin())
    if held[most] >= _UNEVEN * held[least]:
        yield (
            f"classes are imbalanced: {names[most]!r} has {many(held[most], 'training example')} and {names[least]!r} "
            f"has {held[least]}; read balanced accuracy beside accuracy"
        )


def _held(federation: Federation) -> Index:
    """How many training examples of each class there are."""
    clients: dict[str, Any] = federation.partition["clients"]
    held: Index = np.sum([training(c) for c in clients.values()], axis=0)
    return held


def _alike(federation: Federation) -> Iterator[str]:
    """Classes whose names differ in case, blanks or the form of their characters only."""
    groups: dict[str, list[int]] = {}
    classes = federation.space.classes
    for i, name in enumerate(classes):
        groups.setdefault(" ".join(unicodedata.normalize("NFKC", name).casefold().split()), []).append(i)
    held = _held(federation)
    for group in (g for g in groups.values() if len(g) > 1):
        names, kept = [classes[i] for i in group], classes[max(group, key=lambda i: held[i])]
        mend = ", ".join(f"{toml_key(n)} = {json.dumps(kept, ensure_ascii=False)}" for n in names if n != kept)
        yield (
            f"classes {', '.join(map(repr, names[:-1]))} and {names[-1]!r} look alike; if they are one, write "
            f"data.labels = {{ {mend} }}"
        )


@dataclass(frozen=True)
class _Seen:
    """What one pass over all N rows gathers."""

    rows: Rows
    trained: Index  # positions of the training rows
    scored: Index  # of those that are scored on
    digests: np.ndarray[tuple[int], np.dtype[np.uint64]]  # [N], of each row's bytes
    blank: Index  # positions of images that are one value all over
    mean: Tensor  # of the training rows, as scaled: a value a channel or feature
    std: Tensor
    constant: Tensor  # bool, of the training rows: a value a channel or feature


def _look(federation: Federation) -> _Seen:
    """Read every row that some client or the test set has, once."""
    pooled = federation.pooled()
    test = _test(federation)
    shares = [s.index for s in (pooled.private, pooled.validation, pooled.holdout, test) if s is not None]
    rows = test.with_index(np.unique(np.concatenate(shares)))
    trained = torch.from_numpy(np.isin(rows.index, pooled.private.index))
    chunks = torch.split(torch.arange(len(rows)), _CHUNK)
    digests, blank, moments, extremes = [], [], [], []
    for at, (x, _) in zip(chunks, rows.rows(chunks), strict=True):
        flat = x.flatten(1)
        digests += _digests(x)
        blank.append(at[(flat == flat[:, :1]).all(1)] if x.dim() == 4 else at[:0])
        own = x[trained[at]].double().transpose(0, 1).flatten(1)  # [channels or features, values]
        if own.numel():
            moments.append(torch.stack([torch.full_like(own[:, 0], own.shape[1]), own.sum(1), own.square().sum(1)]))
            extremes.append(torch.stack([own.amin(1), -own.amax(1)]))
    n, total, squares = torch.stack(moments).sum(0)
    least, most = torch.stack(extremes).amin(0)
    mean = total / n
    std = (squares / n - mean.square()).clamp(min=0).sqrt()
    digested = np.array(digests, dtype=np.uint64)
    scored = np.flatnonzero(np.isin(rows.index, np.concatenate([pooled.validation.index, test.index])))
    return _Seen(
        rows, np.flatnonzero(trained.numpy()), scored, digested, torch.cat(blank).numpy(), mean, std, least == -most
    )


def _stored(prepared: Prepared, index: Index) -> np.ndarray[tuple[int], np.dtype[np.uint64]]:
    """Digests of rows as they are stored, before any scaling."""
    examples, found = examples_of(prepared.source), list[int]()
    for rows in np.array_split(index, -(-len(index) // _CHUNK)):
        found += _digests(examples.take(rows.tolist()))
    return np.array(found, dtype=np.uint64)


def _digests(x: Tensor) -> list[int]:
    """Of each row's bytes."""
    return [int.from_bytes(hashlib.blake2b(row, digest_size=8).digest(), "big") for row in x.flatten(1).numpy()]


def _across(seen: Mapping[str, _Seen]) -> Iterator[str]:
    """Examples that one client trains on and another is scored on."""
    for b, theirs in seen.items():
        for a, ours in seen.items():
            trained = ours.digests[ours.trained]
            both = theirs.scored[np.isin(theirs.digests[theirs.scored], trained)]
            if a != b and len(both):
                twin = ours.trained[trained == theirs.digests[both[0]]][0]
                yield (
                    f"{len(both)} of the {len(theirs.scored)} examples that client {b!r} is scored on equal a training "
                    f"example of client {a!r}, {theirs.rows.where(both[0])} for instance {ours.rows.where(twin)}"
                )


def _twins(federation: Federation, seen: _Seen) -> Iterator[str]:
    """Examples that are there twice: in training and in evaluation, or under two labels."""
    pooled = federation.pooled()
    trained, test = seen.trained, _test(federation)
    for what, share in (("test", test), ("validation", pooled.validation), ("hold-out", pooled.holdout)):
        if share is None or (what == "validation" and np.isin(share.index, test.index).all()):
            continue
        scored = np.flatnonzero(np.isin(seen.rows.index, share.index))
        both = scored[np.isin(seen.digests[scored], seen.digests[trained])]
        if len(both):
            twin = trained[seen.digests[trained] == seen.digests[both[0]]][0]
            yield (
                f"{len(both)} of {len(scored)} {what} examples equal a training example, {seen.rows.where(both[0])} for "
                f"instance {seen.rows.where(twin)}; scores on them tell what was memorised"
            )
    _, which = np.unique(seen.digests, return_inverse=True)
    first = np.full(which.max() + 1, -1)
    labels = seen.rows.labels
    first[which] = np.arange(len(which))
    odd = np.flatnonzero(labels != labels[first[which]])
    if len(odd) and labels.dtype.kind == "i":  # numbers that are learned may well differ
        a, b = odd[0], first[which[odd[0]]]
        yield (
            f"equal examples have different labels, {seen.rows.where(a)} ({federation.space.classes[labels[a]]!r}) and "
            f"{seen.rows.where(b)} ({federation.space.classes[labels[b]]!r}) for instance"
        )


def _values(federation: Federation, seen: _Seen) -> Iterator[str]:
    """Inputs that tell nothing, and the scaling that the data ask for."""
    if len(seen.blank):
        yield f"{many(len(seen.blank), 'image')} of one value all over: {seen.rows.where(seen.blank[0])}, for instance"
    names = federation.space.columns or tuple(str(i) for i in range(len(seen.constant)))
    constant = [names[i] for i in seen.constant.nonzero().flatten().tolist()]
    if constant:
        kind = "channel" if len(federation.space.shape) == 3 else "feature"
        yield f"the same value in every training example, which tells nothing: {kind} {listed(constant)}"
    if not federation.space.scaling["mean"] and len(seen.mean) <= _VALUES:
        wanted = (seen.mean, seen.std.where(seen.std > 0, 1))
        mean, std = (", ".join(f"{v:.4g}" for v in values.tolist()) for values in wanted)
        yield f"the training examples ask for data.mean = [{mean}] and data.std = [{std}]"
