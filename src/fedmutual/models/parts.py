"""Common parts of fedmutual's own networks: the check of image shapes, and two named halves."""

from collections import OrderedDict

from torch import nn


def parse_image_shape(shape: tuple[int, ...], least: int = 1) -> tuple[int, int, int]:
    """Return the shape of one example as (channels, height, width).

    Raises:
        ValueError: no image, or an image below `least` x `least`. The message continues a sentence that begins with the
            network.
    """
    if len(shape) != 3:
        raise ValueError(f"takes images (channels, height, width), not examples of shape {shape}; 'mlp' takes any shape")
    channels, height, width = shape
    if min(height, width) < least:
        raise ValueError(describe_too_small(shape, least))
    return channels, height, width


def describe_too_small(shape: tuple[int, ...], least: int) -> str:
    """Return the error text for images (channels, height, width) below a network's least side, with the fix."""
    return (
        f"takes images of at least {least} x {least} pixels, but these have {shape[1]} x {shape[2]}; "
        "choose another network, or larger images with the key 'data.size'"
    )


def make_sequential(**layers: nn.Module) -> nn.Sequential:
    """Return layers in a row; the keywords name the layers, and so the weights in files and messages."""
    return nn.Sequential(OrderedDict(layers))


def join_halves(features: nn.Module, classifier: nn.Module) -> nn.Module:
    """Return a network of ``features.`` [B, ...] -> [B, F] and ``classifier.`` [B, F] -> logits [B, C]."""
    return make_sequential(features=features, classifier=classifier)
