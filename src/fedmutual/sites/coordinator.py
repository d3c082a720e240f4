"""The part of the server: rounds, shared model and scores, which are saved on disk after each round. It has no data."""

from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from fedmutual.core import At, Message, Total
from fedmutual.data.statistics import Layout, add_sums, read_sums
from fedmutual.engines.loop import count_bytes, federate
from fedmutual.errors import RunError, UserError
from fedmutual.events import Event, Failed, Noted, Observer, PhaseDone, RoundDone
from fedmutual.federation.description import describe_federation, describe_space
from fedmutual.federation.experiment import Experiment, list_leaves
from fedmutual.federation.plan import RoundPlan
from fedmutual.rundir import folder as folders
from fedmutual.rundir.checkpoint import Checkpoints, read_checkpoint, restore_server
from fedmutual.rundir.observers import Ledger, Metrics
from fedmutual.rundir.schema import RecordedEngine, Saved
from fedmutual.rundir.summary import write_summary
from fedmutual.rundir.text import TextLog
from fedmutual.sites.contract import Contract, identify
from fedmutual.sites.engine import Setback, SitesEngine, TooFew
from fedmutual.sites.peers import is_peer_to_peer
from fedmutual.sites.protocol import Transport
from fedmutual.sites.secure_sum.fixed_point import list_masked_leaves
from fedmutual.sites.secure_sum.identity import read_authority
from fedmutual.sites.secure_sum.server import SecureSums
from fedmutual.sites.server_experiment import build_server_experiment, count_update, make_first_state
from fedmutual.sites.server_journal import GENERATIONS, ServerJournal
from fedmutual.sites.sizes import MessageSizes
from fedmutual.sites.statistics import (
    SUMS,
    GatheredStatistics,
    SumStatistics,
    pack_scaling,
    read_gathered,
    read_scaling,
    write_gathered,
)


@dataclass(frozen=True)
class Coordinator:
    """The server of one federation."""

    contract: Contract
    folder: Path  # of this federation, in the form of a run folder, so that `report` can read it
    startup: Path | None = None  # of the server's kit: holds the authority's certificate, which a secure sum needs

    def run(
        self, transport: Transport, observers: Sequence[Observer] = (), pause: Callable[[], None] = lambda: None
    ) -> None:
        """Run all rounds that are not done yet.

        pause: called after every saved round. An exception of `transport`, of an observer or of `pause` ends the run.

        Raises:
            TooFew: too few sites answered. The saved rounds stay, and another call continues after them.
            ConfigError: the shared network, or the state that the algorithm begins with, cannot be built.
            RunError: the folder is in use, is damaged, cannot be written, or holds another federation or more rounds than
                the contract has; the server's kit, which a secure sum needs, is missing or damaged; sites sent sums that
                are impossible; too many rounds failed; or too few sites are left.
        """
        contract, experiment = self.contract, build_server_experiment(self.contract)
        name = identify(contract.config, contract.digest + (contract.public or {"digest": ""})["digest"])
        with folders.lock_folder(self.folder), closing(ServerJournal(self.folder)) as journal:
            first_state = make_first_state(contract, experiment)
            server, saved = self._restore(first_state, name)
            gathered = read_gathered(journal) if contract.layout is not None else None
            self._describe(experiment, gathered)
            logs: list[Observer] = [Metrics(self.folder), Ledger(self.folder), TextLog(self.folder), *observers]
            peer_to_peer, deadline = is_peer_to_peer(contract.algorithm), contract.sites.deadline
            words = count_update(contract, first_state)
            sizes = MessageSizes(contract.algorithm, first_state, contract.sites.names, peer_to_peer, words)
            quorum, limits, sums = contract.quorum, contract.limits, self._open_sums(journal)
            engine = SitesEngine(transport, quorum, deadline, peer_to_peer, sizes, journal, limits, contract.algorithm, sums)
            while True:
                self._check_progress(journal, saved, logs)
                checkpoints = Checkpoints(self.folder, 1, name, saved.seconds if saved else 0.0, generations=GENERATIONS)
                rounds = saved.round if saved else None
                try:
                    if contract.layout is not None:
                        gathered = gathered or self._gather_statistics(engine, journal, contract.layout, experiment)
                        engine.scaling = pack_scaling(gathered.statistics.moments)
                        _log_statistics(logs, gathered, engine, saved)
                    federate(self._make_plan(), engine, server, rounds, [*logs, checkpoints, _Pause(pause)], None)
                    break
                except Setback as problem:
                    actions = journal.go_back(problem.diverged, contract.limits)
                    _log_remarks(logs, problem.round + 1, [*engine.take_remarks(), str(problem), *actions])
                except (TooFew, UserError):
                    _log_remarks(logs, (saved.round if saved else 0) + 1, engine.take_remarks())
                    raise
                server, saved = self._restore(first_state, name)
            self._write_summary(checkpoints.seconds)

    def _gather_statistics(
        self, engine: SitesEngine, journal: ServerJournal, layout: Layout, experiment: Experiment
    ) -> GatheredStatistics:
        """Ask the sites for the sums of their training rows, and save and return the statistics.

        Raises:
            TooFew, Setback, RunError: as `SitesEngine.train`. RunError: also where no rows have such sums.
        """
        config, phase = self.contract.config, SumStatistics(layout)
        at, declared = At(config.seed, -1, config.rounds, 0), phase.leaves({})
        sites = self.contract.sites.names
        answers = list(engine.train(phase, at, {i: {} for i in sites}, declared))
        replies = {answer[0]: answer[1] for answer in answers if not isinstance(answer, Total)}
        words = [answer.words for answer in answers if isinstance(answer, Total)]
        words += [reply.message[SUMS] for reply in replies.values() if reply.message]
        try:
            statistics = read_sums(layout, add_sums(tensor.numpy() for tensor in words))
            read_scaling(layout, pack_scaling(statistics.moments))
        except ValueError as problem:  # under masks: a single site's sums are checked before
            raise RunError(
                f"{self.folder}: the statistics of all sites are impossible, so a site sent wrong sums: {problem}; begin a "
                "federation of another name, with numbers as 'data.mean' and 'data.std' or with other sites"
            ) from None
        up = {i: reply.up or count_bytes(reply.message) for i, reply in replies.items()}
        gathered = GatheredStatistics(statistics, up, {i: reply.down or 0 for i, reply in replies.items()})
        write_gathered(journal, gathered)
        self._describe(experiment, gathered)
        return gathered

    def _check_progress(self, journal: ServerJournal, saved: Saved | None, logs: Sequence[Observer]) -> None:
        """Raise RunError, and log it, where no round can begin: too few sites are left, or too many rounds failed."""
        try:
            journal.check_setbacks()
            journal.check_quorum(self.contract.sites.names, self.contract.quorum)
        except RunError as problem:
            for log in logs:
                log(Failed((saved.round if saved else 0) + 1, problem))
            raise

    def _open_sums(self, journal: ServerJournal) -> SecureSums | None:
        """Return the object that computes the secure sums, or None where the sum is not masked."""
        if not self.contract.is_masked:
            return None
        if self.startup is None:
            raise RunError(f"{self.folder}: a secure sum needs the server's kit, which has the authority's certificate")
        return SecureSums(journal, read_authority(self.startup), self.contract.binding, self.contract.sites.names)

    def _make_plan(self) -> RoundPlan:
        config, algorithm = self.contract.config, self.contract.algorithm
        if self.contract.layout is not None:  # the sums are gathered before the rounds
            algorithm = replace(algorithm, start=())
        return RoundPlan(
            algorithm=algorithm,
            seed=config.seed,
            rounds=config.rounds,
            clients=self.contract.sites.names,
            notes=self.contract.algorithm.remarks,
            participation=1.0,
            evaluate_every=config.records.evaluate_every,
            evaluations=dict.fromkeys(self.contract.sites.names, ()),  # each site has its own list
            seeds=(self.contract.public or {}).get("bytes", {}),
            homes={},
        )

    def _restore(self, first_state: Message, name: str) -> tuple[Message, Saved | None]:
        """Return (state, last saved round or None), and cut the logs after the last saved round."""
        saved = read_checkpoint(self.folder)
        if saved is not None and saved.run != name:
            raise RunError(f"{self.folder}: holds another federation of this name; give the new federation another name")
        config, last = self.contract.config, saved.round if saved else None
        if last is not None:
            folders.check_schedules(self.folder, config)
        if last is not None and config.rounds < last:
            raise RunError(
                f"{self.folder}: round {last} is done, and the contract has {config.rounds}; set 'rounds' to {last} or more"
            )
        every = config.records.evaluate_every
        return restore_server(self.folder, name, first_state, config.rounds, every, generations=GENERATIONS)

    def _describe(self, experiment: Experiment, gathered: GatheredStatistics | None) -> None:
        """Write the files that describe the federation. gathered: the statistics of all sites, if they are known."""
        about: dict[str, Any] = {"engine": RecordedEngine(name="sites")}
        if gathered is not None:
            experiment = build_server_experiment(self.contract, gathered.statistics)
            about["statistics"] = gathered.statistics.record()
        space = experiment.data.space
        environment = describe_federation(
            folders.describe_environment(1, "cpu").model_copy(update=about),
            experiment,
            personal={},
            clients=dict.fromkeys(self.contract.sites.names, describe_space(space)),
        )
        record = {"format": 1, "kind": "sites", "source": "sites", "fingerprint": self.contract.digest}
        folders.write_about(
            self.folder, self.contract.config, environment, {**record, "classes": list(space.classes), "clients": {}}
        )

    def _write_summary(self, seconds: float) -> None:
        state = make_first_state(self.contract, build_server_experiment(self.contract))
        list_tensors = list_masked_leaves if self.contract.is_masked else list_leaves
        leaves = list_tensors(self.contract.algorithm, state)
        write_summary(self.folder, self.contract.config, seconds=round(seconds, 3), leaves=leaves)


def _log_remarks(logs: Sequence[Observer], round: int, remarks: Sequence[str]) -> None:
    """Log the remarks of a round that failed."""
    for remark in remarks:
        for log in logs:
            log(Noted(round, remark))


def _log_statistics(
    logs: Sequence[Observer], gathered: GatheredStatistics, engine: SitesEngine, saved: Saved | None
) -> None:
    """Log the bytes of the statistics, unless a saved round has them in its log, and the engine's remarks."""
    _log_remarks(logs, 0, engine.take_remarks())
    for log in logs if saved is None else ():
        log(PhaseDone(0, SUMS, dict(gathered.down), dict(gathered.up), {}))


class _Pause:
    """Observer: calls a function after every saved round but the last; the function may raise to end the run."""

    def __init__(self, pause: Callable[[], None]) -> None:
        self._pause = pause

    def __call__(self, event: Event) -> None:
        if isinstance(event, RoundDone) and event.round < event.rounds:
            self._pause()
