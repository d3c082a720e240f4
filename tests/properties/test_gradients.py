"""The projected gradient: by hand, against solvers of the problem it solves, its promise as a property, and stacked."""

import doctest
import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from scipy.optimize import nnls
from torch import Tensor

from fedmutual import gradients
from fedmutual.core import Message
from fedmutual.gradients import conflict, pcgrad, project

SHAPES = {"conv.weight": (2, 1, 3), "conv.bias": (2,), "scale": ()}  # 9 numbers


def vector(g: Message) -> np.ndarray:
    return torch.cat([g[name].flatten() for name in sorted(g)]).numpy()


def draw(seed: int, dtype: torch.dtype = torch.float64) -> Message:
    rng = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=rng, dtype=torch.float64).to(dtype) for name, shape in SHAPES.items()}


def times(a: float, g: Message) -> Message:
    return {name: a * t for name, t in g.items()}


def orthogonal(g: Message) -> Message:
    """At a right angle to g, exactly: its first two numbers, swapped, one with the other sign."""
    turned = {name: torch.zeros_like(t) for name, t in g.items()}
    turned["conv.bias"] = torch.stack([-g["conv.bias"][1], g["conv.bias"][0]])
    return turned


A, B = draw(0), draw(1)
DEGENERATE = {
    "both zero": (times(0, A), times(0, A)),
    "the local one zero": (A, times(0, A)),
    "the public one zero": (times(0, A), A),
    "equal": (A, A),
    "parallel": (A, times(3, A)),
    "opposite": (A, times(-1, A)),
    "opposite, far longer": (A, times(-1e6, A)),
    "opposite, far shorter": (A, times(-1e-6, A)),
    "orthogonal": (A, orthogonal(A)),
    "all but orthogonal, against": (A, {k: v - 1e-9 * A[k] for k, v in orthogonal(A).items()}),
    "all but orthogonal, with": (A, {k: v + 1e-9 * A[k] for k, v in orthogonal(A).items()}),
    "all but opposite": (A, {k: 1e-7 * B[k] - v for k, v in A.items()}),
}
RANDOM = {f"random {seed}": (draw(2 * seed), draw(2 * seed + 1)) for seed in range(20)}
PAIRS = DEGENERATE | RANDOM
pairs = pytest.mark.parametrize(("g_pub", "g_loc"), list(PAIRS.values()), ids=list(PAIRS))


HAND = {
    # <(1, 2, 2), (0, -3, 0)> = -6 and <g_loc, g_loc> = 9, so v = 2/3 and g = (1, 2, 2) + 2/3 (0, -3, 0) = (1, 0, 2)
    "against": (project, {"w": [[1.0, 2.0]], "b": 2.0}, {"w": [[0.0, -3.0]], "b": 0.0}, {"w": [[1.0, 0.0]], "b": 2.0}, 1),
    # tensor by tensor w would be projected (-1 < 0); together <(1, 4), (-1, 1)> = 3, and nothing is
    "one product": (project, {"w": [1.0], "b": [4.0]}, {"w": [-1.0], "b": [1.0]}, {"w": [1.0], "b": [4.0]}, 0),
    # <(2, 0, 1), (-1, 5, 0)> = -2, <g_loc, g_loc> = 26, v = 1/13: a name of only one is zero in the other
    "other names": (
        project,
        {"both": [2.0], "pub": [1.0]},
        {"loc": [5.0], "both": [-1.0]},
        {"both": [2 - 1 / 13], "pub": [1.0], "loc": [5 / 13]},
        1,
    ),
    "no name in common": (project, {"a": [1.0, 1.0]}, {"b": [-1.0]}, {"a": [1.0, 1.0], "b": [0.0]}, 0),
    # <p, l> = -5, <p, p> = 5, <l, l> = 10: p + 5/10 l = (1.5, 0.5) and l + 5/5 p = (2, -1)
    "pcgrad": (pcgrad, {"w": [1.0, 2.0]}, {"w": [1.0, -3.0]}, {"w": [3.5, -0.5]}, 1),
    "pcgrad, turned": (pcgrad, {"w": [1.0, -3.0]}, {"w": [1.0, 2.0]}, {"w": [3.5, -0.5]}, 1),
    "pcgrad, agreeing": (pcgrad, {"w": [1.0, 2.0]}, {"w": [3.0, -1.0]}, {"w": [4.0, 1.0]}, 0),  # <., .> = 1: the sum
}


@pytest.mark.parametrize(("function", "g_pub", "g_loc", "expected", "against"), list(HAND.values()), ids=list(HAND))
def test_by_hand(function, g_pub, g_loc, expected, against) -> None:
    pub, loc, wanted = ({k: torch.tensor(v) for k, v in g.items()} for g in (g_pub, g_loc, expected))
    torch.testing.assert_close(function(pub, loc), wanted, rtol=0, atol=1e-6)
    assert conflict(pub, loc).item() == against


@pytest.mark.parametrize("function", [project, pcgrad])
def test_the_order_of_the_local_gradient_changes_no_bit(function) -> None:
    for g_pub, g_loc in RANDOM.values():
        more = {name + " of g_loc only": tensor for name, tensor in g_loc.items()}
        items = (g_loc | more).items()
        in_order, reversed_order = (function(g_pub, dict(ordered)) for ordered in (items, reversed(items)))
        assert all(torch.equal(tensor, reversed_order[name]) for name, tensor in in_order.items())


@pairs
def test_against_the_dual_by_nnls(g_pub: Message, g_loc: Message) -> None:
    """min over v >= 0 of ||g_pub + v g_loc||^2, and the same with the two in each other's place for PCGrad."""
    p, loc = vector(g_pub), vector(g_loc)

    def solved(g: np.ndarray, wall: np.ndarray) -> np.ndarray:
        return g + nnls(wall[:, None], -g)[0] * wall

    np.testing.assert_allclose(vector(project(g_pub, g_loc)), solved(p, loc), rtol=0, atol=1e-9)
    both = solved(p, loc) + solved(loc, p)
    np.testing.assert_allclose(vector(pcgrad(g_pub, g_loc)), both, rtol=0, atol=1e-9 * max(1, abs(loc).max()))


@pairs
def test_the_reported_conflict_tells_whether_the_gradient_was_projected(g_pub: Message, g_loc: Message) -> None:
    share = conflict(g_pub, g_loc)
    assert share.shape == ()
    assert share.item() == (exactly(torch.tensor(vector(g_pub)), torch.tensor(vector(g_loc))) < 0)
    unmoved = all(torch.equal(project(g_pub, g_loc)[name], t) for name, t in g_pub.items())
    assert unmoved == (share.item() == 0)


@st.composite
def two_gradients(draw) -> tuple[Tensor, Tensor]:
    """Two vectors of one type, 1 to 12 numbers: zeros, huge and tiny ones, equal, opposite and rescaled ones among them."""
    dtype, small, large, width = draw(
        st.sampled_from([(torch.float32, 2.0**-50, 2.0**50, 32), (torch.float64, 2.0**-450, 2.0**450, 64)])
    )
    numbers = st.one_of(
        st.just(0.0),
        st.floats(small, large, width=width),
        st.floats(-large, -small, width=width),
        st.floats(-4, 4, width=16),
    )
    size = draw(st.integers(1, 12))
    vectors = st.lists(numbers, min_size=size, max_size=size).map(lambda v: torch.tensor(v, dtype=dtype))
    g_pub = draw(vectors)
    related = st.sampled_from([-1.0, 1.0, -3.0, 1e-3, -1e-3]).map(lambda a: a * g_pub)
    return g_pub, draw(st.one_of(vectors, related))


def exactly(a: Tensor, b: Tensor) -> Fraction:
    """<a, b> without rounding."""
    return sum((Fraction(x) * Fraction(y) for x, y in zip(a.tolist(), b.tolist(), strict=True)), Fraction(0))


def length(a: Tensor) -> float:
    return math.hypot(*a.tolist())


@settings(max_examples=500, deadline=None)
@given(two_gradients())
@example((torch.tensor([1.0, 1.0], dtype=torch.float64), torch.tensor([-1e-170, 0.0], dtype=torch.float64)))  # no 1e-340
def test_never_against_the_local_gradient(two: tuple[Tensor, Tensor]) -> None:
    """<g, g_loc> >= 0 up to rounding, both sides of which are exact here.

    With n numbers, u = 2^-53, and u_t, e_t the rounding unit and smallest number of the gradients' type: each term of the
    two sums is multiplied once and added at most n - 1 times, a factor of at most (1 + u)^n; v and v * wall round once
    each, so <g_pub, g_loc> and v <g_loc, g_loc>, which cancel, leave at most (2 n + 2) u |g_pub| |g_loc|. The entries of
    g round once in double precision and once in their own type: (u + u_t) |g| |g_loc|, and |g| <= |g_pub|; where they
    are subnormal, e_t |g_loc| each. The factor 1.01 takes the products of these.
    """
    g_pub, g_loc = two
    g = project({"w": g_pub}, {"w": g_loc})["w"]
    n, u, kind = len(g), 2.0**-53, torch.finfo(g.dtype)
    rounding = (2 * n + 3) * u + kind.eps / 2
    bound = 1.01 * rounding * length(g_pub) * length(g_loc) + n * kind.smallest_normal * kind.eps * length(g_loc)
    assert exactly(g, g_loc) >= -Fraction(bound)
    if exactly(g_pub, g_loc) > Fraction(n * 1.01 * u * length(g_pub) * length(g_loc)):  # and not by rounding
        assert torch.equal(g, g_pub)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_types_and_shapes_stay(dtype: torch.dtype) -> None:
    g_pub, g_loc = draw(0, dtype), times(-1, draw(0, dtype))
    for function in (project, pcgrad):
        for name, t in function(g_pub, g_loc).items():
            assert (t.dtype, t.shape) == (dtype, g_pub[name].shape)
    assert conflict(g_pub, g_loc).dtype == torch.get_default_dtype()


def test_sums_are_in_double_precision() -> None:
    # 2^24 + 1 is no float32, so that in float32 <g_pub, g_loc> = 2^24 - (2^24 + 1) would be 0 instead of -1
    g_pub = {"w": torch.tensor([-(2.0**24), -1.0, 2.0**24])}
    g_loc = {"w": torch.ones(3)}
    assert conflict(g_pub, g_loc).item() == 1


def test_stacked_is_the_loop() -> None:
    kinds = [(a, b) for a, b in PAIRS.values()]
    stacks = [{name: torch.stack([kind[i][name] for kind in kinds]) for name in SHAPES} for i in (0, 1)]
    for function in (project, pcgrad):
        at_once = torch.func.vmap(function)(*stacks)
        for k, kind in enumerate(kinds):
            expected = function(*kind)
            for name, t in expected.items():
                scale = max(1.0, max(float(v.abs().max()) for v in kind[1].values()))
                torch.testing.assert_close(at_once[name][k], t, rtol=0, atol=1e-14 * scale)
    share = torch.func.vmap(conflict)(*stacks)
    assert share.tolist() == [conflict(*kind).item() for kind in kinds]
    assert 0 < share.sum() < len(kinds)  # some of both


def test_nothing_given_is_touched() -> None:
    g_pub, g_loc = draw(0), times(-1, draw(0))
    before = [{name: t.clone() for name, t in g.items()} for g in (g_pub, g_loc)]
    for function in (project, pcgrad):
        for t in function(g_pub, g_loc).values():
            t.add_(1)
    for g, old in zip((g_pub, g_loc), before, strict=True):
        assert all(torch.equal(g[name], t) for name, t in old.items())


def test_a_nan_is_not_hidden() -> None:
    good, bad = {"w": torch.ones(2)}, {"w": torch.tensor([1.0, math.nan])}
    for a, b in ((good, bad), (bad, good)):
        assert project(a, b)["w"].isnan().any()


def test_gradients_of_two_networks_are_refused() -> None:
    with pytest.raises(ValueError, match=r"^'w' has shape \(3,\) in one gradient, \(1,\) in the other$"):
        project({"w": torch.ones(3)}, {"w": torch.ones(1)})


def test_the_examples_of_the_docstrings() -> None:
    tried = doctest.testmod(gradients)
    assert tried.attempted > 0
    assert tried.failed == 0
