"""Section steps: the arithmetic of one FML step of a client, the rate of its products alone, and what takes the rest."""

import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from bare import BATCH, NETS
from common import Options, figure, spread
from ours import noisy
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from fedmutual import cpu
from fedmutual.core import At
from fedmutual.engines import allocator
from fedmutual.federation.build import build
from fedmutual.stepping import work

STEPS = 8  # of a turn
KINDS = {  # of operations, by the beginning of the profiler's names; Python and the dispatch of operations are the rest
    "optimiser": ("aten::_fused_", "aten::_foreach"),
    "loss": ("aten::_log_softmax", "aten::nll_", "aten::exp", "aten::masked_fill", "aten::sub", "aten::sum"),
    "pooling and activations": ("aten::max_pool", "aten::threshold", "aten::relu", "aten::clamp_min"),
    "copies": ("aten::copy_", "aten::index", "aten::cat", "aten::stack", "aten::empty"),
}


class Products(TorchDispatchMode):
    """Collects the matrix products and convolutions that run within it, with their arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, Any, Any, int]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func._overloadpacket in flop_registry:
            count = flop_registry[func._overloadpacket]
            self.calls.append((func, args, kwargs or {}, count(*args, **kwargs or {}, out_val=out)))
        return out


def measure(options: Options) -> list[dict[str, Any]]:
    library = cpu.choose_library("auto")
    print(f"FML, batches of {BATCH}, one client, one thread, products by {library}: a step, and its products one by one")
    allocator.keep_freed_memory()  # as the command line's process
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return [{"products": library, **_measure_network(network, options)} for network in NETS]
    finally:
        torch.set_num_threads(threads)


def _measure_network(network: str, options: Options) -> dict[str, Any]:
    steps = 1 if options.tiny else STEPS
    with noisy(network, 1, BATCH * steps) as config, cpu.compute_on_cpu():
        experiment = build(config)
        client, server = experiment.build_client(experiment.clients[0]), experiment.make_server_state()
        phase = experiment.algorithm.phases[0]

        def train(round: int) -> None:
            work(phase, client, server, At(0, round, 1000, 0))

        train(0)  # warms up
        seconds = [
            _time(lambda turn=turn: train(turn)) / steps for turn in range(1, 2 if options.tiny else options.pairs + 1)
        ]
        with profile(activities=[ProfilerActivity.CPU]) as profiled:
            train(1)
        with Products() as found:
            train(1)
        calls = found.calls[: len(found.calls) // steps]  # of the first step; the others are alike
        alone = sum(_time_call(*call[:3], seconds=0.0 if options.tiny else 0.3) for call in calls)
    step, flops = spread(seconds), sum(call[3] for call in calls)
    taken = Counter[str]()
    for event in profiled.key_averages():
        kind = next((kind for kind, names in KINDS.items() if event.key.startswith(names)), None)
        if kind is not None:
            taken[kind] += event.self_cpu_time_total / 1e6 / steps / step.median
    shares = {"products alone": alone / step.median} | {kind: taken[kind] for kind in KINDS}
    rate, best = flops / step.median / 1e9, flops / alone / 1e9
    parts = ", ".join(f"{kind} {share:.0%}" for kind, share in shares.items())
    print(
        f"{network:7} {flops / 1e6:.0f} MFLOP in {1e3 * step.median:.2f} ms: {rate:.0f} GFLOP/s, products alone {best:.0f}"
    )
    print(f"        {parts}", flush=True)
    return {
        "network": network,
        "batch": BATCH,
        "megaflops_per_step": figure(flops / 1e6),
        "milliseconds_per_step": spread([1e3 * s for s in seconds]),
        "gigaflops_per_second": figure(rate),
        "gigaflops_per_second_of_products_alone": figure(best),
        "shares_of_a_step": {kind: figure(share, 2) for kind, share in shares.items()},
    }


def _time(do: Callable[[], Any]) -> float:
    began = time.perf_counter()
    do()
    return time.perf_counter() - began


def _time_call(func: Any, args: Any, kwargs: Any, seconds: float) -> float:
    """Return the best decile of the seconds of a call, which is repeated for this long, five times at least."""
    ends, taken = time.perf_counter() + seconds, list[float]()
    with torch.no_grad():
        while len(taken) < 5 or time.perf_counter() < ends:
            taken.append(_time(lambda: func(*args, **kwargs)))
    return sorted(taken)[len(taken) // 10]
