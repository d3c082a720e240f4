"""torchvision's classification networks by name; and initial weights from ImageNet or a file in place of random ones.

A name of a network may have the prefix "torchvision:". The prefix is required where fedmutual has a network of this name:
`resnet18` is fedmutual's network in the form for CIFAR, `torchvision:resnet18` is torchvision's. A network's head keeps
random weights.
"""

import hashlib
import pickle
from collections.abc import Collection
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple
from urllib.error import HTTPError, URLError

import torch
from safetensors.torch import load_file
from torch import Tensor, hub, nn

from fedmutual.core import Message
from fedmutual.errors import ConfigError, shorten_error
from fedmutual.files import limit_waiting
from fedmutual.models.libraries import HF, HF_WEIGHTS, read_weights
from fedmutual.models.networks import NAMES, parse_image_shape

PREFIX = "torchvision:"  # has the form of "module:factory"
IMAGENET = "imagenet"
PREFERRED = "IMAGENET1K_V1"  # used in papers before 2022; torchvision's later weights come from longer training
connection_errors: list[str] = []  # after one timeout, no further network is tried
ENDINGS = (".safetensors", ".pth", ".pt")
_HOLDERS = ("state_dict", "model_state_dict", "model")  # keys of a training checkpoint that may hold the state dict
_COUNTER = "num_batches_tracked"  # a BatchNorm tensor that files of old torch versions lack
_AUXILIARY = ("aux1.", "aux2.", "AuxLogits.")  # tensors in ImageNet weights of the auxiliary outputs, disabled below
# With auxiliary outputs, these two return several tensors in training. They warn unless init_weights is set.
_PLAIN = {name: {"aux_logits": False, "init_weights": True} for name in ("googlenet", "inception_v3")}


def find_name(network: str) -> str | None:
    """Return torchvision's name of a network of the configuration, with or without prefix; None for other networks."""
    bare = network.removeprefix(PREFIX)
    is_other = ":" in bare or network in NAMES  # other modules must not be imported here
    return None if is_other or bare not in list_names() else bare


@cache
def list_names() -> tuple[str, ...]:
    """Return the names of torchvision's classification networks."""
    from torchvision import models  # takes seconds to import; fedmutual's networks do not need it

    return tuple(models.list_models(module=models))


def make_network(name: str, shape: tuple[int, ...], classes: int) -> nn.Module:
    """Return the network `name`, one of `list_names()`, with random weights: images [B, 3, H, W] -> logits [B, classes].

    Raises:
        ValueError: the examples are not images of 3 channels.
    """
    from torchvision import models

    channels, _, _ = parse_image_shape(shape)
    if channels != 3:
        raise ValueError(
            f"has a stem for images of 3 channels, but these have {channels}; choose a network of fedmutual's "
            "own, or a factory 'module:name' that replaces the stem"
        )
    net: nn.Module = models.get_model(name, weights=None, num_classes=classes, **_PLAIN.get(name, {}))
    return net


def get_least_side(name: str) -> int:
    """Return the side in pixels of the smallest image that torchvision states for the network."""
    from torchvision import models

    return int(min(max(weights.meta["min_size"]) for weights in models.get_model_weights(name)))


class Weights(NamedTuple):
    """The initial weights of a network."""

    description: str  # for the report
    state: Message | None  # name -> tensor; None: not available, so random weights are used
    place: str = ""  # the key and the file, for messages


def find_initial_weights(source: str, network: str, key: str) -> Weights:
    """Return the weights of a network of the configuration; without ImageNet weights, a result with random weights.

    Args:
        source: "imagenet", a file, or a folder with one file for each network, named after the network without "module:".
        network: the name in the configuration.
        key: the configuration key that names the source.

    Raises:
        ConfigError: a file is missing, or holds no tensors by name.
    """
    if source == IMAGENET:
        hint = f"; {PREFIX}{network} is torchvision's" if find_name(PREFIX + network) else ""
        torchvision_name = find_name(network)
        found = try_fetch(torchvision_name) if torchvision_name else f"it is none of torchvision's networks{hint}"
        if isinstance(found, str):
            return Weights(f"random weights: ImageNet's of {network} could not be loaded ({found})", None)
        return Weights(f"ImageNet's weights of {network} ({found[0]}), a new head", found[1], f"key {key!r}: {found[0]}")
    file = _find_file(Path(source), network, key)
    is_folder_of_hf = network.startswith(HF) and Path(source).is_dir() and file.name == HF_WEIGHTS
    state = read_weights(file.parent) if is_folder_of_hf else _read_state(file, key)
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
    misfits += [k for k in new_state if k not in state and not k.startswith(_AUXILIARY)]
    if misfits:
        there, here = (list(tensors[k].shape) if (k := misfits[0]) in tensors else "none" for tensors in (new_state, state))
        raise ConfigError(
            f"{weights.place} does not fit network {name!r}: {misfits[0]!r} has the shape {there} there and {here} here; "
            "use weights of this network, or remove the key"
        )
    net.load_state_dict(state | {k: new_state[k] for k in loaded_names})


def _unwrap_names(new_state: Message, state: Message) -> Message:
    """Return the tensors of a file without the prefix of a wrapper, such as "module.", if all names have it.

    No name with the prefix is the network's.
    """
    if new_state.keys() & state.keys():
        return new_state
    prefixes = (name.removesuffix(key) for key in state for name in new_state if name.endswith(f".{key}"))
    prefix = next((p for p in prefixes if all(name.startswith(p) for name in new_state)), "")
    return {name.removeprefix(prefix): tensor for name, tensor in new_state.items()}


def _find_file(source: Path, network: str, key: str) -> Path:
    if source.is_file():
        return source
    if not source.is_dir():
        fix = f"name a file of weights, a folder of such files, or {IMAGENET!r}"
        raise ConfigError(f"key {key!r}: there is no file or folder {source}; {fix}")
    names = [network.rpartition(":")[2] + ending for ending in ENDINGS]
    if network.startswith(HF):
        names = [HF_WEIGHTS]
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
            f"key {key!r}: {file} is no state dict, or contains pickled objects, which are refused, because unpickling can "
            "run code; write the file with torch.save(net.state_dict(), ...), or as safetensors"
        ) from None
    except Exception as problem:  # damaged files raise many kinds of errors
        raise ConfigError(
            f"key {key!r}: {file} cannot be read ({shorten_error(problem)}); give safetensors, or a state dict of torch"
        ) from None
    nested: list[Any] = [state.get(k) for k in _HOLDERS] if isinstance(state, dict) else []
    state_dicts = [one for one in ([state] if _is_state_dict(state) else nested) if _is_state_dict(one)]
    if len(state_dicts) != 1:
        content = "several state dicts" if state_dicts else "no state dict, name -> tensor"
        raise ConfigError(f"key {key!r}: {file} holds {content}; write net.state_dict() into it")
    return dict(state_dicts[0])


def _is_state_dict(value: object) -> bool:
    return isinstance(value, dict) and all(isinstance(k, str) and isinstance(v, Tensor) for k, v in value.items())


@cache
def try_fetch(name: str) -> str | tuple[str, Message]:
    """Return the name and the tensors of the ImageNet weights of a network of torchvision's, or why there are none.

    A process tries each network once, so that all its runs start alike.
    """
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
