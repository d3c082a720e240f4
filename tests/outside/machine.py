"""Which machine computes: equal bits are promised where the processor and torch are the same."""

import platform
from pathlib import Path

import torch


def describe_machine() -> dict[str, str]:
    """What the bits of a result depend on: the processor, the instructions that torch uses, torch's version."""
    return {
        "processor": _processor(),
        "capability": torch.backends.cpu.get_cpu_capability(),
        "torch": torch.__version__.partition("+")[0],
    }


def _processor() -> str:
    """The processor's name and model, as Linux has them; elsewhere its kind."""
    file = Path("/proc/cpuinfo")
    lines = file.read_text(encoding="utf-8").split("\n\n")[0].splitlines() if file.exists() else []
    about = {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in lines)}
    named = [about[key] for key in ("model name", "cpu family", "model") if key in about]
    return ", ".join(named) or f"{platform.system()} {platform.machine()} {platform.processor()}"
