"""Memory that a step frees stays with the process, where the C library can be told so."""

import ctypes
import sys
from contextlib import suppress

_TRIM_THRESHOLD, _MMAP_MAX = -1, -4  # glibc's <malloc.h>
_NEVER = 2**31 - 1


def keep_freed_memory() -> None:
    """Let glibc reuse large blocks instead of handing each back to the kernel at once.

    By its defaults the activations of a wide network are mapped anew and zeroed page by page at every step: CNN2 of FML
    takes 1.5 times as long. It holds for the whole process, so only processes of our own ask for it: the command line's and
    the workers'. Elsewhere than on Linux with glibc it does nothing.
    """
    if sys.platform == "linux":
        with suppress(OSError, AttributeError):  # another C library
            libc = ctypes.CDLL(None)
            libc.mallopt(_MMAP_MAX, 0)
            libc.mallopt(_TRIM_THRESHOLD, _NEVER)
