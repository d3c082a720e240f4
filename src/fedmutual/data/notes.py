"""What is worth saying of data that can be used as they are: one sentence each."""

from collections.abc import Mapping, Sequence
from typing import Any

from fedmutual.config import Config, SplitConfig
from fedmutual.config.schema import ClientConfig
from fedmutual.data.draws import many
from fedmutual.data.examples import listed

NOBODY = "no client has training examples of"


def remarks(config: Config, partition: Mapping[str, Any]) -> tuple[str, ...]:
    """About clients and classes; `partition` as partition.json holds it."""
    clients: Mapping[str, Any] = partition["clients"]
    names: Sequence[str] = partition["classes"]
    found = []
    private = {i: sum(c["counts"]["private"]) for i, c in clients.items()}
    small = {i: n for i, n in private.items() if n < batch_size(config, i)}
    for i, n in list(small.items())[: _MOST if len(small) > _MOST + 1 else None]:
        size = batch_size(config, i)
        found.append(f"client {i!r} has {many(n, 'example')}, fewer than batch_size {size}: it trains as one smaller batch")
    if len(small) > _MOST + 1:
        found.append(f"{len(small) - _MOST} more clients have fewer examples than their batch_size, too")
    trained = [sum(c["counts"]["private"][k] for c in clients.values()) for k in range(len(names))]
    lacking = [name for name, n in zip(names, trained, strict=True) if not n]
    if lacking:
        found.append(f"{NOBODY} {_class(lacking)}, so nobody learns to recognise {_them(lacking)}")
    untested = [n for n, t, k in zip(names, partition["test"]["counts"], trained, strict=True) if k and not t]
    if untested:
        found.append(f"the test set has no examples of {_class(untested)}: its scores say nothing about {_them(untested)}")
    if config.partition.kind == "file" and config.split != SplitConfig():
        found.append("validation, hold-out and test rows come from the partition file: [split] has no effect")
    return tuple(found)


_MOST = 3


def batch_size(config: Config, client: str) -> int:
    """A client's own, or the federation's."""
    return config.clients.get(client, ClientConfig()).training.batch_size or config.training.batch_size


def _class(names: Sequence[str]) -> str:
    return f"{'class' if len(names) == 1 else 'classes'} {listed(names)}"


def _them(names: Sequence[str]) -> str:
    return "it" if len(names) == 1 else "them"
