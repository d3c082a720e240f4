"""torchvision's classification networks by name, with weights of their own start: nothing is downloaded.

A name may have "torchvision:" before it, and must where fedmutual has a network of the same name: `resnet18` is ours, the
form for CIFAR, and `torchvision:resnet18` theirs.
"""

from functools import cache

from torch import nn

from fedmutual.models.parts import image

PREFIX = "torchvision:"  # as of "module:factory", with torchvision for the module
AUXILIARY = ("aux1.", "aux2.", "AuxLogits.")  # what ImageNet's weights hold of the outputs that are left out below

# With auxiliary outputs these two return several tensors while they train; and they want to be told how to start.
_PLAIN = {
    "googlenet": {"aux_logits": False, "init_weights": True},
    "inception_v3": {"aux_logits": False, "init_weights": True},
}


def name(network: str) -> str | None:
    """torchvision's name of a network of the configuration, with the prefix or without; None of one that it has not."""
    bare = network.removeprefix(PREFIX)
    return bare if ":" not in bare and bare in names() else None  # of others' modules nothing is imported here


@cache
def names() -> tuple[str, ...]:
    """The names torchvision knows."""
    from torchvision import models  # takes seconds to import: only when a network is asked for that is not ours

    return tuple(models.list_models(module=models))


def make(name: str, shape: tuple[int, ...], classes: int) -> nn.Module:
    """The network `name`, one of `names()`, for images [B, 3, H, W] -> logits [B, classes].

    Raises:
        ValueError: an example is no image of 3 channels.
    """
    from torchvision import models

    channels, _, _ = image(shape)
    if channels != 3:
        raise ValueError(
            f"has a stem for images of 3 channels, and these have {channels}; choose a network of fedmutual's "
            "own, or a factory 'module:name' that swaps the stem"
        )
    net: nn.Module = models.get_model(name, weights=None, num_classes=classes, **_PLAIN.get(name, {}))
    return net


def least(name: str) -> int:
    """The side of the smallest image that torchvision states for the network."""
    from torchvision import models

    return int(min(max(weights.meta["min_size"]) for weights in models.get_model_weights(name)))
