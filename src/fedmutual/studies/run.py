"""One experiment, from its configuration to its folder."""

import hashlib
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch

from fedmutual import data
from fedmutual.config import Config
from fedmutual.config.checks import describe_unused_engine_keys
from fedmutual.core import Message
from fedmutual.cpu import use_threads
from fedmutual.engines.base import Simulation, WorkerLost, count_parameters
from fedmutual.engines.inprocess import remove_stored_states
from fedmutual.engines.loop import drive, generate_rounds
from fedmutual.engines.ray import Cluster
from fedmutual.engines.select import EngineChoice, choose_engine, count_memory, make_stacker, open_engine, plan_disk_storage
from fedmutual.engines.stacked import Stacked, Training, train_together
from fedmutual.errors import RunError
from fedmutual.events import Observer
from fedmutual.federation import build
from fedmutual.federation.description import describe_run, find_common_metric
from fedmutual.federation.experiment import Experiment, find_stack_obstacle
from fedmutual.models import list_user_networks
from fedmutual.rundir import best as bests
from fedmutual.rundir import folder as folders
from fedmutual.rundir import trackers
from fedmutual.rundir.checkpoint import Checkpoints, load_client, make_file_name, read_checkpoint, restore_server
from fedmutual.rundir.file_names import CONFIG, LEDGER, METRICS, client_folder, server_folder
from fedmutual.rundir.logs import Ledger, Metrics, TextLog
from fedmutual.rundir.record_files import is_finished, read_environment, read_summary, rewind
from fedmutual.rundir.schema import Environment, RecordedEngine, Saved
from fedmutual.rundir.summary import write_summary
from fedmutual.studies import privacy_plan
from fedmutual.studies.trained_run import Run, open_trained_run
from fedmutual.tensor_files import read_tensors

FIX_WORKERS = "set engine.workers lower, or engine.name = 'inprocess', and continue with --resume (in Python: resume=True)"
MOST_DEATHS = 3  # deaths of workers since a saved round


class RunRequest(NamedTuple):
    """A run to train; the fields are the arguments of `train_run`."""

    config: Config
    folder: Path
    resume: bool
    observers: Sequence[Observer]


def train_run(config: Config, folder: Path, resume: bool = False, observers: Sequence[Observer] = ()) -> Run:
    """Train one run as `fedmutual.run`, without warnings, for callers whose observers show the remarks.

    Raises:
        UserError, Diverged, Refused: as `fedmutual.run`.
    """
    recorded = _read_environment(folder, config, resume)
    if recorded is not None:
        try:
            with use_threads(config.engine.threads), torch.random.fork_rng(devices=[]):  # the caller's streams stay
                experiment = _build(config, folder, recorded)
                privacy_plan.check_budget(experiment)
                handle = EngineHandle(experiment, recorded.engine.name if recorded.engine else None, folder)
                with closing(handle), folders.lock_folder(folder):
                    if _read_environment(folder, config, resume) is not None:  # else another process finished it meanwhile
                        _train_through(handle, folder, observers)
        except WorkerLost as problem:
            raise RunError(f"{folder}: {problem}; is there enough memory? {FIX_WORKERS}") from None
    return open_trained_run(folder, config)


def attempt_together(requests: Sequence[RunRequest]) -> list[Exception | None]:
    """Train several experiments at once, with the clients of all experiments in common stacks.

    Return the error of each run, None for a finished run; a run that fails stops no other run.

    Raises:
        UserError: a folder, the data or a network cannot be used; raised before the first training.
        BaseException: an error that is no `Exception`, of the first run that raised such an error.
    """
    environments = [_read_environment(r.folder, r.config, r.resume) for r in requests]
    with use_threads(max(r.config.engine.threads for r in requests)), torch.random.fork_rng(devices=[]):
        prepared: dict[str, dict[str, data.Prepared]] = {}
        built = {}
        for n, (recorded, request) in enumerate(zip(environments, requests, strict=True)):
            if recorded is not None:
                key = identify_data(request.config)
                prepared[key] = prepared.get(key) or data.prepare(request.config)
                built[n] = _build(request.config, request.folder, recorded, prepared[key])
        stacker = make_stacker([requests[n].config.engine for n in built])
        engines = [Stacked(experiment.build_client, tuple(experiment.clients), stacker) for experiment in built.values()]
        choice = EngineChoice("stacked", 1, f"{len(built)} runs at once fill a device better")

        def train(n: int, engine: Simulation) -> Training:
            config, folder, resume, observers = requests[n]
            with folders.lock_folder(folder):
                if _read_environment(folder, config, resume) is not None:
                    _describe(folder, built[n], engine, choice)
                    notes = (*describe_unused_engine_keys(config, choice.name),)
                    yield from _train(built[n], engine, folder, observers, notes, _describe_pick(choice))

        raised = dict(zip(built, train_together(engines, list(map(train, built, engines))), strict=True))
    problems: list[Exception | None] = [None] * len(requests)
    for n, problem in raised.items():
        if problem is not None and not isinstance(problem, Exception):
            raise problem
        problems[n] = problem
    return problems


def identify_data(config: Config) -> str:
    """Return a key that is equal for configurations that read equal data in one form, which the networks choose."""
    clients = {i: (client_config.data, client_config.training.task) for i, client_config in config.clients.items()}
    kind = config.partition.kind if config.partition.kind in data.OF_DOMAINS else ""  # domains decide which data are read
    drawn = config.seed if data.is_drawn_by_seed(config.data) else None
    return repr((config.data, kind, drawn, config.training.task, clients, list_user_networks(config)))


def can_stack(configs: Sequence[Config]) -> bool:
    """Return whether the clients of these runs can train in common stacks: several runs with equal tables [engine].

    Runs with `privacy.nets` cannot, because the gradient of each example is clipped; nor those of `find_stack_obstacle`.

    Raises:
        ConfigError: this machine lacks the device.
    """
    has_obstacle = any(c.privacy.nets != "none" or find_stack_obstacle(c) for c in configs)
    if len(configs) < 2 or has_obstacle or any(c.engine != configs[0].engine for c in configs):
        return False
    engine = configs[0].engine
    return engine.name == "stacked" or (engine.name == "auto" and build.pick_device(engine.device).type == "cuda")


class EngineHandle:
    """An experiment with its engine, which is chosen and opened, and started again after the death of a worker."""

    def __init__(self, experiment: Experiment, before: str | None, folder: Path | None = None) -> None:
        """before: the engine of the run before it was stopped; None for a new run.

        folder: of the run, where states of clients may be stored; None: all clients stay in memory.

        Raises:
            ConfigError: the engine cannot hold the clients.
            WorkerLost: three workers died while they built their clients.
        """
        engine = experiment.config.engine
        self.experiment, self.work = experiment, experiment.estimate_work()
        self._obstacle = find_stack_obstacle(experiment.config)
        noised = "clients with clipped and noised gradients cannot share a stack"
        obstacle = noised if experiment.noised else self._obstacle
        name = before if before and engine.name == "auto" else engine.name
        self.choice = choose_engine(name, engine.workers, experiment.device, self.work, obstacle)
        if name != engine.name:
            self.choice = self.choice._replace(why="as the run was begun")
        self._disk = None
        if folder is not None:
            self._disk = plan_disk_storage(engine.resident, self.choice, self.work, folder, count_memory())
        self._lost: list[str] = []  # workers that died while they built their clients
        self.engine = self._open()

    @property
    def notes(self) -> tuple[str, ...]:
        """Remarks on keys without effect, and on workers that died while they built clients."""
        return (*describe_unused_engine_keys(self.experiment.config, self.choice.name), *self._lost)

    @property
    def choices(self) -> tuple[str, ...]:
        """The engine that was chosen automatically, and where the states of clients are stored."""
        engine = self.experiment.config.engine
        picked = _describe_pick(self.choice) if engine.name == "auto" else ()
        if self._disk is not None and engine.resident is None:
            size = sum(w.bytes for w in self.work.values()) / 2**30
            picked += (
                f"the states of all clients take about {size:.1f} GiB: {self._disk.resident} clients of each process stay "
                "in memory, and the states of the others are stored in the run folder (engine.resident)",
            )
        return picked

    def restart(self) -> None:
        """Start a new engine, with clients as before round 1. Raises ConfigError and WorkerLost as `EngineHandle`."""
        self.close()
        self.engine = self._open()

    def close(self) -> None:
        """Close the engine and its clients."""
        try:
            self.engine.close()
        finally:
            if self._disk is not None:
                remove_stored_states(self._disk.folder)

    def _open(self) -> Simulation:
        """Open the engine; if a worker dies while it builds its clients, open the engine again."""
        experiment, device = self.experiment, self.experiment.device
        while True:
            try:
                engine, self.choice = open_engine(
                    self.choice,
                    experiment.build_client,
                    self.work,
                    experiment.config.engine,
                    device,
                    self._disk,
                    self._obstacle,
                )
                return engine
            except WorkerLost as lost:
                self._lost.append(f"{lost}; another worker took over")
                if len(self._lost) >= MOST_DEATHS:
                    raise


def _describe_pick(choice: EngineChoice) -> tuple[str, ...]:
    """Return a sentence with the engine, its number of workers, and the reason of the choice."""
    many = f" with {choice.workers} workers" if choice.workers > 1 else ""
    return (f"engine {choice.name!r}{many}: {choice.why}",)


def _build(
    config: Config, folder: Path, recorded: Environment, prepared: dict[str, data.Prepared] | None = None
) -> Experiment:
    begun, weights = folders.find_source_weights(folder), folders.read_initial_weights(folder)
    return build.build(config, recorded.device, prepared, begun, weights)


def _read_environment(folder: Path, config: Config, resume: bool) -> Environment | None:
    """Return the content of environment.json of the run in the folder: empty for a new run, None for a finished run."""
    if not (resume and (folder / CONFIG).exists()):
        folders.check_free(folder)
        return Environment()
    folders.check_no_links(folder)
    folders.check_resumable(folder, config)
    if is_finished(read_summary(folder), config.rounds):
        return None
    return read_environment(folder)


def _describe(folder: Path, experiment: Experiment, engine: Simulation, choice: EngineChoice) -> None:
    """Write the files that describe the run before its first round, after a check of the saved files of a resumed run.

    An incomplete last line of a log is removed.
    """
    saved, homes = read_checkpoint(folder), [client_folder(folder, i) for i in experiment.clients]
    for log in (folder / LEDGER, folder / METRICS, *(home / METRICS for home in homes)):
        rewind(log, lambda round: True)
    if experiment.config.records.keep_best:
        bests.check_best_files(folder)
    if saved is not None:
        for state_folder in (server_folder(folder), *homes):
            read_tensors(state_folder / make_file_name(saved.round), ())
    about: dict[str, Any] = {
        "engine": RecordedEngine(**choice._asdict()),
        "products": experiment.choose_products(),
        "scaling": experiment.data.space.scaling,
    }
    if experiment.data.statistics is not None:
        about["statistics"] = experiment.data.statistics.record()
    environment = folders.describe_environment(experiment.config.engine.threads, str(experiment.device))
    sizes = engine.visit(count_parameters, dict.fromkeys(experiment.clients, ()), reads=True)
    if experiment.nets.begun is not None:
        folders.write_begun(folder, experiment.nets.begun)
    environment = describe_run(environment.model_copy(update=about), experiment, dict(sizes))
    folders.write_about(folder, experiment.config, environment, experiment.data.partition)
    folders.write_initial_weights(folder, experiment.nets.pretrained)


def _train_through(handle: EngineHandle, folder: Path, observers: Sequence[Observer]) -> None:
    """Describe the run, and train it to the end; after the death of a worker, continue from the last saved round."""
    try:
        _describe(folder, handle.experiment, handle.engine, handle.choice)
    except WorkerLost:  # a worker of the run before, which was dying
        handle.restart()
        _describe(folder, handle.experiment, handle.engine, handle.choice)
    notes, choices, deaths = handle.notes, handle.choices, list[int]()
    while True:
        try:
            if isinstance(handle.engine, Cluster):
                handle.engine.reach(folder)  # each machine of clients must see the folder
            return drive(_train(handle.experiment, handle.engine, folder, observers, notes, choices), handle.engine)
        except WorkerLost as lost:
            saved = read_checkpoint(folder)
            deaths.append(saved.round if saved else 0)
            if deaths.count(deaths[-1]) == MOST_DEATHS:
                raise RunError(f"{folder}: {lost}, several times; is there enough memory? {FIX_WORKERS}") from None
            notes = (f"{lost}; all clients continue from {f'round {deaths[-1]}, the last saved' if saved else 'the start'}",)
            choices = ()
            handle.restart()


def _train(
    experiment: Experiment,
    engine: Simulation,
    folder: Path,
    observers: Sequence[Observer],
    notes: tuple[str, ...],
    choices: tuple[str, ...],
) -> Training:
    """Train from the start, or from the saved round, to the last round; then write the summary."""
    config, recording = experiment.config, experiment.config.records
    name = folders.compute_identity(config, _fingerprint_experiment(experiment))
    server, saved = _restore_run(experiment, engine, folder, name)
    seconds = saved.seconds if saved else 0.0
    keep = None
    if recording.keep_best:
        keep = bests.BestRule(recording.best_by, recording.evaluate_every, name, find_common_metric(experiment))
    checkpoints = Checkpoints(folder, recording.checkpoint_every, name, seconds, keep)
    records: list[Observer] = [Metrics(folder), Ledger(folder), TextLog(folder), *observers]
    records += [*([bests.BestWeights(folder, keep)] if keep else []), checkpoints]
    tracked = trackers.open_trackers(folder, config, name)
    records += tracked
    homes = {i: client_folder(folder, i) for i in experiment.clients}
    patience = bests.Patience(folder, recording, find_common_metric(experiment))
    plan = replace(experiment.make_plan(homes, notes, choices), keep=keep, is_over=patience.is_over)
    yield from generate_rounds(plan, engine, server, saved.round if saved else None, records, experiment.make_judge())
    partition = experiment.data.partition
    write_summary(
        folder,
        config,
        seconds=round(checkpoints.seconds, 3),
        leaves=experiment.list_leaves(),
        data={"name": config.data.name, "classes": partition["classes"]},
        fingerprint=partition["fingerprint"],
        **privacy_plan.record(experiment, engine),
    )
    for tracker in tracked:
        tracker.end(trackers.list_sent_files(folder))


def _restore_run(experiment: Experiment, engine: Simulation, folder: Path, name: str) -> tuple[Message, Saved | None]:
    """Restore clients and logs to the last saved round; return the server's state and the saved round.

    Nothing saved: the server's first state, and None. name: the identity of the run, which its checkpoint must have.
    """
    recording, rounds = experiment.config.records, experiment.config.rounds
    due = recording.evaluate_every
    server, saved = restore_server(folder, name, experiment.make_server_state(), rounds, due, experiment.clients)
    remove_stored_states(folder)
    if recording.keep_best:
        bests.settle_best_files(folder, saved.round if saved else None, rounds, due)
    if saved is not None:
        file = make_file_name(saved.round)
        places = {i: (client_folder(folder, i) / file, name, saved.round) for i in experiment.clients}
        for _ in engine.visit(load_client, places):
            pass
    return server, saved


def _fingerprint_experiment(experiment: Experiment) -> str:
    """Return the fingerprint of the data, and of the model of another run with which the server starts."""
    fingerprint: str = experiment.data.partition["fingerprint"]
    public = experiment.data.public
    if public is not None and public.file is not None:  # partition.json has no rows of it
        fingerprint += public.digest
    if experiment.nets.begun is None:
        return fingerprint
    tensors = sorted(experiment.nets.begun.items())
    return fingerprint + hashlib.sha256(b"".join(v.cpu().numpy().tobytes() for _, v in tensors)).hexdigest()
