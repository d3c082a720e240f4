"""Augmentation of a whole batch at once; all randomness comes from the given stream."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

Augment = Callable[[Tensor, torch.Generator], Tensor]
"""(images [B, C, H, W], stream) -> augmented images [B, C, H, W]."""

PAD = 4


@dataclass(frozen=True)
class CropFlip:
    """A random crop after padding by 4 pixels, and a mirror image with probability 1/2: the usual augmentation for CIFAR.

    black [C]: the scaled value of a pixel 0; it fills the border.
    """

    black: Tensor

    def __call__(self, x: Tensor, rng: torch.Generator) -> Tensor:
        """Return augmented images [B, C, H, W]. The crops are drawn on the CPU, so they do not depend on the device of x."""
        b, c, h, w = x.shape
        top, left = torch.randint(2 * PAD + 1, (2, b, 1), generator=rng)
        mirrored = torch.randint(2, (b, 1), generator=rng).bool()
        rows = torch.arange(h) + top  # [B, H]
        columns = torch.arange(w)
        columns = torch.where(mirrored, columns.flip(0), columns) + left  # [B, W]
        padded = self.black.to(x.device).view(1, -1, 1, 1).repeat(b, 1, h + 2 * PAD, w + 2 * PAD)
        padded[..., PAD:-PAD, PAD:-PAD] = x
        pixels = (rows[:, :, None] * (w + 2 * PAD) + columns[:, None, :]).view(b, 1, -1).to(x.device)
        return padded.flatten(2).gather(2, pixels.expand(-1, c, -1)).view(b, c, h, w)
