"""In the job's process at a site: the half, over FLARE's tasks and, between sites, its messages."""

import time
from contextlib import ExitStack
from pathlib import Path

import torch
from nvflare.apis.event_type import EventType
from nvflare.apis.executor import Executor
from nvflare.apis.fl_constant import FLContextKey, ReturnCode
from nvflare.apis.fl_context import FLContext
from nvflare.apis.shareable import Shareable, make_reply
from nvflare.apis.signal import Signal

from fedmutual import plugins
from fedmutual.errors import UserError
from fedmutual.rundir import folder as folders
from fedmutual.sites.contract import accept_contract, check_rounds
from fedmutual.sites.flare import workspace
from fedmutual.sites.flare.access_control import LETTER
from fedmutual.sites.flare.console import print_line, print_line_seldom
from fedmutual.sites.modules import leave_working_folders
from fedmutual.sites.protocol import MalformedMessage, SiteAnswer, pack_message, read_order
from fedmutual.sites.site_runtime import SiteRuntime, read_site_file

READY, BODY = "ready", "body"
_EVERY = 10.0  # seconds between lines on the console
_AGAIN = 30.0  # seconds until who could not take part tries again; doubled each time
_PATIENCE = 20.0  # seconds for the process of the job before to let go of the state, and for a letter to be taken


class Site(Executor):  # type: ignore[misc]
    """A site's part in a job. Checks the job's contract against the one that its operator agreed to; then does as told."""

    def __init__(self, contract: str) -> None:
        """contract: the job's, as JSON text."""
        super().__init__()
        self._contract = contract
        self._half: SiteRuntime | None = None
        self._held, self._told = ExitStack(), 0.0
        self._next, self._pause = 0.0, _AGAIN

    def handle_event(self, event_type: str, fl_ctx: FLContext) -> None:
        """Begin with the job, end with it."""
        if event_type == EventType.START_RUN:
            self._try(fl_ctx)
        elif event_type == EventType.END_RUN:
            self._held.close()
            print_line("the job is over; waiting for the next")

    def execute(self, task_name: str, shareable: Shareable, fl_ctx: FLContext, abort_signal: Signal) -> Shareable:
        """Carry an order out."""
        content = shareable.get(BODY)
        if task_name == READY:
            return _reply(b"")
        try:
            if self._half is None and time.monotonic() > self._next:
                # another process may have had its state, or its disk was full; the others wait for this answer
                self._try(fl_ctx, patience=0.0)
            if self._half is None:
                return _reply(
                    pack_message(
                        SiteAnswer(read_order(content)[0], problem="it does not take part; its operator reads why"), {}
                    )
                )
            answer = self._half.do(content)
            self._send(self._half.letters(content), fl_ctx)
            self._tell(content)
            return _reply(answer)
        except MalformedMessage as problem:
            print_line_seldom("order", f"an order of the server is not carried out: {problem}")
            return make_reply(ReturnCode.EXECUTION_EXCEPTION)
        except (UserError, OSError) as problem:  # what leaves could not be written down, so nothing does
            print_line(str(problem))
            return make_reply(ReturnCode.EXECUTION_EXCEPTION)

    def _try(self, fl_ctx: FLContext, patience: float = _PATIENCE) -> None:
        """Begin, or say why not; and then not at once again."""
        try:
            self._begin(fl_ctx, patience)
            print_line("takes part")
        except UserError as problem:
            self._held.close()
            print_line(f"this site does not take part: {problem}")
            self._next, self._pause = time.monotonic() + self._pause, 2 * self._pause

    def _tell(self, content: bytes) -> None:
        """Now and then how far it is."""
        if time.monotonic() - self._told > _EVERY:
            print_line(f"{read_order(content)[0].said} done")
            self._told = time.monotonic()

    def _begin(self, fl_ctx: FLContext, patience: float) -> None:
        """Read the site's own file, and compare the job's contract with what the operator agreed to before it is parsed."""
        work = Path(fl_ctx.get_prop(FLContextKey.WORKSPACE_OBJECT).get_root_dir())
        about = workspace.read_pointer(work)
        mine = read_site_file(Path(about["config"]))
        leave_working_folders(work)
        plugins.confine(mine.code)
        contract = accept_contract(self._contract, about["contracts"])
        check_rounds(contract.config.rounds, about["rounds"], mine.file.limits)
        _alone(self._held, mine.state / contract.name, patience)
        torch.set_num_threads(mine.file.engine.threads)
        half = SiteRuntime(contract, mine, print_line, startup=work / "startup")
        if half.peers is not None:
            fl_ctx.get_engine().register_aux_message_handler(topic=LETTER, message_handle_func=self._take)
        self._half = half

    def _take(self, topic: str, request: Shareable, fl_ctx: FLContext) -> Shareable:
        """A letter of another site's: who sent it is what its certificate says."""
        sender = fl_ctx.get_peer_context().get_identity_name()
        if self._half is None or self._half.peers is None:
            return make_reply(ReturnCode.EXECUTION_EXCEPTION)
        try:
            self._half.peers.receive(sender, request.get(BODY))
        except MalformedMessage as problem:
            print_line_seldom("letter", f"a letter of site {sender!r} is refused: {problem}")
            return make_reply(ReturnCode.BAD_REQUEST_DATA)
        return make_reply(ReturnCode.OK)

    def _send(self, letters: dict[str, bytes], fl_ctx: FLContext) -> None:
        """To all at once, and until they have them."""
        for letter in set(letters.values()):
            request = Shareable()
            request[BODY] = letter
            to = [i for i, found in letters.items() if found == letter]
            replies = fl_ctx.get_engine().send_aux_request(to, LETTER, request, _PATIENCE, fl_ctx, secure=True)
            lost = [i for i in to if i not in replies or replies[i].get_return_code() != ReturnCode.OK]
            if lost:
                print_line(f"site {', '.join(lost)} did not take the letter")


def _alone(held: ExitStack, folder: Path, patience: float) -> None:
    """Hold the state against other processes; that of the job before may still be ending."""
    until = time.monotonic() + patience
    while True:
        try:
            held.enter_context(folders.held(folder, "still works with this state", "look what is in its way"))
            return
        except UserError:
            if time.monotonic() > until:
                raise
            time.sleep(0.2)


def _reply(body: bytes) -> Shareable:
    found = Shareable()
    found[BODY] = body
    found.set_return_code(ReturnCode.OK)
    return found
