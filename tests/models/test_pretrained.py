"""What networks begin with: ImageNet's weights from the cache or not at all, a file's, a folder's, and what does not fit."""

import hashlib
import pickle
import socket
from collections.abc import Callable
from pathlib import Path
from urllib.error import HTTPError, URLError

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, hub, nn

from fedmutual import models
from fedmutual.errors import ConfigError
from fedmutual.files import SILENCE_LIMIT
from fedmutual.models import pretrained

pytestmark = pytest.mark.long

KEY = "model.pretrained"
COLOURS = (3, 96, 96)
LENET = ("lenet5", (1, 28, 28))


def made(name: str, shape: tuple[int, ...], classes: int, seed: int = 0, source: Path | str | None = None) -> nn.Module:
    weights = None if source is None else models.find_initial_weights(str(source), name, KEY)
    return models.build(name, shape, classes, torch.Generator().manual_seed(seed), weights=weights)


def refusal(source: Path | str, name: str = "lenet5", shape: tuple[int, ...] = (1, 28, 28), classes: int = 3) -> str:
    with pytest.raises(ConfigError) as problem:
        made(name, shape, classes, source=source)
    message = str(problem.value)
    assert "\n" not in message
    assert message.startswith(f"key {KEY!r}: ")
    return message.removeprefix(f"key {KEY!r}: ")


def differing(a: nn.Module, b: nn.Module) -> list[str]:
    other_state = b.state_dict()
    return [k for k, v in a.state_dict().items() if v.shape != other_state[k].shape or not torch.equal(v, other_state[k])]


# Files


@pytest.mark.parametrize(
    ("name", "head"),
    [
        ("torchvision:resnet18", "fc"),
        ("torchvision:resnet34", "fc"),
        ("torchvision:resnet50", "fc"),
        ("torchvision:alexnet", "classifier.6"),
        ("torchvision:vgg11", "classifier.6"),
        ("torchvision:mobilenet_v2", "classifier.1"),
    ],
)
def test_the_networks_of_the_paper_take_96_x_96_and_begin_with_torchvisions_tensors(
    name: str, head: str, tmp_path: Path
) -> None:
    """A file of 1,000 classes as torchvision publishes them, all of one number: what is not that was drawn."""
    from torchvision.models import get_model

    with torch.device("meta"):  # names and shapes by torchvision itself, nothing drawn
        published = get_model(name.removeprefix("torchvision:")).state_dict()
    file = tmp_path / "weights.safetensors"
    given = {k: torch.full(v.shape, 0.0625, dtype=v.dtype) for k, v in published.items()}
    save_file(given, file)
    del given
    net = made(name, COLOURS, 7, source=file)
    state = net.state_dict()
    assert state.keys() == published.keys()
    drawn = {k for k, v in state.items() if v.is_floating_point() and not bool((v == 0.0625).all())}
    assert drawn == {f"{head}.weight", f"{head}.bias"}
    assert state[f"{head}.weight"].shape[0] == 7
    assert net.training
    with torch.no_grad():
        assert net.eval()(torch.zeros(1, *COLOURS)).shape == (1, 7)


HEAD = ["classifier.fc3.weight", "classifier.fc3.bias"]


@pytest.mark.parametrize("classes", [10, 3])
def test_the_head_is_the_one_that_random_weights_would_have(classes: int, tmp_path: Path) -> None:
    """A head of the right shape is new, too: its classes may stand in another order. No other stream moves."""
    other = made(*LENET, classes, seed=1)
    torch.save(other.state_dict(), tmp_path / "w.pth")
    before = torch.get_rng_state()
    net, random = made(*LENET, 3, source=tmp_path / "w.pth"), made(*LENET, 3)
    assert torch.equal(torch.get_rng_state(), before)
    assert differing(net, other) == HEAD
    assert differing(net, random) == [k for k in net.state_dict() if k not in HEAD]


def test_types_are_the_networks_and_counters_of_old_files_may_be_missing(tmp_path: Path) -> None:
    name, shape = "resnet18", (3, 8, 8)
    other = made(name, shape, 3, seed=1)
    old = {k: v.double() for k, v in other.state_dict().items() if not k.endswith("num_batches_tracked")}
    torch.save(old, tmp_path / "w.pth")
    net = made(name, shape, 3, source=tmp_path / "w.pth")
    assert differing(net, other) == ["classifier.weight", "classifier.bias"]
    assert {v.dtype for v in net.state_dict().values()} == {torch.float32, torch.int64}


def test_a_users_network_with_two_layers_of_the_size_of_its_classes(module: Callable[[str], str], tmp_path: Path) -> None:
    name = module("""
    class Two(nn.Module):
        def __init__(self, shape, classes):
            super().__init__()
            self.short, self.hidden = nn.Linear(4, classes), nn.LazyLinear(5)
            self.out = nn.Linear(5, classes)
        def forward(self, x):
            return self.short(x) + self.out(self.hidden(x))
    """)
    name = f"{name}:Two"
    other = made(name, (4,), 9, seed=1)
    save_file(other.state_dict(), tmp_path / "Two.safetensors")
    net = made(name, (4,), 3, source=tmp_path)  # a folder: what stands after the ":"
    assert set(net.state_dict()) - set(differing(net, other)) == {"hidden.weight", "hidden.bias"}


def test_of_a_folder_each_network_takes_its_own_file(tmp_path: Path) -> None:
    lenet, cnn = made(*LENET, 10, seed=1), made("cnn1", (1, 28, 28), 10, seed=1)
    torch.save(lenet.state_dict(), tmp_path / "lenet5.pth")
    save_file(cnn.state_dict(), tmp_path / "cnn1.safetensors")
    assert len(differing(made(*LENET, 3, source=tmp_path), lenet)) == 2
    assert len(differing(made("cnn1", (1, 28, 28), 3, source=tmp_path), cnn)) == 2
    assert refusal(tmp_path, "mlp") == (
        f"{tmp_path} has no weights of network 'mlp'; put mlp.safetensors or mlp.pth or mlp.pt there"
    )
    torch.save(lenet.state_dict(), tmp_path / "lenet5.pt")
    assert refusal(tmp_path) == (
        f"{tmp_path / 'lenet5.pth'} and {tmp_path / 'lenet5.pt'} are both for network 'lenet5'; remove one"
    )


def test_initial_weights_are_described_with_their_digest(tmp_path: Path) -> None:
    file = tmp_path / "w.safetensors"
    save_file({"a": torch.zeros(1)}, file)
    digest = hashlib.sha256(file.read_bytes()).hexdigest()[:12]
    about = models.find_initial_weights(str(file), "mlp", KEY).description
    assert about == f"weights of {file} (sha256 {digest}), a new head"


# What does not fit

CONV = "features.conv2.weight"


@pytest.mark.parametrize(
    ("change", "name", "why"),
    [
        (lambda s: s.update({CONV: torch.zeros(16, 6, 3, 3)}), CONV, "[16, 6, 3, 3] there and [16, 6, 5, 5]"),
        (lambda s: s.pop(CONV), CONV, "none there and [16, 6, 5, 5]"),
        (lambda s: s.update({f"module.{CONV}": s.pop(CONV)}), CONV, "none there and [16, 6, 5, 5]"),
        (lambda s: s.update({"norm.weight": torch.zeros(2)}), "norm.weight", "[2] there and none"),
    ],
)
def test_a_tensor_that_does_not_fit(
    change: Callable[[dict[str, Tensor]], object], name: str, why: str, tmp_path: Path
) -> None:
    state = dict(made(*LENET, 3, seed=1).state_dict())
    change(state)
    file = tmp_path / "w.safetensors"
    save_file(state, file)
    fix = "use weights of this network, or remove the key"
    assert refusal(file) == f"{file} does not fit network 'lenet5': {name!r} has the shape {why} here; {fix}"


class Trap:
    """What pickle would run."""

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return (pytest.fail, ("a pickle was run",))


def test_a_pickle_is_not_opened(tmp_path: Path) -> None:
    torch.save({"a": Trap()}, tmp_path / "new.pth")
    (tmp_path / "old.pth").write_bytes(pickle.dumps({"a": Trap()}, protocol=2))
    for file in ("new.pth", "old.pth"):
        assert "unpickling can run code" in refusal(tmp_path / file)


@pytest.mark.parametrize(
    ("content", "what"),
    [
        ([torch.zeros(1)], "no state dict, name -> tensor"),
        ({"epoch": 3, "weights": {"a": torch.zeros(1)}}, "no state dict, name -> tensor"),
        ({1: torch.zeros(1)}, "no state dict, name -> tensor"),
        ({"epoch": 3, "model": {"a": torch.zeros(1)}, "state_dict": {"a": torch.ones(1)}}, "several state dicts"),
    ],
)
def test_no_state_dict(content: object, what: str, tmp_path: Path) -> None:
    torch.save(content, tmp_path / "w.pth")
    assert refusal(tmp_path / "w.pth").endswith(f"holds {what}; write net.state_dict() into it")


@pytest.mark.parametrize("prefix", ["", "module.", "module._orig_mod.", "_orig_mod.module.", "model.", "net.0."])
@pytest.mark.parametrize("holder", [None, "state_dict", "model", "model_state_dict"])
def test_the_names_of_wrappers_are_left_out(prefix: str, holder: str | None, tmp_path: Path) -> None:
    other = made(*LENET, 3, seed=1)
    state = {f"{prefix}{k}": v for k, v in other.state_dict().items()}
    torch.save(state if holder is None else {"epoch": 3, "optimizer": {"state": {}}, holder: state}, tmp_path / "w.pth")
    assert differing(made(*LENET, 3, source=tmp_path / "w.pth"), other) == HEAD


def test_a_network_may_have_the_name_of_a_wrapper_itself(module: Callable[[str], str], tmp_path: Path) -> None:
    name = module("""
    class Own(nn.Module):
        def __init__(self, shape, classes):
            super().__init__()
            self.module = nn.Sequential(nn.Linear(4, 5), nn.Linear(5, classes))
        def forward(self, x):
            return self.module(x)
    """)
    other = made(f"{name}:Own", (4,), 3, seed=1)
    for prefix in ("", "module."):
        save_file({f"{prefix}{k}": v for k, v in other.state_dict().items()}, tmp_path / "w.safetensors")
        net = made(f"{name}:Own", (4,), 3, source=tmp_path / "w.safetensors")
        assert differing(net, other) == ["module.1.weight", "module.1.bias"]


@pytest.mark.parametrize("name", ["w.pth", "w.safetensors"])
@pytest.mark.parametrize("content", [b"", b"not weights at all", b"PK\x03\x04 cut off"])
def test_a_damaged_file(name: str, content: bytes, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(content)
    assert f"{tmp_path / name} " in refusal(tmp_path / name)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    assert refusal(tmp_path / "none.pth") == (
        f"there is no file or folder {tmp_path / 'none.pth'}; name a file of weights, a folder of such files, or 'imagenet'"
    )


# ImageNet's


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Torch hub's cache in an empty folder, and nobody asked yet."""
    monkeypatch.setenv("TORCH_HOME", str(tmp_path))
    monkeypatch.setattr(pretrained, "connection_errors", [])
    pretrained.try_fetch.cache_clear()
    yield tmp_path / "hub" / "checkpoints"
    pretrained.try_fetch.cache_clear()


@pytest.fixture
def requests(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The downloads that were tried; none has a connection."""
    tried: list[str] = []

    def no_connection(url: str, *_: object, **__: object) -> None:
        assert socket.getdefaulttimeout() == SILENCE_LIMIT
        tried.append(url)
        raise URLError("Name or service not known")

    monkeypatch.setattr(hub, "download_url_to_file", no_connection)
    return tried


def test_without_a_connection_weights_are_random_and_it_is_asked_once(cache: Path, requests: list[str]) -> None:
    waited = socket.getdefaulttimeout()
    first, second = (models.find_initial_weights("imagenet", name, KEY) for name in ("torchvision:resnet18", "alexnet"))
    assert socket.getdefaulttimeout() == waited
    assert (first.state, second.state) == (None, None)
    assert first.description == (
        "random weights: ImageNet's of torchvision:resnet18 could not be loaded "
        "(https://download.pytorch.org/models/resnet18-f37072fd.pth cannot be reached: Name or service not known)"
    )
    assert second.description == (  # its own file, not that of the network which was asked for first
        "random weights: ImageNet's of alexnet could not be loaded "
        "(https://download.pytorch.org/models/alexnet-owt-7be5be79.pth cannot be reached: Name or service not known)"
    )
    assert len(requests) == 1
    name, shape = "squeezenet1_1", (3, 32, 32)
    assert differing(made(name, shape, 3, source="imagenet"), made(name, shape, 3)) == []
    assert len(requests) == 1


def test_one_file_that_the_server_has_not_says_nothing_of_the_others(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tried = []

    def not_found(url: str, *_: object, **__: object) -> None:
        tried.append(url)
        raise HTTPError(url, 404, "Not Found", None, None)  # type: ignore[arg-type]

    monkeypatch.setattr(hub, "download_url_to_file", not_found)
    descriptions = [
        models.find_initial_weights("imagenet", name, KEY).description for name in ("resnet34", "alexnet", "alexnet")
    ]
    assert len(tried) == 2
    assert descriptions[0].endswith("(https://download.pytorch.org/models/resnet34-b627a593.pth: HTTP Error 404: Not Found)")


def test_what_lies_in_torch_hubs_cache_needs_no_connection(cache: Path, requests: list[str]) -> None:
    from torchvision.models import squeezenet1_1

    published = squeezenet1_1()
    cache.mkdir(parents=True)
    torch.save(published.state_dict(), cache / "squeezenet1_1-b8a52dc0.pth")
    models.find_initial_weights("imagenet", "alexnet", KEY)  # for which a connection is missed
    weights = models.find_initial_weights("imagenet", "squeezenet1_1", KEY)
    assert weights.description == "ImageNet's weights of squeezenet1_1 (IMAGENET1K_V1), a new head"
    net = made("squeezenet1_1", (3, 32, 32), 3, source="imagenet")
    assert differing(net, published) == ["classifier.1.weight", "classifier.1.bias"]
    assert len(requests) == 1


def test_a_damaged_cache_file_does_not_crash(cache: Path, requests: list[str]) -> None:
    cache.mkdir(parents=True)
    (cache / "alexnet-owt-7be5be79.pth").write_bytes(b"PK\x03\x04 cut off")
    weights = models.find_initial_weights("imagenet", "alexnet", KEY)
    assert weights.state is None
    assert f"({cache / 'alexnet-owt-7be5be79.pth'} cannot be read: " in weights.description
    assert requests == []


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("resnet18", "it is none of torchvision's networks; torchvision:resnet18 is torchvision's"),
        ("mlp", "it is none of torchvision's networks"),
        ("own_module:net", "it is none of torchvision's networks"),
    ],
)
def test_networks_that_imagenet_has_no_weights_of(name: str, why: str) -> None:
    weights = models.find_initial_weights("imagenet", name, KEY)
    assert weights == (f"random weights: ImageNet's of {name} could not be loaded ({why})", None, "")


def test_weights_of_the_time_of_the_papers() -> None:
    """resnet50 and mobilenet_v2 have two sets; of networks without the first, torchvision's own choice is taken."""
    assert [pretrained.choose_weights(name).name for name in ("resnet50", "mobilenet_v2", "vit_h_14")] == [
        "IMAGENET1K_V1",
        "IMAGENET1K_V1",
        "IMAGENET1K_SWAG_E2E_V1",
    ]
