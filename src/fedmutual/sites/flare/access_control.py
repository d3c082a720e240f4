"""The door of a participant's processes: whose requests they take, and which.

FLARE carries any request of any participant to any process, and a site does as it is asked: it holds its rights against
what the server says of the asker. So whoever holds a kit could read a site's files. Here stands for each process who may
ask what of it; all else is refused before it is unpacked, and so is a job that is not what fedmutual writes and a lead
signed. Under a FLARE without these methods no process starts.
"""

import logging
from collections.abc import Callable, Mapping
from functools import wraps
from pathlib import Path
from typing import Any

from nvflare.apis.fl_component import FLComponent
from nvflare.apis.fl_constant import AdminCommandNames, ReservedKey
from nvflare.fuel.f3.cellnet.core_cell import CoreCell
from nvflare.fuel.f3.cellnet.defs import MessageHeaderKey, ReturnCode
from nvflare.fuel.f3.cellnet.utils import make_reply, new_cell_message
from nvflare.fuel.f3.streaming.stream_const import StreamHeaderKey
from nvflare.fuel.hci.proto import MetaStatusValue, make_meta
from nvflare.fuel.hci.server.authz import AuthzFilter
from nvflare.fuel.hci.server.constants import ConnProps
from nvflare.private.admin_defs import MsgHeader, error_reply
from nvflare.private.admin_defs import ReturnCode as Code
from nvflare.private.defs import RequestHeader, TrainingTopic
from nvflare.private.fed.client.admin import FedAdminAgent
from nvflare.private.fed.client.command_agent import CommandAgent

from fedmutual.errors import RunError, UserError
from fedmutual.sites.flare import leftovers, workspace
from fedmutual.sites.flare.archive import check_deployment, check_submission
from fedmutual.sites.flare.console import print_line
from fedmutual.sites.flare.job import APP
from fedmutual.sites.flare.leftovers import JOB
from fedmutual.sites.protocol import clean_text

LETTER = "fedmutual.letter"  # the topic of what sites send to each other
_AUX, _REPLY, _STREAM, _DATA = "aux_communication", "return_only", "sm__STREAM", "sm__DATA"

Rules = Mapping[str, tuple[str, ...] | None]
"""Channel -> topics; None: all of them."""

_ANYBODY: Rules = {"credential_manager": ("key_exchange",), "cellnet.channel": ("bye",), _STREAM: ("sm__ACK", "sm__ERROR")}
_RULES: Mapping[tuple[str, str], Rules] = {  # (whose process, who asks)
    ("site", "server"): {"admin": None},
    ("site job", "server job"): {_AUX: None, _REPLY: None},
    ("site job", "site job"): {_AUX: (LETTER,), _REPLY: (f"{_AUX}:{LETTER}",)},
    ("server", "site"): {"task": None},
    ("server", "site job"): {"task": None},
    ("server", "lead"): {"task": None, "hci_channel": None, _AUX: None, _REPLY: None},
    ("server job", "site job"): {"server_command": ("get_task", "submit_update"), _AUX: None, _REPLY: None},
}
_ORDERS = (  # what a server may order of a site: to begin a job that a lead signed, and to end it
    *(TrainingTopic.CHECK_RESOURCE, TrainingTopic.CANCEL_RESOURCE, TrainingTopic.DEPLOY),
    *(TrainingTopic.START_JOB, TrainingTopic.ABORT, TrainingTopic.ABORT_TASK, TrainingTopic.NOTIFY_JOB_STATUS),
)
_log = logging.getLogger(__name__)


def is_allowed(me: str, asker: str, channel: str, topic: str) -> bool:
    """Whether a process takes a request. me, asker: as FLARE calls processes: ``north``, ``north.JOB``, ``server``."""
    if asker.split(".")[0] == me.split(".")[0]:
        return True  # a process of the same participant
    rules = {**_ANYBODY, **_RULES.get((_kind(me), _kind(asker)), {})}
    if not (isinstance(channel, str) and isinstance(topic, str)):  # headers are whatever their sender wrote
        return False
    if channel not in rules or (topic == LETTER and _kind(asker) != "site job"):
        return False
    topics = rules[channel]
    return topics is None or topic in topics


def _kind(name: str) -> str:
    """What sort of process has a name."""
    first, *rest = name.split(".")
    if first.startswith("_admin_"):
        return "lead"
    return ("server" if first == "server" else "site") + (" job" if rest else "")


class Door(FLComponent):  # type: ignore[misc]
    """Stands from its making on, in the process that makes it. Made before the process talks to anybody."""

    def __init__(self, work: str) -> None:
        """work: FLARE's workspace of this process."""
        super().__init__()
        checks = JobChecks(Path(work))
        _guard(CoreCell, "_process_request", _at_the_door)
        _guard(FedAdminAgent, "_dispatch_request", checks.only_orders, _no_words)
        _guard(CommandAgent, "aux_communication", _true_sender)
        _guard(AuthzFilter, "pre_command", checks.only_leads)


def _guard(kind: Any, name: str, before: Callable[..., Any], after: Callable[[Any], Any] = lambda answer: answer) -> None:
    """Let `before` stand before a method, once: it gives what is answered instead, or None; and `after` behind it."""
    method = getattr(kind, name)
    if hasattr(method, "guarded"):
        return

    @wraps(method)
    def guarded(self: Any, *given: Any, **named: Any) -> Any:
        refused = before(self, *given, **named)
        return after(method(self, *given, **named)) if refused is None else refused

    guarded.guarded = True  # type: ignore[attr-defined]
    setattr(kind, name, guarded)


def _at_the_door(cell: Any, origin: str, message: Any) -> Any:
    """Whose request, and on what: of a stream what it will become."""
    channel, topic = (message.get_header(key, "") for key in (MessageHeaderKey.CHANNEL, MessageHeaderKey.TOPIC))
    if (channel, topic) == (_STREAM, _DATA):
        channel, topic = (message.get_header(key, "") for key in (StreamHeaderKey.CHANNEL, StreamHeaderKey.TOPIC))
    me = cell.my_info.fqcn
    sealed = topic != LETTER or message.get_header(MessageHeaderKey.ENCRYPTED)  # else the server could have written it
    if sealed and is_allowed(me, origin, channel, topic):
        return None
    _log.warning(clean_text(f"{me}: refused a request of {origin!r}: {channel}/{topic}"))
    return make_reply(ReturnCode.UNAUTHENTICATED, error="not for you to ask")


class JobChecks:
    """Who may order and submit a job, and which jobs are taken."""

    def __init__(self, work: Path) -> None:
        self._work, self._root = work, work / "startup" / "rootCA.pem"

    def only_orders(self, agent: Any, request: Any) -> Any:
        """What the server may order of a site, of a job by its number and no other folder."""
        order = request.payload
        job = order.get_header(RequestHeader.JOB_ID)
        if order.topic not in _ORDERS or not (job is None or (isinstance(job, str) and JOB.fullmatch(job))):
            _log.warning(clean_text(f"refused an order of {request.get_header(MessageHeaderKey.ORIGIN)!r}: {order.topic}"))
            return new_cell_message({}, error_reply("not for you to ask"))
        if order.topic != TrainingTopic.DEPLOY:
            return None
        try:
            if job is None or order.get_header(RequestHeader.APP_NAME) != APP:
                raise RunError("the order names no job of ours")
            check_deployment(order.body, self._root)
            leftovers.remove_folders(self._work, agent.app_ctx.get_all_job_ids())  # of jobs that never were begun
        except UserError as problem:
            _log.warning(clean_text(f"refused a job: {problem}"))
            return _no_words(new_cell_message({}, error_reply(f"a job: {problem}")))
        return None

    def only_leads(self, rights: Any, conn: Any, words: list[str]) -> bool | None:
        """FLARE lets any certificate of the federation log in, and asks for no right before some commands.

        What a lead submits is looked at here, before FLARE reads it: what is refused is removed.
        """
        file, command = conn.get_prop(ConnProps.FILE_LOCATION), conn.get_prop(ConnProps.CMD_ENTRY).name
        try:  # by the command that FLARE found, which has a second name with its module's before it
            if not command.startswith("_") and conn.get_prop(ConnProps.USER_ROLE) != "lead":  # not logging in and out
                raise RunError("only a lead may ask this")
            if command == AdminCommandNames.SUBMIT_JOB:
                if file is None or len(words) != 2:
                    raise RunError("a job is submitted as an archive, and without options")
                check_submission(Path(file), words[1], self._root, workspace.read_pointer(self._work)["contracts"])
                return None
            if file is not None:
                raise RunError("nothing but a job may be sent")
            return None
        except UserError as problem:
            _log.warning(clean_text(f"refused {command!r} of {conn.get_prop(ConnProps.USER_NAME)!r}: {problem}"))
            conn.append_error(str(problem), meta=make_meta(MetaStatusValue.INVALID_JOB_DEFINITION, str(problem)))
            if file is not None:
                Path(file).unlink(missing_ok=True)
            return False


def _no_words(reply: Any) -> Any:
    """Why a site could not is for its operator to read: the words may hold data or paths."""
    answer = reply.payload
    if answer.get_header(MsgHeader.RETURN_CODE) == Code.ERROR:
        print_line(f"refused, or could not: {clean_text(str(answer.body))}")
        answer.body = "refused, or could not; its operator reads why"
    return reply


def _true_sender(agent: Any, request: Any) -> Any:
    """A letter says who wrote it; its seal, by which certificate."""
    origin, said = request.get_header(MessageHeaderKey.ORIGIN, ""), request.payload.get_peer_props() or {}
    if _kind(origin).startswith("server") or said.get(ReservedKey.IDENTITY_NAME) == origin.split(".")[0]:
        return None
    _log.warning(clean_text(f"refused a letter of {origin!r}, which calls itself {said.get(ReservedKey.IDENTITY_NAME)!r}"))
    return make_reply(ReturnCode.UNAUTHENTICATED, error="not by who it says")
