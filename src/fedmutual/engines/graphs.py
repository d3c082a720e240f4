"""Steps of a stack as CUDA graphs: captured once for each shape of their inputs, then launched as one kernel is.

Source: CUDA graphs in PyTorch, https://pytorch.org/docs/stable/notes/cuda.html#cuda-graphs.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import TreeSpec, tree_flatten, tree_map, tree_unflatten

from fedmutual.errors import shorten_error

Work = Callable[[], Any]
"""Reads and writes tensors that stay where they are; returns a tree of tensors and other values."""


def capture_graph(work: Work) -> Work:
    """Capture a CUDA graph of the work without running it; return a function that runs it on the same tensors.

    Raises:
        RuntimeError: the work waits for the GPU, for instance with `.item()`.
    """
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output = work()

    def replay() -> Any:
        graph.replay()
        return output

    return replay


class Graphs:
    """The graphs of one stack. A graph holds the addresses of all tensors that its work reads: none of them may move.

    remarks: receives a sentence about work that cannot be captured. capture: as `capture_graph`.
    """

    def __init__(self, remarks: list[str], capture: Callable[[Work], Work] = capture_graph) -> None:
        self._remarks, self._capture = remarks, capture
        self._replays: dict[Any, Callable[[list[Tensor]], Any] | None] = {}

    def run(self, key: Any, work: Callable[[Any], Any], inputs: Any) -> Any:
        """Return ``work(inputs)``, in new tensors.

        The first work with a key and with these shapes runs as it is, so that libraries prepare themselves; the second is
        captured. Work that cannot be captured always runs as it is.

        key: of the work, without its inputs. inputs: a tree of tensors.
        """
        given, tree = tree_flatten(inputs)
        key = key, str(tree), tuple((t.shape, t.stride(), t.dtype) for t in given)
        if key not in self._replays:
            self._replays[key] = None
            return _run_on_own_stream(partial(work, inputs))
        replay = self._replays[key] = self._replays[key] or self._make_replay(work, given, tree)
        return replay(given)

    def _make_replay(
        self, work: Callable[[Any], Any], given: Sequence[Tensor], tree: TreeSpec
    ) -> Callable[[Sequence[Tensor]], Any]:
        """Return a function that runs the work on other inputs like the given ones."""
        fixed = [t.detach().clone() for t in given]
        try:
            run = self._capture(lambda: work(tree_unflatten(fixed, tree)))
        except RuntimeError as problem:
            self._remarks.append(f"engine.graphs has no effect here: a step cannot be captured ({shorten_error(problem)})")
            return lambda tensors: work(tree_unflatten(tensors, tree))

        def replay(tensors: Sequence[Tensor]) -> Any:
            for to, tensor in zip(fixed, tensors, strict=True):
                to.copy_(tensor)
            return tree_map(lambda value: value.clone() if isinstance(value, Tensor) else value, run())

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
