"""ImageNet's weights of torchvision's networks, from torch hub's cache, or downloaded into it by torchvision."""

from functools import cache
from pathlib import Path
from typing import Any
from urllib.error import HTTPError, URLError

from torch import hub

from fedmutual.core import Message
from fedmutual.downloads import first_line, patient

FIRST = "IMAGENET1K_V1"  # what papers before 2022 began with; torchvision's later ones are of longer training

_unreachable: list[str] = []  # why: who waited once for a connection need not wait again for the next network


class Unavailable(RuntimeError):
    """ImageNet's weights could not be had; the message says why."""


def fetch(name: str) -> tuple[str, Message]:
    """The weights' name and tensors, of one of torchvision's networks. Asked once a process: all its runs begin alike.

    Raises:
        Unavailable: they are not in the cache, and could not be downloaded.
    """
    found = _asked(name)
    if isinstance(found, str):
        raise Unavailable(found)
    return found


@cache
def _asked(name: str) -> str | tuple[str, Message]:
    weights = _weights(name)
    cached = Path(hub.get_dir(), "checkpoints", weights.url.rpartition("/")[2])
    if _unreachable and not cached.exists():
        return f"{weights.url} cannot be reached: {_unreachable[0]}"
    try:
        with patient():
            return weights.name, weights.get_state_dict(progress=False, check_hash=True, weights_only=True)
    except Exception as problem:  # no network, no space, no rights, a damaged file
        if cached.exists():
            return f"{cached} cannot be read: {first_line(problem)}"
        if isinstance(problem, URLError) and not isinstance(problem, HTTPError):
            _unreachable.append(str(problem.reason))
            return f"{weights.url} cannot be reached: {problem.reason}"
        return f"{weights.url}: {first_line(problem)}"


def _weights(name: str) -> Any:
    from torchvision import models

    every = models.get_model_weights(name)
    return every.__members__.get(FIRST, every.DEFAULT)
