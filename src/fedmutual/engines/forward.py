"""A phase's loss for many stacked clients at once: vmap, and torch.compile where it is asked for."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch.func import vmap

from fedmutual.core import Batch, Client, Message, Net, Phase, Work, find_head
from fedmutual.stepping import count_calls, lowered, make_call

Forward = Callable[[Any, Any, Batch, Message], Message]
"""params, rest (both by net), batch, const, all stacked [k, ...] -> loss terms [k]; buffers in `rest` move in place."""


def compute_stacked_loss(phase: Phase, skeletons: Mapping[str, nn.Module], like: Client, work: Work) -> Forward:
    """Return the phase's loss as a function for many clients at once.

    skeletons: net name -> module, whose weights the function replaces. like: a client with the settings of all clients.
    work: receives the forward passes of one step of a client, in `work.forwards`.
    """
    heads = {n: find_head(net) for n, net in skeletons.items()}

    def loss(params: Any, rest: Any, batch: Batch, const: Message) -> Message:
        work.forwards = 0  # torch.compile runs this function once, and the count stays
        states = {n: {**params[n], **rest[n]} for n in skeletons}
        calls = {n: count_calls(lowered(make_call(net, states[n]), like), work) for n, net in skeletons.items()}
        nets = {n: Net(calls[n], params[n], heads[n]) for n in skeletons}
        return phase.loss(nets, batch, const)

    return vmap(loss)


class CompiledLoss:
    """A `Forward` compiled by torch.compile; if compiling fails, one remark is added and the plain function is used."""

    def __init__(self, plain: Forward, remarks: list[str]) -> None:
        self._plain, self._remarks = plain, remarks
        self._compiled: Forward | None = torch.compile(plain, dynamic=False)

    def __call__(self, params: Any, fixed: Any, batch: Batch, const: Message) -> Message:
        """Return the loss terms [k] of the clients; see `Forward`."""
        if self._compiled is not None:
            try:
                return self._compiled(params, fixed, batch, const)
            except Exception as problem:  # no C++ compiler, code that dynamo cannot trace, ...
                self._compiled = None
                reason = (str(problem).strip().splitlines() or [type(problem).__name__])[0]
                self._remarks.append(f"engine.compile has no effect here: torch.compile refuses ({reason[:200]})")
        return self._plain(params, fixed, batch, const)
