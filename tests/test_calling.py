"""How a network is called: its inputs by name or as one, whatever it returns, and weights of another type."""

from collections import namedtuple
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fedmutual.calling import NoLogits, call_network, find_logits

A, B = torch.arange(6.0).reshape(2, 3), torch.ones(2, 3)
Named = namedtuple("Named", ["logits", "aux"])
Second = namedtuple("Second", ["features", "logits"])


@pytest.mark.parametrize(
    "output",
    [
        A,
        (A, B),
        [None, A, B],
        Named(A, B),
        Second(B, A),
        {"logits": A, "out": B},
        {"aux": B, "out": A},
        {"any": A, "loss": None},
        SimpleNamespace(logits=A, loss=B),
    ],
)
def test_the_logits_of_an_output(output: Any) -> None:
    assert find_logits(output) is A


@pytest.mark.parametrize("output", [None, 3, (), {}, {"a": A, "b": B}, SimpleNamespace(out=A), SimpleNamespace(logits=3)])
def test_an_output_without_logits(output: Any) -> None:
    with pytest.raises(NoLogits, match=f"returns {type(output).__name__}.*, but must return a tensor of logits"):
        find_logits(output)


class ByName(nn.Module):
    def forward(self, image: Tensor, table: Tensor, mask: Tensor | None = None) -> Tensor:
        return image + 2 * table + (0 if mask is None else mask)


class Everything(nn.Module):
    def forward(self, **inputs: Tensor) -> Tensor:
        return inputs["image"] + 2 * inputs["table"] + inputs.get("mask", 0)


class AsOne(nn.Module):
    def forward(self, x: dict[str, Tensor]) -> Tensor:
        return x["image"] + 2 * x["table"] + x.get("mask", 0)


@pytest.mark.parametrize("net", [ByName(), Everything(), AsOne()])
@pytest.mark.parametrize("mask", [{}, {"mask": B}])
def test_several_inputs_by_name_or_as_one(net: nn.Module, mask: dict[str, Tensor]) -> None:
    assert torch.equal(call_network(net, {"image": A, "table": B} | mask), A + 2 * B + len(mask))


def test_a_mask_that_a_network_does_not_take_is_left_out() -> None:
    net = nn.Linear(3, 1)
    assert torch.equal(call_network(net, {"x": A, "mask": B}), net(A))
    with pytest.raises(TypeError):  # an input is never left out
        call_network(net, {"x": A, "table": B})


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_weights_of_another_type_get_inputs_of_their_type(dtype: torch.dtype) -> None:
    net = nn.Linear(3, 2).to(dtype)
    output = call_network(net, A)
    assert output.dtype == torch.float32
    assert torch.equal(output, net(A.to(dtype)).float())
    other = {"bias": torch.ones(2, dtype=dtype), "weight": torch.zeros(2, 3, dtype=dtype)}
    assert torch.equal(call_network(net, A, other), torch.ones(2, 2))
