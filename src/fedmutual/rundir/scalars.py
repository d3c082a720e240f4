"""The numbers of an evaluation as named scalars, for TensorBoard and other trackers."""

from collections.abc import Iterator

from fedmutual.events import Evaluated


def list_scalars(event: Evaluated) -> Iterator[tuple[str, float]]:
    """Yield a name and a value for each score that clients disclose, and for each mean training loss.

    Names are `<metric>/<model>/<data>`, with `/<client>` for the rows of one client, and `train/<loss>/<client>`.
    """
    for score in event.scores:
        tag = "/".join((score.model, score.data, *([score.client] if score.client is not None else [])))
        for name, value in score.values.items():
            if isinstance(value, float):
                yield f"{name}/{tag}", value
    for client, terms in event.train.items():
        for name, value in terms.items():
            yield f"train/{name}/{client}", value
