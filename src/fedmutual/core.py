"""The interface of an algorithm: what is sent, what is minimised, how replies are combined. No engine is known here.

Read in this order: a `Message` is sent; a `Phase` is one exchange, with its hooks; `stepping.work` is the client's part
of a phase, with the same code in every eager engine. Shapes: B batch, C classes; ``...`` the shape of one example.
"""

import abc
import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from fedmutual.calling import Inputs, list_tensors
from fedmutual.metric import ACCURACY
from fedmutual.metric import Metric as Metric
from fedmutual.metric import TargetKind as TargetKind
from fedmutual.role import Role as Role
from fedmutual.settings import Disclosure as Disclosure
from fedmutual.settings import OnlyIf as OnlyIf
from fedmutual.settings import Schedule as Schedule
from fedmutual.settings import Setting as Setting
from fedmutual.settings import above_zero as above_zero
from fedmutual.settings import within as within

T = TypeVar("T")
PREVIOUS = "previous reply."  # of a client's memory: begins the names of what `Phase.keeps_reply` keeps

Message = dict[str, Tensor]
"""Named tensors. Participants exchange messages; scores and losses are sent separately (`boundary.release_metrics`)."""

Spec = Mapping[str, tuple[torch.dtype, tuple[int, ...]]]
"""The tensors that a message may hold: name -> (dtype, shape)."""

Batch = tuple[Any, ...]
"""Inputs x (`Inputs`), targets y [B, ...], then the tensors that a phase adds."""


class Diverged(RuntimeError):
    """A loss, a weight or an output stopped being finite. `round` and `batch` count from 0; the message counts from 1."""

    def __init__(self, client: str | None, round: int, batch: int | None, what: str) -> None:
        """client: None for the shared model of the server. batch: None in an evaluation."""
        super().__init__(client, round, batch, what)
        self.client, self.round, self.batch, self.what = client, round, batch, what

    def __str__(self) -> str:
        who = "the shared model" if self.client is None else f"client {self.client!r}"
        at = "" if self.batch is None else f" at batch {self.batch + 1}"
        return f"{who} diverged in round {self.round + 1}{at}: {self.what}"


class Disagreed(RuntimeError):
    """A participant's public seed set differs from that of the others: names the participant and the difference."""

    def __init__(self, client: str, what: str, clients: tuple[str, ...] = ()) -> None:
        """clients: all participants with a different set; empty: only `client`."""
        super().__init__(client, what, clients)
        self.client, self.what, self.clients = client, what, clients or (client,)

    def __str__(self) -> str:
        return f"client {self.client!r} has a public seed set that differs from the others' ({self.what}); give all one set"


class Unusable(Exception):
    """Replies that must not be used, raised by `Phase.receive`, which is then called again without them.

    why: sender -> the fault of its reply.
    """

    def __init__(self, why: Mapping[str, str]) -> None:
        super().__init__(dict(why))
        self.why = dict(why)


def setting(default: T, about: str, tune: tuple[T, ...] = (), only_if: tuple[OnlyIf, ...] = ()) -> T:
    """Return a dataclass field that users set under [algorithm]. about: its meaning in one line, for `list keys`.

    tune: the values that `compare --tune` tries; without values the setting is not tuned.
    only_if: the conditions under which the setting has an effect.
    """
    return field(default=default, metadata={"about": about, "tune": tune, "only_if": only_if})


def from_training(default: T) -> T:
    """Return a dataclass field with the value of the key of the same name in [training], or with the default of this key.

    default: the value in an instance that a caller makes, and if the key has neither a value nor a default.
    """
    return field(default=default, metadata={"from": "training"})


def run_field(default: T) -> T:
    """Return a dataclass field that the run sets, and no key."""
    return field(default=default, metadata={"from": "run"})


class Net(NamedTuple):
    """A model as a loss sees it: one module, or one of many stacked under vmap."""

    call: Callable[..., Tensor]  # x [B, ...], and weights in the place of its own by name, or none -> output [B, C]
    params: Message  # the trainable ones
    head: nn.Linear | None = None  # its last linear layer

    def __call__(self, x: Inputs, weights: Message | None = None) -> Tensor:
        """Return the output [B, C] for x [B, ...].

        weights: tensors in place of the model's tensors of these names; gradients reach them.
        """
        return self.call(x) if weights is None else self.call(x, weights)

    def features(self, x: Inputs, weights: Message | None = None, beside: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return (the input of the last layer [B, F], the output [B, C]), for algorithms with `Algorithm.features`.

        weights: as in a call. beside: further features [G, F], which the last layer gets too: the output is [B + G, C].
        """
        return take_features(self.head, lambda: self(x, weights), beside)


def take_features(head: nn.Linear | None, call: Callable[[], Tensor], beside: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Return (the input [B, F] of the layer `head` while `call` computes the output, the output [B, C]).

    beside: further rows [G, F] of the layer's input; the output is then [B + G, C].
    """
    assert head is not None  # of a network with `Algorithm.features`, as is checked before the first round
    taken: list[Tensor] = []

    def take(_: nn.Module, inputs: tuple[Tensor, ...]) -> Tensor | None:
        taken.append(inputs[0])
        return None if beside is None else torch.cat((inputs[0], beside.to(inputs[0])))

    with head.register_forward_pre_hook(take):
        output = call()
    return taken[-1].to(output.dtype), output


def match_inputs(value: Tensor, x: Inputs) -> Tensor:
    """Return numbers on the device of inputs x, and in the type of x unless x are integers or several inputs."""
    like = list_tensors(x)[0]
    return value.to(like) if like is x and like.is_floating_point() else value.to(like.device)


def format_tensor(x: Inputs) -> str:
    """Return a tensor's type and shape as text, for example "float32 [3, 8, 8]"; of several tensors with their names."""
    if not isinstance(x, Tensor):
        return ", ".join(f"{name} {format_tensor(one)}" for name, one in x.items())
    return f"{str(x.dtype).removeprefix('torch.')} {list(x.shape)}"


def find_head(net: nn.Module) -> nn.Linear | None:
    """Return the last declared linear layer of a network; None without a linear layer."""
    return next((module for module in reversed(list(net.modules())) if isinstance(module, nn.Linear)), None)


@dataclass(frozen=True)
class Total(Mapping[str, Message]):
    """The sum of the replies of several clients, in place of their replies, which are masked, or not kept.

    `Phase.receive` passes a total unread to `aggregate`, or to the `receive` of its base class.
    """

    names: tuple[str, ...]  # of the clients

    def __getitem__(self, name: str) -> Message:
        """Raise TypeError."""
        raise TypeError("only the sum of the replies is known: pass `replies` to self.aggregate as they are")

    def __iter__(self) -> Iterator[str]:
        return iter(self.names)

    def __len__(self) -> int:
        return len(self.names)


@dataclass(frozen=True)
class At:
    """The position in the run: seed, round and phase. It is public, and equal at every participant."""

    seed: int
    round: int  # 0 .. rounds - 1; -1 in Algorithm.start and while nets are made
    rounds: int
    phase: int = 0

    def rng(self, *words: str) -> torch.Generator:
        """Return a new generator of a client's stream, ``rng(client.id, "batches")``, or of a shared one, ``rng("public")``.

        Equal words give an equal stream, whatever ran before. So neither the order of clients, nor the number of workers,
        nor a stop and resume changes the stream.
        """
        path = repr((self.seed, self.round, self.phase, *words)).encode()
        return torch.Generator().manual_seed(int.from_bytes(hashlib.blake2b(path, digest_size=7).digest(), "big"))

    def number(self, setting: Setting) -> float:
        """Return the value of a setting in this round, as a number."""
        return setting(self.round, self.rounds) if isinstance(setting, Schedule) else float(setting)

    def value(self, setting: Setting) -> Tensor:
        """Return the value of a setting in this round as a tensor [], so that a loss treats all kinds of settings alike."""
        return torch.tensor(self.number(setting), dtype=torch.get_default_dtype())


class Data(Protocol):
    """Rows by index: resident tensors, or a DataLoader over data that do not fit in memory."""

    def __len__(self) -> int:
        """Return the number of rows."""
        ...

    def rows(self, plan: Iterable[Tensor], rng: torch.Generator | None = None) -> Iterable[Batch]:
        """Yield one batch for each index tensor [B] of `plan`. rng: for augmentation; None: no augmentation.

        Raises:
            DataError: a row cannot be read, or holds NaN or infinite values.
            Refused: the rows are private, and the algorithm reads them where `privacy.nets` adds no noise.
        """
        ...


@dataclass(frozen=True)
class Seeds:
    """The agreed facts about the public seed set, equal at every participant; its rows are `Client.data["public"]`."""

    owners: Mapping[str, range]  # participant -> the positions of its rows in the set; all participants, in one order
    about: Message  # the values that participants compare: a digest uint8 [32], the numbers of rows [] and of each class [C]


class Task(Protocol):
    """What a client learns; classification by default. Losses are scalars, means over the batch.

    Members may be missing: `targets`, the kind of the targets (`get_target_kind`); `metric`, the main metric
    (`get_metric`); `answer`, outputs [B, ...] -> answers for users [B, ...]; and `is_mean` (True), whether the losses of a
    batch are means of the losses of its examples, as noise for privacy needs them.
    """

    @property
    def outputs(self) -> int | None:
        """Return the number of outputs for numeric targets; None: one for each class, label or number."""
        ...

    def fit(self, output: Tensor, target: Tensor) -> Tensor:
        """Return the loss [] of one network: output [B, ...], target [B, ...] in the shapes of the task."""
        ...

    def mutual(
        self, personal: Tensor, meme: Tensor, target: Tensor, alpha: Tensor, beta: Tensor, temperature: float
    ) -> tuple[Tensor, Tensor]:
        """Return (personal loss [], meme loss []) of two networks that teach each other; each loss trains one network.

        personal, meme: the outputs [B, ...] of both networks. alpha, beta: tensors [], the weights of the target's loss.
        """
        ...

    @property
    def tells(self) -> tuple[str, ...]:
        """Return the names of the task's scores; an evaluation can send no others."""
        ...

    def score(self, output: Tensor, target: Tensor) -> Mapping[str, Any]:
        """Return the scores over a data set: name -> a number, None, or a list with one value for each class.

        output, target: of all N rows, [N, ...].
        """
        ...


def get_target_kind(task: Task) -> TargetKind:
    """Return the member `targets` of a task; without the member, classes if `outputs` is None, else numbers."""
    kind: TargetKind = getattr(task, "targets", "classes" if task.outputs is None else "numbers")
    return kind


def get_metric(task: Task) -> Metric | None:
    """Return the member `metric` of a task; without the member, the accuracy of a task that declares one, else None."""
    metric: Metric | None = getattr(task, "metric", ACCURACY if ACCURACY.name in task.tells else None)
    return metric


class Privacy(Protocol):
    """The component that makes a client's steps on its private rows differentially private (fedmutual.privacy)."""

    steps: int  # taken on private rows since the run began

    @property
    def nets(self) -> frozenset[str]:
        """Return the networks with clipped and noised gradients; every reply is computed from these networks."""
        ...

    @property
    def reading(self) -> bool:
        """Return whether the batches of the current phase hold private rows."""
        ...

    def batches(self, phase: "Phase", client: "Client", inbox: Message, at: At) -> Iterable[Batch]:
        """Return the batches of a phase; batches of private rows are sampled and accounted for before any row is read.

        Raises:
            RunError: the privacy budget of a real site does not allow the phase, or the ledger cannot be used.
            DataError, Refused: as `Data.rows`.
        """
        ...

    def gradients(self, phase: "Phase", client: "Client", batch: Batch, const: Message) -> tuple[Message, Message]:
        """Return (the gradients of a step on private rows, "net.name" -> gradient, its loss terms)."""
        ...


@dataclass
class Work:
    """The work of a client's phase. The number of steps reveals the number of rows, so real sites never send it."""

    steps: int = 0  # gradient steps
    forwards: int | None = 0  # of a network over a step's batch; None: not counted, as with differential privacy


class Recipe(NamedTuple):
    """How a client's steps change the gradients of its losses. The key of [training] of the same name sets each field.

    Norms and values are those of the gradients that the optimiser applies, after `Phase.edit`; with `privacy`, after noise.
    """

    clip_norm: float | None = None  # the largest norm of the gradient of each network; None: any norm
    clip_value: float | None = None  # the largest absolute value of an element of a gradient; None: any value
    accumulate: int = 1  # batches of one step, whose gradients are averaged
    # rounds without a smaller loss on the client's own validation rows, after which it takes no more steps; None: never
    patience: int | None = None


PLAIN = Recipe()


@dataclass
class Client:
    """One participant. No server function receives a client."""

    id: str
    # "personal", and "meme" if parameters are shared: a new fork of the shared model in every round that uses it. Of a meme
    # only the tensors that stay at the client (its adaptor, or a proxy) are kept from round to round
    nets: dict[str, nn.Module]
    optimizers: dict[str, Optimizer]  # by the net's name
    data: Mapping[str, Data]  # "private", to train on (`Algorithm.trains_on`); "public" where there is a seed set
    rate: Setting = 0.01  # the learning rate of its optimisers
    recipe: Recipe = PLAIN
    shared: tuple[str, ...] = ()  # the names of the meme's exchanged tensors; the others, its adaptor, stay at the client
    proxy: bool = False  # whether its meme is a proxy: the client's own net, exchanged with peers, kept from round to round
    boundary_exempt: frozenset[str] = frozenset()  # names in `shared` that may equal the personal net's initial tensors
    task: Task | None = None  # its losses and scores; None: the phase's task, and scores of a classification
    settings: Mapping[str, Any] = field(default_factory=dict)  # alpha, ...: replace the phase's, and are never sent
    precision: torch.dtype | None = None  # a lower precision for the networks' arithmetic; weights keep theirs
    metrics: Disclosure = "all"  # which losses and scores the client discloses; messages are sent in any case
    seeds: Seeds | None = None  # of the public seed set, where the algorithm has one
    memory: Message = field(default_factory=dict)  # carried from phase to phase, checkpointed, never sent
    recipe_state: Message = field(default_factory=dict)  # likewise, of the recipe: the last meme, the loss scale, ...
    privacy: Privacy | None = None  # clips and noises the steps on private rows; None: nothing is clipped or noised
    work: Work = field(default_factory=Work)  # of its last phase

    @property
    def previous(self) -> Message:
        """What the client last sent in a phase with `keeps_reply`, by name; {} before its first reply."""
        return {k.removeprefix(PREVIOUS): v for k, v in self.memory.items() if k.startswith(PREVIOUS)}


class Phase(abc.ABC):
    """One exchange. A subclass is a frozen dataclass of settings; state is passed in and returned.

    A hook that reads rows raises DataError and Refused as `Data.rows` does.
    """

    title: ClassVar[str]  # the name of the method in tables; by default the name of the class
    role: ClassVar[Role]  # in comparisons; each class declares its own, a subclass inherits none and then has `Role()`
    scores: ClassVar[tuple[str, ...]] = ("personal",)  # the models that are scored, as `Algorithm.scores`
    terms: ClassVar[tuple[str, ...]] = ()  # names of all numbers that training may disclose beside the reply: loss terms
    # whether only gradient steps read private rows, so that noise on these steps covers all that leaves; a subclass does not
    # inherit it
    dp_ready: ClassVar[bool] = False
    # whether the client keeps what it sends, for its next phase: `Client.previous`
    keeps_reply: ClassVar[bool] = False
    # whether the client's personal network becomes what the client sends, after the boundary has let it pass
    adopts_reply: ClassVar[bool] = False
    # the algorithm whose shared model `fedmutual adapt` fine-tunes for comparison with a newcomer that learns by this class;
    # None: a newcomer cannot learn by it. A subclass does not inherit it
    adapt_rival: ClassVar[str | None] = None

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        cls.title = vars(cls).get("title", cls.__name__)

    @property
    def rate(self) -> Setting | None:
        """Return the learning rate of this phase; None: the client's learning rate."""
        return None

    def count_steps(self, client: "Client") -> int | None:
        """Return about how many steps `batches` leads to; None if `batches` depends on more than the client's rows and `at`.

        With a number, an engine may move the client to another process between two steps, which draws the batches again.
        """
        return None

    def leaves(self, server: Message) -> Spec:
        """Return all that a reply may hold, name -> (dtype, shape), from public knowledge.

        The operator of a site reads this declaration before the site joins.
        """
        return {k: (v.dtype, tuple(v.shape)) for k, v in server.items()}

    def send(self, server: Message, to: str, at: At) -> Message:
        """Return the message for participant `to`; without a server each peer calls `send` and `receive` itself."""
        return server

    def begin(self, client: Client, inbox: Message, at: At) -> Message:
        """Read the inbox into the client; return the constants of `loss` for this phase, such as alpha."""
        return {}

    @abc.abstractmethod
    def batches(self, client: Client, inbox: Message, at: At) -> Iterable[Batch]:
        """Return the batches of the local steps, one for each step; none for a client that skips this phase."""

    @abc.abstractmethod
    def loss(self, nets: Mapping[str, Net], batch: Batch, const: Message) -> Message:
        """Return named scalars; their sum is minimised, and each is logged.

        The function is pure, does not branch on values and reads settings from `const`, so that it works under vmap.
        """

    def edit(self, grads: Message, memory: Message) -> tuple[Message, Message]:
        """Return (the gradients to apply, the new memory), with equal names and shapes at every step. Pure, for vmap."""
        return grads, memory

    def end(self, client: Client, at: At) -> Message:
        """Return the reply: all declared tensors, or {} from a client that skips this phase.

        The tensors are not copied: the privacy boundary identifies each tensor by its storage before it copies it.
        """
        return {}

    def weigh_reply(self, reply: Message) -> tuple[Message, float] | None:
        """Return (the model of a reply, its weight) if `receive` needs only the mean of the models, else None."""
        return None

    def receive(self, server: Message, replies: Mapping[str, Message], at: At) -> Message:
        """Return the next server state. replies: from the participants that answered; may be empty, or a `Total`.

        Raises:
            Unusable: some of the replies must not be used.
        """
        return server

    def algorithm(self) -> "Algorithm":
        """Return an algorithm with this phase alone."""
        kind = type(self)
        return Algorithm(kind.__name__.lower(), (self,), scores=self.scores, dp_ready=vars(kind).get("dp_ready", False))


@dataclass(frozen=True)
class Public:
    """How an algorithm uses the public seed set, whose rows all participants hold."""

    labelled: bool = True  # whether all participants get its labels; else labels stay with the owners of the rows
    batch: int | None = None  # the number of examples in a message; None: no message of a round is about public examples
    of_sender: bool = False  # whether `batch` counts rows of each sender; else rows of the whole set
    pairs: bool = False  # whether the algorithm draws the participants of a round
    server: bool = False  # whether only the server has the rows, to train the shared model on
    own_labels: bool = True  # whether a participant reads the labels of the rows that it owns


@dataclass(frozen=True)
class Bench:
    """The network and public data of a server that trains the shared model: the field `bench` of a phase (`run_field`)."""

    net: nn.Module  # the shared network; its weights are not used
    public: Data  # the public rows; their labels are not used


SCORED_MODELS = ("global", "personal", "proxy")
"""The models that `Algorithm.scores` may name: the shared model, personal models, and proxies that peers exchange."""


@dataclass(frozen=True)
class Algorithm:
    """The phases before round 1, the phases of each round in order, and the models that are scored."""

    name: str
    phases: tuple[Phase, ...]  # of a round: one for FML and FedAvg, two for FedH2L, three for FedMD
    start: tuple[Phase, ...] = ()  # before the first round, once (FedMD's transfer)
    # "global": a shared model, forked as meme; "personal": a network of each client; "proxy": a meme of each client, which
    # peers exchange, and no shared model
    scores: tuple[str, ...] = ("personal",)
    alike: bool = False  # whether a client's personal network must have the shared architecture
    same_heads: bool = False  # whether the last layers of all personal networks must have the shape of the shared one's
    features: tuple[str, ...] = ()  # the nets whose features are read (`Net.features`); they must end in a linear layer
    # (the shared network, the number of classes) -> the server's first state besides a shared model, if the state is not
    # public data; all clients must then have the same classes
    begins: Callable[[nn.Module, int], Message] | None = None
    # (the sent message, a compressed reply) -> the model that the reply stands for, by which real sites compare updates;
    # None: replies are not compressed
    restore: Callable[[Message, Message], Message] | None = None
    public: Public | None = None  # None: there is no public seed set
    # whether every row must have a label; an algorithm with a labelled public set needs them, too
    needs_labels: bool = False
    # the parts of a client's rows in `Client.data["private"]`: "private", "own public", or "public" of all clients
    trains_on: tuple[str, ...] = ("private", "own public")
    remarks: tuple[str, ...] = ()  # sentences for the user on consequences of these settings
    dp_ready: bool = False  # as `Phase.dp_ready`, of all its phases
