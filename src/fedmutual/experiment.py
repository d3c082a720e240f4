"""From a configuration to what a run needs: data, nets, optimisers, the server's first state. Trains nothing."""

import copy
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch
from torch import nn

from fedmutual import data, models
from fedmutual.boundary import constant
from fedmutual.config import Config, client_settings, make_algorithm
from fedmutual.config.schema import ClientConfig
from fedmutual.core import Algorithm, At, Client, Data, Message
from fedmutual.data.rows import Rows
from fedmutual.engines.base import COPY, Exam, score
from fedmutual.engines.choice import Work, flops
from fedmutual.engines.loop import Judge, Plan
from fedmutual.errors import ConfigError
from fedmutual.losses import Classification
from fedmutual.records.events import Score

POOLED = "pooled"  # the one client of `centralised`


@dataclass(frozen=True)
class Experiment:
    """A configuration with its data. Nets are made from their own streams, the same whenever and wherever that is done."""

    config: Config
    data: data.Federation
    algorithm: Algorithm
    device: torch.device

    @property
    def pooled(self) -> bool:
        """Whether all data lie in one place: `centralised`."""
        return bool(self.config.algorithm["name"] == "centralised")

    @property
    def clients(self) -> tuple[str, ...]:
        """Who trains."""
        return (POOLED,) if self.pooled else tuple(self.data.clients)

    @property
    def complete(self) -> bool:
        """Whether the server's state is a whole model."""
        return "global" in self.algorithm.scores and len(self.shared) == len(self.shared_net.state_dict())

    @cached_property
    def shared_net(self) -> nn.Module:
        """The shared architecture with its first weights."""
        at = At(self.config.seed, -1, self.config.rounds)
        return self._net(self.config.model.shared, at.rng("model", "shared"), "model.shared")

    @cached_property
    def shared(self) -> tuple[str, ...]:
        """The names of its tensors that cross. With `model.batchnorm = "local"` those of BatchNorm layers do not."""
        state = self.shared_net.state_dict()
        if self.config.model.batchnorm == "average":
            return tuple(state)
        norms = [n for n, m in self.shared_net.named_modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)]
        return tuple(k for k in state if not any(k.startswith(f"{n}.") for n in norms))

    def server(self) -> Message:
        """The server's first state: the shared tensors, or nothing where nothing is shared."""
        if "global" not in self.algorithm.scores or self.pooled:
            return {}
        state = self.shared_net.state_dict()
        return {k: state[k].detach().to("cpu", copy=True).contiguous() for k in self.shared}

    def personal(self, client: str) -> str:
        """The name of a client's own architecture."""
        own = self._own(client).model.personal
        listed = self.config.model.personal or (self.config.model.shared,)
        if self.pooled:
            return self.config.model.shared
        return own or listed[list(self.data.clients).index(client) if len(listed) > 1 else 0]

    def client(self, id: str) -> Client:
        """One participant, as it is before round 1."""
        if self.device.type == "cuda":
            tf32 = self.config.engine.precision == "tf32"
            torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = tf32  # for the whole process
        nets = {name: self._placed(net) for name, net in self._nets(id).items()}
        own, rows = self._own(id), self._rows(id)
        if min(own.training.batch_size or self.config.training.batch_size, len(rows["private"])) == 1:
            self._check_alone(id, nets)
        shared = self.shared if "meme" in nets else ()
        rate = own.optimizer.lr if own.optimizer.lr is not None else self.config.optimizer.lr
        return Client(
            id=id,
            nets=nets,
            optimizers={n: self._optimizer(n, net, id) for n, net in nets.items()},
            data=rows,
            rate=rate,
            shared=shared,
            twins=_twins(nets, shared),
            own=client_settings(self.config, id),
            precision=torch.bfloat16 if self.config.engine.precision == "bf16" else None,
            tells=(own.share or self.config.share).metrics == "all",
        )

    def work(self) -> dict[str, Work]:
        """What each client has to do, by the arithmetic of its networks."""
        by_name: dict[str, float] = {}
        found = {}
        for id in self.clients:
            rows, training = len(self._rows(id)["private"]), self._own(id).training
            epochs = (training.local_epochs or self.config.training.local_epochs) * self.config.rounds
            batch = training.batch_size or self.config.training.batch_size
            networks = self._networks(id).values()
            for name, key in networks:
                if name not in by_name:
                    by_name[name] = flops(self._net(name, torch.Generator(), key), self.data.shape)
            backward = 3  # times a forward, with the forward itself
            found[id] = Work(
                epochs * -(-rows // batch), epochs * rows * backward * sum(by_name[name] for name, _ in networks)
            )
        return found

    def plan(self, homes: Mapping[str, Path], notes: tuple[str, ...] = ()) -> Plan:
        """What the loop needs to know; `notes` come after those of the settings and the data."""
        config = self.config
        return Plan(
            algorithm=self.algorithm,
            seed=config.seed,
            rounds=config.rounds,
            clients=self.clients,
            notes=(*self.algorithm.remarks, *self.data.notes, *notes),
            participation=config.engine.participation,
            evaluate_every=config.records.evaluate_every,
            exams={i: tuple(self._exams(i)) for i in self.clients},
            homes=homes,
        )

    def judge(self) -> Judge | None:
        """Scores the complete shared model on the test set."""
        if not self.complete or self.pooled:
            return None
        net, test = self.global_net(), self.data.test.to(self.device)

        def judged(server: Message) -> Score:
            net.load_state_dict(server)
            return Score("global", None, "test", score(net, test, Classification()))

        return judged

    def global_net(self) -> nn.Module:
        """A fresh net of the shared architecture."""
        at = At(self.config.seed, -1, self.config.rounds)
        return self._placed(self._net(self.config.model.shared, at.rng("model", "shared"), "model.shared"))

    def leaves(self) -> dict[str, dict[str, tuple[str, list[int]]]]:
        """All that may leave a client: phase -> name -> dtype, shape."""
        return {
            type(phase).__name__.lower(): {
                name: (str(dtype).removeprefix("torch."), list(shape))
                for name, (dtype, shape) in phase.leaves(self.server()).items()
            }
            for phase in (*self.algorithm.start, *self.algorithm.phases)
        }

    def _own(self, client: str) -> ClientConfig:
        return self.config.clients.get(client, ClientConfig())

    def _net(self, name: str, rng: torch.Generator, key: str) -> nn.Module:
        return models.build(name, self.data.shape, len(self.data.classes), rng, key)

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
        at = At(self.config.seed, -1, self.config.rounds)
        nets = {}
        for net, (name, key) in self._networks(id).items():
            alone = net == "personal" and not self.pooled  # what all share starts equal
            nets[net] = self._net(name, at.rng(id, "personal") if alone else at.rng("model", "shared"), key)
        if self.config.model.start == "server" and "personal" in nets:
            try:
                nets["personal"].load_state_dict(self.shared_net.state_dict())
            except RuntimeError:
                raise ConfigError(
                    f"model.start = 'server': client {id!r} has the personal network {self.personal(id)!r}, which cannot "
                    f"start from the shared {self.config.model.shared!r}; use model.start = 'own'"
                ) from None
        return nets

    def _check_alone(self, id: str, nets: Mapping[str, nn.Module]) -> None:
        """Raise ConfigError where a net cannot be trained on one example at a time, as BatchNorm over features cannot."""
        for name, net in nets.items():
            try:
                copy.deepcopy(net).train()(torch.zeros(1, *self.data.shape, device=self.device))
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

    def _rows(self, id: str) -> dict[str, Data]:
        """Rows to train on, and to be scored on: keys as in `_exams`."""
        found: dict[str, Rows | None]
        if self.pooled:
            found = {"private": self.data.pooled().private, "test": self.data.test}
            for i, shares in self.data.clients.items():
                found |= {f"validation of {i}": shares.validation, f"holdout of {i}": shares.holdout}
        else:
            shares = self.data.clients[id]
            found = {"private": shares.private, "validation": shares.validation, "test": self.data.test}
            found["holdout"] = shares.holdout
        return {key: rows.to(self.device) for key, rows in found.items() if rows is not None}

    def _exams(self, id: str) -> Iterable[Exam]:
        """What is scored at a client: each of its nets on its own rows, and its personal net on all classes too."""
        if self.pooled:
            yield Exam("personal", "test", "global", None, "test")
            for rows in self._rows(id):
                kind, _, of = rows.partition(" of ")
                if of:
                    yield Exam("personal", rows, "global", of, kind)
            return
        own = [kind for kind in ("validation", "holdout") if kind in self._rows(id)]
        if "personal" in self.algorithm.scores:
            yield from (Exam("personal", kind, "personal", id, kind) for kind in (*own, "test"))
        if "global" in self.algorithm.scores:
            model = "global" if self.complete else "meme"
            yield from (Exam("meme", kind, model, id, kind) for kind in own)
            if self.config.records.copies:
                yield from (Exam("meme", kind, COPY, id, kind) for kind in own)


def build(config: Config, device: str | None = None, prepared: data.Prepared | None = None) -> Experiment:
    """Read the data, unless they are prepared, and check that everything the configuration names can be made.

    Raises:
        UserError: in one sentence, what cannot.
    """
    federation = data.load(config, prepared)
    experiment = Experiment(config, federation, make_algorithm(config), pick_device(device or config.engine.device))
    unknown = [i for i in config.clients if i not in federation.clients]
    if unknown:
        raise ConfigError(f"key 'clients.{unknown[0]}': there is no such client; there are {', '.join(federation.clients)}")
    personal = config.model.personal or ()
    if len(personal) not in (0, 1, len(federation.clients)):
        raise ConfigError(
            f"key 'model.personal' names {len(personal)} networks for {len(federation.clients)} clients; "
            "name one for all, or one for each"
        )
    return experiment


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


def _twins(nets: Mapping[str, nn.Module], shared: tuple[str, ...]) -> frozenset[str]:
    """The meme's shared tensors that equal one of the personal net's by right.

    Those that start equal, unless all their elements are: every BatchNorm starts with ones and zeros. And, where both
    nets begin with a BatchNorm of the input, its running statistics: they tell of the same inputs, not of a net.
    """
    if not {"personal", "meme"} <= nets.keys():
        return frozenset()
    personal, meme = (nets[n].state_dict() for n in ("personal", "meme"))
    same = {k for k in shared if not constant(meme[k]) and any(_same(v, meme[k]) for v in personal.values())}
    both = _of_input(personal).keys() & _of_input(meme).keys()
    return frozenset(same | (both & set(shared)))


def _same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.shape == b.shape and torch.equal(a, b)


def _of_input(state: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The running statistics of a BatchNorm before which a net has no other tensor."""
    first = next(iter(state), "").rpartition(".")[0]
    own = [k for k in state if k.rpartition(".")[0] == first]
    return {k: state[k] for k in own if k.endswith(("running_mean", "running_var"))}
