"""The engine of an experiment in training: it is chosen, opened, and started again after the death of a worker."""

from pathlib import Path

from fedmutual.config.checks import describe_unused_engine_keys
from fedmutual.engines.base import Simulation, WorkerLost
from fedmutual.engines.inprocess import DiskStorage, remove_stored_states
from fedmutual.engines.ray import Cluster
from fedmutual.engines.select import EngineChoice, choose_engine, count_memory, open_engine, plan_disk_storage
from fedmutual.federation.experiment import Experiment

FIX_WORKERS = "set engine.workers lower, or engine.name = 'inprocess', and continue with --resume"
MOST_DEATHS = 3  # deaths of workers since a saved round


class EngineHandle:
    """An experiment with its engine, which can be started again."""

    def __init__(self, experiment: Experiment, before: str | None, folder: Path | None = None) -> None:
        """before: the engine of the run before it was stopped; None for a new run.

        folder: of the run, where states of clients may be stored; None: all clients stay in memory.

        Raises:
            ConfigError: the engine cannot hold the clients.
            WorkerLost: three workers died while they built their clients.
        """
        engine = experiment.config.engine
        self.experiment, self.work = experiment, experiment.estimate_work()
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
        """Remarks on keys without effect, and on workers that died while they built clients."""
        return (*describe_unused_engine_keys(self.experiment.config, self.choice.name), *self._lost)

    @property
    def choices(self) -> tuple[str, ...]:
        """The engine that was chosen automatically, and where the states of clients are stored."""
        picked = describe_pick(self.choice) if self._automatic else ()
        if self._disk is not None and self.experiment.config.engine.resident is None:
            size = sum(w.bytes for w in self.work.values()) / 2**30
            picked += (
                f"the states of all clients take about {size:.1f} GiB: {self._disk.resident} clients of each process stay "
                "in memory, and the states of the others are stored in the run folder (engine.resident)",
            )
        return picked

    def restart(self) -> None:
        """Start a new engine, with clients as before round 1.

        Raises:
            ConfigError, WorkerLost: as `EngineHandle`.
        """
        self.close()
        self.engine = self._open()

    def reach(self, folder: Path) -> None:
        """Check that the folder exists on each machine of clients, because clients write their state into it.

        Raises:
            RunError: a machine does not see the folder.
            WorkerLost: a worker died.
        """
        if isinstance(self.engine, Cluster):
            self.engine.reach(folder)

    def close(self) -> None:
        """Close the engine and its clients."""
        try:
            self.engine.close()
        finally:
            if self._disk is not None:
                remove_stored_states(self._disk.folder, self._disk.name)

    def _open(self) -> Simulation:
        """Open the engine; if a worker dies while it builds its clients, open the engine again."""
        config, device = self.experiment.config.engine, self.experiment.device
        while True:
            try:
                engine, self.choice = open_engine(
                    self.choice, self.experiment.build_client, self.work, config, device, self._disk
                )
                return engine
            except WorkerLost as lost:
                self._lost.append(f"{lost}; another worker took over")
                if len(self._lost) >= MOST_DEATHS:
                    raise


def describe_pick(choice: EngineChoice) -> tuple[str, ...]:
    """Return a sentence with the engine, its number of workers, and the reason of the choice."""
    many = f" with {choice.workers} workers" if choice.workers > 1 else ""
    return (f"engine {choice.name!r}{many}: {choice.why}",)
