"""One site's half of a federation: its data, its model, its state on disk; orders in, answers out, as bytes."""

import json
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from fedmutual import plugins
from fedmutual.boundary import Refused
from fedmutual.config import Config, read_tables
from fedmutual.core import At, Client, Disagreed, Diverged, Message, Phase, Spec, Unusable
from fedmutual.data.examples import listed
from fedmutual.data.federation import describe_column_difference
from fedmutual.engines.base import participate
from fedmutual.errors import ConfigError, RunError, UserError, format_error
from fedmutual.evaluation import COPY, compute_scores, select_metrics
from fedmutual.events import Evaluated
from fedmutual.federation import build, description
from fedmutual.federation.experiment import Experiment
from fedmutual.models.pretrained import IMAGENET
from fedmutual.privacy.budget import Budget, Spent
from fedmutual.rundir import folder as folders
from fedmutual.rundir.file_names import METRICS
from fedmutual.rundir.logs import Metrics, read_lines, rewind, stays_scored
from fedmutual.rundir.summary import write_summary
from fedmutual.sites import guarantee
from fedmutual.sites.admission import Bounds, Declined, admit, find_answer
from fedmutual.sites.contract import Contract, identify, parse_table
from fedmutual.sites.journal import Journal, JournalEntry, Place
from fedmutual.sites.modules import ListedModules
from fedmutual.sites.peers import PeerMailbox, is_peer_to_peer
from fedmutual.sites.protocol import (
    ATTEMPTS,
    EXAM,
    MalformedMessage,
    Order,
    ReleasedScore,
    SiteAnswer,
    digest_order,
    pack_message,
)
from fedmutual.sites.protocol import read_answer as answered
from fedmutual.sites.protocol import read_order as ordered
from fedmutual.sites.schema import SiteFile
from fedmutual.sites.secure_sum.fixed_point import count_words, list_masked_leaves
from fedmutual.sites.secure_sum.messages import WORDS, Rejected, Stage
from fedmutual.sites.secure_sum.site_files import SumFiles
from fedmutual.sites.seedset import CollectedSeedset
from fedmutual.sites.sent_log import LEFT, SentLog
from fedmutual.sites.sizes import MessageSizes

Say = Callable[[str], None]
_SENTENCES = (Diverged, Refused, Disagreed, Unusable, UserError)
SERVER = "server"
_REPEATS = 100  # how often a process answers one order: an answer is lost once or twice, and each is a line in the ledger


@dataclass(frozen=True)
class SiteSettings:
    """A site's own file, and where it was read from."""

    file: SiteFile
    source: Path

    @property
    def state(self) -> Path:
        """Where the site keeps what it must not lose."""
        return _from(self.source, self.file.state.folder)

    @property
    def code(self) -> ListedModules:
        """Which modules the site imports where its file, or the federation's, names code."""
        listed = self.file.trust.modules
        return ListedModules(
            listed,
            [self.source.parent],
            lambda name: f"write trust = {{ modules = {json.dumps([*listed, name])} }} into {self.source}",
        )


def read_site_file(path: Path) -> SiteSettings:
    """A site's own file. Paths in it count from the folder that it is in.

    Raises:
        ConfigError: which key is wrong or missing.
    """
    file: SiteFile = parse_table(SiteFile, read_tables(path), str(path))
    if file.data.name is None:
        raise ConfigError(f"{path}: the key 'data.name' is missing, which says where the site's examples come from")
    data = {key: _from(path, value) for key in ("root", "test") if (value := getattr(file.data, key)) is not None}
    given = file.model.pretrained
    model = {} if given in (None, IMAGENET) else {"pretrained": str(_from(path, Path(given)))}
    tables = {"data": file.data.model_copy(update=data), "model": file.model.model_copy(update=model)}
    return SiteSettings(file.model_copy(update=tables), path.resolve())


def _from(source: Path, path: Path) -> Path:
    return (source.parent / path).resolve()


def build_site(contract: Contract, mine: SiteSettings) -> Experiment:
    """What one site needs to take part; checks all that can be checked without the others.

    Raises:
        UserError: what of its file, its data or its network does not go together with the contract.
    """
    config = configured(contract, mine)
    with plugins.under(mine.code):
        made = build.build(config, gathered=_collected(contract, mine))
    shape = list(made.data.space.shape)
    if shape != list(contract.sites.input) and (made.nets.shares or made.algorithm.public):
        raise ConfigError(
            f"{mine.source}: the examples have the shape {shape}, and the federation agreed on "
            f"{list(contract.sites.input)} (sites.input); resize images by 'data.size', or bring the columns into that form"
        )
    columns = describe_column_difference(made.data.space.columns, contract.sites.columns)
    if columns is not None:
        raise ConfigError(
            f"{mine.source}: the examples have {columns}, and the federation agreed on "
            f"{listed(contract.sites.columns or ())} (sites.columns); bring the file into that form"
        )
    return made


def configured(contract: Contract, mine: SiteSettings) -> Config:
    """The whole configuration of one site.

    Raises:
        ConfigError: the site is not of this federation, or a key of its file is wrong.
    """
    if mine.file.site not in contract.sites.names:
        raise ConfigError(
            f"{mine.source}: site {mine.file.site!r} is not of federation {contract.name!r}, whose sites are "
            f"{', '.join(contract.sites.names)}"
        )
    with plugins.under(mine.code):
        return contract.at(mine.file, str(mine.source))


def _collected(contract: Contract, mine: SiteSettings) -> CollectedSeedset | None:
    """What makes the public seed set; None where the algorithm has none."""
    use = contract.algorithm.public
    if use is None:
        return None
    if mine.file.public is None:
        raise ConfigError(
            f"{mine.source}: the key 'public.folder' is missing: algorithm {contract.config.algorithm['name']!r} needs the "
            "public seed set, and this is the folder with SITE.npz of every site"
        )
    folder = _from(mine.source, mine.file.public.folder)
    return CollectedSeedset(folder, mine.file.site, contract.sites.names, use.labelled, contract.public)


class SiteRuntime:
    """One site's part. Does what an order says, once, and answers."""

    def __init__(
        self,
        contract: Contract,
        mine: SiteSettings,
        say: Say = lambda line: None,
        looks: bool = False,
        startup: Path | None = None,
    ) -> None:
        """looks: only look whether the site can take part, and write nothing; else the state folder is this object's alone.

        startup: of the site's kit, with the key by which it signs; a secure sum needs it.

        Raises:
            UserError: the site cannot take part, in one sentence.
        """
        self.experiment, self.site, self._say = build_site(contract, mine), mine.file.site, say
        self.folder, self._state = mine.state / contract.name, mine.state
        guarantee.check_site(self.experiment.config, mine.file, mine.source)
        self._budget: Budget | None = None
        if self.experiment.noised:
            self._budget = guarantee.open_budget(self.experiment, self.site, contract.name, mine.state)
            guarantee.remark_others(self.experiment, self.site, mine.state, say)
        made, algorithm = self.experiment, self.experiment.algorithm
        fingerprint = made.data.partition["fingerprint"] + contract.digest + _print(made)
        self._diary = Journal(self.folder, self.site, identify(made.config, fingerprint))
        self._bounds = Bounds(
            rounds=made.config.rounds,
            start=len(algorithm.start),
            phases=len(algorithm.phases) + (len(Stage) if contract.is_masked else 0),
            evaluate_every=made.config.records.evaluate_every,
        )
        self._declined = set[str]()  # why orders were declined since the last that was not: each is written down once
        self._outbox = SentLog(self.folder, self.site)
        # what all know of the first state: names and shapes, not what later rounds hold
        self._public = made.server(contract.sites.names)
        self.peers: PeerMailbox | None = None
        if is_peer_to_peer(algorithm):
            self.peers = PeerMailbox(
                algorithm, self._public, self.site, contract.sites.names, self.folder, made.config.rounds
            )
        words = count_words(algorithm.phases[0], self._public) if contract.is_masked else None
        self._limit = MessageSizes(algorithm, self._public, contract.sites.names, self.peers is not None, words).order
        self.is_masked = contract.is_masked
        self._sums: SumFiles | None = None
        if contract.is_masked and not looks:
            if startup is None:
                raise RunError(f"{mine.source}: a secure sum needs the site's kit, which has the key that signs")
            self._sums = SumFiles(self.folder, self.site, contract.sites.names, contract.binding, startup)
        if self._diary.entries and not looks:  # who looks may have the contract as the kit has it, of other rounds
            self._check_schedules()
        self._repeats = Counter[tuple[str, int, int]]()  # how often each answer was given again
        self._client: Client | None = None
        self._at: Place | None = None  # where the client in memory is; None: before all
        if not looks:
            _prepare(self.folder, made, self.site)
            self._sum_up(max((line["round"] for line in read_lines(self.folder / METRICS)), default=0))

    def _check_schedules(self) -> None:
        """Raise RunError where a schedule of its own, or the contract's, was begun with other rounds."""
        try:
            folders.check_schedules(self.folder, self.experiment.config)
        except RunError as problem:  # a key of the site's own file has no client before it
            raise RunError(str(problem).replace(f"'clients.{self.site}.", "'")) from None

    def leaves(self) -> dict[str, Spec]:
        """All that may leave this site: phase -> name -> dtype, shape."""
        algorithm = self.experiment.algorithm
        if self.is_masked:
            count = count_words(algorithm.phases[0], self._public)
            return {type(algorithm.phases[0]).__name__.lower(): {WORDS: (torch.int64, (count,))}}
        return {type(p).__name__.lower(): p.leaves(self._public) for p in (*algorithm.start, *algorithm.phases)}

    def do(self, content: bytes) -> bytes:
        """Carry an order out -> the answer, which is all that leaves by the server.

        Raises:
            Garbled: it is no order, larger than one, or was answered so often that no loss explains it.
            RunError: what leaves cannot be written down, so nothing may.
        """
        order, inbox = ordered(content, self._limit)
        asked = digest_order(order, inbox)
        known = find_answer(self._diary, order, asked)
        begun = self._diary.begun
        if known is not None or (begun is not None and begun.inbox == asked):  # answered, or begun and failed
            self._count_repeat(order)
        if known is not None:
            self._say(f"{order.said}: asked again, answered as before")
            self._outbox.record(*answered(known), known, SERVER)
            return known
        message: Message = {}
        unmasked: str | None = None
        try:
            self._begin(order, asked)
            if order.kind == EXAM:
                answer, message = self._exam(order, inbox)
            elif order.phase < len(self._phases(order)):
                answer, message = self._work(order, inbox, asked)
            else:
                answer, message, unmasked = self._sum(order, inbox)
            reply = pack_message(answer, {} if self.peers else message)
            self._write(order, asked, reply)
        except Declined as problem:
            return self._decline(order, str(problem))
        except Exception as problem:  # of any type, where a network or a task of the site's own is at work
            self._client = None  # what was done since the last saved phase is undone
            self._say(f"{order.said}: {problem if isinstance(problem, _SENTENCES) else format_error(problem)}")
            accused = problem.clients if isinstance(problem, Disagreed) else ()
            diverged = isinstance(problem, Diverged)
            answer, message = SiteAnswer(order, problem=_said(problem), accused=accused, diverged=diverged), {}
            reply = pack_message(answer, message)
        self._outbox.record(answer, {} if self.peers else message, reply, SERVER, unmasked)
        return reply

    def _count_repeat(self, order: Order) -> None:
        """Raise Garbled where a server asks for one thing for ever, which would fill the disk with lines of the ledger."""
        place = order.kind, order.round, order.phase
        self._repeats[place] += 1
        if self._repeats[place] > _REPEATS:
            raise MalformedMessage(f"{order.said} was answered {_REPEATS} times, and is not answered again")

    def letters(self, content: bytes) -> dict[str, bytes]:
        """What goes to other sites after an order was carried out -> site -> bytes, written down."""
        order, inbox = ordered(content)
        if self.peers is None or order.kind == EXAM or find_answer(self._diary, order, digest_order(order, inbox)) is None:
            return {}
        found = self.peers.letters(order, self._when(order))
        for to, letter in found.items():
            self._outbox.record(*answered(letter), letter, to)
        return found

    def _begin(self, order: Order, asked: str) -> None:
        """Write down that an order is begun. Raises Declined where it is not to be carried out. asked: its digest."""
        before = self._diary.begun
        if admit(self._diary, order, asked, self._bounds):
            self._client = None
        if order.attempt > (before.attempt if before else 0):
            self._say(f"{order.said}: the server goes back: attempt {order.attempt} of the {ATTEMPTS} that it may begin")
        self._declined.clear()

    def _decline(self, order: Order, why: str) -> bytes:
        """The answer to an order that is not carried out; a server that asks for ever fills no disk by it."""
        answer = SiteAnswer(order, problem=why)
        reply = pack_message(answer, {})
        if why not in self._declined:
            self._say(f"{order.said}: not done, for {why}")
            self._outbox.record(answer, {}, reply, SERVER)
            self._declined.add(why)
        return reply

    def _work(self, order: Order, inbox: Message, asked: str) -> tuple[SiteAnswer, Message]:
        """The site's half of a phase. asked: the order's digest."""
        at, phase, client = self._when(order), self._phases(order)[order.phase], self._ready((order.round, order.phase))
        up: int | None = None
        down: int | None = None
        remarks: tuple[str, ...] = ()
        if self.peers is not None:
            inbox, down, remarks = self.peers.inbox(order, at)
        reply = participate(client, phase, inbox, phase.leaves(self._public), at)
        self._outbox.check(reply.message)
        self._at = (order.round, order.phase)
        if self.peers is not None:
            up = self.peers.keep(order, reply.message, at)
        if self._sums is not None:  # after the boundary; the update stays here until it is masked
            self._sums.write_update(reply.message, inbox, order.round, asked)
            return SiteAnswer(order, reply.train), {}
        return SiteAnswer(order, reply.train, up=up, down=down, remarks=remarks), reply.message

    def _sum(self, order: Order, letter: Message) -> tuple[SiteAnswer, Message, str | None]:
        """A stage of the round's secure sum -> (answer, message, digest of words that were masked)."""
        assert self._sums is not None
        self._ready((order.round, order.phase))
        self._at = (order.round, order.phase)
        try:
            message, unmasked = self._sums.answer_stage(Stage(order.phase), order.round, order.attempt, letter)
        except Rejected as problem:
            raise Declined(str(problem)) from None
        return SiteAnswer(order), message, unmasked

    def _exam(self, order: Order, inbox: Message) -> tuple[SiteAnswer, Message]:
        """The site's scores after a round; they are written down at home, and told if it tells."""
        client = self._ready((order.round + 1, 0))
        exams = tuple(self.experiment.exams(self.site))
        if any(exam.model == COPY for exam in exams):
            self._give_back(client, order)
        measured = compute_scores(client, exams, inbox)
        if inbox:
            self._diary.shared(inbox, order.round)
        rewind(self.folder / METRICS, lambda round: round <= order.round)
        Metrics(self.folder)(Evaluated(order.round + 1, {}, tuple(measured.values())))
        self._sum_up(order.round + 1)
        return SiteAnswer(order, scores=tuple(ReleasedScore(**vars(s)) for s in select_metrics(client, measured))), {}

    def _give_back(self, client: Client, order: Order) -> None:
        """Give a client what of its meme it sent, which is scored as it was trained: no file of its state has it."""
        entry, meme = self._diary.before((order.round + 1, 0)), client.nets.get("meme")
        if entry is not None and meme is not None:
            sent = answered(self._diary.reply(entry))[1] if self._sums is None else self._sums.read_reply()
            meme.load_state_dict(meme.state_dict() | {k: v for k, v in sent.items() if k in client.shared})

    def _sum_up(self, round: int) -> None:
        """After the last round, as at the end of any run."""
        config = self.experiment.config
        if round == config.rounds:
            spent = guarantee.record(self.experiment, self.site, self._budget)
            algorithm = self.experiment.algorithm
            leaves = list_masked_leaves(algorithm, self._public) if self.is_masked else self.experiment.leaves()
            write_summary(self.folder, config, leaves=leaves, bytes=None, **spent)  # bytes: in the ledger

    def _write(self, order: Order, asked: str, reply: bytes) -> None:
        """Save, before the answer leaves. asked: the order's digest."""
        assert self._client is not None
        if order.kind == EXAM:
            self._diary.write_scores(order.round, asked, reply)
        else:
            last = order.phase + 1 == (self._bounds.start if order.round < 0 else self._bounds.phases)
            self._diary.write(self._client, JournalEntry(order.round, order.phase, asked, last), reply)

    def _ready(self, at: Place) -> Client:
        """The client as it was before a place."""
        entry = self._diary.before(at)
        place = entry.place if entry else None
        if self._client is None or self._at != place:
            self._client = guarantee.protect(self.experiment.client(self.site), self._budget, self._state)
            if entry is not None:
                self._diary.load(self._client, entry)
            self._at = place
        return self._client

    def _phases(self, order: Order) -> tuple[Phase, ...]:
        return self.experiment.algorithm.start if order.round < 0 else self.experiment.algorithm.phases

    def _when(self, order: Order) -> At:
        config = self.experiment.config
        return At(config.seed, order.round, config.rounds, order.phase)


def _print(made: Experiment) -> str:
    """Of the public seed set, where the algorithm has one."""
    return "" if made.seeds is None else bytes(made.seeds.about["digest"].tolist()).hex()


def _prepare(folder: Path, made: Experiment, site: str) -> None:
    """The folder, in the form of a run of one client, so that `predict` and `report` read it."""
    about = folders.environment(made.config.engine.threads, made.device)
    about |= {"engine": {"name": "sites"}, "scaling": made.data.space.scaling}
    sizes = {name: sum(p.numel() for p in net.parameters()) for name, net in made.client(site).nets.items()}
    folders.write_about(folder, made.config, about | description.describe_networks(made, {site: sizes}), made.data.partition)
    every, rounds = made.config.records.evaluate_every, made.config.rounds
    rewind(folder / LEFT, lambda round: True)  # drops a line that a kill, or a full disk, cut short
    rewind(folder / METRICS, lambda round: stays_scored(round, round, every, rounds))


def _said(problem: BaseException) -> str:
    """A problem in words that may leave: no data, no paths, nothing of the site's own file."""
    if isinstance(problem, Disagreed):
        return problem.what
    if isinstance(problem, Diverged):
        return "it diverged: its loss or its weights are no longer finite"
    if isinstance(problem, Refused):
        return "its privacy boundary kept a message back"
    if isinstance(problem, Spent):
        return "its privacy budget is spent"
    return "it could not do its part; its operator reads why"
