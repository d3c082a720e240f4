"""Networks by name: fedmutual's, torchvision's, and "module:factory". Initial weights come only from a given stream."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from fedmutual.calling import (
    Inputs,
    NoLogits,
    Shape,
    Shapes,
    call_network,
    find_image_shape,
    format_shape,
    get_shape,
    list_tensors,
    map_inputs,
)
from fedmutual.config import Config
from fedmutual.core import format_tensor
from fedmutual.errors import ConfigError, format_error, suggest_name
from fedmutual.models import libraries, networks, pretrained
from fedmutual.models.copying import copy_or_make, describe_network
from fedmutual.models.networks import NAMES as NAMES
from fedmutual.models.own import make_user_network
from fedmutual.models.pretrained import Weights as Weights
from fedmutual.models.pretrained import find_initial_weights as find_initial_weights
from fedmutual.models.pretrained import find_name
from fedmutual.user_code.plugins import LIBRARIES

_OURS: dict[str, Callable[[tuple[int, ...], int], nn.Module]] = {
    name: getattr(networks, name.replace("-", "_")) for name in NAMES
}

checked_networks: set[tuple[Any, ...]] = set()
"""(name, shape, types of inputs, classes, shapes of the logits, a user's network without its tensors' values, its inputs) of
networks that passed the check in this process: a run builds a network for each client, and they differ in their weights
only."""


def build(
    name: str,
    shape: Shape,
    classes: int,
    rng: torch.Generator,
    key: str = "model.shared",
    weights: Weights | None = None,
    of_pixels: bool | None = False,
    examples: Inputs | None = None,
    check: bool = True,
) -> nn.Module:
    """Return the new network `name` for examples of `shape`, for instance (C, H, W): [B, *shape] -> logits [B, classes].

    Args:
        rng: the stream of the initial weights; neither this stream nor the global streams advance.
        key: the configuration key that names the network, for messages.
        weights: loaded into all tensors except the head, whose shape depends on the number of classes.
        of_pixels: whether the network must give the logits of each pixel, [B, classes, H, W]; None: both forms are accepted.
        examples: two inputs [2, *shape] on which the network is tried; None: zeros, float32.
        check: whether to try the network; False for a network that was trained before.

    Raises:
        ConfigError: the network is unknown, cannot be made, does not fit the examples and classes, or does not fit the
            weights.
    """
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(rng.initial_seed())  # torch.manual_seed would also change the GPUs' streams
        try:
            net = _make_network(name, shape, classes, key)
            forms = _list_forms(shape, classes, of_pixels)
            if check or weights is not None:
                examples = make_example_inputs(find_image_shape(shape)) if examples is None else examples
                is_lazy_net = any(map(is_lazy, (*net.parameters(), *net.buffers())))  # an input determines its shapes
                of_user: tuple[Any, ...] = ()
                if is_user_network(name) and not is_lazy_net:  # another call may return another network; ids have a range
                    of_user = describe_network(net), *(hash(x.numpy().tobytes()) for x in list_tensors(examples))
                about = (name, shape, format_tensor(examples), classes, forms, of_user)
                if check and (is_lazy_net or about not in checked_networks):
                    _check_network(net, name, examples, forms, lambda: _make_network(name, shape, classes, key))
                    if not is_lazy_net:
                        checked_networks.add(about)
                if weights is not None and weights.state is not None:
                    pretrained.load_weights(net, weights, _list_head(net, name, examples, classes, key), name)
        except ValueError as problem:
            raise ConfigError(f"key {key!r}: network {name!r} {problem}") from problem
    return net.train()


def make_outline(make: Callable[[], nn.Module], *names: str) -> nn.Module | None:
    """Return the network of `make` on the meta device, which allocates nothing; None if the network cannot be made there.

    names: of the network and its adaptor. None for a user's network too, whose factory is called only once.
    """
    if any(is_user_network(name) for name in names):
        return None
    try:
        with torch.device("meta"):
            return make()
    except RuntimeError:  # torchvision's regnets compute their widths as tensors
        return None


def make_example_inputs(shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> Tensor:
    """Return two constant inputs [2, *shape] for trying a network without data: 0, or the id 1, because 0 may be padding."""
    return torch.full((2, *shape), 0 if dtype.is_floating_point else 1, dtype=dtype)


def is_user_network(name: str) -> bool:
    """Return whether a network is the user's own, "module:factory"."""
    return ":" in name and not name.startswith(LIBRARIES)


def list_user_networks(config: Config) -> tuple[str, ...]:
    """Return the names of the user's own networks in a configuration, each once."""
    personal = (client.model.personal for client in config.clients.values())
    names = dict.fromkeys((config.model.shared, *(config.model.personal or ()), *personal))
    return tuple(name for name in names if name is not None and is_user_network(name))


def try_network(
    name: str,
    shape: Shape,
    examples: Inputs,
    classes: int,
    of_pixels: bool,
    made: dict[tuple[str, Shape, int], nn.Module],
) -> Tensor | None:
    """Return the logits that a network for examples of `shape` computes from these examples [2, ...]; None if it cannot.

    Raises IndexError if the network takes integers, and none as large as these.

    made: the networks that were made before, (name, shape, classes) -> network; a new one is added, so that a factory is
    called once.
    """
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        try:
            if (name, shape, classes) not in made:
                made[name, shape, classes] = _make_network(name, shape, classes, "model.shared").eval()
            torch.default_generator.manual_seed(0)
            return _forward(made[name, shape, classes], name, examples, _list_forms(shape, classes, of_pixels), "")
        except (ValueError, ConfigError) as problem:
            if isinstance(problem.__cause__, IndexError) and not list_tensors(examples)[0].is_floating_point():
                raise problem.__cause__ from None
            return None


def _make_network(name: str, shape: Shape, classes: int, key: str) -> nn.Module:
    if is_user_network(name):
        return make_user_network(name, shape, classes, key)
    if isinstance(shape, Shapes) and not name.startswith("hf:"):
        fix = "name a network of your own" if any(shape.values()) else "give numbers as a table, in one DataFrame or file"
        raise ValueError(f"takes one input, but the examples have several ({format_shape(shape)}); {fix}")
    one = find_image_shape(shape)  # a network of transformers has no need of it
    if name in _OURS:
        return _OURS[name](one, classes)
    if torchvision_name := find_name(name):
        return pretrained.make_network(torchvision_name, one, classes)
    if name.startswith(LIBRARIES) and not name.startswith(pretrained.PREFIX):
        try:
            return libraries.make_network(name, one, classes)
        except ValueError:
            raise
        except Exception as problem:  # a library may refuse arguments in any way
            raise ValueError(f"cannot be made: {format_error(problem)}") from problem
    theirs = pretrained.list_names()
    known = [*_OURS, *theirs, *(pretrained.PREFIX + n for n in theirs)]
    fix = suggest_name(name.lower(), known, f"there are {', '.join(_OURS)}, torchvision's, and 'module:factory'")
    raise ConfigError(f"key {key!r}: there is no network {name!r}; {fix}")


def _list_head(net: nn.Module, name: str, examples: Inputs, classes: int, key: str) -> set[str]:
    """Return the names of the tensors whose shape changes with the number of classes."""
    is_user_code, shape = is_user_network(name), get_shape(examples)
    with torch.device("cpu" if is_user_code else "meta"):  # "meta" draws no weights; user code may need real tensors
        other = _make_network(name, shape, classes + 1, key)
    if is_user_code:
        with torch.no_grad():
            call_network(
                other.eval(), map_inputs(torch.clone, examples)
            )  # lazy layers get their shapes from the first input
    shapes = {k: v.shape for k, v in other.state_dict().items()}
    return {k for k, v in net.state_dict().items() if shapes.get(k) != v.shape}


def _list_forms(shape: Shape, classes: int, of_pixels: bool | None) -> tuple[tuple[int, ...], ...]:
    """Return the shapes that the logits of one example may have."""
    of_example, of_each_pixel = (classes,), (classes, *find_image_shape(shape)[1:])
    return (of_example, of_each_pixel) if of_pixels is None else (of_each_pixel if of_pixels else of_example,)


def _check_network(
    net: nn.Module, name: str, examples: Inputs, forms: tuple[tuple[int, ...], ...], make: Callable[[], nn.Module]
) -> None:
    """Run a forward pass in eval mode, and a forward and backward pass in training mode on a copy.

    make: as `copy_or_make` takes it.

    Raises:
        ValueError: a pass fails, or the output is not logits of one of the forms.
    """
    with torch.no_grad():
        _forward(net.eval(), name, examples, forms, "")
        if forms[0] == (2,) and call_network(net, map_inputs(lambda x: torch.cat([x, x]), examples)).shape == (2, 4):
            raise ValueError("gives outputs [classes, batch]; return [batch, classes]")
    trained = copy_or_make(net, make).train()
    output = _forward(trained, name, examples, forms, " in training mode")
    if output.requires_grad:
        try:
            torch.autograd.backward([output.sum()])
        except Exception as problem:
            raise ValueError(f"cannot be trained: {format_error(problem)}") from problem
    sparse = next((k for k, p in trained.named_parameters() if p.grad is not None and p.grad.is_sparse), None)
    if sparse is not None:
        raise ValueError(f"has sparse gradients of {sparse!r}, which no optimiser takes; make this layer with sparse=False")


def _forward(net: nn.Module, name: str, examples: Inputs, forms: tuple[tuple[int, ...], ...], mode: str) -> Tensor:
    """Return the logits of two examples, each of one of the forms; raise ValueError for other outputs."""
    logits = forms[0]
    try:
        output = call_network(net, map_inputs(torch.clone, examples))
    except NoLogits as problem:
        raise ValueError(f"{problem}{mode}") from problem
    except Exception as problem:  # a network's code may raise any error
        raise ValueError(_describe_misfit(net, name, examples, problem, mode)) from problem
    if tuple(output.shape) not in [(2, *form) for form in forms]:
        fix = "; let its factory take the argument `classes`" if is_user_network(name) else ""
        if output.shape in ((2,), (2, 1)) and logits == (2,):
            fix = "; two classes need two outputs, or training.task = 'multilabel' with one label"
        elif output.shape == (2,):
            fix = "; return [batch, outputs], without .squeeze()"
        if len(logits) > 1 and output.dim() == 2:
            fix = "; a segmentation needs a network with logits of each pixel, for example 'unet'"
        elif len(logits) == 1 and output.dim() == 4:
            fix = "; a network with logits of each pixel is for training.task = 'segmentation'"
        wanted = f"2 examples of {logits[0]} classes, not {[2, *logits]}"
        raise ValueError(f"gives outputs {list(output.shape)}{mode} for {wanted}{fix}")
    return output


def _describe_misfit(net: nn.Module, name: str, examples: Inputs, problem: Exception, mode: str) -> str:
    torchvision_name, shape = find_name(name), get_shape(examples)
    if (
        torchvision_name
        and isinstance(shape, tuple)
        and min(shape[-2:]) < (least := pretrained.get_least_side(torchvision_name))
    ):
        return networks.describe_too_small(shape, least)
    reason = f"{mode}: {format_error(problem)}"
    if any(isinstance(module, nn.EmbeddingBag) for module in net.modules()):
        reason += "; ids are rows [B, L], filled up with 0: call EmbeddingBag(..., padding_idx=0) without offsets"
    misfit = f"does not take examples of shape {shape}{reason}"
    if not isinstance(examples, Tensor):
        inputs = format_tensor(map_inputs(lambda one: one[0], examples))
        fix = "`forward` gets them unchanged, by these names or as one dictionary"
        fix += "; give images as [examples, channels, ...]" if any(one.dim() > 2 for one in list_tensors(examples)) else ""
        return f"does not take the inputs {inputs}{reason}; {fix}"
    if examples.is_floating_point():
        if not is_user_network(name) or not _computes(net, examples.long()):
            return misfit
        fix = "give x whole numbers, in an array of an integer type, and choose networks that all take ids"
        return f"{misfit}; it takes ids, but its inputs here are {str(examples.dtype).removeprefix('torch.')} numbers: {fix}"
    if isinstance(problem, IndexError):
        ids = f"from {examples.min()} to {examples.max()}"
        return f"{misfit}; the first examples have ids {ids}: give its embedding more rows"
    return f"{misfit}; the examples are ids, because another network takes nothing else: choose networks that all take ids"


@torch.no_grad()
def _computes(net: nn.Module, examples: Inputs) -> bool:
    try:
        call_network(net, examples)
    except Exception:  # a network's code may raise any error
        return False
    return True
