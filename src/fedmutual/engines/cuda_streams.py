"""Clients stepped in turns, each on a CUDA stream of its own: the kernels of one fill the gaps of another's."""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch

from fedmutual.core import Message
from fedmutual.engines.group import PhaseInput
from fedmutual.stepping import steps

Done = tuple[Message, dict[str, float]]


class InterleavedSteps:
    """A phase of several clients, as `stepping.work` does it, a step of each after a step of each.

    Not for clients whose networks draw random numbers: they would draw from one generator in turns.
    """

    def __init__(self, parts: Sequence[PhaseInput]) -> None:
        self._left = [(part, steps(part.phase, part.client, part.inbox, part.at), _stream(part)) for part in parts]

    def take(self, most: int | None = None) -> Iterator[tuple[PhaseInput, Done | Exception]]:
        """All steps, or at most so many of each -> (part, what its work came to, or raised), as they end."""
        taken = 0
        while self._left and taken != most:
            for entry in list(self._left):
                part, stepping, stream = entry
                try:
                    with _on(stream):
                        next(stepping)
                    continue
                except StopIteration as done:
                    ended: Done | Exception = done.value
                except Exception as problem:  # of this client alone
                    ended = problem
                _rejoin(stream)
                self._left.remove(entry)
                yield part, ended
            taken += 1
        for _, _, stream in self._left:
            _rejoin(stream)


def find_device(parts: Sequence[PhaseInput]) -> torch.device:
    """Where these clients' networks are."""
    return next(p.device for net in parts[0].client.nets.values() for p in net.parameters())


def _stream(part: PhaseInput) -> torch.cuda.Stream | None:
    """A stream that begins after what was asked of the device so far; None on a device that has none."""
    device = find_device([part])
    if device.type != "cuda":
        return None
    stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream(device))
    return stream


def _on(stream: torch.cuda.Stream | None) -> AbstractContextManager[object]:
    return nullcontext() if stream is None else torch.cuda.stream(stream)


def _rejoin(stream: torch.cuda.Stream | None) -> None:
    """What comes after sees what was done there."""
    if stream is not None:
        torch.cuda.current_stream(stream.device).wait_stream(stream)
