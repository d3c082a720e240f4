"""Networks of every kind are trained, stored and rebuilt by `federate`: tensors, copies and outputs of all sorts."""

from collections.abc import Callable
from functools import partial
from threading import Lock

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import fedmutual
from fedmutual import Site

pytestmark = [pytest.mark.run, pytest.mark.filterwarnings("ignore")]

RNG = np.random.default_rng(0)
X = RNG.normal(size=(60, 4)).astype(np.float32)
Y = (X[:, 0] > 0).astype(int)


class Fourier(nn.Module):
    """Complex weights, and a complex buffer."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, classes, dtype=torch.complex64))
        self.register_buffer("phase", torch.tensor([1j, 1, -1j]))

    def forward(self, x: Tensor) -> Tensor:
        return ((torch.fft.rfft(x) * self.phase) @ self.weight).real


class Hooked(nn.Module):
    """Reads what a hook kept, and cannot be copied: the hook refers to this network."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.body, self.head, self.kept = nn.Linear(4, 8), nn.Linear(8, classes), dict[str, Tensor]()
        self.body.register_forward_hook(lambda _, inputs, output: self.kept.update(body=output))

    def forward(self, x: Tensor) -> Tensor:
        self.body(x)
        return self.head(self.kept["body"].relu())


LOCK = Lock()


class Locked(nn.Linear):
    """Cannot be copied: it holds a lock, which is one for all networks, so that they are alike."""

    def __init__(self, classes: int) -> None:
        super().__init__(4, classes)
        self.lock = LOCK


class Returning(nn.Module):
    def __init__(self, classes: int, form: str) -> None:
        super().__init__()
        self.head, self.form = nn.Linear(4, classes), form

    def forward(self, x: Tensor) -> object:
        out = self.head(x)
        return {"tuple": (out, x), "logits": {"logits": out, "x": x}, "out": {"aux": out + 1, "out": out}}[self.form]


def weight_norm(classes: int) -> nn.Module:
    return nn.Sequential(nn.utils.weight_norm(nn.Linear(4, classes)))


def lazy(classes: int) -> nn.Module:
    return nn.Sequential(nn.LazyLinear(8), nn.ReLU(), nn.LazyLinear(classes))


def half(classes: int) -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, classes)).bfloat16()


RETURNING = (partial(Returning, form=form) for form in ("tuple", "logits", "out"))
MAKERS = [Fourier, Hooked, Locked, weight_norm, lazy, half, *RETURNING]


@pytest.mark.parametrize("engine", ["inprocess", "stacked"])
@pytest.mark.parametrize("make", MAKERS, ids=lambda m: m.keywords["form"] if isinstance(m, partial) else m.__name__)
def test_a_network_is_trained_and_rebuilt(make: Callable[..., nn.Module], engine: str, tmp_path) -> None:
    sites = {name: Site(train=(X[k::2], Y[k::2])) for k, name in enumerate("ab")}
    settings = {"split.test": 0.3}
    run = fedmutual.federate(
        sites, "fml", make, rounds=3, lr=0.1, batch_size=8, engine=engine, settings=settings, out=tmp_path / "r"
    )
    last = run.history().query("metric == 'accuracy' and model == 'global' and round == 3")["value"]
    assert last.mean() > 0.7
    remark = "clients a, b step one after the other, not stacked: their networks cannot be copied (cannot pickle"
    assert (remark in (tmp_path / "r/log.txt").read_text()) == (make is Locked and engine == "stacked")
    net = run.global_model()
    assert net.state_dict().keys() == make(classes=2).state_dict().keys()
    answers = run.predict(X[:5]).to_numpy()
    assert np.isfinite(answers).all()
    again = fedmutual.Run(tmp_path / "r", models={"shared": make})
    np.testing.assert_array_equal(again.predict(X[:5]).to_numpy(), answers)


def test_an_object_with_a_hook_on_itself_is_refused_with_the_fix() -> None:
    with pytest.raises(fedmutual.UserError, match=r"a hook of its layer Linear refers to .* give a function"):
        fedmutual.federate({"a": Site(train=(X, Y))}, "fml", Hooked(2), rounds=1)


def test_logits_with_the_classes_first_are_refused_also_of_two_classes() -> None:
    class Transposed(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x).T

    with pytest.raises(fedmutual.UserError, match=r"return \[batch, classes\]"):
        fedmutual.federate({"a": Site(train=(X, Y))}, "fml", Transposed(4, 2), rounds=1)
