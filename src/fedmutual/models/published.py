"""torchvision's classification networks by name, with random initial weights: nothing is downloaded.

A name may have the prefix "torchvision:". The prefix is required where fedmutual has a network of this name: `resnet18` is
fedmutual's network in the form for CIFAR, `torchvision:resnet18` is torchvision's.
"""

from functools import cache

from torch import nn

from fedmutual.models.parts import parse_image_shape

PREFIX = "torchvision:"  # has the form of "module:factory"
AUXILIARY = ("aux1.", "aux2.", "AuxLogits.")  # tensors in ImageNet weights of the auxiliary outputs that are disabled below

# With auxiliary outputs, these two return several tensors in training. They warn unless init_weights is set.
_PLAIN = {
    "googlenet": {"aux_logits": False, "init_weights": True},
    "inception_v3": {"aux_logits": False, "init_weights": True},
}


def find_name(network: str) -> str | None:
    """Return torchvision's name of a network of the configuration, with or without prefix; None for other networks."""
    bare = network.removeprefix(PREFIX)
    return bare if ":" not in bare and bare in list_names() else None  # other modules must not be imported here


@cache
def list_names() -> tuple[str, ...]:
    """Return the names of torchvision's classification networks."""
    from torchvision import models  # takes seconds to import; fedmutual's networks do not need it

    return tuple(models.list_models(module=models))


def make_network(name: str, shape: tuple[int, ...], classes: int) -> nn.Module:
    """Return the network `name`, one of `list_names()`: images [B, 3, H, W] -> logits [B, classes].

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
