"""The part of one site in a federation: it holds the data, the model and the state on disk, and answers orders (bytes)."""

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path

from fedmutual.algorithms.peers import is_peer_to_peer
from fedmutual.core import At, Client, Data, Disagreed, Message, Phase
from fedmutual.data.federation import list_training_rows
from fedmutual.data.prepared import prepare
from fedmutual.data.rows import Rows, merge_rows
from fedmutual.data.statistics import Moments, Words, sum_client
from fedmutual.engines.base import count_parameters, keep_best_personal
from fedmutual.errors import ConfigError, RunError, UserError
from fedmutual.events import Evaluated, Observer, Score
from fedmutual.federation import description
from fedmutual.federation.description import find_common_metric
from fedmutual.federation.evaluation import COPY, EvalSpec, compute_scores, select_metrics
from fedmutual.federation.experiment import Experiment
from fedmutual.files import is_disk_full
from fedmutual.privacy.budget import PrivacyBudget
from fedmutual.rundir import best
from fedmutual.rundir import folder as folders
from fedmutual.rundir.file_names import METRICS, SUMMARY, client_folder, server_folder
from fedmutual.rundir.logs import Metrics
from fedmutual.rundir.record_files import is_scored_on_resume, read_records, rewind
from fedmutual.rundir.schema import Evaluation, RecordedEngine
from fedmutual.rundir.summary import write_summary
from fedmutual.rundir.trackers import Tracker, open_trackers
from fedmutual.sites import guarantee
from fedmutual.sites.baseline import Baseline
from fedmutual.sites.contract import Contract, identify
from fedmutual.sites.journal import Journal
from fedmutual.sites.leaving import is_to_leave
from fedmutual.sites.ledger import record_sent
from fedmutual.sites.peers import PeerMailbox
from fedmutual.sites.private_values import (
    Say,
    answer_phase,
    check_first_replies,
    describe_failure,
    describe_failure_outside,
    may_depend_on_rows,
)
from fedmutual.sites.protocol import (
    ATTEMPTS,
    EVALUATE,
    LEAVES,
    WORK,
    MalformedMessage,
    Order,
    Place,
    ReleasedScore,
    SiteAnswer,
    digest_order,
    pack_message,
    read_answer,
    read_order,
)
from fedmutual.sites.secure_sum.fixed_point import list_masked_leaves
from fedmutual.sites.secure_sum.messages import Rejected, Stage
from fedmutual.sites.secure_sum.site import SiteSums, check_sum_sites
from fedmutual.sites.site_journal import MESSAGE, NO_TRAINING, NOT_JOINED, REPLY, UPDATE, Declined, SiteJournal
from fedmutual.sites.site_settings import SiteSettings, build_site
from fedmutual.sites.sizes import MessageSizes
from fedmutual.sites.statistics import SCALING, SumStatistics, read_scaling
from fedmutual.stepping import describe_stop
from fedmutual.user_code import plugins

SERVER = "server"
_MOST_REPEATS = 100  # answers of a process to one order: an answer is lost once or twice, and each is a line in the ledger


class SiteRuntime:
    """The part of one site. It carries out each order once, and answers it."""

    def __init__(
        self,
        contract: Contract,
        settings: SiteSettings,
        say: Say = lambda line: None,
        check_only: bool = False,
        startup: Path | None = None,
    ) -> None:
        """Build the site's experiment, and open the site's state.

        check_only: only check whether the site can take part, and write nothing. Otherwise no other object may use the state
        folder. say: takes the lines for the operator. startup: the folder of the site's kit that holds the signing key; a
        secure sum needs this folder. Raises UserError where the site cannot take part.
        """
        self.site, self.say = settings.file.site, say
        self.folder, self.state = settings.state / contract.name, settings.state
        self._contract, self._settings = contract, settings
        self.is_evaluator = self.site in contract.sites.evaluators
        self.trains_alone = contract.trains_alone and not self.is_evaluator
        with closing(Journal(self.folder, read_only=True)) as journal:
            self._moments: Moments | None = journal.get_fact(SCALING, Moments)  # None: the server has not sent them
        self.experiment = self._build_experiment()
        guarantee.check_site(self.experiment.config, settings.file, settings.source)
        self._budget: PrivacyBudget | None = None
        if self.experiment.noised:
            self._budget = guarantee.open_budget(self.experiment, self.site, contract.name, settings.state, say)
        self.is_masked, names = contract.is_masked, contract.sites.names
        self._journal = self._open_journal(check_only)
        if self._journal.left is not None:
            after = f"after round {self._journal.left}" if self._journal.left > 0 else "before its first round"
            raise RunError(
                f"{self.folder}: this site left federation {contract.name!r} {after}; take part in one of another name"
            )
        self._journal.trains = not self.is_evaluator
        if self.is_evaluator and not self.experiment.nets.complete:
            raise ConfigError(f"{settings.source}: 'sites.evaluators' need a shared model of which sites send all tensors")
        if self.is_evaluator and self.experiment.config.records.keep_best:
            raise ConfigError(f"{settings.source}: a site that only evaluates keeps no model; remove 'records.keep_best'")
        if self.is_masked:
            check_sum_sites(self._journal, contract.sites.trainers, read_only=check_only)
        self._baseline = None if check_only else self._make_baseline()
        self._not_done = set[str]()  # reasons for failed orders since the last success: each is said once
        self._public = self.experiment.make_server_state(names)  # only its names and shapes are used, which are public
        algorithm, config = self.experiment.algorithm, self.experiment.config
        sizes = MessageSizes(algorithm, self._public, names, self.is_masked)
        self._limit = sizes.order
        self.peers: PeerMailbox | None = None
        if is_peer_to_peer(algorithm):
            self.peers = PeerMailbox(algorithm, self._public, self.site, names, self._journal, config, sizes.peer_message)
        self._sums: SiteSums | None = None
        if self.is_masked and not check_only:
            if startup is None:
                raise RunError(f"{settings.source}: a secure sum needs the site's kit, which holds the signing key")
            self._sums = SiteSums(self._journal, self.site, contract.sites.trainers, contract.binding, startup)
        self._repeats = Counter[tuple[str, int, int]]()  # how often each answer was sent again
        self._trackers: list[Tracker] = []
        self._client: Client | None = None
        self._at: Place | None = None  # the last phase that the client in memory did; None: no phase
        if check_only:
            if not self.is_evaluator:
                check_first_replies(self.experiment, self.site, names, settings.source)
            return
        if self._journal.is_begun():  # a check may run with the kit's contract with other rounds
            try:
                folders.check_schedules(self.folder, config)
            except RunError as problem:  # in the site's own file, keys have no prefix `clients.NAME`
                raise RunError(str(problem).replace(f"'clients.{self.site}.", "'")) from None
        _prepare_folder(self.folder, self.experiment, self.site)
        try:
            self._trackers = open_trackers(self.folder, config, self._journal.run, f", site {self.site}")
        except RunError as problem:  # no site is missing in a round because its tracker is
            self.say(f"{problem}; until the next start nothing is logged there")
        self._write_summary(max((line.round for line in read_records(self.folder / METRICS, Evaluation)), default=0))

    def _make_baseline(self) -> Baseline | None:
        """Return the site's training alone, or None where there is none: the operator reads why."""
        if not self.trains_alone:
            return None
        try:
            with plugins.use_rule(self._settings.code):
                return Baseline(self.experiment, self.site, self.folder, self._journal.run, self.say)
        except UserError as problem:
            self.say(f"this site trains no network alone (sites.baseline), so its gain is not known: {problem}")
            return None

    def train_alone(self, end: int | None = None) -> None:
        """Train the network of `sites.baseline` in the rounds that the site has done. end: only in the rounds before it."""
        if self._baseline is not None:
            self._baseline.train(self._journal.list_rounds(end))

    def _open_journal(self, check_only: bool) -> SiteJournal:
        experiment, contract = self.experiment, self._contract
        config, algorithm, stages = experiment.config, experiment.algorithm, len(Stage) if contract.is_masked else 0
        seedset = "" if experiment.seeds is None else bytes(experiment.seeds.about["digest"].tolist()).hex()
        run = identify(config, experiment.data.partition["fingerprint"] + contract.digest + seedset)
        start = len(algorithm.start) + (stages if algorithm.start else 0)
        bounds = config.rounds, start, len(algorithm.phases) + stages, config.records.evaluate_every
        return SiteJournal(self.folder, self.site, run, bounds, self._budget, read_only=check_only)

    def close(self) -> None:
        """Close the journal, and end the trackers' runs. The object cannot be used afterwards."""
        for tracker in self._trackers:
            tracker.end((), is_finished=(self.folder / SUMMARY).exists())
        self._journal.close()

    def _build_experiment(self) -> Experiment:
        """Build the site's experiment, with the scaling that the server has sent, if it has."""
        contract, settings = self._contract, self._settings
        experiment = build_site(contract, settings, self._moments)
        if contract.layout is None:
            return experiment

        def sum_site() -> Words:
            with plugins.use_rule(settings.code):
                ((prepared, rows),) = list_training_rows(experiment.config, prepare(experiment.config)).values()
                return sum_client(prepared, rows, hide_carries=contract.is_masked)

        start = (SumStatistics(contract.layout, sum_site),)
        return replace(experiment, algorithm=replace(experiment.algorithm, start=start))

    def list_leaves(self) -> dict[str, dict[str, tuple[str, list[int]]]]:
        """Return all tensors that may leave this site: name of the phase -> name of the tensor -> (dtype, shape)."""
        if self.is_masked and not self.is_evaluator:
            return list_masked_leaves(self.experiment.algorithm, self._public)
        return {} if self.is_evaluator else self.experiment.list_leaves()

    def carry_out(self, content: bytes) -> bytes:
        """Carry out an order, and return the answer. Only this answer leaves the site for the server.

        Raises:
            MalformedMessage: the bytes are not an order, are longer than any order, or repeat an order too often.
            RunError: the journal cannot be read or written; then nothing is sent.
        """
        order, inbox = read_order(content, self._limit)
        if self.has_left:  # also to an earlier order: its answer again would be a line in a closed ledger
            return self._leave(order)
        digest = digest_order(order, inbox)
        known_reply, before = self._journal.find_answer(order, digest), self._journal.begun
        if known_reply is not None or (before is not None and before[2] == digest):  # answered, or begun and failed
            self._count_repeat(order)
        if known_reply is not None:
            self.say(f"{order.round_name}: repeated order, the first answer is sent again")
            record_sent(self._journal, *read_answer(known_reply), known_reply, SERVER)
            return known_reply
        if order.phase == 0 and (order.kind == WORK or self.is_evaluator) and is_to_leave(self.state, self._contract.name):
            return self._leave(order)
        try:
            self._check_role(order)
            moments = self._check_scaling(order, inbox)
            if self._journal.begin(order, digest):
                self._client = None
            if order.attempt > (before[0] if before else 0):
                self.say(
                    f"{order.round_name}: the server goes back, and begins attempt {order.attempt} of at most {ATTEMPTS}"
                )
            if moments is not None:
                self._adopt_scaling(moments)
                inbox = {name: tensor for name, tensor in inbox.items() if name != SCALING}
            reply = self._do(order, inbox, digest)
            self._journal.publish()
            self._not_done.clear()
            return reply
        except (Declined, Rejected) as problem:
            is_recorded_once, why, answer = True, f"declined: {problem}", SiteAnswer(order, problem=str(problem))
        except Exception as problem:  # of any type: a site's own network or task may raise any error
            self._client = None  # discards changes since the last saved phase
            accused = problem.clients if isinstance(problem, Disagreed) else ()
            is_recorded_once, why = is_disk_full(problem), describe_failure(problem)
            answer = SiteAnswer(order, problem=describe_failure_outside(problem), accused=accused)
        reply = pack_message(answer, {})
        if is_new := why not in self._not_done:
            self._not_done.add(why)
            self.say(f"{order.round_name}: {why}")
        if is_new or not is_recorded_once:
            record_sent(self._journal, answer, {}, reply, SERVER)
        return reply

    @property
    def has_left(self) -> bool:
        """Whether the site answered its last order, and closed its ledger."""
        return self._journal.left is not None

    def _leave(self, order: Order) -> bytes:
        """Return the site's last message: to every further order, too, of which the ledger then has no line."""
        answer = SiteAnswer(order, problem=LEAVES)
        reply = pack_message(answer, {})
        if not self.has_left:
            with self._journal.change():
                self._journal.set_fact("left", order.round)
                record_sent(self._journal, answer, {}, reply, SERVER)
            self.say(f"{order.round_name}: this site leaves the federation; its ledger is closed")
        return reply

    def _do(self, order: Order, inbox: Message, digest: str) -> bytes:
        """Carry out an order that was begun, and return the answer, which is on the disk. digest: of the order."""
        kept: dict[str, Message] = {}
        unmasked: str | None = None
        is_stage = self._is_stage(order)
        self.train_alone(order.round + (order.kind == EVALUATE))  # what was not trained since the last answer
        if order.kind == EVALUATE:
            answer, message = self._evaluate(order, inbox)
        elif not is_stage:
            answer, message, kept = self._do_phase(order, inbox)
        place = self._journal.find_place(order)
        is_current = self._client is not None and self._at == self._journal.find_before(place)
        with self._journal.change(erase=is_stage):
            if self._sums is not None and is_stage:
                answer = SiteAnswer(order)
                message, unmasked = self._sums.answer_stage(order, inbox)
            reply = pack_message(answer, message)
            trained = None if is_stage or order.kind == EVALUATE else self._client
            self._journal.finish(order, digest, reply, trained, kept)
            record_sent(self._journal, answer, message, reply, SERVER, unmasked)
        self._at = place if is_current else self._at
        return reply

    def _is_stage(self, order: Order) -> bool:
        """Return whether an order is a stage of the secure sum, which follows the phases of a round."""
        return order.kind != EVALUATE and order.phase >= len(self._list_phases(order))

    def _count_repeat(self, order: Order) -> None:
        """Raise MalformedMessage where a server repeats one order without end, for each answer adds a line to the ledger."""
        place = order.kind, order.round, order.phase
        self._repeats[place] += 1
        if self._repeats[place] > _MOST_REPEATS:
            raise MalformedMessage(
                f"{order.round_name} was answered {_MOST_REPEATS} times, and is not answered again; restart the site to "
                "allow more"
            )

    def make_peer_messages(self, content: bytes) -> dict[str, bytes]:
        """Return the messages to other sites after an order was carried out: site -> bytes. Each message is logged.

        Raises MalformedMessage where the bytes are not an order; RunError where the journal cannot be read or written.
        """
        order, inbox = read_order(content)
        is_done = order.kind != EVALUATE and self._journal.find_answer(order, digest_order(order, inbox)) is not None
        if self.peers is None or not is_done:
            return {}
        messages = self.peers.make_peer_messages(order)
        for receiver, sent_content in messages.items():
            record_sent(self._journal, *read_answer(sent_content), sent_content, receiver)
        return messages

    def _check_role(self, order: Order) -> None:
        """Raise Declined where the contract gives this site no such order."""
        if self.is_evaluator and order.kind == WORK:
            raise Declined(NO_TRAINING)
        if not self._contract.sites.takes_part(self.site, order.round):
            raise Declined(NOT_JOINED)

    def _check_scaling(self, order: Order, inbox: Message) -> Moments | None:
        """Return the scaling in an order; None where the order needs none.

        Raises Declined where the order lacks the scaling, or has another one than earlier orders.
        """
        layout = self._contract.layout
        if layout is None or order.round < 0 or self._is_stage(order):
            return None
        try:
            moments = read_scaling(layout, inbox)
        except ValueError as problem:
            raise Declined(str(problem)) from None
        if self._moments not in (None, moments):
            raise Declined("the order has another mean or divisor of the inputs than this site was sent before")
        return moments

    def _adopt_scaling(self, moments: Moments) -> None:
        """Standardise the site's rows by the first scaling that the server sends."""
        if self._moments is None:
            self._journal.set_fact(SCALING, moments)
            self._moments, self._client = moments, None
            self.experiment = self._build_experiment()
            self._baseline = self._make_baseline()
            _prepare_folder(self.folder, self.experiment, self.site)
            self.say("the inputs are standardised by the statistics of all sites")

    def _do_phase(self, order: Order, inbox: Message) -> tuple[SiteAnswer, Message, dict[str, Message]]:
        """Carry out the client's part of a phase, and return (answer, message, tensors that stay in the journal by kind)."""
        phase, config = self._list_phases(order)[order.phase], self.experiment.config
        down, remarks = None, tuple[str, ...]()
        if self.peers is not None:
            inbox, down, missing, faults = self.peers.read_inbox(order)
            remarks = tuple(f"{i!r}: its message did not arrive" for i in missing)
            for sender, why in faults.items():
                self.say(f"{order.round_name}: the message of {sender!r} is left out: {why}")

        def take_client() -> Client:
            client, self._client = self._restore_client((order.round, order.phase)), None  # a phase changes the client
            return client

        self._client, reply = answer_phase(
            take_client,
            phase,
            inbox,
            phase.leaves(self._public),
            At(config.seed, order.round, config.rounds, order.phase),
            self._sums is not None or self._budget is not None,
            lambda line: self.say(f"{order.round_name}: {line}"),
        )
        self._at = (order.round, order.phase)
        for line in () if self._client is None else describe_stop(self._client):
            self.say(f"{order.round_name}: {line}")
        if self.peers is not None:
            up = self.peers.count_sent_bytes(order, reply.message)
            return SiteAnswer(order, reply.train, up=up, down=down, remarks=remarks), {}, {MESSAGE: reply.message}
        if self._sums is not None:  # after the boundary; an unmasked update does not leave the site
            return SiteAnswer(order, reply.train), {}, {UPDATE: self._sums.pack_update(reply.message, inbox)}
        return SiteAnswer(order, reply.train), reply.message, {}

    def _evaluate(self, order: Order, inbox: Message) -> tuple[SiteAnswer, Message]:
        """Write the site's scores after a round to its disk, and return those that the site shares."""
        client = self._restore_client((order.round + 1, 0))
        evaluations = tuple(self.experiment.list_evaluations(self.site))
        if self.is_evaluator:
            evaluations = (EvalSpec("meme", "test", "global", self.site, "test"),)
            client.data = {"test": self._collect_rows()}
        if any(spec.model == COPY for spec in evaluations):
            self._restore_sent_meme(client, order)
        scores: dict[EvalSpec, Score] = {}
        try:
            scores = compute_scores(client, evaluations, inbox, lambda _, what: self.say(f"{order.round_name}: {what}"))
        except Exception as problem:
            if not may_depend_on_rows(problem):
                raise
            self.say(f"{order.round_name}: no scores: {describe_failure(problem)}; only this site knows why")
        if inbox:
            self._journal.save_shared(inbox, order.round)
        alone, shared_alone = ((), ()) if self._baseline is None else self._baseline.score(order.round)
        rewind(self.folder / METRICS, lambda round: round <= order.round)
        logs: tuple[Observer, ...] = (Metrics(self.folder), *self._trackers)
        for log in logs:
            log(Evaluated(order.round + 1, {}, (*scores.values(), *alone)))
        if self.experiment.config.records.keep_best and not self.is_evaluator:
            self._keep_best(client, evaluations, tuple(scores.values()), inbox, order.round)
        self._write_summary(order.round + 1)
        shared = (ReleasedScore(**vars(score)) for score in (*select_metrics(client, scores), *shared_alone))
        return SiteAnswer(order, scores=tuple(shared)), {}

    def _keep_best(
        self, client: Client, evaluations: Sequence[EvalSpec], scores: Sequence[Score], shared: Message, round: int
    ) -> None:
        """Save the site's own model and the shared model after a round, from 0, if no earlier round was better."""
        config = self.experiment.config
        by, every, metric = config.records.best_by, config.records.evaluate_every, find_common_metric(self.experiment)
        keep = best.BestRule(by, every, self._journal.run, metric)
        best.settle_best_files(self.folder, round, config.rounds, every)  # the server may have gone back
        keep_best_personal(client, evaluations, scores, client_folder(self.folder, self.site), round + 1, keep)
        if shared:
            merit = best.compute_merit([s for s in scores if s.model == "global"], "validation", by, metric)
            best.save_if_better(server_folder(self.folder), lambda: shared, merit, round + 1, keep)

    def _collect_rows(self) -> Data:
        """Return all rows of a site that only evaluates: each row once, whatever its split is."""
        data, shares = self.experiment.data, self.experiment.data.clients[self.site]
        parts = (shares.private, shares.validation, shares.holdout, shares.public, shares.test, data.test)
        return merge_rows([rows for rows in parts if isinstance(rows, Rows) and len(rows)]).to(self.experiment.device)

    def _restore_sent_meme(self, client: Client, order: Order) -> None:
        """Load the meme's tensors that the client sent: scores are of the trained meme, which no state file holds."""
        place, meme = self._journal.find_before((order.round + 1, 0)), client.nets.get("meme")
        if place is None or meme is None:
            return
        if self._sums is None:
            reply = self._journal.read_content(REPLY, *place)
            sent = read_answer(reply)[1] if reply is not None else {}
        else:
            sent = self._sums.read_reply(place[0])
        meme.load_state_dict(meme.state_dict() | {k: v for k, v in sent.items() if k in client.shared})

    def _write_summary(self, round: int) -> None:
        """Write the summary after the last round, as every run does. round: the number of rounds that are done."""
        config = self.experiment.config
        if round == config.rounds:
            spent = guarantee.record(self.experiment, self.site, self._budget)
            write_summary(self.folder, config, leaves=self.list_leaves(), bytes=None, **spent)  # the ledger has the bytes

    def _restore_client(self, at: Place) -> Client:
        """Return the client with its state before a phase."""
        place = None if self.is_evaluator else self._journal.find_before(at)
        if self._client is None or self._at != place:
            self._client = guarantee.protect(self.experiment.build_client(self.site), self._budget, self.state)
            if place is not None:
                self._journal.load(self._client, place)
            self._at = place
        return self._client

    def _list_phases(self, order: Order) -> tuple[Phase, ...]:
        return self.experiment.algorithm.start if order.round < 0 else self.experiment.algorithm.phases


@contextmanager
def hold_runtime(
    contract: Contract, settings: SiteSettings, say: Say, patience: float = 20.0, startup: Path | None = None
) -> Iterator[SiteRuntime]:
    """Yield the part of a site, which no other process holds meanwhile. Arguments and errors as `SiteRuntime`.

    patience: seconds to wait until the state folder is free.
    """
    with (
        folders.lock_folder(settings.state / contract.name, "still works with this state", "end that process", patience),
        closing(SiteRuntime(contract, settings, say, startup=startup)) as runtime,
    ):
        yield runtime


def _prepare_folder(folder: Path, experiment: Experiment, site: str) -> None:
    """Write the folder in the form of a run of one client, so that `predict` and `report` can read the folder."""
    about = {
        "engine": RecordedEngine(name="sites"),
        "products": experiment.choose_products(),
        "scaling": experiment.data.space.scaling,
    }
    environment = folders.describe_environment(experiment.config.engine.threads, str(experiment.device))
    sizes = {site: count_parameters(experiment.build_client(site))}
    environment = description.describe_run(environment.model_copy(update=about), experiment, sizes)
    folders.write_about(folder, experiment.config, environment, experiment.data.partition)
    every, rounds = experiment.config.records.evaluate_every, experiment.config.rounds
    rewind(folder / METRICS, lambda round: is_scored_on_resume(round, round, every, rounds))
