"""The site's part in the job's process at a site: it answers FLARE tasks and exchanges messages with other sites."""

import math
import os
import secrets
import time
from collections import Counter
from contextlib import ExitStack, suppress
from pathlib import Path
from threading import Thread
from typing import Any

import torch
from nvflare.apis.event_type import EventType
from nvflare.apis.executor import Executor
from nvflare.apis.fl_component import FLComponent
from nvflare.apis.fl_constant import FLContextKey, ReturnCode
from nvflare.apis.fl_context import FLContext
from nvflare.apis.shareable import Shareable, make_reply
from nvflare.apis.signal import Signal
from nvflare.fuel.f3.cellnet.defs import IdentityChallengeKey, MessageHeaderKey
from nvflare.fuel.f3.cellnet.defs import ReturnCode as ReplyCode
from nvflare.fuel.f3.cellnet.fqcn import FQCN
from nvflare.fuel.f3.cellnet.utils import new_cell_message
from nvflare.fuel.sec.audit import AuditService
from nvflare.lighter.utils import load_crt_chain_bytes
from nvflare.private.defs import CellChannel, CellChannelTopic
from nvflare.private.fed.utils.identity_utils import TokenVerifier

from fedmutual.errors import RunError, UserError
from fedmutual.files import FORMAT, is_disk_full, write_json
from fedmutual.rundir.folder import lock_folder
from fedmutual.sites.contract import accept_contract, check_rounds
from fedmutual.sites.flare.access_control import PEER_TOPIC
from fedmutual.sites.flare.progress import name_lines, print_line
from fedmutual.sites.flare.workspace import BODY, CLOCK, read_pointer, remove_job_folder
from fedmutual.sites.leaving import note_told
from fedmutual.sites.modules import leave_working_folders
from fedmutual.sites.private_values import DISK_FULL
from fedmutual.sites.protocol import MalformedMessage, SiteAnswer, pack_message, read_answer, read_order
from fedmutual.sites.schema import CLOCK_FILE, MOST_AHEAD, WORK_FOLDER
from fedmutual.sites.site_runtime import SiteRuntime, hold_runtime
from fedmutual.sites.site_settings import read_site_file
from fedmutual.user_code import plugins

_LINE_INTERVAL = 10.0  # seconds between lines on the console
_FIRST_PAUSE = 30.0  # seconds until a site that could not start tries again; doubled after each try
_SIGN_OUT = 2.0  # seconds that the server may take to know that this process ends
_LAST_ANSWER = 5.0  # seconds that this process waits for the end of its answer before that
_PATIENCE = 20.0  # seconds until the previous job must release the state, and until a message must be taken


_CONNECTED = "connected to the server; waiting for a lead to submit"
_client: Any = None  # FLARE's object of this process, when it has registered at the server
_last = ExitStack()  # the lock of an ending process, held until its end


def sign_out(work: Path) -> None:
    """Tell the server that this site's process ends: then no round waits for its answer.

    An answer in progress is finished first, if this takes less than `_LAST_ANSWER`, and the job begins no other order.
    work: FLARE's workspace of this process, whose lock the job holds from an order until its answer is sent.
    """

    def send() -> None:
        with suppress(Exception), _client.engine.new_context() as fl_ctx:  # the server may be gone, too
            _client.communicator.heartbeat_done = True  # a later heartbeat would connect this site again
            _client.logout_client(fl_ctx)

    with suppress(RunError):
        _last.enter_context(lock_folder(work, patience=_LAST_ANSWER))
    thread = Thread(target=send, daemon=True)
    thread.start()
    thread.join(_SIGN_OUT)


class SiteEvents(FLComponent):  # type: ignore[misc]
    """A component of a site's process, outside of jobs: print the connection, remove the folder of a finished job.

    FLARE's process registers once, and afterwards shows the server a token that the server's key signed. A server with a
    renewed key drops every message with this token. So after a heartbeat without an answer, for which FLARE waits 30 s, the
    site compares the token with the server's certificate, and registers again if they do not fit.
    """

    def __init__(self, work: str) -> None:
        """work: FLARE's workspace of this process."""
        super().__init__()
        self._work, self._sent_at = Path(work), 0.0  # the last heartbeat

    def handle_event(self, event_type: str, fl_ctx: FLContext) -> None:
        """Remove the folder of the finished job only, because the next job may be deployed already."""
        global _client
        if event_type == EventType.AFTER_CLIENT_REGISTER:
            _client = fl_ctx.get_prop(FLContextKey.SITE_OBJ)
            print_line(_CONNECTED)
        elif event_type == EventType.BEFORE_CLIENT_HEARTBEAT:
            self._sent_at = time.monotonic()
        elif event_type == EventType.AFTER_CLIENT_HEARTBEAT and time.monotonic() - self._sent_at > _PATIENCE:
            with suppress(Exception):  # the server is gone again: the next heartbeat tries again
                _register_again(fl_ctx)
        elif event_type == EventType.JOB_COMPLETED:
            remove_job_folder(self._work, str(fl_ctx.get_prop(FLContextKey.CURRENT_JOB_ID)))


def _register_again(fl_ctx: FLContext) -> None:
    """Register this site again if the server's key did not sign its token. FLARE then checks the server's certificate."""
    name, about = _client.client_name, {IdentityChallengeKey.COMMON_NAME: _client.client_name}
    request = new_cell_message({**about, IdentityChallengeKey.NONCE: secrets.token_hex()}, None)
    place = {"target": FQCN.ROOT_SERVER, "channel": CellChannel.SERVER_MAIN, "topic": CellChannelTopic.Challenge}
    reply = _client.cell.send_request(**place, request=request, timeout=_PATIENCE, optional=True)
    if reply.get_header(MessageHeaderKey.RETURN_CODE) != ReplyCode.OK:
        return
    certificate = load_crt_chain_bytes(reply.payload[IdentityChallengeKey.CERT])[0]
    if TokenVerifier(certificate).verify(name, _client.token, _client.token_signature):
        return
    session = _client.communicator.client_registration(name, next(iter(_client.servers)), fl_ctx)
    if session[0]:
        _client.token, _client.token_signature, _client.ssid = session
        print_line(_CONNECTED)


class SiteExecutor(Executor):  # type: ignore[misc]
    """A site's part in a job: check that the operator agreed to the job's contract, then carry out orders."""

    def __init__(self, contract: str) -> None:
        """contract: the contract of the job, as JSON text."""
        super().__init__()
        self._contract = contract
        self._runtime: SiteRuntime | None = None
        self._open, self._printed_at = ExitStack(), 0.0  # the lock of the state, and the journal
        self._answering = ExitStack()  # the lock of FLARE's workspace: see `sign_out`
        self._parent = os.getppid()
        self._next_try, self._pause, self._is_disk_full = 0.0, _FIRST_PAUSE, False
        self._refusals: Counter[str] = Counter()  # kind -> lines about it so far

    def handle_event(self, event_type: str, fl_ctx: FLContext) -> None:
        """Start and end with the job."""
        if event_type == EventType.START_RUN:
            AuditService.close()  # of this job, whose folder is removed; on a full disk its lines would stop each answer
            self._try_start(fl_ctx)
        elif event_type == EventType.AFTER_SEND_TASK_RESULT and self._runtime is not None:
            self._answering.close()
            if self._runtime.has_left:
                note_told(self._runtime.state)
            else:
                self._runtime.train_alone()  # while other sites still work
        elif event_type == EventType.END_RUN:
            self._answering.close()
            self._open.close()
            print_line("the job is over; waiting for the next")

    def execute(self, task_name: str, shareable: Shareable, fl_ctx: FLContext, abort_signal: Signal) -> Shareable:
        """Return the answer to an order."""
        content = shareable.get(BODY)
        if content == b"":  # the server asks whether this site is ready
            self._compare_clocks(shareable.get(CLOCK), fl_ctx)
            return _make_answer(b"")
        try:
            if self._runtime is None and time.monotonic() > self._next_try:
                # the state was in use or the disk was full; no patience, because the other sites wait for this answer
                self._try_start(fl_ctx, patience=0.0)
            if self._runtime is None:
                why = DISK_FULL if self._is_disk_full else "it does not take part; its operator reads why"
                return _make_refusal(content, why)
            self._answering.close()  # of an order whose answer FLARE did not send
            lock = lock_folder(self._runtime.state / WORK_FOLDER, "ends", "start it again", patience=_PATIENCE)
            self._answering.enter_context(lock)
            if os.getppid() != self._parent:
                raise RunError("the process of this site has ended, so this job carries out no more orders")
            answer = self._runtime.carry_out(content)
            self._send_to_peers(self._runtime.make_peer_messages(content), fl_ctx)
            is_due = time.monotonic() - self._printed_at > _LINE_INTERVAL
            if is_due and (answered := read_answer(answer)[0]).problem is None:  # a declined order is not done
                print_line(f"{answered.order.round_name} done")
                self._printed_at = time.monotonic()
            return _make_answer(answer)
        except MalformedMessage as fault:
            self._print_refusal("order", f"an order of the server is not carried out: {fault}")
            return make_reply(ReturnCode.EXECUTION_EXCEPTION)
        except (UserError, OSError) as fault:  # an answer that cannot be written into the ledger is not sent
            self._print_refusal("answer", str(fault))
            return _make_refusal(content, DISK_FULL) if is_disk_full(fault) else make_reply(ReturnCode.EXECUTION_EXCEPTION)

    def _compare_clocks(self, server_time: object, fl_ctx: FLContext) -> None:
        """Write how far the clock of the server is ahead of this host's; an order without content arrives at once."""
        if isinstance(server_time, float) and math.isfinite(server_time):
            ahead, work = server_time - time.time(), Path(fl_ctx.get_prop(FLContextKey.WORKSPACE_OBJECT).get_root_dir())
            with suppress(RunError):  # a full disk: the next order tells the operator
                write_json(work / CLOCK_FILE, {"format": FORMAT, "ahead": ahead})
            if abs(ahead) > MOST_AHEAD:
                self._print_refusal("clock", f"the clock of the server is {ahead:+.3g} s from this host's; set both by NTP")

    def _try_start(self, fl_ctx: FLContext, patience: float = _PATIENCE) -> None:
        """Start, or print why the site cannot start, and set the time of the next try."""
        try:
            self._start(fl_ctx, patience)
            print_line("takes part")
        except UserError as problem:
            self._open.close()
            print_line(f"this site does not take part: {problem}", "error")
            self._is_disk_full = is_disk_full(problem)
            self._next_try, self._pause = time.monotonic() + self._pause, 2 * self._pause

    def _print_refusal(self, kind: str, line: str) -> None:
        """Print only the first, second, fourth, eighth ... line of a kind: others cannot flood the console."""
        self._refusals[kind] += 1
        if (count := self._refusals[kind]).bit_count() == 1:
            print_line(line if count == 1 else f"{line} ({count} of this kind so far)", "warning")

    def _start(self, fl_ctx: FLContext, patience: float) -> None:
        """Read the site's file, and check the contract against the agreed contracts before the contract is parsed."""
        work = Path(fl_ctx.get_prop(FLContextKey.WORKSPACE_OBJECT).get_root_dir())
        pointer = read_pointer(work)
        site_config = read_site_file(Path(pointer["config"]))
        leave_working_folders(work)
        plugins.set_rule(site_config.code)
        contract = accept_contract(self._contract, pointer["contracts"])
        name_lines(contract.name)
        check_rounds(contract.config.rounds, pointer["rounds"], site_config.file.limits)
        torch.set_num_threads(site_config.file.engine.threads)
        held = hold_runtime(contract, site_config, print_line, patience, work / "startup")
        runtime = self._open.enter_context(held)
        if runtime.peers is not None:
            fl_ctx.get_engine().register_aux_message_handler(topic=PEER_TOPIC, message_handle_func=self._receive)
        self._runtime = runtime

    def _receive(self, topic: str, request: Shareable, fl_ctx: FLContext) -> Shareable:
        """Take a message of another site. The sender is the name in the certificate of that site."""
        sender = fl_ctx.get_peer_context().get_identity_name()
        if self._runtime is None or self._runtime.peers is None:
            return make_reply(ReturnCode.EXECUTION_EXCEPTION)
        try:
            self._runtime.peers.receive(sender, request.get(BODY))
        except MalformedMessage as problem:
            self._print_refusal("message", f"a message of site {sender!r} is refused: {problem}")
        # of a refused message, too: the server sees this reply, and the reason of a refusal may depend on the sender's rows
        return make_reply(ReturnCode.OK)

    def _send_to_peers(self, messages: dict[str, bytes], fl_ctx: FLContext) -> None:
        """Send messages to other sites, and wait until they are taken. messages: receiver -> bytes."""
        for message in set(messages.values()):  # one request sends an equal message to all its receivers
            request = Shareable()
            request[BODY] = message
            receivers = [i for i, content in messages.items() if content == message]
            replies = fl_ctx.get_engine().send_aux_request(receivers, PEER_TOPIC, request, _PATIENCE, fl_ctx, secure=True)
            lost = [i for i in receivers if i not in replies or replies[i].get_return_code() != ReturnCode.OK]
            if lost:
                print_line(f"site {', '.join(lost)} did not take the message")


def _make_refusal(order: bytes, problem: str) -> Shareable:
    """Return an answer that the ledger does not record. problem: a constant sentence, why the order is not carried out."""
    return _make_answer(pack_message(SiteAnswer(read_order(order)[0], problem=problem), {}))


def _make_answer(body: bytes) -> Shareable:
    answer = Shareable()
    answer[BODY] = body
    answer.set_return_code(ReturnCode.OK)
    return answer
