"""A small U-Net for segmentation, with one path down and up.

Ronneberger, Fischer & Brox, U-Net: Convolutional Networks for Biomedical Image Segmentation, 2015,
https://arxiv.org/abs/1505.04597. It has two levels in place of five, padded convolutions, and no BatchNorm.
"""

import torch
from torch import Tensor, nn

from fedmutual.models.parts import MaxPool, join_halves, make_sequential, parse_image_shape

WIDTHS = (16, 32)  # channels at full and at half size


class UNetFeatures(nn.Module):
    """Images [B, channels, H, W] -> features [B, 16, H, W]: half the size, back, and joined with the features before."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        wide, deep = WIDTHS
        self.down = _convolve_twice(channels, wide)
        self.pool = MaxPool()
        self.middle = _convolve_twice(wide, deep)
        self.up = nn.ConvTranspose2d(deep, wide, 2, stride=2)
        self.join = _convolve_twice(2 * wide, wide)

    def forward(self, x: Tensor) -> Tensor:
        """Return features [B, 16, H, W]."""
        before = self.down(x)
        joined: Tensor = self.join(torch.cat([before, self.up(self.middle(self.pool(before)))], 1))
        return joined


def unet(shape: tuple[int, ...], classes: int) -> nn.Module:
    """Return a U-Net of two levels with 16 and 32 channels: images [B, channels, H, W] -> logits [B, classes, H, W].

    Source: a smaller form of the network of Ronneberger et al., 2015, https://arxiv.org/abs/1505.04597.

    Raises:
        ValueError: the examples are no images, or a side is odd. The message continues a sentence that begins with the
            network.
    """
    channels, height, width = parse_image_shape(shape, 2)
    if height % 2 or width % 2:
        raise ValueError(f"takes images with even sides, but these have {height} x {width}; crop or pad images and masks")
    return join_halves(UNetFeatures(channels), make_sequential(pixel=nn.Conv2d(WIDTHS[0], classes, 1)))


def _convolve_twice(channels: int, width: int) -> nn.Sequential:
    return make_sequential(
        conv1=nn.Conv2d(channels, width, 3, padding=1),
        relu1=nn.ReLU(),
        conv2=nn.Conv2d(width, width, 3, padding=1),
        relu2=nn.ReLU(),
    )
