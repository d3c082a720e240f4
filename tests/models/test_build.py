"""Networks by name: whose random numbers they take, torchvision's, a user's own, and every way it can go wrong."""

from collections.abc import Callable
from threading import Lock

import pytest
import torch
from torch import nn

from fedmutual import models
from fedmutual.errors import ConfigError
from fedmutual.models.copying import copy_or_make


def build(name: str, shape: tuple[int, ...] = (1, 28, 28), classes: int = 10, seed: int = 0) -> nn.Module:
    return models.build(name, shape, classes, torch.Generator().manual_seed(seed), "model.personal")


def refusal(name: str, shape: tuple[int, ...] = (1, 28, 28)) -> str:
    """The sentence with which a network is refused."""
    with pytest.raises(ConfigError) as problem:
        build(name, shape)
    message = str(problem.value)
    assert "\n" not in message
    assert message.startswith("key 'model.personal': ")
    return message.removeprefix("key 'model.personal': ")


@pytest.fixture(autouse=True)
def check_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let each test check each network, also those that an earlier test built."""
    monkeypatch.setattr(models, "checked_networks", set())


def same(a: nn.Module, b: nn.Module) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a.state_dict().values(), b.state_dict().values(), strict=True))


def test_a_network_that_cannot_be_copied_is_made_again() -> None:
    net, other = nn.Linear(2, 2), nn.Linear(2, 2)
    assert same(copy_or_make(net, lambda: other), net)
    net.lock = Lock()  # type: ignore[assignment]
    assert copy_or_make(net, lambda: other) is other


# Random numbers


@pytest.mark.parametrize("name", ["lenet5", "resnet18", "squeezenet1_1"])
def test_first_weights_come_from_the_stream_alone(name: str) -> None:
    shape = (3, 32, 32)
    torch.manual_seed(1)
    first = build(name, shape)
    torch.manual_seed(2)
    assert same(first, build(name, shape))
    assert not same(first, build(name, shape, seed=1))


@pytest.mark.parametrize(
    ("name", "side"), [("lenet5", 32), ("squeezenet1_1", 32), ("squeezenet1_1", 8), ("no-such-network", 32)]
)
def test_no_other_stream_moves(name: str, side: int) -> None:
    stream = torch.Generator().manual_seed(3)
    before = torch.get_rng_state(), stream.get_state()
    try:
        models.build(name, (3, side, side), 10, stream)
    except ConfigError:
        assert side == 8 or name == "no-such-network"
    assert torch.equal(torch.get_rng_state(), before[0])
    assert torch.equal(stream.get_state(), before[1])


# torchvision


def test_a_network_of_torchvision() -> None:
    from torchvision.models import squeezenet1_1

    net = build("squeezenet1_1", (3, 32, 32), classes=7)
    assert net.state_dict().keys() == squeezenet1_1(num_classes=7).state_dict().keys()
    assert net(torch.zeros(2, 3, 32, 32)).shape == (2, 7)


def test_networks_with_auxiliary_outputs_train_on_the_main_one() -> None:
    assert isinstance(build("googlenet", (3, 32, 32)).train()(torch.zeros(2, 3, 32, 32)), torch.Tensor)


def test_a_stem_for_colours() -> None:
    assert refusal("squeezenet1_1", (1, 28, 28)) == (
        "network 'squeezenet1_1' has a stem for images of 3 channels, but these have 1; choose a network of fedmutual's "
        "own, or a factory 'module:name' that replaces the stem"
    )
    assert "takes images (channels, height, width), not examples of shape (64,)" in refusal("squeezenet1_1", (64,))


@pytest.mark.parametrize(
    ("name", "side", "sentence"),
    [
        (
            "alexnet",
            28,
            "takes images of at least 63 x 63 pixels, but these have 28 x 28; choose another network, or larger",
        ),
        ("inception_v3", 28, "takes images of at least 75 x 75 pixels, but these have 28 x 28; choose another network, or"),
        ("vit_b_32", 256, "does not take examples of shape (3, 256, 256): AssertionError: Wrong image height! Expected 224"),
    ],
)
def test_an_image_of_another_size_than_a_network_of_torchvision_takes(name: str, side: int, sentence: str) -> None:
    assert refusal(name, (3, side, side)).startswith(f"network {name!r} {sentence}")


# Names


@pytest.mark.parametrize(
    ("name", "near"),
    [("LeNet", "lenet5"), ("mpl", "mlp"), ("CNN2", "cnn2"), ("alexnte", "alexnet"), ("resnet-50", "resnet50")],
)
def test_the_nearest_name(name: str, near: str) -> None:
    assert refusal(name) == f"there is no network {name!r}; did you mean {near!r}?"


def test_a_name_like_no_other() -> None:
    known = f"{', '.join(models.NAMES)}, torchvision's, and 'module:factory'"
    assert refusal("transformer-of-ours") == f"there is no network 'transformer-of-ours'; there are {known}"


# A user's own

Module = Callable[[str], str]

FACTORIES = {
    "shape_classes": "def make(shape, classes): return nn.Sequential(nn.Flatten(), nn.Linear(shape[1] * shape[2], classes))",
    "input_num": "def make(*, input_shape, num_classes):\n"
    "    return nn.Sequential(nn.Flatten(), nn.Linear(input_shape[1] * input_shape[2], num_classes))",
    "classes_only": "def make(classes, width=5): return nn.Sequential(nn.Flatten(), nn.Linear(784, classes))",
    "nothing": "def make(): return nn.Sequential(nn.Flatten(), nn.Linear(784, 10))",
    "anything": "def make(**kwargs):\n    assert not kwargs\n    return nn.Sequential(nn.Flatten(), nn.Linear(784, 10))",
    "class": """
    class make(nn.Module):
        def __init__(self, shape, num_classes):
            super().__init__()
            self.head = nn.Linear(shape[1] * shape[2], num_classes)
        def forward(self, x):
            return self.head(x.flatten(1))
    """,
    "lazy": "def make(classes): return nn.Sequential(nn.Flatten(), nn.LazyLinear(classes))",
}


@pytest.mark.parametrize("source", FACTORIES.values(), ids=FACTORIES)
def test_a_factory_is_given_what_it_asks_for(source: str, module: Module) -> None:
    name = f"{module(source)}:make"
    net = build(name)
    assert net(torch.zeros(3, 1, 28, 28)).shape == (3, 10)
    assert net.training
    assert same(net, build(name))
    assert not same(net, build(name, seed=1))


def test_frozen_weights_stay_frozen_and_statistics_untouched(module: Module) -> None:
    source = """
    def make():
        net = nn.Sequential(nn.Flatten(), nn.BatchNorm1d(784), nn.Linear(784, 10))
        net[2].bias.requires_grad_(False)
        return net
    """
    net = build(f"{module(source)}:make")
    assert [p.requires_grad for p in net.parameters()] == [True, True, True, False]
    assert net[1].num_batches_tracked == 0


WRONG = [
    ("", "module 'NAME' has no 'make'"),
    ("make = nn.Linear(784, 10)", "is an instance of Linear; name a function or class that makes a new torch.nn.Module"),
    ("make = 3", "is an instance of int; name a function or class"),
    ("def make(): return 'mlp'", "returned str, but must return a torch.nn.Module"),
    ("def make(): return nn.Linear", "returned type, but must return a torch.nn.Module"),
    ("def make(width): return nn.Linear(784, 10)", "cannot be made: TypeError: missing a required argument: 'width'"),
    ("def make(): raise KeyError('weights')", "cannot be made: KeyError: 'weights'"),
    ("def make(): raise OSError('one\\ntwo')", "cannot be made: OSError: one"),
    (
        "def make(): return nn.Sequential(nn.Flatten(), nn.Linear(784, 7))",
        "gives outputs [2, 7] for 2 examples of 10 classes, not [2, 10]; let its factory take the argument `classes`",
    ),
    ("def make(): return nn.Linear(28, 10)", "gives outputs [2, 1, 28, 10] for 2 examples of 10 classes, not [2, 10]"),
    ("def make(): return nn.Linear(27, 10)", "does not take examples of shape (1, 28, 28): RuntimeError: "),
    ("def make(): return nn.LSTM(28, 10)", "does not take examples of shape (1, 28, 28): "),
    (
        "class make(nn.Module):\n    def forward(self, x): return 3",
        "returns int, but must return a tensor of logits, a tuple that begins with it, or a dictionary or an object",
    ),
    ("class make(nn.Module):\n    pass", "does not take examples of shape (1, 28, 28): NotImplementedError: "),
    ("import no_such_package", "module 'NAME' cannot be imported: No module named 'no_such_package'"),
    ("1 / 0", "module 'NAME' cannot be imported: ZeroDivisionError: division by zero"),
    ("def make(:", "module 'NAME' cannot be imported: SyntaxError: "),
]


TRAINS = """
class make(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.head, self.calls = nn.BatchNorm1d(784), nn.Linear(784, 10), 0
    def forward(self, x):
        self.calls += self.training
        out = self.head(self.norm(x.flatten(1)))
        if self.training:
            LINE
        return out
"""


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("self.head(x)", "does not take examples of shape (1, 28, 28) in training mode: RuntimeError: "),
        ("return None", "returns NoneType, but must return a tensor of logits, a tuple that begins with it, or a"),
        ("return out[:1]", "gives outputs [1, 10] in training mode for 2 examples of 10 classes, not [2, 10]; let its"),
        ("out = out.exp(); out += 1", "cannot be trained: RuntimeError: "),
    ],
)
def test_a_network_that_fails_in_training_mode_only(line: str, why: str, module: Module) -> None:
    assert why in refusal(f"{module(TRAINS.replace('LINE', line))}:make")


def test_the_try_in_training_mode_leaves_no_trace(module: Module) -> None:
    net = build(f"{module(TRAINS.replace('LINE', 'torch.rand(1)'))}:make")
    assert net.calls == 0
    assert net.norm.num_batches_tracked == 0
    assert torch.equal(net.norm.running_var, torch.ones(784))
    assert all(p.grad is None for p in net.parameters())
    assert net.training


@pytest.mark.parametrize(("source", "why"), WRONG)
def test_a_factory_that_does_not_work(source: str, why: str, module: Module) -> None:
    name = module(source)
    assert why.replace("NAME", name) in refusal(f"{name}:make")


def test_a_module_that_is_not_there(module: Module) -> None:
    """Also where it is imported by a module whose name begins with the same letters."""
    name = module("import own_")
    assert refusal("no_such_module:make").startswith("there is no module 'no_such_module'; put no_such_module.py into ")
    assert refusal(f"{name}:make") == f"module {name!r} cannot be imported: No module named 'own_'"


def test_a_network_is_checked_again_only_with_other_layers_or_settings(module: Module) -> None:
    """Clients build equal networks, and each check is a forward and a backward pass; a user's factory may change."""
    source = """
    layers, slopes = [nn.Tanh, nn.ReLU], [0.1, 0.2]
    def equal(classes): return nn.Sequential(nn.Flatten(), nn.Linear(2688, classes))
    def lazy(classes): return nn.Sequential(nn.Flatten(), nn.LazyLinear(classes))
    def changing(classes): return nn.Sequential(nn.Flatten(), nn.Linear(2688, classes), layers.pop()())
    def setting(classes): return nn.Sequential(nn.Flatten(), nn.Linear(2688, classes), nn.LeakyReLU(slopes.pop()))
    """
    own = module(source)
    names = ("mlp", "squeezenet1_1", *(f"{own}:{factory}" for factory in ("equal", "lazy", "changing", "setting")))
    passes: list[nn.Module] = []
    hook = nn.modules.module.register_module_forward_pre_hook(lambda net, _: passes.append(net))
    counts: dict[str, list[int]] = {}
    try:
        for name in names:
            counts[name] = []
            for _ in range(2):
                passes.clear()
                build(name, (3, 32, 28), classes=11)
                counts[name].append(len(passes))
    finally:
        hook.remove()
    assert all(first for first, _ in counts.values())
    assert [name for name, (_, again) in counts.items() if again] == [f"{own}:{f}" for f in ("lazy", "changing", "setting")]
    assert counts[f"{own}:lazy"][0] == counts[f"{own}:lazy"][1]


def test_a_network_is_checked_again_for_other_outputs() -> None:
    stream = torch.Generator()
    models.build("mlp", (1, 4, 4), 3, stream, of_pixels=False)
    with pytest.raises(ConfigError, match="gives outputs"):
        models.build("mlp", (1, 4, 4), 3, stream, of_pixels=True)
