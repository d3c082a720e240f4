"""What is worth saying of data that can be used as they are: one sentence each."""

from collections.abc import Mapping, Sequence
from typing import Any

from fedmutual.config import Config, SplitConfig
from fedmutual.data.division import Table
from fedmutual.data.draws import many
from fedmutual.data.examples import listed

NOBODY = "no client has training examples of"


def remarks(config: Config, partition: Mapping[str, Any]) -> tuple[str, ...]:
    """About clients and classes; `partition` as partition.json holds it."""
    clients: Mapping[str, Any] = partition["clients"]
    names: Sequence[str] = partition["classes"]
    found = []
    held = {i: training(client) for i, client in clients.items()}
    small = {i: sum(own) for i, own in held.items() if sum(own) < batch_size(config, i)}
    for i, n in list(small.items())[: _MOST if len(small) > _MOST + 1 else None]:
        size = batch_size(config, i)
        found.append(f"client {i!r} has {many(n, 'example')}, fewer than batch_size {size}: it trains as one smaller batch")
    if len(small) > _MOST + 1:
        found.append(f"{len(small) - _MOST} more clients have fewer examples than their batch_size, too")
    trained = [sum(own) for own in zip(*held.values(), strict=True)]
    lacking = [name for name, n in zip(names, trained, strict=True) if not n]
    if lacking:
        found.append(f"{NOBODY} {_class(lacking)}, so nobody learns to recognise {_them(lacking)}")
    untested = [n for n, t, k in zip(names, partition["test"]["counts"], trained, strict=True) if k and not t]
    if untested:
        found.append(f"the test set has no examples of {_class(untested)}: its scores say nothing about {_them(untested)}")
    if config.partition.kind == "file" and config.split != SplitConfig():
        found.append("validation, hold-out and test rows come from the partition file: [split] has no effect")
    return tuple(found)


def of_split(split: SplitConfig, table: Table) -> tuple[str, ...]:
    """About what is held out of these rows."""
    found = []
    if split.private is not None and table.trains < len(table.labels):
        found.append(
            f"the data have {many(len(table.labels) - table.trains, 'test example')} of their own, which nobody uses: with "
            "split.private all shares come out of the training examples"
        )
    if table.bases is not None and split.shared is False:
        found.append(
            "split.shared = false: each domain has its own split of the same images, so clients train on images that others "
            "are scored on, turned otherwise, and scores tell what was memorised, too"
        )
    return tuple(found)


_MOST = 3


def training(client: Mapping[str, Any]) -> list[int]:
    """A client's training examples of each class, public ones too; `client` as partition.json holds it."""
    private, public = (client["counts"].get(kind) for kind in ("private", "public"))
    return [sum(both) for both in zip(private, public, strict=True)] if public else list(private)


def batch_size(config: Config, client: str) -> int:
    """A client's own, or the federation's."""
    return config.own(client).training.batch_size or config.training.batch_size


def _class(names: Sequence[str]) -> str:
    return f"{'class' if len(names) == 1 else 'classes'} {listed(names)}"


def _them(names: Sequence[str]) -> str:
    return "it" if len(names) == 1 else "them"
