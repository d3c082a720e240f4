"""Step clients in turns, each on its own CUDA stream: kernels of one client run while another client's stream waits."""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager

import torch

from fedmutual.core import Message
from fedmutual.cpu import compute_on_cpu
from fedmutual.engines.group import PhaseInput
from fedmutual.stepping import steps

PhaseResult = tuple[Message, dict[str, float]]


class InterleavedSteps:
    """A phase of several clients, as `stepping.work` runs it, one step of each client in turn.

    Networks that draw random numbers are not supported: the clients would share one random generator.
    """

    def __init__(self, parts: Sequence[PhaseInput]) -> None:
        self._remaining = [(part, steps(part.phase, part.client, part.inbox, part.at), _make_stream(part)) for part in parts]

    def take(self, most: int | None = None) -> Iterator[tuple[PhaseInput, PhaseResult | Exception]]:
        """Take all steps, or at most `most` of each client; yield (part, result or exception) as clients finish.

        A result is (reply, the mean of each loss term over the steps). The exception of a client does not stop the others.
        """
        taken = 0
        while self._remaining and taken != most:
            for entry in list(self._remaining):
                part, stepping, stream = entry
                try:
                    with _use(stream):
                        next(stepping)
                    continue
                except StopIteration as done:
                    result: PhaseResult | Exception = done.value
                except Exception as problem:  # of this client alone
                    result = problem
                _wait_for(stream)
                self._remaining.remove(entry)
                yield part, result
            taken += 1
        for _, _, stream in self._remaining:
            _wait_for(stream)


def find_device(parts: Sequence[PhaseInput]) -> torch.device:
    """Return the device of these clients' networks: that of the first client."""
    return next(p.device for net in parts[0].client.nets.values() for p in net.parameters())


def _make_stream(part: PhaseInput) -> torch.cuda.Stream | None:
    """Return a stream that waits for the work queued on the device so far; None on a device without streams."""
    device = find_device([part])
    if device.type != "cuda":
        return None
    stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream(device))
    return stream


def _use(stream: torch.cuda.Stream | None) -> AbstractContextManager[object]:
    return compute_on_cpu() if stream is None else torch.cuda.stream(stream)


def _wait_for(stream: torch.cuda.Stream | None) -> None:
    """Let later work on the device wait for the work on this stream."""
    if stream is not None:
        torch.cuda.current_stream(stream.device).wait_stream(stream)
