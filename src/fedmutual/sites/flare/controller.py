"""In the job's process at the server: the coordinator, over FLARE's tasks. One task an order, one site a task."""

import math
import os
import queue
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from nvflare.apis.client import Client
from nvflare.apis.controller_spec import ClientTask, Task
from nvflare.apis.fl_constant import FLContextKey, ReturnCode
from nvflare.apis.fl_context import FLContext
from nvflare.apis.impl.controller import Controller
from nvflare.apis.shareable import Shareable
from nvflare.apis.signal import Signal

from fedmutual import plugins
from fedmutual.engines.loop import Paused
from fedmutual.errors import UserError
from fedmutual.sites.contract import accept_contract
from fedmutual.sites.coordinator import Coordinator
from fedmutual.sites.engine import TooFew
from fedmutual.sites.flare import presence, rejoin_backoff, workspace
from fedmutual.sites.flare.console import print_line
from fedmutual.sites.flare.progress import FILE, Outcome, Progress, change_progress, read_progress
from fedmutual.sites.modules import leave_working_folders, modules_of_server

TASK, READY, BODY = "do", "ready", "body"
_TICK = 0.05


class Aborted(Exception):
    """FLARE ends the job."""


class Rounds(Controller):  # type: ignore[misc]
    """The workflow of a federation's job. What comes of it stands in the outcome; it raises nothing for FLARE to judge."""

    def __init__(self, contract: str) -> None:
        """contract: as JSON text, for FLARE takes inner tables for components."""
        super().__init__(task_check_period=_TICK)
        self._contract = contract

    def start_controller(self, fl_ctx: FLContext) -> None:
        """Nothing: the rounds are in `control_flow`."""

    def stop_controller(self, fl_ctx: FLContext) -> None:
        """Nothing."""

    def process_result_of_unknown_task(
        self, client: Client, task_name: str, client_task_id: str, result: Shareable, fl_ctx: FLContext
    ) -> None:
        """An answer that came after its deadline: it counts for nothing."""

    def control_flow(self, abort_signal: Signal, fl_ctx: FLContext) -> None:
        """All rounds that are left, or until somebody joins, too few answer, or FLARE ends the job."""
        work = Path(fl_ctx.get_prop(FLContextKey.WORKSPACE_OBJECT).get_root_dir())
        about = workspace.read_pointer(work)
        state = Path(about["state"])
        leave_working_folders(work)
        plugins.confine(modules_of_server(about["modules"], [Path(file) for file in about["files"]]))
        try:
            contract = accept_contract(self._contract, about["contracts"], "this server")
        except UserError as problem:  # the server was upgraded, or agreed to another contract, since the job was submitted
            print_line(str(problem))
            _note_refusal(state, fl_ctx.get_job_id(), str(problem))
            return
        folder = state / contract.name
        progress = Progress(folder, contract, fl_ctx.get_job_id())
        torch.set_num_threads(1)
        post = TaskPost(self, fl_ctx, abort_signal, folder, contract.quorum)
        progress.begin(post.there())  # from now on the server knows of it, and begins it anew where it breaks off
        pause = partial(_pause, folder, post, contract.sites.names)
        try:
            progress.begin(post.ready(contract.sites.wait))
            Coordinator(contract, folder, work / "startup").run(post, [progress], pause)
            progress.end(Outcome.DONE, "all rounds are done")
        except Paused as why:
            progress.end(Outcome.AGAIN, str(why))
        except TooFew as why:
            progress.end(Outcome.SHORT, str(why))
        except Aborted:
            progress.end(Outcome.BROKEN, "the job was ended from outside")
        except UserError as problem:
            progress.end(Outcome.FAILED, str(problem))
        except Exception as problem:
            progress.end(Outcome.BROKEN, f"{type(problem).__name__}: {problem}")
            raise


def _note_refusal(state: Path, job: str, why: str) -> None:
    """Let no federation of the state folder be begun again by a job that this server refuses."""
    for file in state.glob(f"*/{FILE}"):
        if (read_progress(file.parent) or {}).get("job") == job:
            change_progress(file.parent, outcome=Outcome.FAILED, said=why)


def _pause(folder: Path, post: "TaskPost", names: Collection[str]) -> None:
    """After a saved round: begin again if a site of the federation is there and not in the job; stop if somebody said so."""
    post.check()
    if presence.is_stop_requested(folder):
        raise Paused("stopped by hand")
    there, heard = post.there(), presence.read_alive(folder.parent)
    new = rejoin_backoff.list_due_sites(folder, {i: heard[i] for i in names if i in heard and i not in there}, there)
    if new:
        raise Paused(f"{', '.join(new)} came, or came back")


class TaskPost:
    """A post over tasks. Who missed a deadline is asked further, and not waited for until it takes an order again."""

    def __init__(self, controller: Rounds, fl_ctx: FLContext, abort: Signal, folder: Path, quorum: int) -> None:
        """quorum: so many answers are waited for at least."""
        self._controller, self._context, self._abort, self._folder = controller, fl_ctx, abort, folder
        self._quorum, self._late = quorum, set[str]()
        inside = {c.name for c in controller._engine.get_clients()}
        self._parent = os.getppid()
        self.began = {
            i: seen for i, seen in presence.read_connected(folder.parent).items() if i in inside
        }  # as the job began

    def there(self) -> tuple[str, ...]:
        """The sites of this job that are connected as they were when it began: who was started anew is not in it."""
        now, gone = presence.read_connected(self._folder.parent), self._controller.communicator.get_client_disconnect_time
        return tuple(sorted(i for i, seen in self.began.items() if now.get(i) == seen and not gone(i)))

    def late(self) -> tuple[str, ...]:
        """Who missed a deadline and has taken no order since."""
        return tuple(sorted(self._late))

    def check(self) -> None:
        """Raise Aborted where the job is over: an orphan must not take its sites' silence for theirs."""
        if self._abort.triggered or os.getppid() != self._parent:
            raise Aborted

    def ready(self, wait: float) -> tuple[str, ...]:
        """Wait until every site takes letters, so long -> those that do."""
        return tuple(sorted(i for i, _ in self._asked(READY, dict.fromkeys(self.there(), b""), wait)))

    def ask(self, orders: Mapping[str, bytes], deadline: float) -> Iterator[tuple[str, bytes]]:
        """A task a site."""
        return self._asked(TASK, orders, deadline)

    def _asked(self, name: str, orders: Mapping[str, bytes], deadline: float) -> Iterator[tuple[str, bytes]]:
        found: queue.Queue[tuple[str, bytes | None]] = queue.Queue()
        tasks = {i: self._task(name, i, order, deadline, found.put) for i, order in orders.items()}
        waiting, until, answers = set(tasks), time.monotonic() + deadline, 0
        try:
            while waiting - self._late or (waiting and answers < self._quorum):
                self.check()
                if time.monotonic() > until:
                    self._late |= waiting
                    return
                try:
                    site, body = found.get(timeout=_TICK)
                except queue.Empty:
                    waiting &= set(self.there())
                    continue
                waiting.discard(site)
                if body is not None:
                    answers += 1
                    yield site, body
        finally:
            for task in tasks.values():
                if task.completion_status is None:
                    self._controller.cancel_task(task, fl_ctx=self._context)

    def _task(
        self, name: str, site: str, order: bytes, deadline: float, put: Callable[[tuple[str, bytes | None]], None]
    ) -> Task:
        data = Shareable()
        data[BODY] = order

        def taken(client_task: ClientTask, fl_ctx: FLContext) -> None:
            self._late.discard(site)

        def received(client_task: ClientTask, fl_ctx: FLContext) -> None:
            result = client_task.result
            fine = isinstance(result, Shareable) and result.get_return_code() == ReturnCode.OK
            body: Any = result.get(BODY) if fine else None
            put((site, body if isinstance(body, bytes) else None))
            client_task.result = None

        task = Task(name, data, timeout=math.ceil(deadline), before_task_sent_cb=taken, result_received_cb=received)
        self._controller.broadcast(task, self._context, targets=[site], min_responses=1)
        return task
