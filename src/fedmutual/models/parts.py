"""What our own networks have in common: they are images' or anybody's, and come in two named halves."""

from collections import OrderedDict

from torch import nn


def image(shape: tuple[int, ...], least: int = 1) -> tuple[int, int, int]:
    """The shape of one example as (channels, height, width).

    Raises:
        ValueError: no image, or one below `least` x `least`; the sentence goes on after the network's name.
    """
    if len(shape) != 3:
        raise ValueError(f"takes images (channels, height, width), not examples of shape {shape}; 'mlp' takes any shape")
    channels, height, width = shape
    if min(height, width) < least:
        raise ValueError(too_small(shape, least))
    return channels, height, width


def too_small(shape: tuple[int, ...], least: int) -> str:
    """What is wrong with images (channels, height, width) below a network's least side, and the mend."""
    return (
        f"takes images of at least {least} x {least} pixels, and these have {shape[1]} x {shape[2]}; "
        "choose another network, or larger images with the key 'data.size'"
    )


def named(**layers: nn.Module) -> nn.Sequential:
    """Layers in a row under their names, which are the names of their weights in files and messages."""
    return nn.Sequential(OrderedDict(layers))


def halves(features: nn.Module, classifier: nn.Module) -> nn.Module:
    """A network of ``features.`` [B, ...] -> [B, F] and ``classifier.`` [B, F] -> logits [B, C]."""
    return named(features=features, classifier=classifier)
