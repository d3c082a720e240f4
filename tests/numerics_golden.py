"""One short run of each method and its final bits. `python tests/numerics_golden.py` adds this machine's to the file.

Bits depend on the CPU, because matrix libraries sum in different orders on different CPUs. So the file holds digests for
each machine, which must be equal on that machine, and the norms of all weights, which must be close on any machine.
"""

import hashlib
import json
import platform
import tempfile
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import nn

from fedmutual import numerics, run
from fedmutual.algorithms import ALGORITHMS
from fedmutual.config import parse_config

GOLDEN = Path(__file__).with_name("numerics_golden.json")
TOLERANCE = 1e-4  # relative, of a norm: machines differ by about 1e-6 after so few steps
TABLES = {
    "rounds": 2,
    "data": {"name": "digits", "angles": [0, 90], "per_class": 20},
    "partition": {"kind": "domains"},
    "split": {"private": 0.55, "public": 0.20, "validation": 0.10, "test": 0.15},
    "model": {"shared": "numerics_golden:small_net", "personal": ["numerics_golden:small_net"]},
    "training": {"local_steps": 4, "batch_size": 8},
    "optimizer": {"name": "sgd", "lr": 0.05, "momentum": 0.9, "weight_decay": 5e-4},
    "engine": {"device": "cpu", "threads": 1, "name": "inprocess"},
}
"""Two domains, so that every method can run: those with public data need some, and the same network serves all."""
AMSGRAD = {"name": "adam", "amsgrad": True, "lr": 1e-3, "weight_decay": 1e-4}
PUBLIC = ("fedh2l", "fedmd", "aggregate")  # the methods of FedH2L's paper, which trains with AMSGrad
FEATURES, CLASSIFIER = ["0", "4"], ["6"]  # the modules of `small_net`, for methods in which a part alone crosses
PARTS = {"fedper": FEATURES, "fedrep": FEATURES, "lg-fedavg": CLASSIFIER}


def small_net(shape, classes):
    """Return a network with a convolution and two layers, for the digits' 8 by 8 pixels."""
    return nn.Sequential(
        nn.Conv2d(1, 4, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(64, 16), nn.ReLU(),
        nn.Linear(16, classes),
    )  # fmt: skip


def machine():
    """Return what the bits depend on besides the program: the processor, its instructions that torch uses, and torch."""
    cpu = Path("/proc/cpuinfo")
    lines = [line.partition(":") for line in cpu.read_text().splitlines()] if cpu.exists() else []
    about = {key.strip(): value.strip() for key, _, value in reversed(lines)}
    name = " ".join(about.get(key, "?") for key in ("model name", "cpu family", "model")) if about else platform.processor()
    return f"{name}, {torch.backends.cpu.get_cpu_capability()}, torch {torch.__version__.partition('+')[0]}"


def trained_weights(method, folder):
    """Return all tensors that a method's short run saved last, of the server and of every client, by name."""
    tables = {**TABLES, "name": method, "algorithm": {"name": method}}
    if method in PUBLIC:
        tables["optimizer"] = AMSGRAD
    if method in PARTS:
        tables["model"] = {**TABLES["model"], "part": PARTS[method]}
    run(parse_config(tables, "golden"), folder)
    saved = sorted(folder.rglob(f"round-{TABLES['rounds']}.safetensors"))
    return {f"{file.parent.name} {k}": v for file in saved for k, v in load_file(file).items()}


def digest(weights):
    """Return a digest of every bit."""
    return hashlib.sha256(b"".join(k.encode() + weights[k].numpy().tobytes() for k in sorted(weights))).hexdigest()


def norms(weights):
    """Return the norm of each tensor."""
    return {k: round(v.double().norm().item(), 8) for k, v in sorted(weights.items())}


def main():
    """Train every method's short run, and write this machine's digests, and the norms of new methods, into the file."""
    golden = json.loads(GOLDEN.read_text()) if GOLDEN.exists() else {}
    if golden.get("version") != numerics.VERSION:
        golden = {"version": numerics.VERSION, "norms": {}, "digests": {}}
    with tempfile.TemporaryDirectory() as folder:
        weights = {method: trained_weights(method, Path(folder) / method) for method in ALGORITHMS}
    golden["norms"] = {method: golden["norms"].get(method) or norms(state) for method, state in weights.items()}
    golden["digests"][machine()] = {method: digest(state) for method, state in weights.items()}
    GOLDEN.write_text(json.dumps(golden, indent=1) + "\n")


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
