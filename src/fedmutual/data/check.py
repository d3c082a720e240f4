"""Problems and remarkable properties of a user's data, one plain sentence each, before any training."""

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedmutual.calling import Inputs, Shapes, list_tensors
from fedmutual.config import ALONE, Config, has_own_data, make_client_config
from fedmutual.data.draws import Index
from fedmutual.data.examples import list_names
from fedmutual.data.federation import Federation, get_test_rows, load
from fedmutual.data.prepared import Prepared, prepare
from fedmutual.data.record import NOBODY, count_training_examples
from fedmutual.data.rows import Rows
from fedmutual.data.space import find_dtype
from fedmutual.errors import format_count

_UNEVEN = 10  # sizes that differ by this factor are reported as imbalanced
_FEW = 30  # below this number of examples, one example is more than 3 % of a score
_VALUES = 200  # more means and standard deviations do not fit into a sentence
_CLIENTS = 10  # up to this number, clients are described one by one
_SHARES = {"training": "private", "public": "public", "validation": "validation", "hold-out": "holdout", "test": "test"}
_CHUNK = 1024
_ONE_CLIENT = "there is one client only"
_SUGGESTED = "the training examples suggest"


def find_problems(config: Config, prepared: Mapping[str, Prepared] | None = None) -> list[str]:
    """Return one sentence for each problem of the configured data. Reads every row, also of data not kept in memory.

    prepared: as in `load`.

    Raises:
        UserError: the data cannot be used; one sentence says why.
    """
    data_by_client = prepare(config) if prepared is None else prepared
    if not has_own_data(config):
        federation = load(config, data_by_client)
        return _find_in_data_set(federation, _scan_rows(federation))
    scans, findings = {}, []
    is_of_tables = len(config.clients) > 1 and all(own_data.source.columns for own_data in data_by_client.values())
    left_out = (_ONE_CLIENT, NOBODY, *([_SUGGESTED] if is_of_tables else []))  # of tables, one setting is for all clients
    for i, own_data in data_by_client.items():
        federation = load(make_client_config(config, i), {"": own_data})
        scans[i] = _scan_rows(federation)
        own_findings = [s for s in _find_in_data_set(federation, scans[i]) if not s.startswith(left_out)]
        findings += [f"client {i!r}: {finding.replace(f'client {ALONE!r} ', 'it ')}" for finding in own_findings]
        # stored rows are compared, because clients may scale their rows differently
        chunks = np.array_split(scans[i].rows.index, -(-len(scans[i].rows) // _CHUNK))
        digests = [digest for rows in chunks for digest in digest_rows(own_data.examples.take(rows.tolist()))]
        scans[i] = replace(scans[i], digests=np.array(digests, dtype=np.uint64))
    for scored_client, scan in scans.items():
        for trainer, other in scans.items():
            copies = scan.find_copies(scan.scored, other) if trainer != scored_client else None
            if copies is not None:
                count, name, copy = copies
                findings.append(
                    f"{count} of the {len(scan.scored)} examples that client {scored_client!r} is scored on equal a "
                    f"training example of client {trainer!r}, for instance {name} equals {copy}"
                )
    return findings


def _find_in_data_set(federation: Federation, scan: "_Scan") -> list[str]:
    checks = (_compare_sizes(federation), _check_classes(federation), _find_duplicates(federation, scan))
    return [*federation.notes, *(s for check in checks for s in check), *_check_values(federation, scan)]


def _compare_sizes(federation: Federation) -> Iterator[str]:
    """Yield a sentence where clients differ much in size, or have very few examples."""
    sizes = {i: sum(count_training_examples(c)) for i, c in federation.partition["clients"].items()}
    small, large = min(sizes, key=sizes.__getitem__), max(sizes, key=sizes.__getitem__)
    if sizes[large] >= _UNEVEN * sizes[small]:
        yield (
            f"clients differ much in size: {large!r} has {format_count(sizes[large], 'training example')} and {small!r} has "
            f"{sizes[small]}; FML weights clients equally, FedAvg by their examples"
        )
    for share_name, kind in _SHARES.items():
        shares: dict[str, Rows | None] = {i: getattr(s, kind) for i, s in federation.clients.items()}
        few = {i: len(rows) for i, rows in shares.items() if rows is not None and len(rows) < _FEW}
        if few:
            least = min(few.values())
            is_scored = kind not in ("private", "public")
            score = f"; one example of {least} is {100 / least:.0f} % of a score" if is_scored else ""
            noun, verb = ("client", "has") if len(few) == 1 else ("clients", "have")
            yield f"{noun} {list_names(list(few))} {verb} fewer than {_FEW} {share_name} examples{score}"


def _check_classes(federation: Federation) -> Iterator[str]:
    """Yield sentences on classes that clients lack, and on classes of very different size."""
    if federation.space.targets != "classes":  # a row has no single class
        return
    names = federation.space.classes
    counts_by_client = {i: count_training_examples(c) for i, c in federation.partition["clients"].items()}
    incomplete = {i: counts for i, counts in counts_by_client.items() if 0 in counts}
    if len(incomplete) > _CLIENTS:
        yield f"{len(incomplete)} of {len(counts_by_client)} clients lack training examples of some class"
    for i, counts in incomplete.items() if len(incomplete) <= _CLIENTS else ():
        present = [name for name, count in zip(names, counts, strict=True) if count]
        missing = [name for name in names if name not in present]
        if len(present) < len(missing):
            yield f"client {i!r} has training examples of {len(present)} of {len(names)} classes: only {list_names(present)}"
        else:
            yield f"client {i!r} has no training examples of {len(missing)} of {len(names)} classes: {list_names(missing)}"
    totals = {name: sum(counts) for name, counts in zip(names, zip(*counts_by_client.values(), strict=True), strict=False)}
    trained = {name: total for name, total in totals.items() if total}
    large, small = max(trained, key=trained.__getitem__), min(trained, key=trained.__getitem__)
    if trained[large] >= _UNEVEN * trained[small]:
        yield (
            f"classes are imbalanced: {large!r} has {format_count(trained[large], 'training example')} and {small!r} has "
            f"{trained[small]}; read balanced accuracy beside accuracy"
        )


@dataclass(frozen=True)
class _Scan:
    """The results of one pass over all N rows."""

    rows: Rows
    trained: Index  # positions of the training rows
    scored: Index  # of those that are scored on
    digests: np.ndarray[Any, np.dtype[np.uint64]]  # [N], of each row's bytes
    blank: list[int]  # positions of images that are one value all over
    mean: Tensor  # of the training rows, as scaled: a value a channel or feature
    std: Tensor
    constant: Tensor  # bool, of the training rows: a value a channel or feature

    def find_copies(self, scored: Index, other: "_Scan") -> tuple[int, str, str] | None:
        """Return how many of the rows at these positions equal a training row of the other scan, and the names of a pair."""
        trained = other.digests[other.trained]
        leaked = scored[np.isin(self.digests[scored], trained)]
        if not len(leaked):
            return None
        copy = other.trained[trained == self.digests[leaked[0]]][0]
        return len(leaked), self.rows.name_row(leaked[0]), other.rows.name_row(copy)


def _scan_rows(federation: Federation) -> _Scan:
    """Read every row that a client or the test set has, once."""
    pooled, test = federation.pool_clients(), get_test_rows(federation)
    shares = [s.index for s in (pooled.private, pooled.validation, pooled.holdout, test) if s is not None]
    rows = test.with_index(np.unique(np.concatenate(shares)))
    trained = np.isin(rows.index, pooled.private.index)
    chunks = torch.split(torch.arange(len(rows)), _CHUNK)
    digests, blank, sums = list[int](), list[int](), list[Tensor]()
    for positions, (x, _) in zip(chunks, rows.rows(chunks), strict=True):
        digests += digest_rows(x)
        some = torch.from_numpy(trained)[positions]
        parts = []
        for one in list_tensors(x):
            flat = one.reshape(len(one), -1)
            blank += positions[(flat == flat[:, :1]).all(1)].tolist() if one.dim() > 3 else []
            values = (
                one.reshape(len(one), *(one.shape[1:] or (1,)))[some].double().transpose(0, 1).flatten(1)
            )  # [channels, values]
            if values.numel() and (isinstance(x, Tensor) or one.is_floating_point()):
                n = torch.full_like(values[:, 0], values.shape[1])
                parts.append(torch.stack([n, values.sum(1), values.square().sum(1), values.amin(1), -values.amax(1)]))
        sums += [torch.cat(parts, 1)] if parts else []
    sums = sums or [torch.ones(5, 0)]  # of integers alone
    n, total, squares = torch.stack(sums)[:, :3].sum(0)
    lowest, highest = torch.stack(sums)[:, 3:].amin(0)
    mean = total / n
    return _Scan(
        rows,
        trained=np.flatnonzero(trained),
        scored=np.flatnonzero(np.isin(rows.index, np.concatenate([pooled.validation.index, test.index]))),
        digests=np.array(digests, dtype=np.uint64),
        blank=blank,
        mean=mean,
        std=(squares / n - mean.square()).clamp(min=0).sqrt(),
        constant=lowest == -highest,
    )


def digest_rows(x: Inputs) -> list[int]:
    """Return a 64-bit digest of each row's bytes, of all its inputs."""
    parts = [one.reshape(len(one), -1).numpy() for one in list_tensors(x)]
    rows = zip(*parts, strict=True) if len(parts) > 1 else ((row,) for row in parts[0])
    return [int.from_bytes(hashlib.blake2b(b"".join(map(bytes, row)), digest_size=8).digest(), "big") for row in rows]


def _find_duplicates(federation: Federation, scan: _Scan) -> Iterator[str]:
    """Yield a sentence for examples that are both in training and in evaluation, or have two labels."""
    pooled, test = federation.pool_clients(), get_test_rows(federation)
    for share_name, share in (("test", test), ("validation", pooled.validation), ("hold-out", pooled.holdout)):
        if share is None or (share_name == "validation" and np.isin(share.index, test.index).all()):
            continue
        scored = np.flatnonzero(np.isin(scan.rows.index, share.index))
        copies = scan.find_copies(scored, scan)
        if copies is not None:
            count, name, copy = copies
            yield (
                f"{count} of {len(scored)} {share_name} examples equal a training example, for instance {name} equals "
                f"{copy}; scores on these examples measure memorisation"
            )
    if federation.space.targets != "classes":  # other targets of equal inputs may differ
        return
    _, first, distinct = np.unique(scan.digests, return_index=True, return_inverse=True)
    labels, classes = scan.rows.labels, federation.space.classes
    others = labels[first[distinct]]
    conflicting = np.flatnonzero((labels != others) & (labels >= 0) & (others >= 0))
    if len(conflicting):
        pair = (conflicting[0], first[distinct[conflicting[0]]])
        one, other = (f"{scan.rows.name_row(row)} ({classes[labels[row]]!r})" for row in pair)
        yield f"equal examples have different labels, for instance {one} and {other}"


def _check_values(federation: Federation, scan: _Scan) -> Iterator[str]:
    """Yield sentences on inputs without information, and on the scaling that the data suggest."""
    space = federation.space
    if scan.blank:
        yield (
            f"{format_count(len(scan.blank), 'image')} with a single value in all pixels: "
            f"{scan.rows.name_row(scan.blank[0])}, for instance"
        )
    is_one = not isinstance(space.shape, Shapes)
    several = space.scaling.inputs or {}
    shapes: Mapping[str, tuple[int, ...]] = (
        {k: v for k, v in space.shape.items() if find_dtype(several[k]).is_floating_point}
        if isinstance(space.shape, Shapes)
        else {"": space.shape}
    )
    names = [f"{name} {i}".strip() for name, one in shapes.items() for i in range(one[0] if one else 1)]
    names = list(space.columns or names) if is_one else names
    constant = [names[i] for i in scan.constant.nonzero().flatten().tolist()]
    if constant:
        kind = "channel" if is_one and len(space.shape) > 1 else "feature"
        yield f"constant in all training examples, so without information: {kind} {list_names(constant)}"
    is_unscaled = not space.scaling.mean and space.scaling.columns is None and not space.has_integers and is_one
    if is_unscaled and len(scan.mean) <= _VALUES:  # ids have no scale
        suggested = (scan.mean, scan.std.where(scan.std > 0, 1))
        mean, std = (", ".join(f"{v:.4g}" for v in values.tolist()) for values in suggested)
        yield f"{_SUGGESTED} data.mean = [{mean}] and data.std = [{std}]"
