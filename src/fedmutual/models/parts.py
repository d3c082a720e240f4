"""Common parts of fedmutual's own networks: the check of image shapes, max pooling, and two named halves."""

from collections import OrderedDict

import torch
from torch import Tensor, nn


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


class MaxPool(nn.MaxPool2d):
    """Max pooling of 2 x 2 pixels: [B, C, H, W] -> [B, C, H // 2, W // 2].

    Without gradients on a CPU, the layer computes the maximum of even and odd rows, then of even and odd columns. The values
    are those of `nn.MaxPool2d`, in a seventh of the time for six channels. An exported program has torch's own pooling.
    """

    def __init__(self) -> None:
        super().__init__(2)

    def forward(self, x: Tensor) -> Tensor:
        """Return the pooled images [..., height // 2, width // 2] of x [..., height, width]."""
        if torch.is_grad_enabled() or x.device.type != "cpu" or torch.compiler.is_exporting():
            pooled: Tensor = super().forward(x)
            return pooled
        height, width = x.shape[-2] // 2 * 2, x.shape[-1] // 2 * 2
        rows = torch.maximum(x[..., 0:height:2, :width], x[..., 1:height:2, :width])
        return torch.maximum(rows[..., ::2], rows[..., 1::2])


def make_sequential(**layers: nn.Module) -> nn.Sequential:
    """Return layers in a row; the keywords name the layers, and so the weights in files and messages."""
    return nn.Sequential(OrderedDict(layers))


def join_halves(features: nn.Module, classifier: nn.Module) -> nn.Module:
    """Return a network of ``features.`` [B, ...] -> [B, F] and ``classifier.`` [B, F] -> logits [B, C]."""
    return make_sequential(features=features, classifier=classifier)
