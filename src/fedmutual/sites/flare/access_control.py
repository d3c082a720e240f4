"""Access control for the FLARE processes of a participant: which process may send which request to which other process.

FLARE delivers any request of any participant to any process, and a site checks the rights of a sender only by what the
server says about that sender. Without this module, any owner of a kit could read the files of a site. The rules below list
the allowed requests; every other request is refused before FLARE unpacks it. A job is refused unless it has the files that
fedmutual writes and a lead signed it. If a version of FLARE lacks the guarded methods, no process starts.
"""

import logging
import os
import sys
from collections.abc import Callable, Mapping
from functools import wraps
from pathlib import Path
from typing import Any

from nvflare.apis.fl_component import FLComponent
from nvflare.apis.fl_constant import AdminCommandNames, ReservedKey
from nvflare.app_common.job_launcher.client_process_launcher import ClientProcessJobLauncher
from nvflare.app_common.job_launcher.server_process_launcher import ServerProcessJobLauncher
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
from fedmutual.sites.flare import workspace
from fedmutual.sites.flare.archive import APP, check_deployment, check_submission
from fedmutual.sites.flare.kits import WANTED
from fedmutual.sites.flare.progress import print_line
from fedmutual.sites.protocol import clean_text

PEER_TOPIC = "fedmutual.letter"  # the topic of messages between sites
_AUX, _REPLY, _STREAM, _DATA = "aux_communication", "return_only", "sm__STREAM", "sm__DATA"

Rules = Mapping[str, tuple[str, ...] | None]
"""Channel -> topics; None: all of them."""

_ANYBODY: Rules = {"credential_manager": ("key_exchange",), "cellnet.channel": ("bye",), _STREAM: ("sm__ACK", "sm__ERROR")}
_RULES: Mapping[tuple[str, str], Rules] = {  # (kind of the receiver, kind of the sender)
    ("site", "server"): {"admin": None},
    ("site job", "server job"): {_AUX: None, _REPLY: None},
    ("site job", "site job"): {_AUX: (PEER_TOPIC,), _REPLY: (f"{_AUX}:{PEER_TOPIC}",)},
    ("server", "site"): {"task": None},
    ("server", "site job"): {"task": None},
    ("server", "lead"): {"task": None, "hci_channel": None, _AUX: None, _REPLY: None},
    ("server job", "site job"): {"server_command": ("get_task", "submit_update"), _AUX: None, _REPLY: None},
}
_ORDERS = (  # a server may order a site only to start a job that a lead signed, and to end the job
    *(TrainingTopic.CHECK_RESOURCE, TrainingTopic.CANCEL_RESOURCE, TrainingTopic.DEPLOY),
    *(TrainingTopic.START_JOB, TrainingTopic.ABORT, TrainingTopic.ABORT_TASK, TrainingTopic.NOTIFY_JOB_STATUS),
)
# -P: `python -m` does not search the working folder, which is FLARE's folder. -E: Python does not read PYTHONPATH, to which
# FLARE adds a folder for code of the job.
_MAIN = "-P -E -m fedmutual.parent_process"
_logger = logging.getLogger(__name__)


class AccessControl(FLComponent):  # type: ignore[misc]
    """The rules, which hold in a process from the construction of this component, before the process connects."""

    def __init__(self, work: str) -> None:
        """work: FLARE's workspace of this process."""
        super().__init__()
        logging.raiseExceptions = False  # on a full disk Python would print a traceback for each line of FLARE's log
        checks = JobChecks(Path(work))
        guard(CoreCell, "_process_request", refuse_request)
        guard(FedAdminAgent, "_dispatch_request", checks.refuse_order, remove_error_text)
        guard(CommandAgent, "aux_communication", refuse_false_sender)
        guard(AuthzFilter, "pre_command", checks.refuse_command)
        for launcher in (ClientProcessJobLauncher, ServerProcessJobLauncher):
            guard(launcher, "get_command", lambda *_, **__: None, change_job_command)


def guard(kind: Any, name: str, before: Callable[..., Any], after: Callable[[Any], Any] = lambda answer: answer) -> None:
    """Wrap a method of a class, once. before: returns a refusal or None. after: changes the method's answer."""
    method = getattr(kind, name)
    if hasattr(method, "guarded"):
        return

    @wraps(method)
    def guarded(self: Any, *args: Any, **kwargs: Any) -> Any:
        refusal = before(self, *args, **kwargs)
        return after(method(self, *args, **kwargs)) if refusal is None else refusal

    guarded.guarded = True  # type: ignore[attr-defined]
    setattr(kind, name, guarded)


def is_allowed(receiver: str, sender: str, channel: str, topic: str) -> bool:
    """Return whether a process accepts a request.

    receiver, sender: names of processes in FLARE: ``north``, ``north.JOB``, ``server``.
    """
    if sender.split(".")[0] == receiver.split(".")[0]:
        return True  # a process of the same participant
    if not (isinstance(channel, str) and isinstance(topic, str)):  # a sender can write anything into a header
        return False
    rules = {**_ANYBODY, **_RULES.get((_find_kind(receiver), _find_kind(sender)), {})}
    if channel not in rules or (topic == PEER_TOPIC and _find_kind(sender) != "site job"):
        return False
    topics = rules[channel]
    return topics is None or topic in topics


def _find_kind(name: str) -> str:
    """Return the kind of a process: "lead", "server", "site", "server job" or "site job"."""
    first, *rest = name.split(".")
    if first.startswith("_admin_"):
        return "lead"
    return ("server" if first == "server" else "site") + (" job" if rest else "")


def _log_refusal(text: str) -> None:
    _logger.warning(clean_text(f"refused {text}"))  # the text may hold words of another participant


def refuse_request(cell: Any, origin: str, message: Any) -> Any:
    """Return a refusal of a forbidden request, or None. A stream is judged by the request that it carries."""
    channel, topic = (message.get_header(key, "") for key in (MessageHeaderKey.CHANNEL, MessageHeaderKey.TOPIC))
    if (channel, topic) == (_STREAM, _DATA):
        channel, topic = (message.get_header(key, "") for key in (StreamHeaderKey.CHANNEL, StreamHeaderKey.TOPIC))
    # without encryption the server could have written a message between sites
    is_authentic = topic != PEER_TOPIC or message.get_header(MessageHeaderKey.ENCRYPTED)
    if is_authentic and is_allowed(cell.my_info.fqcn, origin, channel, topic):
        return None
    _log_refusal(f"a request of {origin!r}: {channel}/{topic}")
    return make_reply(ReturnCode.UNAUTHENTICATED, error="not allowed")


def refuse_false_sender(agent: Any, request: Any) -> Any:
    """Return a refusal where the sender in a message is not the participant whose certificate encrypted it, or None."""
    origin, properties = request.get_header(MessageHeaderKey.ORIGIN, ""), request.payload.get_peer_props() or {}
    stated = properties.get(ReservedKey.IDENTITY_NAME)
    if _find_kind(origin).startswith("server") or stated == origin.split(".")[0]:
        return None
    _log_refusal(f"a message of {origin!r}, which names {stated!r} as its sender")
    return make_reply(ReturnCode.UNAUTHENTICATED, error="wrong sender")


class JobChecks:
    """The checks of orders from the server and of commands from leads."""

    def __init__(self, work: Path) -> None:
        self._work, self._root = work, work / "startup" / "rootCA.pem"

    def refuse_order(self, agent: Any, request: Any) -> Any:
        """Return a refusal of a server's order that is not allowed or that names no valid job, or None."""
        order = request.payload
        job = order.get_header(RequestHeader.JOB_ID)
        if order.topic not in _ORDERS or not (job is None or (isinstance(job, str) and workspace.JOB.fullmatch(job))):
            _log_refusal(f"an order of {request.get_header(MessageHeaderKey.ORIGIN)!r}: {order.topic}")
            return new_cell_message({}, error_reply("not allowed"))
        if order.topic != TrainingTopic.DEPLOY:
            return None
        try:
            if job is None or order.get_header(RequestHeader.APP_NAME) != APP:
                raise RunError("the order names no job of fedmutual")
            check_deployment(order.body, self._root)
            workspace.remove_job_folders(self._work, agent.app_ctx.get_all_job_ids())  # of jobs that never started
        except UserError as problem:
            _log_refusal(f"a job: {problem}")
            return remove_error_text(new_cell_message({}, error_reply(f"a job: {problem}")))
        return None

    def refuse_command(self, rights: Any, conn: Any, words: list[str]) -> bool | None:
        """Return False for a command that is not allowed, else None.

        FLARE lets any certificate of the federation log in, and checks no right before some commands. A submitted job is
        checked here before FLARE reads it; the file of a refused job is removed.
        """
        # CMD_ENTRY is the entry that FLARE found: a command has a second name with the name of its module.
        file, command = conn.get_prop(ConnProps.FILE_LOCATION), conn.get_prop(ConnProps.CMD_ENTRY).name
        try:
            if not command.startswith("_") and conn.get_prop(ConnProps.USER_ROLE) != "lead":  # _: logs in or out
                raise RunError("only a lead may give this command")
            if command == AdminCommandNames.SUBMIT_JOB:
                if file is None or len(words) != 2:
                    raise RunError("a job is submitted as an archive, and without options")
                check_submission(Path(file), words[1], self._root, workspace.read_pointer(self._work)["contracts"])
            elif file is not None:
                raise RunError("only a job may be sent as a file")
        except UserError as problem:
            _log_refusal(f"{command!r} of {conn.get_prop(ConnProps.USER_NAME)!r}: {problem}")
            conn.append_error(str(problem), meta=make_meta(MetaStatusValue.INVALID_JOB_DEFINITION, str(problem)))
            if file is not None:
                Path(file).unlink(missing_ok=True)
            return False
        return None


def remove_error_text(reply: Any) -> Any:
    """Print the error text of a site's reply for its operator, and remove it: the text may hold data or paths."""
    answer = reply.payload
    if answer.get_header(MsgHeader.RETURN_CODE) == Code.ERROR:
        print_line(f"refused, or could not: {clean_text(str(answer.body))}", "warning")
        answer.body = "refused, or could not; its operator reads why"
    return reply


def change_job_command(command: str) -> str:
    """Return the command that starts a job's process, with fedmutual's main module and with options that isolate Python.

    command: as FLARE makes it. The main module ends the job's process when this process ends. FLARE's own check does so
    neither during training nor when reports to this process fail. Raises RuntimeError where the command has another form;
    the job is then not started.
    """
    python, module, rest = command.partition(" -m ")
    if python != sys.executable or not module:
        raise RuntimeError(f"NVIDIA FLARE starts jobs with an unknown command; install a supported version: {WANTED}")
    return f"{python} {_MAIN} {os.getpid()} {rest}"
