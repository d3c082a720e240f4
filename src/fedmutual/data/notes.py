"""Remarks on usable data, one sentence each."""

from collections.abc import Mapping, Sequence
from typing import Any

from fedmutual.config import Config, SplitConfig
from fedmutual.data.division import Table
from fedmutual.data.examples import list_names
from fedmutual.errors import format_count

NOBODY = "no client has training examples of"


def note_clients_and_classes(config: Config, partition: Mapping[str, Any]) -> tuple[str, ...]:
    """Return remarks on small clients and missing classes; `partition`: the content of partition.json."""
    clients: Mapping[str, Any] = partition["clients"]
    names: Sequence[str] = partition["classes"]
    sentences = []
    counts_by_client = {i: count_training_examples(client) for i, client in clients.items()}
    small_clients = {
        i: sum(class_counts) for i, class_counts in counts_by_client.items() if sum(class_counts) < get_batch_size(config, i)
    }
    for i, count in list(small_clients.items())[: _MAX_LISTED if len(small_clients) > _MAX_LISTED + 1 else None]:
        size = get_batch_size(config, i)
        sentences.append(
            f"client {i!r} has {format_count(count, 'example')}, fewer than batch_size {size}: it trains as one smaller "
            "batch"
        )
    if len(small_clients) > _MAX_LISTED + 1:
        sentences.append(f"{len(small_clients) - _MAX_LISTED} more clients have fewer examples than their batch_size, too")
    trained = [sum(class_counts) for class_counts in zip(*counts_by_client.values(), strict=True)]
    missing = [name for name, count in zip(names, trained, strict=True) if not count]
    if missing:
        sentences.append(f"{NOBODY} {_name_classes(missing)}, so no model learns to recognise {_get_pronoun(missing)}")
    untested = [
        count
        for count, test_count, train_count in zip(names, partition["test"]["counts"], trained, strict=True)
        if train_count and not test_count
    ]
    if untested:
        sentences.append(
            f"the test set has no examples of {_name_classes(untested)}: its scores say nothing about "
            f"{_get_pronoun(untested)}"
        )
    if config.partition.kind == "file" and config.split != SplitConfig():
        sentences.append("validation, hold-out and test rows come from the partition file: [split] has no effect")
    return tuple(sentences)


def note_split(split: SplitConfig, table: Table) -> tuple[str, ...]:
    """Return remarks on the rows that the split holds out of the table."""
    sentences = []
    if split.private is not None and table.trains < len(table.labels):
        sentences.append(
            f"the data have {format_count(len(table.labels) - table.trains, 'test example')} of their own, which are "
            "unused: with split.private all shares come out of the training examples"
        )
    if table.bases is not None and split.shared is False:
        sentences.append(
            "split.shared = false: each domain has its own split of the same images, so clients train on images that others "
            "are scored on, at another angle, and scores measure memorisation, too"
        )
    return tuple(sentences)


_MAX_LISTED = 3


def count_training_examples(client: Mapping[str, Any]) -> list[int]:
    """Return a client's training examples of each class [C], with public ones; `client`: an entry of partition.json."""
    private, public = (client["counts"].get(kind) for kind in ("private", "public"))
    return [sum(pair) for pair in zip(private, public, strict=True)] if public else list(private)


def get_batch_size(config: Config, client: str) -> int:
    """Return the batch size of a client: its own, or else the federation's."""
    return config.get_client_config(client).training.batch_size or config.training.batch_size


def _name_classes(names: Sequence[str]) -> str:
    return f"{'class' if len(names) == 1 else 'classes'} {list_names(names)}"


def _get_pronoun(names: Sequence[str]) -> str:
    return "it" if len(names) == 1 else "them"
