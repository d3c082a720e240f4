"""Networks of timm, MONAI and transformers by name: built without a download, with weights of files."""

from pathlib import Path

import pytest
import torch
from torch import nn

from fedmutual import models
from fedmutual.calling import call_network
from fedmutual.config import parse_config
from fedmutual.errors import ConfigError
from fedmutual.user_code.recorded_code import list_named_modules

pytestmark = pytest.mark.long


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("socket.socket.connect", lambda *_: pytest.fail("a network was asked for a file"))


@pytest.fixture
def bert(tmp_path: Path) -> Path:
    """The folder of a small BERT, as `save_pretrained` writes it."""
    transformers = pytest.importorskip("transformers")
    config = transformers.BertConfig(
        vocab_size=50, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16
    )
    torch.manual_seed(1)
    transformers.BertModel(config).save_pretrained(tmp_path / "bert")
    return tmp_path / "bert"


def build(name: str, shape: tuple[int, ...], classes: int = 3, **options: object) -> nn.Module:
    return models.build(name, shape, classes, torch.Generator().manual_seed(0), **options)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "shape", "of_pixels"),
    [
        ("timm:resnet10t", (2, 32, 32), False),
        ("timm:vit_tiny_patch16_224.augreg_in21k", (3, 32, 32), False),
        ("monai:DenseNet121", (1, 32, 32, 32), False),
        ("monai:resnet10", (1, 16, 16, 16), False),
        ("monai:UNet", (1, 16, 16, 16), True),
        ("monai:SegResNet", (1, 16, 16), True),
    ],
)
def test_a_name_is_built_for_the_shape_and_the_classes(name: str, shape: tuple[int, ...], of_pixels: bool) -> None:
    pytest.importorskip(name.partition(":")[0])
    x = torch.rand(2, *shape)
    net = build(name, shape, of_pixels=of_pixels, examples=x)
    assert call_network(net, x).shape == (2, 3, *(shape[1:] if of_pixels else ()))


def test_a_folder_of_transformers_gives_the_architecture_and_as_pretrained_its_weights(bert: Path) -> None:
    ids = torch.randint(0, 50, (2, 7), generator=torch.Generator().manual_seed(0))
    name = f"hf:{bert}"
    weights = models.find_initial_weights(str(bert), name, "model.pretrained")
    net, random = build(name, (7,), examples=ids, weights=weights), build(name, (7,), examples=ids)
    assert call_network(net, ids).shape == (2, 3)
    key = "bert.embeddings.word_embeddings.weight"
    assert torch.equal(net.state_dict()[key], weights.state[key])  # type: ignore[index]
    assert not torch.equal(random.state_dict()[key], weights.state[key])  # type: ignore[index]
    mask = torch.ones_like(ids)
    assert torch.equal(call_network(net.eval(), {"input_ids": ids, "attention_mask": mask}), call_network(net, ids))


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("timm:resnet18x", "is no network of timm; did you mean 'resnet18'?"),
        ("timm:hf-hub:timm/resnet18.a1_in1k", "is no network of timm"),
        ("monai:DenseNet12", "is no network of monai.networks.nets; did you mean 'DenseNet1"),
        ("monai:ViT", "cannot be made: missing a required argument: 'patch_size'"),
        ("hf:bert-base-uncased", "has no file bert-base-uncased/config.json; name a folder that `save_pretrained` wrote"),
    ],
)
def test_a_name_that_a_library_does_not_have(name: str, sentence: str) -> None:
    with pytest.raises(ConfigError) as problem:
        build(name, (1, 32, 32))
    assert sentence in str(problem.value)


@pytest.mark.parametrize(("name", "extra"), [("timm:resnet18", "timm"), ("monai:UNet", "monai"), ("hf:x", "text")])
def test_a_library_that_is_not_installed(name: str, extra: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fedmutual.models.libraries.find_spec", lambda _: None)
    with pytest.raises(ConfigError, match=rf"needs the package \w+: pip install 'fedmutual\[{extra}\]'"):
        build(name, (1, 32, 32))


def test_a_name_of_a_library_is_no_module_of_the_user() -> None:
    tables = {
        "partition": {"clients": 3},
        "model": {"shared": "timm:resnet18", "personal": ["monai:UNet", "hf:x", "my:Net"]},
    }
    assert list_named_modules(tables) == {"my": "model.personal"}
    assert models.list_user_networks(parse_config(tables, "test")) == ("my:Net",)
