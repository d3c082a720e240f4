"""Section gpu: the engine "stacked" over "inprocess" on one GPU, and the bounds by launches, arithmetic and memory.

With --device cpu the section only shows that it runs: operators replace kernels, and the numbers have no meaning.
"""

import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from bare import BATCH, CLASSES, SHAPES
from common import Options, figure, ratios, spread
from ours import hosted, noisy, train
from torch import Tensor, nn
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile
from torch.utils.flop_counter import FlopCounterMode
from turns import Contestant, take_turns

from fedmutual import models
from fedmutual.core import At

BATCHES = {"mlp": 40, "lenet5": 40, "cnn2": 10}  # of a client in a round
CLIENTS = (5, 20)
ENGINES = ("stacked", "inprocess")
GRAPHS = "stacked, graphs"  # engine.graphs on a GPU
NETS = 2  # of a client


def measure(options: Options) -> dict[str, Any] | None:
    """Return the results; None without a GPU."""
    if options.device.startswith("cuda") and not torch.cuda.is_available():
        print("there is no CUDA GPU here; on a machine that has one: uv run python benchmarks/run.py gpu")
        return None
    chip = _chip(options.device)
    print(
        f"an empty kernel's launch {1e6 * chip['launch_seconds']:.2f} us, float32 matrices "
        f"{chip['flops_per_second'] / 1e12:.2f} TFLOP/s, copies {chip['bytes_per_second'] / 1e9:.0f} GB/s"
    )
    cells = [(model, k) for model in BATCHES for k in ((2,) if options.tiny else CLIENTS)]
    return {"device": options.device, "chip": chip, "rows": [_cell(m, k, chip, options) for m, k in cells]}


def _cell(model: str, clients: int, chip: dict[str, float], options: Options) -> dict[str, Any]:
    """Return samples/s of both engines, and the most that each bound permits."""
    batches = 1 if options.tiny else BATCHES[model]
    words = ("--model", model, "--clients", clients, "--rows", batches * BATCH, "--device", options.device)
    has_gpu = options.device.startswith("cuda")
    engines = (*ENGINES, *[GRAPHS] * has_gpu)
    starts = {e: partial(Contestant, "ours.py", *words, *_flags(e)) for e in engines}
    seconds = take_turns(starts, options.pairs)
    samples = clients * batches * BATCH
    rates = {e: spread([samples / s for s in seconds[e]]) for e in engines}
    faster = {e: ratios(seconds["inprocess"], seconds[e]) for e in engines if e != "inprocess"}
    kernels = {e: _kernels(model, clients, e, options.device) for e in engines}
    flops, moved = work(model)
    floors = {
        **{f"launches, {e}": clients * BATCH / (kernels[e] * chip["launch_seconds"]) for e in engines},
        "arithmetic": BATCH * chip["flops_per_second"] / flops,
        "bandwidth": BATCH * chip["bytes_per_second"] / moved,
    }
    print(f"{model:6} K = {clients:>2}: over inprocess {', '.join(f'{e} {r:.2f}' for e, r in faster.items())}; samples/s")
    for name, rate in rates.items():
        print(f"    {name:20} {rate:,.0f}; {kernels[name]:,.0f} kernels for a step of all clients")
    for name, most in floors.items():
        print(f"    floor: {name:27} {most:,.0f}", flush=True)
    return {
        "model": model,
        "clients": clients,
        "batches_per_client": batches,
        "turns": options.pairs,
        "samples_per_second": rates,
        "times_as_fast_as_inprocess": faster,
        "kernels_for_a_step_of_all_clients": kernels,
        "flops_of_a_clients_step": flops,
        "bytes_of_a_clients_step": moved,
        "floors_samples_per_second": {k: figure(v) for k, v in floors.items()},
    }


def _flags(engine: str) -> tuple[str, ...]:
    name, _, way = engine.partition(", ")
    return ("--engine", name, *[f"--{way}"] * bool(way))


def _kernels(model: str, clients: int, engine: str, device: str) -> int:
    """Return the kernels, copies and fills of one step of every client: a round of two steps minus a round of one."""
    few, many = (_launched(model, clients, engine, device, batches) for batches in (1, 2))
    return many - few


def _launched(model: str, clients: int, engine: str, device: str, batches: int) -> int:
    """Return the kernels launched in the second of two rounds."""
    name, _, way = engine.partition(", ")
    with (
        noisy(model, clients, batches * BATCH, name=name, device=device, **({way: True} if way else {})) as config,
        hosted(config) as handle,
    ):
        train(handle, 1, ())
        with profile(activities=[ProfilerActivity.CPU, *[ProfilerActivity.CUDA] * device.startswith("cuda")]) as profiled:
            train(handle, 1, ())
            _wait(device)
        if device.startswith("cuda"):
            return sum(e.device_type == DeviceType.CUDA for e in profiled.events())
        return sum(e.name.startswith("aten::") and not e.cpu_children for e in profiled.events())


def work(model: str) -> tuple[float, float]:
    """Return (floating-point operations, bytes that must move) of a client's step with both its networks.

    Bytes: a weight is read forward, backward and by the optimiser, its gradient written and read, its momentum read and
    written, itself written: 8 times. The output of a layer of weights or pooling is written and read, its gradient likewise:
    4
    times; ReLU and bias count as free.
    """
    net = models.build(model, SHAPES[model], CLASSES, At(0, -1, 1).rng(model))
    given: list[int] = []
    for layer in net.modules():
        if isinstance(layer, nn.Linear | nn.Conv2d | nn.MaxPool2d):
            layer.register_forward_hook(lambda _layer, _args, output: given.append(output.numel()))
    with FlopCounterMode(display=False) as counter:
        net(torch.zeros(BATCH, *SHAPES[model])).sum().backward()
    weights = sum(p.numel() for p in net.parameters())
    return NETS * float(counter.get_total_flops()), NETS * 4.0 * (8 * weights + 4 * sum(given))


def _chip(device: str) -> dict[str, float]:
    """Return the measured peak figures of this device."""
    cuda = device.startswith("cuda")
    side, length = (8192, 2**28) if cuda else (1024, 2**22)
    torch.backends.cuda.matmul.allow_tf32 = False  # as engine.precision = "float32" has it
    a, b = torch.randn(side, side, device=device), torch.randn(side, side, device=device)
    source, target = torch.zeros(length, device=device), torch.empty(length, device=device)
    one = torch.zeros(1, device=device)
    launch: Callable[[], object] = partial(torch.cuda._sleep, 0) if cuda else partial(one.add_, 1)
    return {
        "launch_seconds": figure(_best(launch, device, 10_000)),
        "flops_per_second": figure(2 * side**3 / _best(partial(torch.mm, a, b), device, 5)),
        "bytes_per_second": figure(2 * 4 * length / _best(partial(_copy, target, source), device, 5)),
    }


def _copy(target: Tensor, source: Tensor) -> None:
    target.copy_(source)


def _best(do: Callable[[], object], device: str, times: int) -> float:
    """Return the seconds of one call in a series; the best of five series."""
    seconds = []
    for _ in range(6):  # the first warms up, and is the slowest
        _wait(device)
        begun = time.perf_counter()
        for _ in range(times):
            do()
        _wait(device)
        seconds.append((time.perf_counter() - begun) / times)
    return min(seconds)


def _wait(device: str) -> None:
    if device.startswith("cuda"):
        torch.cuda.synchronize()
