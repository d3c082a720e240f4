"""Networks of timm, MONAI and transformers by name: "timm:resnet18", "monai:DenseNet121", "hf:FOLDER".

Nothing is downloaded. The packages are extras. FOLDER has the `config.json` of a network of transformers.
"""

from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from inspect import signature
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fedmutual.core import Message
from fedmutual.errors import suggest_name
from fedmutual.models.networks import parse_image_shape
from fedmutual.models.own import select_arguments

HF, HF_WEIGHTS = "hf:", "model.safetensors"
_PACKAGES = {"timm": ("timm", "timm"), "monai": ("monai", "monai"), "hf": ("transformers", "text")}  # and their extras
_UNET = {"channels": (16, 32, 64), "strides": (2, 2)}  # of MONAI's networks that leave both to the caller


def make_network(name: str, shape: tuple[int, ...], classes: int) -> nn.Module:
    """Return the network of a library with random weights, for examples of `shape`: [B, *shape] -> logits [B, classes, ...].

    Raises:
        ValueError: the package is missing, or has no such network. The message continues a sentence that begins with the
            network.
    """
    library, _, inner = name.partition(":")
    package, extra = _PACKAGES[library]
    if find_spec(package) is None:
        raise ValueError(f"needs the package {package}: pip install 'fedmutual[{extra}]'")
    net: nn.Module = {"timm": _make_timm, "monai": _make_monai, "hf": _make_transformers}[library](inner, shape, classes)
    return net


def read_weights(folder: Path) -> Message:
    """Return the weights in a folder of transformers, name -> tensor, under the names of the network for `hf:FOLDER`."""
    config = _read_config(str(folder), 2)
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)  # of tensors that the file lacks
        kind = _choose_kind(config)
        net = kind.from_pretrained(folder, config=config, local_files_only=True, use_safetensors=True)
    return dict(net.state_dict())


def _make_timm(name: str, shape: tuple[int, ...], classes: int) -> nn.Module:
    timm: Any = import_module("timm")
    if not timm.is_model(name):
        raise ValueError(f"is no network of timm; {suggest_name(name, timm.list_models(), 'timm.list_models() lists them')}")
    channels, height, width = parse_image_shape(shape)
    make: Callable[..., nn.Module] = timm.create_model
    try:  # of networks for images of one size
        return make(name, num_classes=classes, in_chans=channels, img_size=(height, width))
    except TypeError:
        return make(name, num_classes=classes, in_chans=channels)


def _make_monai(name: str, shape: tuple[int, ...], classes: int) -> nn.Module:
    nets: Any = import_module("monai.networks.nets")
    make = getattr(nets, name, None)
    if not callable(make):
        fix = suggest_name(name, dir(nets), "MONAI's documentation lists them")
        raise ValueError(f"is no network of monai.networks.nets; {fix}")
    channels, *sides = shape
    sizes = {"in_channels": channels, "out_channels": classes, "num_classes": classes, "spatial_dims": len(sides)}
    available = {**sizes, **_UNET, "img_size": sides, "pretrained": False}
    try:
        arguments = select_arguments(make, available)
    except TypeError as problem:
        missing = str(problem).partition(" (")[0]
        raise ValueError(f"cannot be made: {missing}; make it in a function of your own, 'module:factory'") from None
    if "spatial_dims" not in signature(make).parameters:  # its keywords are those of the class that it makes
        stem = "n_input_channels" if name.lower().startswith("resnet") else "in_channels"
        arguments |= {stem: channels, "num_classes": classes, "spatial_dims": len(sides)}
    net: nn.Module = make(**arguments)
    return net


def _make_transformers(folder: str, shape: tuple[int, ...], classes: int) -> nn.Module:
    config = _read_config(folder, classes)
    net: nn.Module = _choose_kind(config).from_config(config)
    return net


def _read_config(folder: str, classes: int) -> Any:
    if not (Path(folder) / "config.json").is_file():
        raise ValueError(f"has no file {Path(folder) / 'config.json'}; name a folder that `save_pretrained` wrote")
    transformers: Any = import_module("transformers")
    config = transformers.AutoConfig.from_pretrained(folder, local_files_only=True, num_labels=classes)
    if getattr(config, "pad_token_id", None) is None:
        config.pad_token_id = 0  # fills up short texts, see `data.text`
    return config


def _choose_kind(config: Any) -> Any:
    """Return the class of transformers that classifies: sequences, else images."""
    transformers: Any = import_module("transformers")
    is_text = type(config) in transformers.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING
    return transformers.AutoModelForSequenceClassification if is_text else transformers.AutoModelForImageClassification
