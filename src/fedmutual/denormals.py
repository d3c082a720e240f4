"""Numbers next to zero, with which some processors compute many times slower, taken as zero."""

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch

for _kind in (np.float32, np.float64):
    np.finfo(_kind)  # older NumPy looks once how small numbers get, and warns where they are flushed by then


@contextmanager
def flush_denormals() -> Iterator[None]:
    """With numbers below the smallest normal one (1.2e-38 in float32) taken as zero on the CPU, if one thread computes.

    Adam with weight decay takes the weights of dead units there, and its own moments, where they stay: what would shrink
    them further rounds to zero. It is a state of each thread. Those that torch computes with besides this one would keep
    theirs, so that a result would hang on when they were started; with several threads nothing is changed. Nor is it on a
    processor that has no such mode.
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
