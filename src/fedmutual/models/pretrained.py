"""Initial weights in place of random ones, from ImageNet or from a file. The head keeps random weights."""

import hashlib
import pickle
from collections.abc import Collection
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple, NoReturn
from urllib.error import HTTPError, URLError

import torch
from safetensors.torch import load_file
from torch import Tensor, hub, nn

from fedmutual.core import Message
from fedmutual.errors import ConfigError
from fedmutual.models import published
from fedmutual.network_timeout import limit_waiting, shorten_error

IMAGENET = "imagenet"
PREFERRED = "IMAGENET1K_V1"  # used in papers before 2022; torchvision's later weights come from longer training
connection_errors: list[str] = []  # after one timeout, no further network is tried
ENDINGS = (".safetensors", ".pth", ".pt")
_HOLDERS = ("state_dict", "model_state_dict", "model")  # keys of a training checkpoint that may hold the state dict
_WRAPPERS = ("module.", "_orig_mod.")  # before each name in files of torch.nn.DataParallel and torch.compile
_COUNTER = "num_batches_tracked"  # a BatchNorm tensor that files of old torch versions lack


class Weights(NamedTuple):
    """The initial weights of a network."""

    description: str  # for the report
    state: Message | None  # name -> tensor; None: not available, so random weights are used
    place: str = ""  # the key and the file, for messages


def find_weights(source: str, network: str, torchvision_name: str | None, key: str) -> Weights:
    """Return the weights of a network of the configuration; without ImageNet weights, a result with random weights.

    Args:
        source: "imagenet", a file, or a folder with one file for each network, named after the network without "module:".
        network: the name in the configuration.
        torchvision_name: torchvision's name of the network, or None.
        key: the configuration key that names the source.

    Raises:
        ConfigError: a file is missing, or holds no tensors by name.
    """
    if source == IMAGENET:
        try:
            name, state = fetch_weights(torchvision_name or _raise_not_torchvision(network))
        except WeightsUnavailable as problem:
            return Weights(f"random weights: ImageNet's of {network} could not be loaded ({problem})", None)
        return Weights(f"ImageNet's weights of {network} ({name}), a new head", state, f"key {key!r}: {name}")
    file = _find_file(Path(source), network, key)
    state = _read_state(file, key)
    digest = hashlib.sha256(file.read_bytes()).hexdigest()[:12]
    return Weights(f"weights of {file} (sha256 {digest}), a new head", state, f"key {key!r}: {file}")


def load_weights(net: nn.Module, weights: Weights, head: Collection[str], name: str) -> None:
    """Load weights into the network `name`, except the tensors of its head.

    Raises:
        ConfigError: a tensor is missing, has another shape, or is not part of the network.
    """
    state = net.state_dict()
    new_state = _unwrap_names(weights.state or {}, state)
    loaded_names = [k for k in state if k not in head and (k in new_state or not k.endswith(_COUNTER))]
    misfits = [k for k in loaded_names if k not in new_state or new_state[k].shape != state[k].shape]
    misfits += [k for k in new_state if k not in state and not k.startswith(published.AUXILIARY)]
    if misfits:
        file_shape, network_shape = (
            list(tensors[misfits[0]].shape) if misfits[0] in tensors else "none" for tensors in (new_state, state)
        )
        raise ConfigError(
            f"{weights.place} does not fit network {name!r}: {misfits[0]!r} has the shape {file_shape} there and "
            f"{network_shape} here; use "
            "weights of this network, or remove the key"
        )
    net.load_state_dict(state | {k: new_state[k] for k in loaded_names})


def _unwrap_names(new_state: Message, state: Message) -> Message:
    """Return the tensors of a file without a wrapper's prefix, if all names have it and no name is the network's."""
    for wrapper in _WRAPPERS if new_state and not new_state.keys() & state.keys() else ():
        if all(k.startswith(wrapper) for k in new_state):
            return _unwrap_names({k.removeprefix(wrapper): tensor for k, tensor in new_state.items()}, state)
    return new_state


def _raise_not_torchvision(network: str) -> NoReturn:
    prefixed = published.PREFIX + network
    hint = f"; {prefixed} is torchvision's" if published.find_name(prefixed) else ""
    raise WeightsUnavailable(f"it is none of torchvision's networks{hint}")


def _find_file(source: Path, network: str, key: str) -> Path:
    if source.is_file():
        return source
    if not source.is_dir():
        raise ConfigError(
            f"key {key!r}: there is no file or folder {source}; name a file of weights, a folder of such files, or "
            f"{IMAGENET!r}"
        )
    names = [network.rpartition(":")[2] + ending for ending in ENDINGS]
    files = [source / name for name in names if (source / name).is_file()]
    if len(files) == 1:
        return files[0]
    if files:
        raise ConfigError(f"key {key!r}: {files[0]} and {files[1]} are both for network {network!r}; remove one")
    raise ConfigError(f"key {key!r}: {source} has no weights of network {network!r}; put {' or '.join(names)} there")


def _read_state(file: Path, key: str) -> Message:
    try:
        if file.suffix == ".safetensors":
            return load_file(file)
        state = torch.load(file, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError:
        raise ConfigError(
            f"key {key!r}: {file} is no state dict, or contains pickled objects, which are refused, because unpickling "
            "can run code; "
            "write the file with torch.save(net.state_dict(), ...), or as safetensors"
        ) from None
    except Exception as problem:  # damaged files raise many kinds of errors
        raise ConfigError(
            f"key {key!r}: {file} cannot be read ({shorten_error(problem)}); give safetensors, or a state dict of torch"
        ) from None
    nested = [state[k] for k in _HOLDERS if k in state and _is_state_dict(state[k])] if isinstance(state, dict) else []
    state_dicts = [state] if _is_state_dict(state) else nested
    if len(state_dicts) != 1:
        content = "several state dicts" if state_dicts else "no state dict, name -> tensor"
        raise ConfigError(f"key {key!r}: {file} holds {content}; write net.state_dict() into it")
    return dict(state_dicts[0])


def _is_state_dict(value: object) -> bool:
    return isinstance(value, dict) and all(isinstance(k, str) and isinstance(v, Tensor) for k, v in value.items())


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
