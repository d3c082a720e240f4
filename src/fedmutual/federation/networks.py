"""The networks of each client, their weights before round 1, what they cost, and which tensors start equal."""

from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from fedmutual import data, models
from fedmutual.boundary import is_constant
from fedmutual.calling import Inputs, call_network, list_tensors, map_inputs
from fedmutual.config import Config, is_pooled
from fedmutual.core import At, Message
from fedmutual.data.space import Space
from fedmutual.errors import ConfigError
from fedmutual.models import Weights
from fedmutual.models.own import find_ending
from fedmutual.models.splice import build_meme, list_shared_tensors
from fedmutual.optimizers import skip_dynamo
from fedmutual.tasks import TASKS

_STEP, _RATE = 6e-4, 4e10  # a rough guess of a core: seconds that any step takes, floating-point operations a second


class Workload(NamedTuple):
    """The estimated work of one client in a run: local steps, and the floating-point operations of all of these steps."""

    steps: float
    flops: float
    bytes: float = 0.0  # of weights and optimiser states; not of buffers and the memory that an algorithm keeps

    @property
    def seconds(self) -> float:
        """Estimated seconds on one core; use it only to compare workloads."""
        return self.steps * _STEP + self.flops / _RATE


def count_flops(net: nn.Module, examples: Inputs) -> float:
    """Return the floating-point operations of a forward pass of one example; 0 if they cannot be counted."""
    # this import loads Triton, which worker processes do not need
    from torch.utils.flop_counter import FlopCounterMode, _FlopCounterMode

    skip_dynamo(_FlopCounterMode.__torch_dispatch__)
    try:
        with FlopCounterMode(display=False) as counter, torch.no_grad():
            call_network(net.eval(), examples)
    except Exception:  # a user's network may fail in any way, and this is only an estimate
        return 0.0
    return float(counter.get_total_flops()) / len(list_tensors(examples)[0])


POOLED = "pooled"  # the one client of `centralised`

Pretrained = Mapping[tuple[str, str], Weights]
"""Initial weights by (client id, or "" for all clients; network name)."""


@dataclass(frozen=True)
class Networks:
    """The networks of an experiment. Each network has its own random stream, so that every process builds equal networks."""

    config: Config
    data: data.Federation
    scores: tuple[str, ...]  # the models that the algorithm trains, as `Algorithm.scores`
    device: torch.device
    begun: Message | None = None  # shared tensors of another run with which the server begins (model.weights)
    pretrained: Pretrained = field(default_factory=dict)  # read once, then sent to all processes

    @property
    def pooled(self) -> bool:
        """Whether one model is trained on the data of all clients together: `centralised`."""
        return is_pooled(self.config)

    @property
    def clients(self) -> tuple[str, ...]:
        """The ids of the clients that train."""
        return (POOLED,) if self.pooled else tuple(self.data.clients)

    @property
    def forks(self) -> bool:
        """Whether clients have a meme: a fork of the server's model, or a proxy."""
        return "global" in self.scores or "proxy" in self.scores

    @property
    def shares(self) -> bool:
        """Whether the shared network is used at all."""
        return self.forks or self.config.model.start == "server" or self.pooled

    @property
    def complete(self) -> bool:
        """Whether the server holds all tensors of the shared model. Raises ConfigError as `crossing`."""
        return "global" in self.scores and len(self.crossing) == len(self.shared.state_dict())

    @cached_property
    def shared(self) -> nn.Module:
        """The network of `make_shared`, made once. Raises ConfigError as `make_shared`."""
        return self.make_shared()

    def make_shared(self) -> nn.Module:
        """Return a new network: the shared architecture with the server's first weights, for the first client's data.

        Raises:
            ConfigError: the network cannot be built, or the run in `model.weights` shares another network.
        """
        net = self.build_shared(self.data.space)
        if self.begun is not None:
            _begin(net, self.begun, self._list_exchanged(net), self.config.model.weights)
        return net

    @cached_property
    def crossing(self) -> tuple[str, ...]:
        """The names of the shared network's tensors that clients and server exchange.

        Raises:
            ConfigError: as `shared`; or `model.part` or `model.batchnorm` does not fit the network.
        """
        return self._list_exchanged(self.shared)

    @property
    def notes(self) -> tuple[str, ...]:
        """Remarks for the user about the networks. Raises ConfigError if a network cannot be built."""
        remarks = []
        if self.forks and self.config.model.batchnorm != "average" and not _list_norm_layers(self.shared):
            name = self.config.model.shared
            remarks.append(f"network {name!r} has no BatchNorm layer, so 'model.batchnorm' has no effect")
        if self.forks and self.config.model.part is not None:
            named = list_shared_tensors(self.shared, self.config.model.part, self.config.model.shared)
            tied = sorted({*self.crossing} - {*named})
            remarks += [f"model.part: {name!r} is shared, too: it is one tensor with a shared one" for name in tied]
        if self.config.records.keep_best and self.forks and not self.complete and "personal" not in self.scores:
            remarks.append(
                "each model is a client's fork, whose best round is not kept, so 'records.keep_best' has no effect"
            )
        return (*remarks, *self._describe_endings())

    def _describe_endings(self) -> Iterator[str]:
        """Yield a remark for each of the user's networks that gives probabilities to a loss that takes logits."""
        checked = set[tuple[str, Any]]()
        for client in self.clients:
            space = self.get_space(client)
            for name, key in self.name_architectures(client).values():
                about = (name, (space.shape, space.outputs, space.task))
                takes_logits = space.task in TASKS and not space.numbers  # an own task may take probabilities
                if not models.is_user_network(name) or not takes_logits or about in checked:
                    continue
                checked.add(about)
                ending = find_ending(self._build_net(name, space, torch.Generator(), key), space.make_examples())
                if ending is not None:
                    yield (
                        f"network {name!r} gives probabilities, as after a {ending}, but the losses of {space.task} take "
                        "logits; remove the last function of the network"
                    )

    def get_shared_state(self) -> Message:
        """Return the exchanged tensors with the server's values before round 1, on the CPU.

        Raises:
            ConfigError: as `crossing`.
        """
        state = self.shared.state_dict()
        return {k: state[k].detach().to("cpu", copy=True).contiguous() for k in self.crossing}

    def name_personal(self, client: str) -> str:
        """Return the name of a client's personal architecture."""
        listed = self.config.model.personal or (self.config.model.shared,)
        if self.pooled:
            return self.config.model.shared
        of_client = self.config.get_client_config(client).model.personal
        return of_client or listed[list(self.data.partition["clients"]).index(client) if len(listed) > 1 else 0]

    def name_architectures(self, client: str) -> dict[str, tuple[str, str]]:
        """Return the architecture of each of a client's nets, and the configuration key that names the architecture."""
        shared, named = (self.config.model.shared, "model.shared"), {}
        if self.pooled:
            return {"personal": shared}
        if "personal" in self.scores:
            of_client = self.config.get_client_config(client).model.personal
            listed = "model.personal" if self.config.model.personal else "model.shared"
            named["personal"] = (self.name_personal(client), f"clients.{client}.model.personal" if of_client else listed)
        if self.forks:
            named["meme"] = shared
        return named

    def describe_first_weights(self, client: str | None = None) -> str:
        """Return a description of the initial weights of a client's personal network; None: those of the shared network."""
        model = self.config.model
        if client is not None and model.start == "server":
            return "those of the shared network"
        if client is None and self.begun is not None:
            return f"the shared model of {model.weights}"
        weights = (
            self._find_weights(model.shared) if client is None else self._find_weights(self.name_personal(client), client)
        )
        return weights.description if weights else "random weights"

    def build_shared(self, space: Space) -> nn.Module:
        """Return the complete shared architecture with the weights that all clients share.

        Raises:
            ConfigError: the network cannot be built, or does not fit the inputs and outputs of `space`.
        """
        at, name = At(self.config.seed, -1, self.config.rounds), self.config.model.shared
        return self._build_net(name, space, at.rng("model", "shared"), "model.shared", self._find_weights(name))

    def build_for(self, client: str) -> dict[str, nn.Module]:
        """Return a client's nets as they are before round 1, on its device.

        Raises:
            ConfigError: a network cannot be made, or does not fit the client's data.
        """
        nets = self._build_nets(client)
        if self.config.model.start == "server" and "personal" in nets:
            try:
                nets["personal"].load_state_dict(self.shared.state_dict())
            except RuntimeError:
                raise ConfigError(
                    f"model.start = 'server': client {client!r} has the personal network {self.name_personal(client)!r}, "
                    f"which cannot start from the shared {self.config.model.shared!r}; use model.start = 'own'"
                ) from None
        if "personal" in nets and self.is_frozen("personal", client):
            nets["personal"].requires_grad_(False)
        return {name: self.place_on_device(net) for name, net in nets.items()}

    def is_frozen(self, net: str, client: str) -> bool:
        """Return whether a client's net is frozen."""
        return net == "personal" and self.config.get_client_config(client).model.frozen

    def place_on_device(self, net: nn.Module) -> nn.Module:
        """Move a network to the device. On a CPU channels are last in memory: convolutions are 1.2 to 1.5 times as fast."""
        if self.device.type != "cpu":
            return net.to(self.device)
        with torch.no_grad():
            for tensor in (*net.parameters(), *net.buffers()):
                if tensor.dim() == 4:  # MONAI's networks on volumes were .74 to 1.01 times as fast with channels_last_3d
                    tensor.data = tensor.data.to(memory_format=torch.channels_last)
        return net

    def measure_costs(self) -> dict[str, tuple[float, int]]:
        """Return client -> (operations of a forward pass of one example, parameters) of all its networks together.

        The operations are 0 if they are not known. Raises ConfigError if a network cannot be built.
        """
        counted, costs = dict[tuple[str, Any], tuple[float, int]](), {}
        for client in self.clients:
            networks, space = self.name_architectures(client).values(), self.get_space(client)
            about = (space.shape, space.outputs)
            for name, key in networks:
                if (name, about) not in counted:
                    net = self._build_net(name, space, torch.Generator(), key)
                    size = sum(p.numel() for p in net.parameters())
                    counted[name, about] = count_flops(net, space.make_examples()), size
            of_client = [counted[name, about] for name, _ in networks]
            costs[client] = sum(flops for flops, _ in of_client), sum(size for _, size in of_client)
        return costs

    def get_space(self, client: str) -> Space:
        """Return the inputs and outputs of a client's networks."""
        return self.data.space if self.pooled else self.data.spaces[client]

    def begin_with(self, initial_weights: Pretrained) -> "Networks":
        """Return these networks with the initial weights of `model.pretrained`, of all clients or of one.

        initial_weights: weights that a resumed run began with; only missing weights are read.

        Raises:
            ConfigError: weights cannot be read.
        """
        model, pretrained = self.config.model, dict[tuple[str, str], Weights]()
        for id in self.clients:
            pretrained_of_client = self.config.get_client_config(id).model.pretrained
            shared = {"shared": (model.shared, "model.shared")} if self.shares else {}
            for net, (name, _) in (self.name_architectures(id) | shared).items():
                is_clients_own = net == "personal" and pretrained_of_client is not None
                source = pretrained_of_client if is_clients_own else model.pretrained
                owner = (id if is_clients_own else "", name)
                if source is not None and owner not in pretrained:
                    key = f"clients.{id}.model.pretrained" if is_clients_own else "model.pretrained"
                    pretrained[owner] = initial_weights.get(owner) or models.find_initial_weights(source, name, key)
        return replace(self, pretrained=pretrained)

    def _build_nets(self, id: str) -> dict[str, nn.Module]:
        at, nets = At(self.config.seed, -1, self.config.rounds), dict[str, nn.Module]()
        for net, (name, key) in self.name_architectures(id).items():
            if self.pooled:
                nets[net] = self.make_shared()
            elif net == "meme":
                nets[net] = self._build_client_meme(id)
            else:
                nets[net] = self._build_net(name, self.get_space(id), at.rng(id, net), key, self._find_weights(name, id))
        return nets

    def _build_client_meme(self, id: str) -> nn.Module:
        """Return a client's meme: the shared architecture, or the shared part of it with the client's own adaptor."""
        at, space = At(self.config.seed, -1, self.config.rounds), self.get_space(id)
        shared_rng, adaptor_rng = at.rng("model", "shared"), at.rng(id, "adaptor")
        weights = self._find_weights(self.config.model.shared)
        rngs, examples = (shared_rng, adaptor_rng), space.make_examples()
        net = build_meme(self.config.model, space.shape, space.outputs, *rngs, weights, space.of_pixels, examples)
        if self.begun is not None:
            net.load_state_dict(net.state_dict() | self.get_shared_state())
        return net

    def _list_exchanged(self, net: nn.Module) -> tuple[str, ...]:
        """Return the names of the exchanged tensors: of the network or of `model.part`.

        BatchNorm layers are not exchanged if `model.batchnorm` is "local".
        """
        model, state = self.config.model, net.state_dict()
        is_rest = model.adaptor == "rest"
        names = tuple(state) if model.part is None else list_shared_tensors(net, model.part, model.shared, tied=is_rest)
        if model.batchnorm == "average":
            return names
        norms = _list_norm_layers(net)
        exchanged = tuple(k for k in names if not any(k.startswith(f"{n}.") for n in norms))
        if not exchanged:
            raise ConfigError(
                f"model.batchnorm = 'local' keeps all shared layers of network {model.shared!r} at the clients, because "
                "they are BatchNorm layers; share another part (model.part), or set model.batchnorm = 'average'"
            )
        return exchanged

    def _build_net(
        self, name: str, space: Space, rng: torch.Generator, key: str, weights: Weights | None = None
    ) -> nn.Module:
        return models.build(name, space.shape, space.outputs, rng, key, weights, space.of_pixels, space.make_examples())

    def _find_weights(self, name: str, client: str = "") -> Weights | None:
        """Return the pretrained weights of a network: those of the client, else those for all; None if there are none."""
        return self.pretrained.get((client, name), self.pretrained.get(("", name)))


def _list_norm_layers(net: nn.Module) -> list[str]:
    """Return the names of a network's BatchNorm layers."""
    return [n for n, m in net.named_modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)]


def _begin(net: nn.Module, state: Message, names: tuple[str, ...], run: Path | None) -> None:
    """Load the shared tensors of another run into a net.

    Raises:
        ConfigError: the other run shares a different network.
    """
    net_state = net.state_dict()
    unequal = [k for k in names if k not in state or state[k].shape != net_state[k].shape]
    unequal += [k for k in state if k not in names]
    if unequal:
        shapes = (list(tensors[unequal[0]].shape) if unequal[0] in tensors else "none" for tensors in (state, net_state))
        raise ConfigError(
            f"key 'model.weights': {run} shares another network: {unequal[0]!r} has the shape {next(shapes)} in that run "
            f"and {next(shapes)} here; set 'model.shared', 'model.part' and the classes as in that run"
        )
    net.load_state_dict(net_state | state)


def find_exempt_tensors(nets: Mapping[str, nn.Module], shared: tuple[str, ...], examples: Inputs) -> frozenset[str]:
    """Return the names of the meme's shared tensors that may legitimately equal a tensor of the personal net.

    A shared tensor is exempt in three cases. First, all shared tensors start equal to those of the personal net: then
    all are exempt. Second, the tensor alone starts equal and is not constant; a constant tensor (the ones and zeros of
    a BatchNorm) is not exempt alone. Third, both nets normalise the input itself and the tensor is a running statistic
    of that layer: the statistic describes the inputs, not a net.

    examples: inputs [B, ...].
    """
    if not {"personal", "meme"} <= nets.keys():
        return frozenset()
    personal, meme = (nets[n].state_dict() for n in ("personal", "meme"))
    if all(k in personal and _is_equal(personal[k], meme[k]) for k in shared):
        return frozenset(shared)
    same = {k for k in shared if not is_constant(meme[k]) and any(_is_equal(v, meme[k]) for v in personal.values())}
    if _list_input_statistics(nets["personal"], examples):
        same |= _list_input_statistics(nets["meme"], examples) & set(shared)
    return frozenset(same)


def _is_equal(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and torch.equal(a, b)


@torch.no_grad()
def _list_input_statistics(net: nn.Module, examples: Inputs) -> set[str]:
    """Return the names of the running statistics of layers that normalise the net's input directly."""
    norms = {name: m for name, m in net.named_modules() if isinstance(m, _NormBase) and m.running_mean is not None}
    if not norms:
        return set()
    statistics, was_training = set[str](), net.training
    x = map_inputs(lambda one: one.to(next(net.buffers()).device), examples)
    # equal numbers, such as zeros, would stay equal through a layer without a bias
    compared = [one for one in list_tensors(x) if not is_constant(one)]

    def compare_input(name: str, layer_input: Tensor) -> None:
        if any(layer_input.numel() == one.numel() and torch.equal(layer_input.flatten(), one.flatten()) for one in compared):
            statistics.update((f"{name}.running_mean", f"{name}.running_var"))

    with torch.random.fork_rng(), ExitStack() as hooks:
        for name, module in norms.items():
            hook = module.register_forward_pre_hook(lambda _, inputs, name=name: compare_input(name, inputs[0]))
            hooks.callback(hook.remove)
        call_network(net.eval(), x)
    net.train(was_training)
    return statistics
