"""The part of the server: rounds, shared model and scores, which are saved on disk after each round. It has no data."""

from collections.abc import Callable, Collection, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from fedmutual import tasks
from fedmutual.aggregation import FixedTotal
from fedmutual.algorithms.peers import make_agreed_state
from fedmutual.calling import Inputs
from fedmutual.config.keys import FEDERATED
from fedmutual.core import At, Message, Total
from fedmutual.data import Federation
from fedmutual.data.scaling import BYTE, Scaling
from fedmutual.data.space import Space
from fedmutual.data.statistics import Layout, Statistics, add_sums, read_sums
from fedmutual.engines.loop import count_bytes, federate
from fedmutual.errors import RunError, UserError
from fedmutual.events import Event, Failed, Noted, Observer, PhaseDone, RoundDone
from fedmutual.federation.description import describe_federation, describe_space
from fedmutual.federation.experiment import Experiment, RoundPlan, list_leaves
from fedmutual.federation.networks import Networks
from fedmutual.rundir import folder as folders
from fedmutual.rundir.checkpoint import Checkpoints, read_checkpoint, restore_server
from fedmutual.rundir.file_names import CONFIG, ENVIRONMENT, LEDGER, METRICS, SUMMARY
from fedmutual.rundir.logs import Ledger, Metrics, TextLog
from fedmutual.rundir.schema import RecordedEngine, Saved
from fedmutual.rundir.summary import write_summary
from fedmutual.rundir.trackers import check_installed, open_trackers
from fedmutual.sites.contract import Contract, identify
from fedmutual.sites.engine import Setback, SitesEngine
from fedmutual.sites.protocol import TooFew, Transport
from fedmutual.sites.secure_sum.fixed_point import list_masked_leaves
from fedmutual.sites.secure_sum.identity import read_authority
from fedmutual.sites.secure_sum.server import SecureSums
from fedmutual.sites.server_journal import GENERATIONS, LEFT, ServerJournal
from fedmutual.sites.sizes import MessageSizes
from fedmutual.sites.statistics import SUMS, Gathered, SumStatistics, pack_scaling, read_scaling


@dataclass(frozen=True)
class Coordinator:
    """The server of one federation."""

    contract: Contract
    folder: Path  # of this federation, in the form of a run folder, so that `report` can read it
    startup: Path | None = None  # of the server's kit: holds the authority's certificate, which a secure sum needs
    left: Collection[str] = ()  # sites that left the federation in another run of its contract

    def run(
        self, transport: Transport, observers: Sequence[Observer] = (), pause: Callable[[], None] = lambda: None
    ) -> None:
        """Run all rounds that are not done yet.

        pause: called after every saved round. An exception of `transport`, of an observer or of `pause` ends the run.

        Raises:
            TooFew: too few sites answered. The saved rounds stay, and another call continues after them.
            ConfigError: the shared network, or the state that the algorithm begins with, cannot be built.
            RunError: the folder is in use, is damaged, cannot be written, or holds another federation or more rounds than
                the contract has; the server's kit, which a secure sum needs, is missing or damaged; sites sent impossible
                sums; too many rounds failed; or too few sites are left.
        """
        contract, experiment = self.contract, build_server_experiment(self.contract)
        name = identify(contract.config, contract.digest + (contract.public or {"digest": ""})["digest"])
        with folders.lock_folder(self.folder), closing(ServerJournal(self.folder)) as journal, ExitStack() as ending:
            first_state = make_first_state(contract, experiment)
            journal.exclude(dict.fromkeys(self.left, LEFT))
            server, saved = self._restore(first_state, name)
            gathered = journal.get_fact(SUMS, Gathered)
            self._describe(experiment, gathered and gathered[0])
            check_installed(contract.config.records)
            trackers = open_trackers(self.folder, contract.config, name, ", server")
            for tracker in trackers:
                ending.callback(tracker.end, (), is_finished=False)  # unless it has ended
            logs: list[Observer] = [Metrics(self.folder), Ledger(self.folder), TextLog(self.folder), *observers, *trackers]
            engine = self._make_engine(transport, journal, first_state)

            def pause_after(event: Event) -> None:
                if isinstance(event, RoundDone) and event.round < event.rounds:
                    pause()

            while True:
                self._check_progress(journal, saved, logs)
                checkpoints = Checkpoints(self.folder, 1, name, saved.seconds if saved else 0.0, generations=GENERATIONS)
                try:
                    if contract.layout is not None:
                        gathered = gathered or self._gather_statistics(engine, journal, contract.layout, experiment)
                        engine.scaling = pack_scaling(gathered[0].moments)
                        _log_remarks(logs, 0, engine.take_remarks())
                        for log in logs if saved is None else ():  # a saved round has them in its log
                            log(PhaseDone(0, SUMS, gathered[2], gathered[1], {}))
                    rounds = saved.round if saved else None
                    federate(self._make_plan(), engine, server, rounds, [*logs, checkpoints, pause_after], None)
                    break
                except Setback as problem:
                    actions = journal.go_back(problem.diverged, contract.sites.update_limit)
                    _log_remarks(logs, problem.round + 1, [*engine.take_remarks(), str(problem), *actions])
                except (TooFew, UserError):
                    saved = read_checkpoint(self.folder)  # several rounds may have been saved since
                    _log_remarks(logs, (saved.round if saved else 0) + 1, engine.take_remarks())
                    raise
                server, saved = self._restore(first_state, name)
            list_tensors = list_masked_leaves if contract.is_masked else list_leaves
            leaves = list_tensors(contract.algorithm, first_state)
            seconds, no_vote = round(checkpoints.seconds, 3), contract.sites.no_vote
            write_summary(self.folder, contract.config, no_vote, seconds=seconds, leaves=leaves)
            for tracker in trackers:  # of the records alone: the journal holds what sites sent
                tracker.end([self.folder / file for file in (CONFIG, ENVIRONMENT, METRICS, LEDGER, SUMMARY)])

    def _make_engine(self, transport: Transport, journal: ServerJournal, first_state: Message) -> SitesEngine:
        contract, sums = self.contract, None
        if contract.is_masked:
            if self.startup is None:
                raise RunError(f"{self.folder}: a secure sum needs the server's kit, which has the authority's certificate")
            sums = SecureSums(journal, read_authority(self.startup), contract.binding, contract.sites.trainers)
        sizes = MessageSizes(contract.algorithm, first_state, contract.sites.names, contract.is_masked)
        return SitesEngine(transport, contract, journal, sizes, sums)

    def _gather_statistics(
        self, engine: SitesEngine, journal: ServerJournal, layout: Layout, experiment: Experiment
    ) -> Gathered:
        """Ask the sites for the sums of their training rows, and save and return the statistics.

        Raises TooFew, Setback, RunError as `SitesEngine.train`. RunError: also where no rows have such sums.
        """
        config, phase, sites = self.contract.config, SumStatistics(layout), self.contract.sites.trainers
        at = At(config.seed, -1, config.rounds, 0)
        answers = list(engine.train(phase, at, {i: {} for i in sites}, phase.leaves({})))
        replies = {answer[0]: answer[1] for answer in answers if not isinstance(answer, Total)}
        words = [answer.words for answer in answers if isinstance(answer, FixedTotal)]
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
        down = {i: reply.down or 0 for i, reply in replies.items()}
        journal.set_fact(SUMS, (statistics, up, down))
        self._describe(experiment, statistics)
        return statistics, up, down

    def _check_progress(self, journal: ServerJournal, saved: Saved | None, logs: Sequence[Observer]) -> None:
        """Raise RunError, and log it, where no round can begin: too few sites are left, or too many rounds failed."""
        try:
            journal.check_setbacks()
            journal.check_quorum(self.contract.sites.trainers, self.contract.quorum)
        except RunError as problem:
            for log in logs:
                log(Failed((saved.round if saved else 0) + 1, problem))
            raise

    def _make_plan(self) -> RoundPlan:
        config, algorithm = self.contract.config, self.contract.algorithm
        if self.contract.layout is not None:  # the sums are gathered before the rounds
            algorithm = replace(algorithm, start=())
        return RoundPlan(
            algorithm=algorithm,
            seed=config.seed,
            rounds=config.rounds,
            clients=self.contract.sites.trainers,
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

    def _describe(self, experiment: Experiment, statistics: Statistics | None) -> None:
        """Write the files that describe the federation. statistics: of all sites' rows, if they are known."""
        about: dict[str, Any] = {"engine": RecordedEngine(name="sites")}
        if statistics is not None:
            experiment = build_server_experiment(self.contract, statistics)
            about["statistics"] = statistics.record()
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


def _log_remarks(logs: Sequence[Observer], round: int, remarks: Sequence[str]) -> None:
    for remark in remarks:
        for log in logs:
            log(Noted(round, remark))


def build_server_experiment(contract: Contract, statistics: Statistics | None = None) -> Experiment:
    """Return the experiment of the server: networks and settings, without any data.

    statistics: of all sites' training rows, with data.mean = "federated"; None: not yet known.
    """
    config, classes = contract.config, contract.classes
    outputs = tasks.make_task(config.training.task, outputs=classes).outputs
    shape, count, declared = contract.sites.shape, outputs or len(classes), contract.sites.inputs
    dtypes: dict[str, Any] = {i: {} if one.dtype == "float32" else {"dtype": one.dtype} for i, one in declared.items()}
    inputs = {i: Scaling(divisor=1.0, mean=(), std=(), size=None, **dtypes[i]) for i in declared}
    examples: Inputs = {name: one.make_examples() for name, one in declared.items()}
    types: dict[str, Any] = {"inputs": inputs}  # only what is set is recorded
    if isinstance(shape, tuple):
        (types,), (examples,) = dtypes.values(), examples.values()
    divisor, size = 1.0, None
    if isinstance(shape, tuple) and len(shape) == 3 and not types:  # images; a site may scale its values otherwise
        divisor, size = BYTE, shape[1:]
    mean, std = (() if isinstance(value, dict) else value or () for value in (config.data.mean, config.data.std))
    if mean == FEDERATED or std == FEDERATED:
        mean, std = ((), ()) if statistics is None or config.data.columns else statistics.moments
    space = Space(
        shape=shape,
        classes=classes,
        outputs=count,
        task=config.training.task,
        scaling=Scaling(divisor=divisor, mean=mean, std=std, size=size, **types),
        rows=examples,
    )
    no_data = Federation({}, {"": space}, None, {"clients": {}, "classes": list(classes)}, ())
    nets = Networks(config, no_data, contract.algorithm.scores, torch.device("cpu"))
    return Experiment(config, no_data, contract.algorithm, nets)


def make_first_state(contract: Contract, experiment: Experiment) -> Message:
    """Return the state of the server before the first round: name -> tensor.

    Raises ConfigError where the shared network, or the state that the algorithm begins with, cannot be built.
    """
    if contract.public is None:
        return experiment.make_server_state(contract.sites.names)
    owners = {site: range(rows) for site, rows in contract.public["rows"].items()}  # only their numbers are used
    return make_agreed_state(owners, experiment.data.space.outputs)


def find_longest_message(contract: Contract) -> int:
    """Return the number of bytes of the longest message between the server and the sites of a federation.

    Raises ConfigError as `make_first_state`.
    """
    experiment, names = build_server_experiment(contract), contract.sites.names
    if contract.algorithm.public is None:
        state = experiment.make_server_state()
    else:  # a contract before submission lacks the number of rows of each site; no message size depends on this number
        state = make_agreed_state(dict.fromkeys(names, range(0)), experiment.data.space.outputs)
    return MessageSizes(contract.algorithm, state, names, contract.is_masked).longest_bytes
