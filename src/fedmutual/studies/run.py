"""One experiment, from its configuration to its folder."""

import hashlib
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from fedmutual import data
from fedmutual.config import Config, unused
from fedmutual.core import Message
from fedmutual.engines.assignment import WorkerLost
from fedmutual.engines.base import Engine, count_parameters
from fedmutual.engines.client_store import DiskStorage, remove_abandoned_files
from fedmutual.engines.loop import drive, generate_rounds
from fedmutual.engines.multi_run import RunScheduler, Training
from fedmutual.engines.ray import Cluster
from fedmutual.engines.select import EngineChoice, choose_engine, count_memory, open_engine, plan_disk_storage
from fedmutual.errors import RunError
from fedmutual.events import Observer
from fedmutual.federation import build
from fedmutual.federation.description import describe_networks, find_common_metric
from fedmutual.federation.experiment import Experiment
from fedmutual.files import read_json
from fedmutual.recorded_code import trusting
from fedmutual.rundir import best as bests
from fedmutual.rundir import folder as folders
from fedmutual.rundir import pretrained, tensorboard
from fedmutual.rundir.checkpoint import Checkpoints, Saved, committed, file_name, load_client, read_state, sweep
from fedmutual.rundir.file_names import CONFIG, ENVIRONMENT, LEDGER, METRICS
from fedmutual.rundir.logs import Ledger, Metrics, rewind, stays_scored
from fedmutual.rundir.summary import write_summary
from fedmutual.rundir.text import TextLog
from fedmutual.rundir.trackers import Tracker
from fedmutual.studies import privacy_plan
from fedmutual.studies.trained_run import Run, open_trained_run
from fedmutual.tensor_files import read_tensors


def run(
    config: Config,
    out: str | Path | None = None,
    resume: bool = False,
    observers: Sequence[Observer] = (),
    trust_code: bool = False,
) -> Run:
    """Train an experiment into a folder, and return the run.

    out: the folder; None: `runs/<name>`.
    resume: continue the run in the folder from its last saved state; a finished run is not trained again.
    trust_code: continue with code that has changed since the run recorded the code.

    Raises:
        UserError: the experiment cannot be trained; one sentence says why.
        Diverged: a client's loss or weights are not finite; the last saved state is kept.
    """
    with trusting(trust_code):
        return _run(config, Path(out) if out is not None else Path("runs") / config.name, resume, observers)


def _run(config: Config, folder: Path, resume: bool, observers: Sequence[Observer]) -> Run:
    recorded = _look(folder, config, resume)
    if recorded is None:
        return open_trained_run(folder, config)
    try:
        with _use_threads(config.engine.threads):
            begun, weights = folders.begun(folder), pretrained.read_initial_weights(folder)
            experiment = build.build(config, recorded.get("device"), begun=begun, pretrained=weights)
            privacy_plan.check_budget(experiment)
            hosted = EngineHandle(experiment, recorded.get("engine", {}).get("name"), folder)
            with closing(hosted), folders.held(folder):
                if _look(folder, config, resume) is not None:  # else another process finished it meanwhile
                    try:
                        _describe(folder, experiment, hosted.engine, hosted.choice)
                    except WorkerLost:  # a worker of the run before, which was dying
                        hosted.again()
                        _describe(folder, experiment, hosted.engine, hosted.choice)
                    _train_through(hosted, folder, observers)
    except WorkerLost as problem:
        raise RunError(f"{folder}: {problem}; is there enough memory? {MEND}") from None
    return open_trained_run(folder, config)


def run_together(
    configs: Sequence[Config], outs: Sequence[Path], resume: bool, observers: Sequence[Sequence[Observer]]
) -> list[Run]:
    """Train several experiments at once, with the clients of all experiments in common stacks; return the runs.

    Raises:
        UserError, Diverged: the error of the first run that failed; the other runs were trained to their end.
    """
    problems = [p for p in attempt_together(configs, outs, resume, observers) if p is not None]
    if problems:
        raise problems[0]
    return [open_trained_run(folder, config) for folder, config in zip(outs, configs, strict=True)]


def attempt_together(
    configs: Sequence[Config], outs: Sequence[Path], resume: bool, observers: Sequence[Sequence[Observer]]
) -> list[BaseException | None]:
    """Train as `run_together`; return the error of each run, None for a finished run."""
    looked = [_look(folder, config, resume) for folder, config in zip(outs, configs, strict=True)]
    left = [n for n, recorded in enumerate(looked) if recorded is not None]
    with _use_threads(max((config.engine.threads for config in configs), default=1)):
        prepared: dict[str, dict[str, data.Prepared]] = {}
        built = {}
        for n in left:
            key = identify_data(configs[n])
            prepared[key] = prepared.get(key) or data.prepare(configs[n])
            device, begun = (looked[n] or {}).get("device"), folders.begun(outs[n])
            built[n] = build.build(configs[n], device, prepared[key], begun, pretrained.read_initial_weights(outs[n]))
        federations = [[built[n].client(i) for i in built[n].clients] for n in left]
        engines = [configs[n].engine for n in left]
        scheduler = RunScheduler(federations, any(e.compile for e in engines), any(e.turns for e in engines))
        choice = EngineChoice("stacked", 1, f"{len(left)} runs at once fill a device better")

        def train(n: int, engine: Engine) -> Training:
            with folders.held(outs[n]):
                if _look(outs[n], configs[n], resume) is not None:
                    _describe(outs[n], built[n], engine, choice)
                    notes = *_picked(choice), *unused.describe_unused_engine_keys(configs[n], choice.name)
                    yield from _train(built[n], engine, outs[n], observers[n], notes)

        raised = dict(zip(left, scheduler.train([partial(train, n) for n in left]), strict=True))
    return [raised.get(n) for n in range(len(configs))]


def identify_data(config: Config) -> str:
    """Return a key that is equal for configurations that read equal data."""
    clients = {i: (client_config.data, client_config.training.task) for i, client_config in config.clients.items()}
    kind = config.partition.kind if config.partition.kind in data.OF_DOMAINS else ""  # domains decide which data are read
    drawn = config.seed if data.is_drawn_by_seed(config.data) else None
    return repr((config.data, kind, drawn, config.training.task, clients))


def can_stack(config: Config) -> bool:
    """Return whether runs of this configuration can be stacked; clipping of single rows' gradients cannot."""
    if config.privacy.nets != "none":
        return False
    name, device = config.engine.name, config.engine.device
    return name == "stacked" or (name == "auto" and build.pick_device(device).type == "cuda")


@contextmanager
def _use_threads(threads: int) -> Iterator[None]:
    """Set the number of torch threads for the block; restore the threads and random streams of the caller afterwards."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        with torch.random.fork_rng(devices=[]):
            yield
    finally:
        torch.set_num_threads(before)


def _describe(folder: Path, experiment: Experiment, engine: Engine, choice: EngineChoice) -> None:
    """Write the files that describe the run before its first round, after a check of the saved files of a resumed run."""
    _check_saved(folder, experiment)
    about = folders.environment(experiment.config.engine.threads, experiment.device)
    about |= {"engine": choice._asdict(), "scaling": experiment.data.space.scaling}
    if experiment.data.statistics is not None:
        about["statistics"] = experiment.data.statistics.record()
    sizes = engine.each(count_parameters, dict.fromkeys(experiment.clients, ()))
    if experiment.nets.begun is not None:
        folders.write_begun(folder, experiment.nets.begun)
    folders.write_about(
        folder, experiment.config, about | describe_networks(experiment, dict(sizes)), experiment.data.partition
    )
    pretrained.keep(folder, experiment.nets.pretrained)


MEND = "set engine.workers lower, or engine.name = 'inprocess', and continue with --resume"
PATIENCE = 3  # deaths of workers since a saved round


class EngineHandle:
    """An experiment with its engine, which can be started again."""

    def __init__(self, experiment: Experiment, before: str | None, folder: Path | None = None) -> None:
        """before: the engine of the run before it was stopped; None for a new run.

        folder: of the run, where states of clients may be stored; None: all clients stay in memory.
        """
        engine = experiment.config.engine
        self.experiment, self.work = experiment, experiment.work()
        self._automatic = engine.name == "auto"
        name = before if before and self._automatic else engine.name
        self.choice = choose_engine(name, engine.workers, experiment.device, self.work, stackable=not experiment.noised)
        if name != engine.name:
            self.choice = self.choice._replace(why="as the run was begun")
        self._disk: DiskStorage | None = None
        if folder is not None:
            self._disk = plan_disk_storage(engine.resident, self.choice, self.work, folder, count_memory())
        self._lost: list[str] = []  # workers that died while they built their clients
        self.engine = self._open()

    @property
    def notes(self) -> tuple[str, ...]:
        """The engine that was chosen automatically, keys without effect, and workers that died while they built clients."""
        picked = _picked(self.choice) if self._automatic else ()
        if self._disk is not None and self.experiment.config.engine.resident is None:
            size = sum(w.bytes for w in self.work.values()) / 2**30
            picked += (
                f"the states of all clients take about {size:.1f} GiB: {self._disk.resident} clients of each process stay "
                "in memory, and the states of the others are stored in the run folder (engine.resident)",
            )
        return (*picked, *unused.describe_unused_engine_keys(self.experiment.config, self.choice.name), *self._lost)

    def again(self) -> None:
        """Start a new engine, with clients as before round 1."""
        self.close()
        self.engine = self._open()

    def reach(self, folder: Path) -> None:
        """Check that the folder exists on each machine of clients, because clients write their state into it."""
        if isinstance(self.engine, Cluster):
            self.engine.reach(folder)

    def close(self) -> None:
        """Close the engine and its clients."""
        try:
            self.engine.close()
        finally:
            if self._disk is not None:
                self._disk.remove_files()

    def _open(self) -> Engine:
        """Open the engine; if a worker dies while it builds its clients, open the engine again."""
        config, device = self.experiment.config.engine, self.experiment.device
        while True:
            try:
                engine, self.choice = open_engine(self.choice, self.experiment.client, self.work, config, device, self._disk)
                return engine
            except WorkerLost as lost:
                self._lost.append(f"{lost}; another worker took over")
                if len(self._lost) >= PATIENCE:
                    raise


def _picked(choice: EngineChoice) -> tuple[str, ...]:
    many = f" with {choice.workers} workers" if choice.workers > 1 else ""
    return (f"engine {choice.name!r}{many}: {choice.why}",)


def _train_through(hosted: EngineHandle, folder: Path, observers: Sequence[Observer]) -> None:
    """Train to the end; after the death of a worker, continue from the last saved round."""
    notes, deaths = hosted.notes, list[int]()
    while True:
        try:
            hosted.reach(folder)
            return drive(_train(hosted.experiment, hosted.engine, folder, observers, notes), hosted.engine)
        except WorkerLost as lost:
            saved = committed(folder)
            deaths.append(saved.round if saved else 0)
            if deaths.count(deaths[-1]) == PATIENCE:
                raise RunError(f"{folder}: {lost}, several times; is there enough memory? {MEND}") from None
            notes = (f"{lost}; all clients continue from {f'round {deaths[-1]}, the last saved' if saved else 'the start'}",)
            hosted.again()


def _look(folder: Path, config: Config, resume: bool) -> dict[str, Any] | None:
    """Return the content of environment.json of the run in the folder: empty for a new run, None for a finished run.

    Raises:
        RunError: another process uses the folder, or the folder holds a run of another configuration.
    """
    if not (resume and (folder / CONFIG).exists()):
        folders.check_free(folder)
        return {}
    folders.check_no_links(folder)
    folders.reopen(folder, config)
    if Run(folder).finished and Run(folder).config.rounds == config.rounds:
        return None
    return read_json(folder / ENVIRONMENT)


def _train(
    experiment: Experiment, engine: Engine, folder: Path, observers: Sequence[Observer], notes: tuple[str, ...]
) -> Training:
    """Train from the start, or from the saved round, to the last round; then write the summary."""
    config = experiment.config
    name = folders.identity(config, _fingerprint(experiment))
    server, saved = _restored(experiment, engine, folder, name)
    seconds = saved.seconds if saved else 0.0
    given = config.records
    keep = bests.Keep(given.best_by, given.evaluate_every, name, find_common_metric(experiment)) if given.keep_best else None
    checkpoints = Checkpoints(folder, given.checkpoint_every, name, seconds, keep)
    best_weights = [bests.BestWeights(folder, keep)] if keep else []
    records: list[Observer] = [Metrics(folder), Ledger(folder), TextLog(folder), *observers, *best_weights, checkpoints]
    if given.tensorboard:
        records.insert(0, tensorboard.Writer(folder))
    tracked = [Tracker(tracker, folder, config, name) for tracker in given.trackers]
    records += tracked
    homes = {i: folder / "clients" / i for i in experiment.clients}
    plan = replace(experiment.plan(homes, notes), keep=keep)
    yield from generate_rounds(plan, engine, server, saved.round if saved else None, records, experiment.judge())
    partition = experiment.data.partition
    write_summary(
        folder,
        config,
        seconds=round(checkpoints.seconds, 3),
        leaves=experiment.leaves(),
        data={"name": config.data.name, "classes": partition["classes"]},
        fingerprint=partition["fingerprint"],
        **privacy_plan.record(experiment, engine),
    )
    for tracker in tracked:
        tracker.end()


def _check_saved(folder: Path, experiment: Experiment) -> None:
    """Raise RunError if a file that a resumed run needs is missing or damaged. Remove an incomplete last line of a log."""
    saved, homes = committed(folder), [folder / "clients" / i for i in experiment.clients]
    for log in (folder / LEDGER, folder / METRICS, *(home / METRICS for home in homes)):
        rewind(log, lambda round: True)
    if experiment.config.records.keep_best:
        bests.check(folder)
    if saved is not None:
        for half in (folder / "server", *homes):
            read_tensors(half / file_name(saved.round), ())


def _fingerprint(experiment: Experiment) -> str:
    """Return the fingerprint of the data, and of the model of another run with which the server starts."""
    data: str = experiment.data.partition["fingerprint"]
    if experiment.nets.begun is None:
        return data
    tensors = sorted(experiment.nets.begun.items())
    return data + hashlib.sha256(b"".join(v.cpu().numpy().tobytes() for _, v in tensors)).hexdigest()


def _restored(experiment: Experiment, engine: Engine, folder: Path, name: str) -> tuple[Message, Saved | None]:
    """Restore clients and logs to the last saved round; return the server's state and the saved round."""
    saved = committed(folder)
    sweep(folder, saved.round if saved else None)
    remove_abandoned_files(folder)
    last, due, rounds = saved.round if saved else None, experiment.config.records.evaluate_every, experiment.config.rounds
    homes = {i: folder / "clients" / i for i in experiment.clients}
    for log in (folder / METRICS, *(home / METRICS for home in homes.values())):
        rewind(log, lambda round: stays_scored(round, last, due, rounds))
    if experiment.config.records.keep_best:
        bests.settle(folder, last, rounds, due)
    rewind(folder / LEDGER, lambda round: saved is not None and round <= saved.round)
    server = experiment.server()
    if saved is None:
        return server, None
    if saved.run != name:
        raise RunError(f"{folder}: its checkpoint belongs to another run; choose another folder with --out")
    file = file_name(saved.round)
    for _ in engine.each(load_client, {i: (home / file, name, saved.round) for i, home in homes.items()}):
        pass
    return read_state(folder / "server" / file, name, saved.round, server), saved
