"""Keep freed memory in the process, where the C library supports it."""

import ctypes
import sys
from contextlib import suppress

_TRIM_THRESHOLD, _MMAP_MAX = -1, -4  # glibc's <malloc.h>
_NEVER = 2**31 - 1


def keep_freed_memory() -> None:
    """Let glibc reuse large blocks instead of handing each back to the kernel at once.

    By default, glibc maps the activations of a wide network again at every step, and the kernel zeroes each page: a step of
    FML with CNN2 takes 1.5 times as long. The setting holds for the whole process, so only the command line and worker
    processes use it. It has no effect on systems other than Linux with glibc.
    """
    if sys.platform == "linux":
        with suppress(OSError, AttributeError):  # another C library
            libc = ctypes.CDLL(None)
            libc.mallopt(_MMAP_MAX, 0)
            libc.mallopt(_TRIM_THRESHOLD, _NEVER)
