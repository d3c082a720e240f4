"""Problems and remarkable properties of a user's data, one plain sentence each, before any training."""

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedmutual.config import ALONE, Config, has_own_data, make_client_config
from fedmutual.data.draws import Index
from fedmutual.data.examples import join_examples, list_names
from fedmutual.data.federation import Federation, get_test_rows, load
from fedmutual.data.notes import NOBODY, count_training_examples
from fedmutual.data.prepared import Prepared, prepare
from fedmutual.data.rows import Rows
from fedmutual.errors import format_count

_UNEVEN = 10  # sizes that differ by this factor are reported as imbalanced
_FEW = 30  # below this number of examples, one example is more than 3 % of a score
_VALUES = 200  # more means and standard deviations do not fit into a sentence
_CLIENTS = 10  # up to this number, clients are described one by one
_SHARES = {"training": "private", "public": "public", "validation": "validation", "hold-out": "holdout", "test": "test"}
_CHUNK = 1024


def find_problems(config: Config, prepared: Mapping[str, Prepared] | None = None) -> list[str]:
    """Return one sentence for each problem of the configured data. Reads every row, also of data not kept in memory.

    prepared: as in `load`.

    Raises:
        UserError: the data cannot be used; one sentence says why.
    """
    data_by_client = prepare(config) if prepared is None else prepared
    if not has_own_data(config):
        federation = load(config, data_by_client)
        return _find_in_data_set(config, federation, _scan_rows(federation))
    scans, findings = {}, []
    is_of_tables = len(config.clients) > 1 and all(own_data.source.columns for own_data in data_by_client.values())
    left_out = (_ONE_CLIENT, NOBODY, *([_SUGGESTED] if is_of_tables else []))  # of tables, one setting is for all clients
    for i, own_data in data_by_client.items():
        federation = load(make_client_config(config, i), {"": own_data})
        scans[i] = _scan_rows(federation)
        client_findings = [
            s for s in _find_in_data_set(make_client_config(config, i), federation, scans[i]) if not s.startswith(left_out)
        ]
        findings += [f"client {i!r}: {finding.replace(f'client {ALONE!r} ', 'it ')}" for finding in client_findings]
        # stored rows are compared, because clients may scale their rows differently
        scans[i] = replace(scans[i], digests=_digest_stored_rows(own_data, scans[i].rows.index))
    return [*findings, *_find_leaks_between_clients(scans)]


_ONE_CLIENT = "there is one client only"
_SUGGESTED = "the training examples suggest"


def _find_in_data_set(config: Config, federation: Federation, scan: "_Scan") -> list[str]:
    """Return the findings of one data set."""
    findings = [
        *federation.notes,
        *_compare_sizes(federation),
        *_check_classes(federation),
        *_find_duplicates(federation, scan),
    ]
    return [*findings, *_check_values(federation, scan)]


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
        small_shares = {i: len(rows) for i, rows in shares.items() if rows is not None and len(rows) < _FEW}
        if small_shares:
            smallest = min(small_shares.values())
            score = (
                f"; one example of {smallest} is {100 / smallest:.0f} % of a score"
                if kind not in ("private", "public")
                else ""
            )
            yield (
                f"{'client' if len(small_shares) == 1 else 'clients'} {list_names(list(small_shares))} "
                f"{'has' if len(small_shares) == 1 else 'have'} fewer than {_FEW} {share_name} examples{score}"
            )


def _check_classes(federation: Federation) -> Iterator[str]:
    """Yield sentences on classes that clients lack, and on classes of very different size."""
    names = federation.space.classes
    clients: dict[str, Any] = federation.partition["clients"]
    incomplete = {i: count_training_examples(c) for i, c in clients.items() if 0 in count_training_examples(c)}
    if len(incomplete) > _CLIENTS:
        yield f"{len(incomplete)} of {len(clients)} clients lack training examples of some class"
    else:
        for i, counts in incomplete.items():
            present, missing = (
                [n for n, k in zip(names, counts, strict=True) if bool(k) == is_present] for is_present in (True, False)
            )
            if len(present) < len(missing):
                present_names = list_names(present)
                yield f"client {i!r} has training examples of {len(present)} of {len(names)} classes: only {present_names}"
            else:
                missing_names = list_names(missing)
                yield f"client {i!r} has no training examples of {len(missing)} of {len(names)} classes: {missing_names}"
    class_counts = _count_training(federation)
    largest = int(class_counts.argmax())
    smallest = int(np.where(class_counts > 0, class_counts, class_counts.max() + 1).argmin())
    if class_counts[largest] >= _UNEVEN * class_counts[smallest]:
        yield (
            f"classes are imbalanced: {names[largest]!r} has {format_count(class_counts[largest], 'training example')} and "
            f"{names[smallest]!r} has {class_counts[smallest]}; read balanced accuracy beside accuracy"
        )


def _count_training(federation: Federation) -> Index:
    """Return the number of training examples of each class [C], over all clients."""
    clients: dict[str, Any] = federation.partition["clients"]
    class_counts: Index = np.sum([count_training_examples(c) for c in clients.values()], axis=0)
    return class_counts


@dataclass(frozen=True)
class _Scan:
    """The results of one pass over all N rows."""

    rows: Rows
    trained: Index  # positions of the training rows
    scored: Index  # of those that are scored on
    digests: np.ndarray[tuple[int], np.dtype[np.uint64]]  # [N], of each row's bytes
    blank: Index  # positions of images that are one value all over
    mean: Tensor  # of the training rows, as scaled: a value a channel or feature
    std: Tensor
    constant: Tensor  # bool, of the training rows: a value a channel or feature


def _scan_rows(federation: Federation) -> _Scan:
    """Read every row that a client or the test set has, once."""
    pooled = federation.pool_clients()
    test = get_test_rows(federation)
    shares = [s.index for s in (pooled.private, pooled.validation, pooled.holdout, test) if s is not None]
    rows = test.with_index(np.unique(np.concatenate(shares)))
    trained = torch.from_numpy(np.isin(rows.index, pooled.private.index))
    chunks = torch.split(torch.arange(len(rows)), _CHUNK)
    digests, blank_rows, moments, extremes = [], [], [], []
    for positions, (x, _) in zip(chunks, rows.rows(chunks), strict=True):
        flat = x.flatten(1)
        digests += digest_rows(x)
        blank_rows.append(positions[(flat == flat[:, :1]).all(1)] if x.dim() > 3 else positions[:0])
        training_values = x[trained[positions]].double().transpose(0, 1).flatten(1)  # [channels or features, values]
        if training_values.numel():
            moments.append(
                torch.stack(
                    [
                        torch.full_like(training_values[:, 0], training_values.shape[1]),
                        training_values.sum(1),
                        training_values.square().sum(1),
                    ]
                )
            )
            extremes.append(torch.stack([training_values.amin(1), -training_values.amax(1)]))
    n, total, squares = torch.stack(moments).sum(0)
    lowest, highest = torch.stack(extremes).amin(0)
    mean = total / n
    std = (squares / n - mean.square()).clamp(min=0).sqrt()
    row_digests = np.array(digests, dtype=np.uint64)
    scored = np.flatnonzero(np.isin(rows.index, np.concatenate([pooled.validation.index, test.index])))
    return _Scan(
        rows,
        np.flatnonzero(trained.numpy()),
        scored,
        row_digests,
        torch.cat(blank_rows).numpy(),
        mean,
        std,
        lowest == -highest,
    )


def _digest_stored_rows(prepared: Prepared, index: Index) -> np.ndarray[tuple[int], np.dtype[np.uint64]]:
    """Return the digests [n] of rows as they are stored, before scaling."""
    examples, digests = join_examples(prepared.source), list[int]()
    for rows in np.array_split(index, -(-len(index) // _CHUNK)):
        digests += digest_rows(examples.take(rows.tolist()))
    return np.array(digests, dtype=np.uint64)


def digest_rows(x: Tensor) -> list[int]:
    """Return a 64-bit digest of each row's bytes."""
    return [int.from_bytes(hashlib.blake2b(row, digest_size=8).digest(), "big") for row in x.flatten(1).numpy()]


def _find_leaks_between_clients(scans: Mapping[str, _Scan]) -> Iterator[str]:
    """Yield a sentence where one client trains on examples that another client is scored on."""
    for scored_client, scored_scan in scans.items():
        for trainer, trained_scan in scans.items():
            trained = trained_scan.digests[trained_scan.trained]
            leaked = scored_scan.scored[np.isin(scored_scan.digests[scored_scan.scored], trained)]
            if trainer != scored_client and len(leaked):
                copy = trained_scan.trained[trained == scored_scan.digests[leaked[0]]][0]
                yield (
                    f"{len(leaked)} of the {len(scored_scan.scored)} examples that client {scored_client!r} is scored on "
                    f"equal a training example of client {trainer!r}, {scored_scan.rows.name_row(leaked[0])} for instance "
                    f"{trained_scan.rows.name_row(copy)}"
                )


def _find_duplicates(federation: Federation, scan: _Scan) -> Iterator[str]:
    """Yield a sentence for examples that are both in training and in evaluation, or have two labels."""
    pooled = federation.pool_clients()
    trained, test = scan.trained, get_test_rows(federation)
    for share_name, share in (("test", test), ("validation", pooled.validation), ("hold-out", pooled.holdout)):
        if share is None or (share_name == "validation" and np.isin(share.index, test.index).all()):
            continue
        scored = np.flatnonzero(np.isin(scan.rows.index, share.index))
        leaked = scored[np.isin(scan.digests[scored], scan.digests[trained])]
        if len(leaked):
            copy = trained[scan.digests[trained] == scan.digests[leaked[0]]][0]
            yield (
                f"{len(leaked)} of {len(scored)} {share_name} examples equal a training example, "
                f"{scan.rows.name_row(leaked[0])} for "
                f"instance {scan.rows.name_row(copy)}; scores on these examples measure memorisation"
            )
    _, distinct = np.unique(scan.digests, return_inverse=True)
    first = np.full(distinct.max() + 1, -1)
    labels = scan.rows.labels
    first[distinct] = np.arange(len(distinct))
    if federation.space.targets != "classes":  # other targets of equal inputs may differ
        return
    conflicting = np.flatnonzero(labels != labels[first[distinct]])
    if len(conflicting):
        row, other_row = conflicting[0], first[distinct[conflicting[0]]]
        yield (
            f"equal examples have different labels, {scan.rows.name_row(row)} ({federation.space.classes[labels[row]]!r}) "
            f"and {scan.rows.name_row(other_row)} ({federation.space.classes[labels[other_row]]!r}) for instance"
        )


def _check_values(federation: Federation, scan: _Scan) -> Iterator[str]:
    """Yield sentences on inputs without information, and on the scaling that the data suggest."""
    if len(scan.blank):
        yield (
            f"{format_count(len(scan.blank), 'image')} with a single value in all pixels: "
            f"{scan.rows.name_row(scan.blank[0])}, for instance"
        )
    names = federation.space.columns or tuple(str(i) for i in range(len(scan.constant)))
    constant = [names[i] for i in scan.constant.nonzero().flatten().tolist()]
    if constant:
        kind = "channel" if len(federation.space.shape) > 1 else "feature"
        yield f"constant in all training examples, so without information: {kind} {list_names(constant)}"
    if federation.space.dtype == torch.int64:
        return  # ids have no scale
    is_unscaled = not federation.space.scaling["mean"] and "columns" not in federation.space.scaling
    if is_unscaled and len(scan.mean) <= _VALUES:
        suggested = (scan.mean, scan.std.where(scan.std > 0, 1))
        mean, std = (", ".join(f"{v:.4g}" for v in values.tolist()) for values in suggested)
        yield f"{_SUGGESTED} data.mean = [{mean}] and data.std = [{std}]"
