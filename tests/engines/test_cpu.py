"""How clients compute on a CPU: numbers next to zero, and the library of matrix products."""

import json
import os
import subprocess
import sys

import numpy as np
import pytest
import torch
from torch import nn

from fedmutual import cpu
from fedmutual.cpu import flush_denormals
from fedmutual.errors import ConfigError
from fedmutual.federation.evaluation import score
from fedmutual.losses import Classification
from toy import CLASSES, rows

TINY = 1e-40


@pytest.fixture
def flushes_denormals():
    if not torch.set_flush_denormal(False):
        pytest.skip("this processor cannot take denormal numbers as zero")
    yield
    torch.set_flush_denormal(False)


def flushes() -> bool:
    return not torch.full((1,), TINY).mul(1).numpy().view("int32").any()


denormals = pytest.mark.usefixtures("flushes_denormals")


@denormals
@pytest.mark.parametrize("before", [False, True])
def test_the_caller_has_its_own_state_again(before):
    torch.set_flush_denormal(before)
    with flush_denormals():
        assert flushes()
        with flush_denormals():
            pass
        assert flushes(), "the inner one gives back the outer one's"
    assert flushes() == before
    with pytest.raises(KeyError), flush_denormals():
        raise KeyError
    assert flushes() == before


@denormals
def test_with_several_threads_nothing_is_changed():
    """Threads that were there before would compute otherwise than this one: bits would hang on when they were started."""
    torch.set_num_threads(2)
    try:
        with flush_denormals():
            assert not flushes()
    finally:
        torch.set_num_threads(1)


@denormals
def test_whatever_the_default_device_is():
    with torch.device("meta"), flush_denormals():
        assert not torch.full((1,), TINY, device="cpu").mul(1).numpy().view("int32").any()
    assert not flushes()


class Watch(nn.Module):
    """Notes whether numbers are flushed when it is asked."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[bool] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen.append(flushes())
        return torch.zeros(len(x), CLASSES)


@denormals
def test_scoring():
    net = Watch()
    score(net, rows(0, 5), Classification(), "0", pytest.fail)
    assert net.seen == [True]
    assert not flushes()


INTEL, AMD = "vendor_id : GenuineIntel", "vendor_id : AuthenticAMD"
FLOAT32, BFLOAT16 = 4e-7, 2e-3  # errors of a product


@pytest.mark.parametrize(
    ("setting", "processor", "has_kernels", "error", "library"),
    [
        ("auto", AMD, True, FLOAT32, "onednn"),
        ("auto", AMD, True, BFLOAT16, "blas"),
        ("auto", AMD, False, FLOAT32, "blas"),
        ("auto", INTEL, True, FLOAT32, "blas"),
        ("blas", AMD, True, FLOAT32, "blas"),
        ("onednn", INTEL, True, FLOAT32, "onednn"),
        ("onednn", AMD, False, FLOAT32, ConfigError),
        ("onednn", AMD, True, BFLOAT16, ConfigError),
    ],
)
def test_the_kind_of_processor_decides_the_library(monkeypatch, setting, processor, has_kernels, error, library):
    monkeypatch.setattr(cpu, "_describe_processor", lambda: processor)
    monkeypatch.setattr(cpu, "_has_kernels", lambda: has_kernels)
    monkeypatch.setattr(cpu, "measure_error", lambda: error)
    if library is ConfigError:
        with pytest.raises(ConfigError, match="use 'auto' or 'blas'"):
            cpu.choose_library(setting)
    else:
        assert cpu.choose_library(setting) == library


def test_the_library_is_set_only_while_clients_compute(monkeypatch):
    monkeypatch.setattr(cpu, "_chosen", ["onednn"])
    before = torch.get_float32_matmul_precision()
    with cpu.compute_on_cpu():
        assert torch.get_float32_matmul_precision() == "medium"
    assert torch.get_float32_matmul_precision() == before


WITH_ONEDNN = """
import copy, json, sys
from pathlib import Path
import torch
from torch import nn
import torch.nn.functional as F
from safetensors.torch import load_file
from fedmutual import cpu, run
from fedmutual.config import parse_config

def read_weights(engine, products):
    folder = Path(sys.argv[1], engine + products)
    tables = {
        "rounds": 1, "data": {"name": "npz", "root": sys.argv[1] + "/rows.npz"}, "partition": {"clients": 2},
        "engine": {"name": engine, "products": products, "device": "cpu", "threads": 1}, "training": {"local_epochs": 1},
    }
    run(parse_config(tables, "products"), folder)
    assert json.loads((folder / "environment.json").read_text())["products"] == products
    return {f"{p.parent.name} {k}": v for p in sorted(folder.rglob("round-1.safetensors")) for k, v in load_file(p).items()}

def measure_gradient_error(library):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(784, 200), nn.ReLU(), nn.Linear(200, 200), nn.ReLU(), nn.Linear(200, 10))
    x, y, exact = torch.randn(128, 784), torch.randint(0, 10, (128,)), copy.deepcopy(net).double()
    wanted = torch.autograd.grad(F.cross_entropy(exact(x.double()), y), list(exact.parameters()))
    cpu.set_library(library)
    with cpu.compute_on_cpu():
        found = torch.autograd.grad(F.cross_entropy(net(x), y), list(net.parameters()))
    return max(float((a - b).norm() / b.norm()) for a, b in zip(found, wanted))

if __name__ == "__main__":
    torch.set_num_threads(1)
    onednn, blas = measure_gradient_error("onednn"), measure_gradient_error("blas")
    weights = {e: read_weights(e, "onednn") for e in ("inprocess", "processes", "stacked")}
    other = read_weights("inprocess", "blas")
    difference = lambda a, b: max(float((a[k] - b[k]).abs().max()) for k in b)
    print(json.dumps({
        "ratio": onednn / blas, "processes": difference(weights["processes"], weights["inprocess"]),
        "stacked": difference(weights["stacked"], weights["inprocess"]), "blas": difference(other, weights["inprocess"]),
    }))
"""


@pytest.mark.long
@pytest.mark.skipif(not cpu._has_kernels(), reason="torch does not use oneDNN for matrix products on this processor")
def test_onednn_has_the_error_of_float32_and_equal_bits_on_engines(tmp_path):
    """The variable takes from oneDNN the instructions with which newer processors round to bfloat16."""
    numbers = np.random.default_rng(0)
    x = numbers.normal(size=(640, 1, 28, 28)).astype(np.float32)
    np.savez(tmp_path / "rows.npz", x=x, y=numbers.integers(0, 10, len(x)))
    script = tmp_path / "with_onednn.py"
    script.write_text(WITH_ONEDNN)
    env = {**os.environ, "ONEDNN_MAX_CPU_ISA": "AVX512_CORE"}
    done = subprocess.run([sys.executable, script, tmp_path], env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["ratio"] < 1.5
    assert found["processes"] == 0
    assert found["stacked"] < 1e-5
    assert 0 < found["blas"] < 1e-5
