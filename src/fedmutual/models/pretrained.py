"""What networks begin with in the place of random weights: ImageNet's, or those of a file. The head stays random."""

import hashlib
import pickle
from collections.abc import Collection
from pathlib import Path
from typing import NamedTuple, NoReturn

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from fedmutual.core import Message
from fedmutual.downloads import first_line
from fedmutual.errors import ConfigError
from fedmutual.models import published
from fedmutual.models.imagenet import Unavailable, fetch

IMAGENET = "imagenet"
ENDINGS = (".safetensors", ".pth", ".pt")
_COUNTER = "num_batches_tracked"  # of BatchNorm; files of old versions of torch lack it


class Weights(NamedTuple):
    """What a network begins with."""

    said: str  # in words, for the report
    state: Message | None  # name -> tensor; None where the wanted ones could not be had, and random ones are taken
    place: str = ""  # the key and the file, for messages


def find(source: str, network: str, theirs: str | None, key: str) -> Weights:
    """The weights of a network of the configuration.

    source: "imagenet", a file, or a folder with a file for each network, named as it is without what stands before ":".
    theirs: torchvision's name of the network, if it is one of torchvision's.
    key: the key of the configuration that names the source.

    Raises:
        ConfigError: a file is missing, or holds no tensors by name. ImageNet's that cannot be had are no error.
    """
    if source == IMAGENET:
        try:
            name, state = fetch(theirs or _none(network))
        except Unavailable as problem:
            return Weights(f"random weights: ImageNet's of {network} could not be had ({problem})", None)
        return Weights(f"ImageNet's weights of {network} ({name}), a new head", state, f"key {key!r}: {name}")
    file = _file(Path(source), network, key)
    state = _read(file, key)
    digest = hashlib.sha256(file.read_bytes()).hexdigest()[:12]
    return Weights(f"weights of {file} (sha256 {digest}), a new head", state, f"key {key!r}: {file}")


def fill(net: nn.Module, weights: Weights, head: Collection[str], name: str) -> None:
    """Load weights into the network `name`, all but the tensors of its head.

    Raises:
        ConfigError: a tensor is missing, has another shape, or is none of the network's.
    """
    given, own = weights.state or {}, net.state_dict()
    wanted = [k for k in own if k not in head and (k in given or not k.endswith(_COUNTER))]
    odd = [k for k in wanted if k not in given or given[k].shape != own[k].shape]
    odd += [k for k in given if k not in own and not k.startswith(published.AUXILIARY)]
    if odd:
        there, here = (list(found[odd[0]].shape) if odd[0] in found else "none" for found in (given, own))
        raise ConfigError(
            f"{weights.place} does not fit network {name!r}: {odd[0]!r} has the shape {there} there and {here} here; name "
            "weights of this very network, or take the key out"
        )
    net.load_state_dict(own | {k: given[k] for k in wanted})


def _none(network: str) -> NoReturn:
    other = published.PREFIX + network
    mend = f"; {other} is torchvision's" if published.name(other) else ""
    raise Unavailable(f"it is none of torchvision's networks{mend}")


def _file(source: Path, network: str, key: str) -> Path:
    if source.is_file():
        return source
    if not source.is_dir():
        raise ConfigError(
            f"key {key!r}: there is no file or folder {source}; name a file of weights, a folder of such files, or "
            f"{IMAGENET!r}"
        )
    names = [network.rpartition(":")[2] + ending for ending in ENDINGS]
    found = [source / name for name in names if (source / name).is_file()]
    if len(found) == 1:
        return found[0]
    if found:
        raise ConfigError(f"key {key!r}: {found[0]} and {found[1]} are both of network {network!r}; take one out")
    raise ConfigError(f"key {key!r}: {source} has no weights of network {network!r}; put {' or '.join(names)} there")


def _read(file: Path, key: str) -> Message:
    try:
        if file.suffix == ".safetensors":
            return load_file(file)
        state = torch.load(file, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError:
        raise ConfigError(
            f"key {key!r}: {file} is no state dict, or holds more than tensors, which is not opened, for it could run code; "
            "write it with torch.save(net.state_dict(), ...), or as safetensors"
        ) from None
    except Exception as problem:  # damaged files fail in many ways
        raise ConfigError(
            f"key {key!r}: {file} cannot be read ({first_line(problem)}); give safetensors, or a state dict of torch"
        ) from None
    if not isinstance(state, dict) or not all(isinstance(k, str) and isinstance(v, Tensor) for k, v in state.items()):
        raise ConfigError(f"key {key!r}: {file} holds no state dict, name -> tensor; write net.state_dict() into it")
    return dict(state)
