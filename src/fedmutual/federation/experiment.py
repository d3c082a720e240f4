"""An experiment: the clients with data, nets and optimisers, the server's first state, and the evaluations."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedmutual import cpu, data, fitting, tasks
from fedmutual.algorithms.peers import make_agreed_state, make_proxy_state
from fedmutual.calling import Inputs, call_network, list_tensors, map_inputs
from fedmutual.config import Config, read_client_settings
from fedmutual.config.checks import describe_unused_keys
from fedmutual.config.methods import make_optimizer
from fedmutual.config.schema import LABELLED
from fedmutual.core import Algorithm, Bench, Client, Data, Diverged, Message, Recipe, Seeds, Task
from fedmutual.errors import ConfigError, DataError
from fedmutual.events import Score
from fedmutual.federation import evaluation
from fedmutual.federation.evaluation import EVAL_MODE_FIX, ROWS, EvalSpec, forward_in_parts, score
from fedmutual.federation.networks import Networks, Workload, find_exempt_tensors
from fedmutual.losses import BuiltIn
from fedmutual.models.copying import copy_or_make
from fedmutual.privacy import rules
from fedmutual.privacy.mechanism import Mechanism
from fedmutual.rundir.best import BestRule
from fedmutual.scores import drop_values
from fedmutual.settings import COMMON_OPTIMIZERS

Judge = Callable[[Message, int], tuple[Score, tuple[str, ...]]]
"""Return the score of the complete shared model on the federation's test set, and remarks; the round counts from 1.

Raises:
    Diverged: outputs of the shared model are not finite, in a run without noise.
"""


@dataclass(frozen=True)
class RoundPlan:
    """The settings of one run, read only by the round loop."""

    algorithm: Algorithm
    seed: int
    rounds: int
    clients: tuple[str, ...]
    notes: tuple[str, ...]  # as in `Started`
    participation: float  # the fraction of clients that take part in a round
    evaluate_every: int
    evaluations: Mapping[str, tuple[EvalSpec, ...]]  # evaluations that run at each client
    seeds: Mapping[str, int]  # bytes of public data that each client sent before round 1; empty without public data
    homes: Mapping[str, Path]  # each client's folder for its best weights and for scores that are not shared
    bench: Bench | None = None  # for algorithms that train at the server
    choices: tuple[str, ...] = ()  # as in `Started`
    keep: BestRule | None = None  # how the best weights are chosen; None: they are not saved
    is_over: Callable[[], bool] = lambda: False  # whether the recorded scores end the run before its last round


@dataclass(frozen=True)
class Experiment:
    """A configuration with its data and its networks."""

    config: Config
    data: data.Federation
    algorithm: Algorithm
    nets: Networks

    @property
    def device(self) -> torch.device:
        """The device on which clients are trained."""
        return self.nets.device

    @property
    def pooled(self) -> bool:
        """Whether one model is trained on the data of all clients together: `centralised`."""
        return self.nets.pooled

    @property
    def clients(self) -> tuple[str, ...]:
        """The ids of the clients that train."""
        return self.nets.clients

    @property
    def seeds(self) -> Seeds | None:
        """The public seed set that all clients know; None if the algorithm uses none, or uses it at the server only."""
        public, use = self.data.public, self.algorithm.public
        if public is None or use is None or use.server:
            return None
        about = public.summary(use.labelled)
        if "counts" in about:  # rows whose targets are no classes count as the first
            about["counts"] = F.pad(about["counts"], (0, self.data.space.outputs - len(about["counts"])))
        return Seeds(public.owners, about)

    @cached_property
    def noised(self) -> frozenset[str]:
        """The networks that are trained with noise (`privacy.nets`).

        Raises:
            ConfigError: messages of a network without noise would leave.
        """
        return rules.list_noised_nets(self.config, self.algorithm, self.make_server_state(), self.pooled)

    def make_server_state(self, members: Sequence[str] | None = None) -> Message:
        """Return the server's first state; empty if the algorithm needs none.

        The state holds the shared tensors, the facts about the public seed set or the proxies, or the state that the
        algorithm begins with.

        members: all participants; give them at a real site, which has one client only.

        Raises:
            ConfigError: the shared network, or the state that the algorithm begins with, cannot be built.
        """
        outputs, scores = self.data.space.outputs, self.algorithm.scores
        if self.seeds is not None:
            return make_agreed_state(self.seeds.owners, outputs)
        if "proxy" in scores:
            return make_proxy_state(members or self.clients, outputs, self.nets.get_shared_state())
        state = self.nets.get_shared_state() if "global" in scores and not self.pooled else {}
        if self.algorithm.begins is not None:
            try:
                state |= self.algorithm.begins(self.nets.shared, outputs)
                self.algorithm.phases[0].leaves(state)
            except ValueError as problem:
                raise ConfigError(f"key 'algorithm.name': {self.config.algorithm['name']!r}: {problem}") from None
        return state

    def make_bench(self) -> Bench | None:
        """Return the model and public data for training at the server; None if the algorithm does not train there."""
        public, use = self.data.public, self.algorithm.public
        if public is None or use is None or not use.server:
            return None
        return Bench(self.nets.place_on_device(self.nets.make_shared()), public.data.to(self.device))

    def make_task(self, client: str) -> Task:
        """Return a client's task: its losses, with the keys of [training] for them, its scores and its main metric.

        Raises:
            ConfigError: the user's loss cannot be imported, the task has no such keys, or `class_weights` fit other classes.
        """
        space = self.nets.get_space(client)
        task = tasks.make_task(space.task, outputs=space.classes)
        tables: list[Any] = [self.config.data, *(c.data for c in self.config.clients.values())]
        if isinstance(task, BuiltIn) and any(table.unlabelled or table.uncertain == "ignore" for table in tables):
            task = replace(task, missing=True)
        values = {key: value for key, value in self._read_training(client, fitting.KEYS).items() if value}
        if not values:
            return task
        if "loss" in values:
            return fitting.Fitted(task, loss=values["loss"], call=fitting.load_loss(values["loss"]))
        if space.task not in LABELLED:
            raise ConfigError(
                f"key 'training.{next(iter(values))}': client {client!r} learns {space.task!r}, whose loss does not take "
                "the key; remove it"
            )
        weights = values.get("class_weights")
        if weights == fitting.BALANCED:
            rows = self.load_rows(client)["private"]
            values["class_weights"] = fitting.count_weights(rows, space.outputs, space.targets == "labels")
        elif weights is not None and len(weights) != space.outputs:
            raise ConfigError(
                f"key 'training.class_weights' has {len(weights)} numbers for the {space.outputs} classes of client "
                f"{client!r}; give one for each"
            )
        return fitting.Fitted(task, **values)

    def _read_training(self, client: str, keys: Iterable[str]) -> dict[str, Any]:
        """Return keys of [training] with the client's own values, where they are set."""
        common, table = self.config.training, self.config.get_client_config(client).training
        return {k: getattr(common, k) if getattr(table, k) is None else getattr(table, k) for k in keys}

    def build_networks(self, id: str) -> dict[str, nn.Module]:
        """Return a client's networks by name, as before round 1, without optimisers, which import `torch._dynamo`.

        Raises:
            ConfigError: a network cannot be built. Or a network cannot be trained: none of its parameters is trainable, or
                the client's batches hold one example and the network needs more. Or noise cannot be added to the training
                of these networks and rows.
            DataError: a network refuses ids of the client's rows.
        """
        nets, private = self.nets.build_for(id), self.load_rows(id)["private"]
        batch = self.config.get_client_config(id).training.batch_size or self.config.training.batch_size
        if min(batch, len(private), self._count_exchanged_rows()) == 1:
            self._check_alone(id, nets)
        for name, net in nets.items():
            if not self.nets.is_frozen(name, id) and not any(p.requires_grad for p in net.parameters()):
                raise ConfigError(f"the {name} network of client {id!r} has no trainable parameter; unfreeze some of it")
        if self.nets.get_space(id).has_integers:
            self._check_ids(id, nets)
        if self.noised:
            rules.check_task(id, self.make_task(id))
            rules.check_nets(id, nets)
            noised = {name: net for name, net in nets.items() if name in self.noised and not self.nets.is_frozen(name, id)}
            rules.check_gradients(id, noised, self._make_examples(id))
            rules.make_units(self.config, id, private)  # raises if groups are to be protected and the rows have none
        return nets

    def build_client(self, id: str) -> Client:
        """Return a participant as before round 1. Raises ConfigError as `build_networks` does."""
        self._set_arithmetic()
        nets, client_config, rows = self.build_networks(id), self.config.get_client_config(id), self.load_rows(id)
        privacy: Mechanism | None = None
        if self.noised:
            privacy = rules.make_mechanism(self.config, id, self.noised, rows["private"])
            rows["private"] = privacy.rows
        shared = self.nets.crossing if "meme" in nets else ()
        rate = client_config.optimizer.lr if client_config.optimizer.lr is not None else self.config.optimizer.lr
        return Client(
            id=id,
            nets=nets,
            optimizers={n: self._make_optimizer(net, id) for n, net in nets.items() if not self.nets.is_frozen(n, id)},
            data=rows,
            rate=rate,
            recipe=self.make_recipe(id),
            shared=shared,
            proxy="proxy" in self.algorithm.scores,
            boundary_exempt=find_exempt_tensors(nets, shared, self.nets.get_space(id).make_examples()),
            task=self.make_task(id),
            settings=read_client_settings(self.config, id),
            precision={"bf16": torch.bfloat16, "fp16": torch.float16}.get(self.config.engine.precision),
            seeds=self.seeds,
            metrics=self.config.disclosure(id),
            privacy=privacy,
        )

    def make_recipe(self, id: str) -> Recipe:
        """Return how a participant trains. Raises ConfigError for training.patience without validation rows."""
        keys = self._read_training(id, Recipe._fields)
        if keys["patience"] is not None and not len(self.load_rows(id).get("validation", ())):
            raise ConfigError(
                f"key 'training.patience': client {id!r} has no validation rows; set 'split.validation' to 0.1"
            )
        return Recipe(**{k: v for k, v in keys.items() if v is not None})

    def _set_arithmetic(self) -> None:
        """Set how this process multiplies matrices, before it trains or scores."""
        cpu.set_library(self.choose_products() or "blas")
        if self.device.type == "cuda":
            tf32 = self.config.engine.precision == "tf32"
            torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = tf32
            torch.backends.cudnn.deterministic = True  # else a convolution adds gradients in a random order

    def choose_products(self) -> cpu.Library | None:
        """Return the library that multiplies float32 matrices; None: the clients do not train on a CPU.

        Raises:
            ConfigError: this machine cannot use the library of `engine.products`.
        """
        return cpu.choose_library(self.config.engine.products) if self.device.type == "cpu" else None

    def estimate_work(self) -> dict[str, Workload]:
        """Return the work of each client in the whole run, estimated from the arithmetic of its networks.

        Raises:
            ConfigError: a network cannot be built.
        """
        costs, work = self.nets.measure_costs(), {}
        optimizer = self.config.optimizer
        slots = 2 + optimizer.amsgrad if optimizer.name != "sgd" else int(bool(optimizer.momentum))
        for id in self.clients:
            steps, examples = self._load(id)
            flops, parameters = costs[id]
            row_cost = 3 * flops  # a backward pass costs as much as two forward passes
            size = 4.0 * parameters * (1 + slots)
            work[id] = Workload(steps * self.config.rounds, examples * self.config.rounds * row_cost, size)
        return work

    def _load(self, id: str) -> tuple[float, float]:
        """Return the number of a client's steps in a round, and the number of examples in these steps."""
        rows = len(self.load_rows(id)["private"])
        training, common = self.config.get_client_config(id).training, self.config.training
        first = self.algorithm.phases[0]
        batch, steps = training.batch_size or common.batch_size, training.local_steps or getattr(first, "local_steps", None)
        if steps is None:
            epochs = training.local_epochs or common.local_epochs
            return epochs * -(-rows // batch), epochs * rows
        use = self.algorithm.public
        exchanged = (use.batch or 0) * self._peer_count if use else 0
        return steps + (exchanged > 0), steps * min(batch, rows) + exchanged

    def make_plan(self, homes: Mapping[str, Path], notes: tuple[str, ...] = (), choices: tuple[str, ...] = ()) -> RoundPlan:
        """Return the plan for the round loop. notes: remarks that follow those of the settings and the data.

        choices: as in `Started`.

        Raises:
            ConfigError: a network cannot be built.
        """
        config, weights = self.config, self.nets.pretrained.values()
        return RoundPlan(
            algorithm=self.algorithm,
            seed=config.seed,
            rounds=config.rounds,
            clients=self.clients,
            notes=(
                *self.algorithm.remarks,
                *describe_unused_keys(config, self.algorithm.scores, self.pooled),
                *self.data.notes,
                *evaluation.describe_evaluation_rows(self.data, config.records.best_by),
                *self.nets.notes,
                *(w.description for w in weights if w.state is None),
                *rules.list_remarks(self.noised, config),
                *notes,
            ),
            choices=(*(w.description for w in weights if w.state is not None), *choices),
            participation=config.engine.participation,
            evaluate_every=config.records.evaluate_every,
            evaluations={i: tuple(self.list_evaluations(i)) for i in self.clients},
            seeds=self._count_public_bytes(),
            homes=homes,
            bench=self.make_bench(),
        )

    def make_judge(self) -> Judge | None:
        """Return the function that scores the complete shared model on the test set; None if there is no such score.

        The function raises Refused if the task returns a score that the task does not declare, and Diverged as `Judge` says.
        """
        learned = {space.task for space in self.data.spaces.values()}
        if not self.nets.complete or self.pooled or self.data.test is None or len(learned) > 1 or self._holdout_only:
            return None
        self._set_arithmetic()
        net, test = self.nets.place_on_device(self.nets.make_shared()), self.data.test.to(self.device)
        task = tasks.make_task(learned.pop(), outputs=self.data.space.classes)

        def score_shared_model(server: Message, round: int) -> tuple[Score, tuple[str, ...]]:
            remarks: list[str] = []

            def report(what: str) -> None:
                if not self.noised:
                    raise Diverged(None, round - 1, None, f"it gives {what} test rows {EVAL_MODE_FIX}")
                remarks.append(f"the shared model gives {what} test rows in eval mode, so these scores are missing")

            net.load_state_dict({k: server[k] for k in self.nets.crossing})  # an algorithm may add tensors
            values = score(net, test, task, "the server", report)
            return Score("global", None, "test", drop_values(values) if remarks else values), tuple(remarks)

        return score_shared_model

    def load_rows(self, id: str) -> dict[str, Data]:
        """Return the training and evaluation rows of a client, by the names of `Client.data`."""
        views = (
            evaluation.pool_rows(self.data) if self.pooled else evaluation.list_client_rows(self.data, id, self.algorithm)
        )
        return {name: rows.to(self.device) for name, rows in views.items()}

    def list_leaves(self) -> dict[str, dict[str, tuple[str, list[int]]]]:
        """Return all tensors that may leave a client: phase -> name -> (dtype, shape), for example ("float32", [64, 10])."""
        return list_leaves(self.algorithm, self.make_server_state())

    def list_evaluations(self, id: str) -> Iterable[EvalSpec]:
        """Yield the evaluations at a client."""
        known, records = self.load_rows(id), self.config.records
        keys = records.copies, id, records.ensemble
        found = (
            evaluation.list_pooled_evaluations(known)
            if self.pooled
            else evaluation.list_evaluations(known, self.algorithm, self.nets.complete, *keys)
        )
        return (spec for spec in found if spec.data == "holdout" or not self._holdout_only)

    @property
    def _holdout_only(self) -> bool:
        return self.config.records.evaluate_on == "holdout"

    def _count_exchanged_rows(self) -> float:
        """Return the fewest public examples of an exchange step; infinity if there is no exchange."""
        use = self.algorithm.public
        if use is None or use.batch is None:
            return math.inf
        return use.batch * (max(self._peer_count, 1) if use.of_sender and not use.pairs else 1)

    @property
    def _peer_count(self) -> int:
        """The number of other participants that give public examples, at any site."""
        return len(self.clients if self.data.public is None else self.data.public.owners) - 1

    def _count_public_bytes(self) -> dict[str, int]:
        """Return the bytes of public data that each client gives; empty if the algorithm uses no public data."""
        public, use = self.data.public, self.algorithm.public
        return {} if public is None or use is None else public.count_bytes(use.labelled)

    def _make_examples(self, id: str) -> Inputs:
        """Return two inputs of a client, on the device of the networks."""
        return map_inputs(lambda x: x.to(self.device), self.nets.get_space(id).make_examples())

    def _check_alone(self, id: str, nets: Mapping[str, nn.Module]) -> None:
        """Raise ConfigError if a net cannot be trained on one example at a time, for example because of BatchNorm."""
        for name, net in nets.items():
            try:
                one = map_inputs(lambda x: x[:1], self._make_examples(id))
                call_network(self._copy(net, name, id).train(), one)
            except ValueError as problem:
                raise ConfigError(
                    f"the batches of client {id!r} have one example, and the {name} network cannot be trained on one "
                    f"example ({problem}); increase training.batch_size, or give the client more examples"
                ) from None

    def _copy(self, net: nn.Module, name: str, id: str) -> nn.Module:
        return copy_or_make(net, lambda: self.nets.build_for(id)[name])

    def _check_ids(self, id: str, nets: Mapping[str, nn.Module]) -> None:
        """Raise DataError if a net refuses integers of the client's rows: in a stack they would read another's weights.

        A net is tried on the rows that hold the smallest and the largest number at each position. It is tried on the CPU,
        because a GPU that reads outside of an embedding cannot be used afterwards.
        """
        views = {**self.load_rows(id), **({} if self.data.test is None else {"test": self.data.test})}
        for kind, rows in ((k, r) for k, r in views.items() if len(r)):
            places, low, high = _find_extreme_rows(rows)
            for net_name, net in nets.items():
                tried = self._copy(net, net_name, id).cpu().eval()
                try:
                    with torch.no_grad():
                        for x, *_ in rows.rows(torch.split(places, ROWS)):
                            forward_in_parts(tried, map_inputs(Tensor.cpu, x))
                except IndexError as problem:
                    raise DataError(
                        f"client {id!r}: the {net_name} network refuses ids of the {kind} rows ({problem}), which are "
                        f"{low} to {high}; give its embedding more rows, or correct the ids"
                    ) from None

    def _make_optimizer(self, net: nn.Module, client: str) -> torch.optim.Optimizer:
        params, own = [p for p in net.parameters() if p.requires_grad], self.config.get_client_config(client).optimizer
        return make_optimizer(self.config.optimizer, own, params, fused=self.device.type in ("cpu", "cuda"))


def find_stack_obstacle(config: Config) -> str:
    """Return why a stack cannot hold the clients of a configuration, as a clause for the user; "" if it can."""
    if config.engine.turns:
        return "clients with engine.turns = true are in no stack"
    if config.engine.precision == "fp16":
        return "clients with engine.precision = 'fp16' have loss scales of their own"
    if config.training.patience or any(client.training.patience for client in config.clients.values()):
        return "clients with training.patience stop alone"
    if (config.optimizer.model_extra or {}).get("dampening"):
        return "with optimizer.dampening the first step of a client differs from its later steps"
    common = config.optimizer.name in COMMON_OPTIMIZERS
    return "" if common else f"clients with optimizer.name = {config.optimizer.name!r} cannot share a stack"


def _find_extreme_rows(rows: Data) -> tuple[Tensor, int, int]:
    """Return the rows with the smallest and the largest integer at each position of the inputs [k], and both numbers."""
    best: dict[tuple[str, int], tuple[Tensor, Tensor]] = {}  # (input, sign) -> signed extremes, and their rows
    start = 0
    for x, *_ in rows.rows(torch.split(torch.arange(len(rows)), ROWS)):
        for name, one in {"": x}.items() if isinstance(x, Tensor) else x.items():
            for sign in (1, -1) if one.dtype == torch.int64 else ():
                values, places = (sign * one.cpu()).reshape(len(one), -1).max(0)
                known, known_places = best.get((name, sign), (values, places + start))
                is_new = values > known
                best[name, sign] = (
                    torch.where(is_new, values, known),
                    torch.where(is_new, places + start, known_places),
                )
        start += len(list_tensors(x)[0])
    high, low = (max(int(v.max()) for (_, s), (v, _) in best.items() if s == sign) for sign in (1, -1))
    return torch.cat([places for _, places in best.values()]).unique(), -low, high  # type: ignore[no-untyped-call]


def list_leaves(algorithm: Algorithm, server: Message) -> dict[str, dict[str, tuple[str, list[int]]]]:
    """Return all tensors that may leave a client: phase -> name -> (dtype, shape), for example ("float32", [64, 10]).

    A phase is named by its class, in lower case. server: the server's first state.
    """
    return {
        type(phase).__name__.lower(): {
            name: (str(dtype).removeprefix("torch."), list(shape)) for name, (dtype, shape) in phase.leaves(server).items()
        }
        for phase in (*algorithm.start, *algorithm.phases)
    }
