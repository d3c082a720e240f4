"""Steps of a stack as CUDA graphs: captured once for each shape of their inputs, then launched as one kernel is.

Source: CUDA graphs in PyTorch, https://pytorch.org/docs/stable/notes/cuda.html#cuda-graphs.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from fedmutual.errors import shorten_error

MOST_GRAPHS = 256  # graphs of a stack: rounds that draw their clients would each add some
Work = Callable[[], Any]
"""Reads and writes tensors that stay where they are; returns a tree of tensors and other values."""


def make_capture() -> Callable[[Work], Work]:
    """Return a function that captures a CUDA graph of work, without running it, and returns a function that launches it.

    A launch reads and writes the tensors that the work held. All graphs of one such function share their memory for
    intermediate results: they must be launched one after the other on one stream, and what a launch returns must be copied
    before the next launch.

    The function raises RuntimeError if the work waits for the GPU, for instance with `.item()`.
    """
    pool = torch.cuda.graph_pool_handle()
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]

    def capture(work: Work) -> Work:
        graph = torch.cuda.CUDAGraph()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            graph.capture_begin(pool)  # not `torch.cuda.graph`, which empties the cache of memory at each capture
            try:
                output = work()
            finally:
                graph.capture_end()
        torch.cuda.current_stream().wait_stream(stream)

        def replay() -> Any:
            graph.replay()
            return output

        return replay

    return capture


class Graphs:
    """The graphs of one stack. A graph holds the addresses of all tensors that its work reads: none of them may move.

    remarks: receives a sentence about work that cannot be captured. capture: as `make_capture` returns it.
    """

    def __init__(self, remarks: list[str], capture: Callable[[Work], Work]) -> None:
        self._remarks, self._capture = remarks, capture
        self._replays: dict[Any, Callable[[list[Tensor]], Any] | None] = {}

    def run(self, key: Any, work: Callable[[Any], Any], inputs: Any) -> Any:
        """Return ``work(inputs)``, in new tensors.

        The first work with a key and with these shapes runs as it is, so that libraries prepare themselves; the second is
        captured. Work that cannot be captured always runs as it is. Of more than `MOST_GRAPHS` keys and shapes, that which
        was used longest ago is forgotten.

        key: of the work, without its inputs. inputs: a tree of tensors, of one structure for each key and number of tensors.
        """
        given, tree = tree_flatten(inputs)
        key = key, tuple((t.shape, t.stride(), t.dtype) for t in given)
        if key not in self._replays:
            self._replays[key] = None
            if len(self._replays) > MOST_GRAPHS:
                del self._replays[next(iter(self._replays))]
            return _run_on_own_stream(partial(work, inputs))
        replay = self._replays[key] = self._replays.pop(key) or self._make_replay(work, given, tree)  # now the last
        return replay(given)

    def _make_replay(
        self, work: Callable[[Any], Any], given: Sequence[Tensor], tree: TreeSpec
    ) -> Callable[[Sequence[Tensor]], Any]:
        """Return a function that runs the work on other inputs like the given ones."""
        fixed, copied = [t.detach().clone() for t in given], [(t, t._version) for t in given]
        try:
            run = self._capture(lambda: tree_flatten(work(tree_unflatten(fixed, tree))))
        except RuntimeError as problem:
            remark = f"engine.graphs has no effect here: a step cannot be captured ({shorten_error(problem)})"
            if remark not in self._remarks:  # of another choice of clients, or another batch size
                self._remarks.append(remark)
            return lambda tensors: work(tree_unflatten(tensors, tree))

        def replay(tensors: Sequence[Tensor]) -> Any:
            for n, tensor in enumerate(tensors):
                source, version = copied[n]
                if tensor is not source or tensor._version != version:  # the constants of a phase are copied once
                    fixed[n].copy_(tensor)
                    copied[n] = tensor, tensor._version
            leaves, of_output = run()
            return tree_unflatten([v.clone() if isinstance(v, Tensor) else v for v in leaves], of_output)

        return replay


def _run_on_own_stream(work: Work) -> Any:
    """Run work on another stream than the default one, as a capture does. Without a GPU, run it as it is."""
    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return work()
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        output = work()
    torch.cuda.current_stream().wait_stream(stream)
    return output
