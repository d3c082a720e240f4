"""Numbers next to zero, which processors compute with a hundred times slower, taken as zero."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def flushed() -> Iterator[None]:
    """With numbers below the smallest normal one (1.2e-38 in float32) taken as zero on the CPU.

    Adam with weight decay takes the weights of dead units there, and there they stay, since rounding keeps the smallest
    number from shrinking further. It is a state of the thread, which the threads that it starts inherit on Linux alone: so
    all that trains or scores asks for it, where it runs. A processor that cannot do it computes on as it does.
    """
    before = not bool(torch.full((), torch.finfo(torch.float32).smallest_normal / 2, dtype=torch.float32) * 1)
    torch.set_flush_denormal(True)
    try:
        yield
    finally:
        torch.set_flush_denormal(before)
