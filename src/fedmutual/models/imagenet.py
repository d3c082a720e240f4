"""ImageNet weights of torchvision's networks, from torch hub's cache or downloaded into the cache by torchvision."""

from functools import cache
from pathlib import Path
from typing import Any
from urllib.error import HTTPError, URLError

from torch import hub

from fedmutual.core import Message
from fedmutual.network_timeout import limit_waiting, shorten_error

PREFERRED = "IMAGENET1K_V1"  # used in papers before 2022; torchvision's later weights come from longer training

connection_errors: list[str] = []  # after one timeout, no further network is tried


class WeightsUnavailable(RuntimeError):
    """The ImageNet weights are not available; the message says why."""


def fetch_weights(name: str) -> tuple[str, Message]:
    """Return the name and the tensors of the ImageNet weights of one of torchvision's networks.

    A process fetches weights once, so that all its runs start alike.

    Raises:
        WeightsUnavailable: the weights are not in the cache and cannot be downloaded.
    """
    result = try_fetch(name)
    if isinstance(result, str):
        raise WeightsUnavailable(result)
    return result


@cache
def try_fetch(name: str) -> str | tuple[str, Message]:
    """Return (identifier, tensors), or one sentence that says why there are none. Each name is tried once in a process."""
    weights = choose_weights(name)
    cached = Path(hub.get_dir(), "checkpoints", weights.url.rpartition("/")[2])
    if connection_errors and not cached.exists():
        return f"{weights.url} cannot be reached: {connection_errors[0]}"
    try:
        with limit_waiting():
            return weights.name, weights.get_state_dict(progress=False, check_hash=True, weights_only=True)
    except Exception as problem:  # no network, no space, no rights, a damaged file
        if cached.exists():
            return f"{cached} cannot be read: {shorten_error(problem)}"
        if isinstance(problem, URLError) and not isinstance(problem, HTTPError):
            connection_errors.append(str(problem.reason))
            return f"{weights.url} cannot be reached: {problem.reason}"
        return f"{weights.url}: {shorten_error(problem)}"


def choose_weights(name: str) -> Any:
    """Return the preferred ImageNet weights of a network: IMAGENET1K_V1 if they exist, else torchvision's default."""
    from torchvision import models

    available = models.get_model_weights(name)
    return available.__members__.get(PREFERRED, available.DEFAULT)
