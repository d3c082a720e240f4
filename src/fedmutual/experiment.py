"""From a configuration to what a run needs: data, nets, optimisers, the server's first state. Trains nothing."""

import copy
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fedmutual import data, idle, models, tasks, views
from fedmutual.algorithms.peers import agreed
from fedmutual.checks import begin, check, check_clients
from fedmutual.config import Config, client_settings, make_algorithm
from fedmutual.config.schema import ClientConfig
from fedmutual.core import Algorithm, At, Client, Data, Message, Seeds, Task
from fedmutual.data.federation import Gather, Space
from fedmutual.engines.base import Exam, score
from fedmutual.engines.choice import Work, flops
from fedmutual.engines.loop import Judge, Plan
from fedmutual.errors import ConfigError
from fedmutual.models import Weights
from fedmutual.models.splice import crossing, fork
from fedmutual.records.checkpoint import shared_state
from fedmutual.records.events import Score
from fedmutual.twins import twins

POOLED = "pooled"  # the one client of `centralised`

Pretrained = Mapping[tuple[str, str], Weights]
"""What networks begin with: (the client whose own it is, or "" for all; the network's name) -> weights."""


@dataclass(frozen=True)
class Experiment:
    """A configuration with its data. Nets are made from their own streams, the same whenever and wherever that is done."""

    config: Config
    data: data.Federation
    algorithm: Algorithm
    device: torch.device
    begun: Message | None = None  # what another run shared, where the server begins with that (model.weights)
    pretrained: Pretrained = field(default_factory=dict)  # taken along to where clients live: read once, alike everywhere

    @property
    def pooled(self) -> bool:
        """Whether all data lie in one place: `centralised`."""
        return bool(self.config.algorithm["name"] == "centralised")

    @property
    def clients(self) -> tuple[str, ...]:
        """Who trains."""
        return (POOLED,) if self.pooled else tuple(self.data.clients)

    @property
    def shares(self) -> bool:
        """Whether the shared network is used at all."""
        return "global" in self.algorithm.scores or self.config.model.start == "server" or self.pooled

    @property
    def complete(self) -> bool:
        """Whether the server's state is a whole model."""
        return "global" in self.algorithm.scores and len(self.shared) == len(self.shared_net.state_dict())

    @property
    def seeds(self) -> Seeds | None:
        """What is agreed of the public seed set, where the algorithm has one."""
        public, use = self.data.public, self.algorithm.public
        if public is None or use is None:
            return None
        return Seeds(public.owners, public.summary(use.labelled))

    @cached_property
    def shared_net(self) -> nn.Module:
        """The shared architecture with the server's first weights, for the first client's inputs and classes."""
        net = self.whole(self.data.space)
        if self.begun is not None:
            begin(net, self.begun, self._crossing(net), self.config.model.weights)
        return net

    @cached_property
    def shared(self) -> tuple[str, ...]:
        """The names of its tensors that cross."""
        return self._crossing(self.shared_net)

    def server(self) -> Message:
        """The server's first state: the shared tensors; of the public seed set what all know; else nothing."""
        if self.seeds is not None:
            return agreed(self.seeds.owners, self.data.space.outputs)
        if "global" not in self.algorithm.scores or self.pooled:
            return {}
        state = self.shared_net.state_dict()
        return {k: state[k].detach().to("cpu", copy=True).contiguous() for k in self.shared}

    def task(self, client: str) -> Task:
        """What a client learns."""
        return tasks.make(self._space(client).task)

    def personal(self, client: str) -> str:
        """The name of a client's own architecture."""
        own = self._own(client).model.personal
        listed = self.config.model.personal or (self.config.model.shared,)
        if self.pooled:
            return self.config.model.shared
        return own or listed[list(self.data.clients).index(client) if len(listed) > 1 else 0]

    def first_weights(self, client: str | None = None) -> str:
        """What a client's own network begins with, in words; None: the shared one."""
        model = self.config.model
        if client is not None and model.start == "server":
            return "those of the shared network"
        if client is None and self.begun is not None:
            return f"the shared model of {model.weights}"
        found = self._weights(model.shared) if client is None else self._weights(self.personal(client), client)
        return found.said if found else "random weights"

    def client(self, id: str) -> Client:
        """One participant, as it is before round 1."""
        if self.device.type == "cuda":
            tf32 = self.config.engine.precision == "tf32"
            torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = tf32  # for the whole process
        nets = {name: self._placed(net) for name, net in self._nets(id).items()}
        own, rows = self._own(id), self.rows(id)
        if min(own.training.batch_size or self.config.training.batch_size, len(rows["private"]), self._exchanged()) == 1:
            self._check_alone(id, nets)
        shared = self.shared if "meme" in nets else ()
        rate = own.optimizer.lr if own.optimizer.lr is not None else self.config.optimizer.lr
        return Client(
            id=id,
            nets=nets,
            optimizers={n: self._optimizer(n, net, id) for n, net in nets.items() if not self._frozen(n, id)},
            data=rows,
            rate=rate,
            shared=shared,
            twins=twins(nets, shared, self._space(id).shape),
            own=client_settings(self.config, id) | {"task": self.task(id)},
            precision=torch.bfloat16 if self.config.engine.precision == "bf16" else None,
            seeds=self.seeds,
            tells=(own.share or self.config.share).metrics == "all",
        )

    def work(self) -> dict[str, Work]:
        """What each client has to do, by the arithmetic of its networks."""
        counted: dict[tuple[str, Any], float] = {}
        found = {}
        for id in self.clients:
            steps, examples = self._load(id)
            networks, space = self._networks(id).values(), self._space(id)
            about = (space.shape, space.outputs)
            for name, key in networks:
                if (name, about) not in counted:
                    counted[name, about] = flops(self._net(name, space, torch.Generator(), key), space.shape)
            backward = 3  # times a forward, with the forward itself
            a_row = backward * sum(counted[name, about] for name, _ in networks)
            found[id] = Work(steps * self.config.rounds, examples * self.config.rounds * a_row)
        return found

    def _load(self, id: str) -> tuple[float, float]:
        """Steps of a client in a round, and the examples in them."""
        rows, own, common = len(self.rows(id)["private"]), self._own(id).training, self.config.training
        first = self.algorithm.phases[0]
        batch, steps = own.batch_size or common.batch_size, own.local_steps or getattr(first, "local_steps", None)
        if steps is None:
            epochs = own.local_epochs or common.local_epochs
            return epochs * -(-rows // batch), epochs * rows
        use = self.algorithm.public
        exchanged = (use.batch or 0) * self._others if use else 0
        return steps + (exchanged > 0), steps * min(batch, rows) + exchanged

    def plan(self, homes: Mapping[str, Path], notes: tuple[str, ...] = ()) -> Plan:
        """What the loop needs to know; `notes` come after those of the settings and the data."""
        config = self.config
        return Plan(
            algorithm=self.algorithm,
            seed=config.seed,
            rounds=config.rounds,
            clients=self.clients,
            notes=(
                *self.algorithm.remarks,
                *idle.remarks(config, self.algorithm.scores, self.pooled),
                *self.data.notes,
                *views.notes(self.data),
                *(w.said for w in self.pretrained.values()),
                *notes,
            ),
            participation=config.engine.participation,
            evaluate_every=config.records.evaluate_every,
            exams={i: tuple(self.exams(i)) for i in self.clients},
            seeds=self._given(),
            homes=homes,
        )

    def judge(self) -> Judge | None:
        """Scores the complete shared model on the test set."""
        learned = {space.task for space in self.data.spaces.values()}
        if not self.complete or self.pooled or self.data.test is None or len(learned) > 1:
            return None
        net, test = self._placed(copy.deepcopy(self.shared_net)), self.data.test.to(self.device)
        task = tasks.make(learned.pop())

        def judged(server: Message) -> Score:
            net.load_state_dict({k: server[k] for k in self.shared})  # beside what an algorithm may remember there
            return Score("global", None, "test", score(net, test, task))

        return judged

    def rows(self, id: str) -> dict[str, Data]:
        """The rows that a client trains on and is scored on, by the names that `Client.data` has them by."""
        found = views.pooled(self.data) if self.pooled else views.rows(self.data, id, self.algorithm)
        return {name: rows.to(self.device) for name, rows in found.items()}

    def leaves(self) -> dict[str, dict[str, tuple[str, list[int]]]]:
        """All that may leave a client: phase -> name -> dtype, shape."""
        return leaves(self.algorithm, self.server())

    def exams(self, id: str) -> Iterable[Exam]:
        """What is scored at a client."""
        known = self.rows(id)
        if self.pooled:
            return views.pooled_exams(known)
        return views.exams(known, self.algorithm, self.complete, self.config.records.copies, id)

    def _exchanged(self) -> float:
        """The fewest public examples that a step of an exchange takes; infinity where there is none."""
        use = self.algorithm.public
        if use is None or use.batch is None:
            return math.inf
        return use.batch * (max(self._others, 1) if use.own and not use.pairs else 1)

    @property
    def _others(self) -> int:
        """How many a client exchanges with: all that give to the public seed set, wherever they are."""
        return len(self.clients if self.data.public is None else self.data.public.owners) - 1

    def _given(self) -> dict[str, int]:
        """Bytes of the public data that each client gives to all, where the algorithm has such."""
        public, use = self.data.public, self.algorithm.public
        return {} if public is None or use is None else public.bytes(use.labelled)

    def _own(self, client: str) -> ClientConfig:
        return self.config.clients.get(client, ClientConfig())

    def _space(self, client: str) -> Space:
        return self.data.space if self.pooled else self.data.spaces[client]

    def _net(self, name: str, space: Space, rng: torch.Generator, key: str, weights: Weights | None = None) -> nn.Module:
        return models.build(name, space.shape, space.outputs, rng, key, weights)

    def _weights(self, name: str, client: str = "") -> Weights | None:
        """What a network begins with; of a client's own, if it names some."""
        return self.pretrained.get((client, name), self.pretrained.get(("", name)))

    def whole(self, space: Space) -> nn.Module:
        """The shared architecture, whole, with the weights that all share."""
        at, name = At(self.config.seed, -1, self.config.rounds), self.config.model.shared
        return self._net(name, space, at.rng("model", "shared"), "model.shared", self._weights(name))

    def _meme(self, id: str) -> nn.Module:
        """A client's fork: the shared architecture; or the shared part of it, with the client's own adaptor."""
        at, space = At(self.config.seed, -1, self.config.rounds), self._space(id)
        shared, own = at.rng("model", "shared"), at.rng(id, "adaptor")
        net = fork(self.config.model, space.shape, space.outputs, shared, own, self._weights(self.config.model.shared))
        if self.begun is not None:
            net.load_state_dict(net.state_dict() | self.server())
        return net

    def _crossing(self, net: nn.Module) -> tuple[str, ...]:
        """Which tensors cross: those of `model.part`; with `model.batchnorm = "local"` not those of BatchNorm layers."""
        model, state = self.config.model, net.state_dict()
        found = tuple(state) if model.part is None else crossing(net, model.part, model.shared)
        if model.batchnorm == "average":
            return found
        norms = [n for n, m in net.named_modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)]
        left = tuple(k for k in found if not any(k.startswith(f"{n}.") for n in norms))
        if not left:
            raise ConfigError(
                f"nothing of network {model.shared!r} would cross, for model.batchnorm = 'local' keeps BatchNorm layers at "
                "home; share another part (model.part), or average them"
            )
        return left

    def _frozen(self, net: str, client: str) -> bool:
        return net == "personal" and self._own(client).model.frozen

    def _placed(self, net: nn.Module) -> nn.Module:
        """On its device; on a CPU with channels last in memory, which makes convolutions there 1.2 to 1.5 times as fast."""
        return net.to(memory_format=torch.channels_last) if self.device.type == "cpu" else net.to(self.device)

    def _networks(self, id: str) -> dict[str, tuple[str, str]]:
        """A client's nets: each one's architecture, and the key that names it."""
        shared = (self.config.model.shared, "model.shared")
        if self.pooled:
            return {"personal": shared}
        found = {}
        if "personal" in self.algorithm.scores:
            named = f"clients.{id}.model.personal" if self._own(id).model.personal else "model.personal"
            key = named if self._own(id).model.personal or self.config.model.personal else "model.shared"
            found["personal"] = (self.personal(id), key)
        if "global" in self.algorithm.scores:
            found["meme"] = shared
        return found

    def _nets(self, id: str) -> dict[str, nn.Module]:
        at, nets = At(self.config.seed, -1, self.config.rounds), {}
        for net, (name, key) in self._networks(id).items():
            if self.pooled:
                nets[net] = copy.deepcopy(self.shared_net)
            else:
                own = (name, self._space(id), at.rng(id, net), key, self._weights(name, id))
                nets[net] = self._meme(id) if net == "meme" else self._net(*own)
        if self.config.model.start == "server" and "personal" in nets:
            try:
                nets["personal"].load_state_dict(self.shared_net.state_dict())
            except RuntimeError:
                raise ConfigError(
                    f"model.start = 'server': client {id!r} has the personal network {self.personal(id)!r}, which cannot "
                    f"start from the shared {self.config.model.shared!r}; use model.start = 'own'"
                ) from None
        if "personal" in nets and self._frozen("personal", id):
            nets["personal"].requires_grad_(False)
        return nets

    def _check_alone(self, id: str, nets: Mapping[str, nn.Module]) -> None:
        """Raise ConfigError where a net cannot be trained on one example at a time, as BatchNorm over features cannot."""
        for name, net in nets.items():
            try:
                copy.deepcopy(net).train()(torch.zeros(1, *self._space(id).shape, device=self.device))
            except ValueError as problem:
                raise ConfigError(
                    f"client {id!r} trains on one example at a time, which its {name} network cannot ({problem}); raise "
                    "training.batch_size, or give it more examples"
                ) from None

    def _optimizer(self, name: str, net: nn.Module, client: str) -> torch.optim.Optimizer:
        given, own = self.config.optimizer, self._own(client)
        params = [p for p in net.parameters() if p.requires_grad]
        if not params:
            raise ConfigError(f"the {name} network of client {client!r} has no trainable parameter; unfreeze some of it")
        fused = self.device.type in ("cpu", "cuda")  # one call for all parameters
        decay = own.optimizer.weight_decay if own.optimizer.weight_decay is not None else given.weight_decay
        if given.name == "sgd":
            momentum = own.optimizer.momentum if own.optimizer.momentum is not None else given.momentum
            return torch.optim.SGD(params, lr=0.0, momentum=momentum, weight_decay=decay, fused=fused)
        kind: type[torch.optim.Adam] = {"adam": torch.optim.Adam, "adamw": torch.optim.AdamW}[given.name]
        return kind(params, lr=0.0, weight_decay=decay, amsgrad=given.amsgrad, fused=fused)


def leaves(algorithm: Algorithm, server: Message) -> dict[str, dict[str, tuple[str, list[int]]]]:
    """The same from the server's first state."""
    return {
        type(phase).__name__.lower(): {
            name: (str(dtype).removeprefix("torch."), list(shape)) for name, (dtype, shape) in phase.leaves(server).items()
        }
        for phase in (*algorithm.start, *algorithm.phases)
    }


def build(
    config: Config,
    device: str | None = None,
    prepared: Mapping[str, data.Prepared] | None = None,
    begun: Message | None = None,
    pretrained: Pretrained | None = None,
    gathered: Gather | None = None,
) -> Experiment:
    """Read the data, unless they are prepared, and check that everything the configuration names can be made.

    begun: what a run that goes on began with, where that was another run's model; else it is read from `model.weights`.
    pretrained: likewise what its networks began with; what is not in it is read from where `model.pretrained` says.
    gathered: as `data.load` takes it.

    Raises:
        UserError: in one sentence, what cannot.
    """
    federation = data.load(config, prepared, gathered)
    if begun is None and config.model.weights is not None:
        begun = shared_state(config.model.weights)
    algorithm, place = make_algorithm(config), pick_device(device or config.engine.device)
    experiment = Experiment(config, federation, algorithm, place, begun)
    check_clients(experiment)
    experiment = replace(experiment, pretrained=_pretrained(experiment, pretrained or {}))
    check(experiment)
    return experiment


def _pretrained(experiment: Experiment, kept: Pretrained) -> Pretrained:
    """What networks begin with, by `model.pretrained` and clients' own, unless it was kept. Raises ConfigError."""
    model, found = experiment.config.model, dict[tuple[str, str], Weights]()
    for id in experiment.clients:
        own = experiment._own(id).model.pretrained
        shared = {"shared": (model.shared, "model.shared")} if experiment.shares else {}
        for net, (name, _) in (experiment._networks(id) | shared).items():
            mine = net == "personal" and own is not None
            source, who = own if mine else model.pretrained, (id if mine else "", name)
            if source is not None and who not in found:
                key = f"clients.{id}.model.pretrained" if mine else "model.pretrained"
                found[who] = kept.get(who) or models.weights(source, name, key)
    return found


def pick_device(name: str) -> torch.device:
    """The device by its name; "auto" takes a CUDA GPU, else Apple's, else the CPU."""
    if name == "auto":
        found = [
            n for n, there in (("cuda", torch.cuda.is_available()), ("mps", torch.backends.mps.is_available())) if there
        ]
        return torch.device(found[0] if found else "cpu")
    try:
        device = torch.device(name)
        torch.zeros(1, device=device).cpu()
    except (RuntimeError, AssertionError, NotImplementedError) as problem:
        why = next(iter(str(problem).splitlines()), type(problem).__name__)
        raise ConfigError(f"key 'engine.device': {name!r} cannot be used here ({why}); try 'auto' or 'cpu'") from None
    return device
