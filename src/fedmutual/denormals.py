"""Treat numbers close to zero as zero, because some processors compute with them many times slower."""

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch

for _kind in (np.float32, np.float64):
    np.finfo(_kind)  # older NumPy looks once how small numbers get, and warns where they are flushed by then


@contextmanager
def flush_denormals() -> Iterator[None]:
    """Within, treat numbers below the smallest normal number (1.2e-38 in float32) as zero on the CPU.

    Adam with weight decay drives the weights of dead units, and its own moments, into that range, where they stay, because
    each further decrease rounds to zero. The mode belongs to each thread. Other threads of torch would keep their mode, so a
    result would depend on when they were started; with several threads nothing is changed. Nor is anything changed on a
    processor without such a mode.
    """
    if torch.get_num_threads() > 1:
        yield
        return
    tiny = torch.full((), torch.finfo(torch.float32).smallest_normal / 2, dtype=torch.float32, device="cpu")
    before = not (tiny * 1).item()
    torch.set_flush_denormal(True)
    try:
        yield
    finally:
        torch.set_flush_denormal(before)
