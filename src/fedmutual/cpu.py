"""How this process computes on a CPU: numbers close to zero, and the library that multiplies float32 matrices."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import cache
from pathlib import Path
from platform import processor
from typing import Literal

import numpy as np
import torch

from fedmutual.errors import ConfigError
from fedmutual.settings import Products

for _kind in (np.float32, np.float64):
    np.finfo(_kind)  # older NumPy tests once for numbers close to zero, and warns if they are flushed already

Library = Literal["blas", "onednn"]
HIGHEST_ERROR = 1e-5
"""The highest relative error of a product in float32. oneDNN's is 4e-7; where oneDNN rounds to bfloat16, 2e-3."""

_chosen: list[Library] = ["blas"]  # in this process; workers choose by the configuration of their clients


@contextmanager
def compute_on_cpu() -> Iterator[None]:
    """Within, train or score as this process computes on a CPU. Other devices are not changed."""
    with flush_denormals(), _set_precision("medium") if _chosen[0] == "onednn" else nullcontext():
        yield


@contextmanager
def use_threads(threads: int) -> Iterator[None]:
    """Within this context, torch computes with this number of threads; then with the earlier number again."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)


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


def choose_library(setting: Products) -> Library:
    """Return the library of a setting; auto takes oneDNN on AMD processors on which oneDNN computes in float32.

    MKL, the library that torch takes on x86 processors, has AVX-512 kernels for Intel's processors only; oneDNN has such
    kernels for AMD's, with which a product is up to twice as fast. The choice depends on the processor and not on measured
    times, so that equal runs on one machine have equal bits.

    Raises:
        ConfigError: the setting is onednn, and torch does not use oneDNN on this processor, or oneDNN rounds to bfloat16.
    """
    if setting == "onednn":
        if not _has_kernels():
            raise ConfigError(
                "engine.products = 'onednn': torch multiplies matrices with oneDNN only on processors with AVX-512; this "
                "processor or this build of torch has no such kernels; use 'auto' or 'blas'"
            )
        if (error := measure_error()) > HIGHEST_ERROR:
            raise ConfigError(
                f"engine.products = 'onednn': on this processor oneDNN rounds to bfloat16 (relative error {error:.0e}); use "
                "'auto' or 'blas', or engine.precision = 'bf16' where that error is acceptable"
            )
        return "onednn"
    is_faster = setting == "auto" and _has_kernels() and "AuthenticAMD" in _describe_processor()
    return "onednn" if is_faster and measure_error() <= HIGHEST_ERROR else "blas"


def set_library(library: Library) -> None:
    """Set the library of `compute_on_cpu` in this process."""
    _chosen[:] = [library]


@cache
def measure_error() -> float:
    """Return the relative error of oneDNN's products of fixed matrices, with the product in float64 as the reference."""
    numbers = torch.Generator().manual_seed(0)
    a, b = (torch.randn(2, 256, 256, dtype=torch.float32, generator=numbers, device="cpu") for _ in range(2))
    exact = a.double() @ b.double()
    with _set_precision("medium"):
        products = torch.stack((torch.mm(a[0], b[0]), torch.bmm(a, b)[1]))
    return float((products - exact).norm() / exact.norm())


@contextmanager
def _set_precision(precision: str) -> Iterator[None]:
    """Within, use this float32 precision of torch for matrices.

    torch has no setting for the library itself. At "medium" torch gives products on a CPU to oneDNN, which may then round to
    bfloat16: oneDNN does so only on processors with instructions for such products (AMX).
    """
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(precision)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def _has_kernels() -> bool:
    return torch.backends.mkldnn.is_available() and torch.backends.cpu.get_cpu_capability() == "AVX512"  # type: ignore[no-untyped-call]


@cache
def _describe_processor() -> str:
    """Return a text that contains the name of the maker of the processor."""
    cpu = Path("/proc/cpuinfo")
    return cpu.read_text(errors="replace") if cpu.exists() else processor()
