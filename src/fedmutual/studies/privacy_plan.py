"""The privacy cost of a federation's rounds for each client: planned before the training, and counted afterwards."""

import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fedmutual.config import Config, read_client_settings
from fedmutual.core import At, Batch, Client, Phase
from fedmutual.engines.base import Simulation
from fedmutual.engines.loop import draw_participants
from fedmutual.errors import ConfigError
from fedmutual.federation.experiment import Experiment
from fedmutual.privacy import rules
from fedmutual.privacy.accountant import NoisedSteps, compute_total_epsilon, find_sigma
from fedmutual.privacy.mechanism import Mechanism
from fedmutual.rundir.record_files import read_summary
from fedmutual.stepping import with_client_settings


class PrivacyCost(NamedTuple):
    """What a client's part in a federation costs."""

    rows: int
    units: int  # rows, or groups of rows
    rate: float  # with which each unit is in a batch
    steps: int
    sigma: float

    def compute_epsilon(self, config: Config) -> float:
        """Return epsilon at the configured delta, by the configured accountant; possibly infinite.

        Raises:
            ConfigError: as `compute_total_epsilon`.
        """
        steps = [NoisedSteps(self.sigma, self.rate, self.steps)]
        return compute_total_epsilon(steps, config.privacy.delta, config.privacy.accountant)

    def find_sigma(self, wished: float, config: Config) -> float:
        """Return the smallest noise multiplier with which the steps cost at most this epsilon.

        Raises:
            ConfigError: no noise multiplier is large enough, or as `compute_total_epsilon`.
        """
        return find_sigma(wished, self.rate, self.steps, config.privacy.delta, config.privacy.accountant)


def plan_privacy(experiment: Experiment) -> dict[str, PrivacyCost]:
    """Return the cost of each client, by its own rows and batch size. Nothing is trained.

    Raises:
        ConfigError: nothing is noised, an algorithm's steps cannot be counted, or `privacy.unit` or `privacy.delta` does not
            fit a client's rows.
    """
    config = experiment.config
    if not experiment.noised:
        raise ConfigError(
            "privacy.nets has no effect here, so nothing is noised and there is no epsilon; set privacy.nets to 'meme' or "
            "'both'" + ("" if config.privacy.nets == "none" else ", or choose an algorithm that sends what it learns")
        )
    assert config.privacy.sigma is not None  # the configuration is checked
    costs = {}
    for client in experiment.clients:
        rows = experiment.load_rows(client)["private"]
        units = rules.make_units(config, client, rows)
        steps = _count_steps(experiment, client, len(rows))
        costs[client] = PrivacyCost(len(rows), units.count, units.rate, steps, config.privacy.sigma)
    return costs


def check_budget(experiment: Experiment) -> None:
    """Check, before the training, that no client's part costs more than `privacy.epsilon`.

    Raises:
        ConfigError: a client's part costs more; or as `plan_privacy` and `compute_total_epsilon`.
    """
    config = experiment.config
    budget = config.privacy.epsilon
    if budget is None or not experiment.noised:
        return
    for client, cost in plan_privacy(experiment).items():
        spent = cost.compute_epsilon(config)
        if spent > budget:
            raise ConfigError(
                f"privacy.epsilon = {budget:g}: {cost.steps} steps with sigma {cost.sigma:g} cost client {client!r} epsilon "
                f"{spent:.3g} at delta {config.privacy.delta:g}; set "
                f"privacy.sigma = {cost.find_sigma(budget, config):g}, or fewer rounds"
            )


def record(experiment: Experiment, engine: Simulation) -> Mapping[str, Any]:
    """Return {"privacy": its table in summary.json}, by the steps that were taken; {} where nothing was noised.

    Raises:
        ConfigError: as `compute_total_epsilon`.
        WorkerLost: a worker died.
    """
    privacy = experiment.config.privacy
    if not experiment.noised:
        return {}
    taken = dict(engine.visit(_list_taken_steps, dict.fromkeys(experiment.clients, ()), reads=True))
    clients = {}
    for client in experiment.clients:
        steps = taken[client]
        spent = compute_total_epsilon([steps], privacy.delta, privacy.accountant)
        clients[client] = {"epsilon": spent if math.isfinite(spent) else None, "steps": steps.number, "rate": steps.rate}
    return {"privacy": describe_privacy(experiment.config, clients)}


def describe_privacy(config: Config, clients: Mapping[str, Mapping[str, float | None]]) -> dict[str, Any]:
    """Return the privacy settings and the cost of each client: epsilon (None: infinite), steps, sampling rate."""
    return {**config.privacy.model_dump(exclude={"epsilon"}), "clients": clients}


def describe_trials(folders: Sequence[Path], config: Config) -> str | None:
    """Return a sentence with the total epsilon of a sweep's trainings; None where no training was noised.

    Raises:
        RunError: a summary.json is damaged.
        ConfigError: as `compute_total_epsilon`.
    """
    taken: dict[str, list[NoisedSteps]] = {}
    unknown = 0
    for folder in folders:
        summary = read_summary(folder)
        unknown += summary is None
        if summary is None or summary.privacy is None:
            continue
        for client, cost in summary.privacy.clients.items():
            taken.setdefault(client, []).append(NoisedSteps(summary.privacy.sigma, cost.rate, cost.steps))
    if not taken:
        return None
    total = max(compute_total_epsilon(steps, config.privacy.delta) for steps in taken.values())
    more = f", without {unknown} that stopped and whose steps are not known" if unknown else ""
    return (
        f"privacy: the trainings of this sweep used the same rows, and together cost epsilon {total:.3g} at delta "
        f"{config.privacy.delta:g}{more}; the scores by which a setting is chosen are not counted"
    )


def _list_taken_steps(client: Client) -> NoisedSteps:
    assert isinstance(client.privacy, Mechanism)
    return NoisedSteps(client.privacy.sigma, client.privacy.units.rate, client.privacy.steps)


class _Counted:
    """Rows that are never read; only the requested batches are counted."""

    def __init__(self, length: int) -> None:
        self.length, self.count = length, 0

    def __len__(self) -> int:
        return self.length

    def rows(self, plan: Iterable[Tensor], rng: torch.Generator | None = None) -> Iterable[Batch]:
        """Yield no batches."""
        self.count += len(list(plan))
        return ()


def _count_steps(experiment: Experiment, id: str, rows: int) -> int:
    """Return the number of steps on private rows of a client: at the start, and in all rounds in which it takes part."""
    config, algorithm = experiment.config, experiment.algorithm
    fraction, clients = config.engine.participation, experiment.clients
    ats = [At(config.seed, r, config.rounds) for r in range(config.rounds)]
    rounds = [at.round for at in ats if id in draw_participants(clients, fraction, at)]
    try:
        steps = {r: _count_round_steps(experiment, id, rows, r, algorithm.phases) for r in {*rounds[:1], *rounds[-1:]}}
        if len(set(steps.values())) > 1:  # rounds differ
            steps = {r: _count_round_steps(experiment, id, rows, r, algorithm.phases) for r in rounds}
        each = next(iter(steps.values()), 0)
        return _count_round_steps(experiment, id, rows, -1, algorithm.start) + sum(steps.get(r, each) for r in rounds)
    except Exception as problem:  # an algorithm of one's own may ask for more than a plan has
        name = config.algorithm["name"]
        raise ConfigError(f"algorithm {name!r}: its steps cannot be counted before the training ({problem})") from problem


def _count_round_steps(experiment: Experiment, id: str, rows: int, round: int, phases: Iterable[Phase]) -> int:
    """Return the number of steps on private rows in one round; round -1 is the start."""
    config, seeds = experiment.config, experiment.seeds
    private, public = _Counted(rows), _Counted(sum(map(len, seeds.owners.values())) if seeds else 0)
    data, settings = {"private": private, "public": public}, read_client_settings(config, id)
    client = Client(id, {}, {}, data=data, task=experiment.make_task(id), settings=settings, seeds=seeds)
    for number, phase in enumerate(phases):
        for _ in with_client_settings(phase, client).batches(client, {}, At(config.seed, round, config.rounds, number)):
            pass
    return private.count
