"""The coordinator in the job's process at the server. Each order to a site is one FLARE task."""

import math
import queue
import time
from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress
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

from fedmutual.config.keys import Table
from fedmutual.engines.loop import Paused
from fedmutual.errors import RunError, UserError
from fedmutual.sites.consent import list_runs
from fedmutual.sites.contract import accept_contract
from fedmutual.sites.coordinator import Coordinator
from fedmutual.sites.flare import progress as files
from fedmutual.sites.flare.progress import Outcome, ProgressFile, print_line, read_connected
from fedmutual.sites.flare.workspace import BODY, CLOCK, read_pointer
from fedmutual.sites.modules import leave_working_folders, make_server_rule
from fedmutual.sites.protocol import TooFew
from fedmutual.sites.server_journal import LEFT, read_gone
from fedmutual.user_code import plugins

_TICK = 0.05


class Aborted(Exception):
    """FLARE has ended the job."""


class Rounds(Controller):  # type: ignore[misc]
    """The workflow of a federation's job. Its result is the outcome in the progress file."""

    def __init__(self, contract: str) -> None:
        """contract: the contract as JSON text, because FLARE builds a component from any table in the arguments."""
        super().__init__(task_check_period=_TICK)
        self._contract = contract

    def start_controller(self, fl_ctx: FLContext) -> None:
        """Do nothing: `control_flow` runs the rounds."""

    def stop_controller(self, fl_ctx: FLContext) -> None:
        """Do nothing."""

    def process_result_of_unknown_task(
        self, client: Client, task_name: str, client_task_id: str, result: Shareable, fl_ctx: FLContext
    ) -> None:
        """Ignore an answer that arrived after its deadline."""

    def control_flow(self, abort_signal: Signal, fl_ctx: FLContext) -> None:
        """Run the remaining rounds, until a site joins, fewer sites than the quorum answer, or FLARE ends the job."""
        work = Path(fl_ctx.get_prop(FLContextKey.WORKSPACE_OBJECT).get_root_dir())
        pointer = read_pointer(work)
        state = Path(pointer["state"])
        leave_working_folders(work)
        plugins.set_rule(make_server_rule(pointer["modules"], [Path(file) for file in pointer["files"]]))
        try:
            contract = accept_contract(self._contract, pointer["contracts"], "this server")
        except UserError as problem:  # since the submission, the server was upgraded or agreed to another contract
            print_line(str(problem), "error")
            write_refusal(state, fl_ctx.get_job_id(), str(problem))
            return
        files.name_lines(contract.name)
        folder = state / contract.name
        progress = ProgressFile(folder, contract, fl_ctx.get_job_id())
        torch.set_num_threads(1)
        transport = TaskTransport(self, fl_ctx, abort_signal, folder, contract.quorum)
        progress.begin(transport.list_connected())  # from now on the server restarts the job if it fails
        pause = partial(pause_for_changes, progress, transport, contract.sites.names)
        try:
            progress.begin(transport.wait_until_ready(contract.sites.wait))
            left = find_left(state, contract.name, pointer["contracts"])
            Coordinator(contract, folder, work / "startup", left).run(transport, [progress], pause)
            progress.end(Outcome.DONE, "all rounds are done")
        except Paused as reason:
            progress.end(Outcome.AGAIN, str(reason))
        except TooFew as reason:
            progress.end(Outcome.SHORT, str(reason))
        except Aborted:
            progress.end(Outcome.BROKEN, "the job was ended from outside")
        except UserError as problem:
            progress.end(Outcome.FAILED, str(problem))
        except Exception as problem:
            progress.end(Outcome.BROKEN, f"{type(problem).__name__}: {problem}")
            raise


def find_left(state: Path, name: str, contracts: Collection[Table]) -> set[str]:
    """Return the sites that left a federation in another run of its contract. contracts: that the server agreed to."""
    names = [[run for run, _ in list_runs(contract["name"], contract["tables"])] for contract in contracts]
    others = [state / run for runs in names if name in runs for run in runs]
    return {site for folder in others for site, why in read_gone(folder).items() if why == LEFT}


def write_refusal(state: Path, job: str, reason: str) -> None:
    """Mark the federation of a refused job as failed, so that the job is not restarted. state: the server's folder."""
    for file in state.glob(f"*/{files.FILE}"):
        with suppress(RunError):  # damaged, probably of another federation; the server's process prints the error
            if (files.read_progress(file.parent) or {}).get("job") == job:
                files.change_progress(file.parent, outcome=Outcome.FAILED, said=reason)


def pause_for_changes(progress: ProgressFile, transport: "TaskTransport", names: Collection[str]) -> None:
    """Raise Paused after a saved round if a lead requested a stop, or if a connected site is not in the job.

    Raises Aborted where FLARE has ended the job; RunError where the progress file cannot be written.
    """
    transport.check()
    if (progress.folder / files.STOP).exists():
        raise Paused("stopped by hand")
    inside, (_, alive, _) = transport.list_connected(), read_connected(progress.folder.parent)
    outside = {i: alive[i] for i in names if i in alive and i not in inside}
    outside = outside and {i: connection for i, connection in outside.items() if i not in read_gone(progress.folder)}
    progress.note_absent(outside, transport.list_late())
    if due := progress.list_due_sites(outside, inside, time.time()):
        raise Paused(f"{', '.join(due)} connected, or connected again")


class TaskTransport:
    """Sends orders as FLARE tasks.

    A site that missed a deadline still receives orders, but a round waits for it only after it has taken an order again.
    """

    def __init__(self, controller: Rounds, fl_ctx: FLContext, abort: Signal, folder: Path, quorum: int) -> None:
        """quorum: the number of answers that are waited for until the deadline."""
        self._controller, self._context, self._abort, self._folder = controller, fl_ctx, abort, folder
        self._quorum, self._late = quorum, set[str]()
        names, (connected, *_) = {c.name for c in controller._engine.get_clients()}, read_connected(folder.parent)
        self._began = {i: connection for i, connection in connected.items() if i in names}  # at the start of the job

    def list_connected(self) -> tuple[str, ...]:
        """Return the sites that are connected since the start of the job. A restarted site is not in the job."""
        connected, *_ = read_connected(self._folder.parent)
        is_disconnected = self._controller.communicator.get_client_disconnect_time
        return tuple(sorted(i for i, c in self._began.items() if connected.get(i) == c and not is_disconnected(i)))

    def list_late(self) -> tuple[str, ...]:
        """Return the sites that missed a deadline and have taken no order since."""
        return tuple(sorted(self._late))

    def check(self) -> None:
        """Raise Aborted if FLARE has ended the job."""
        if self._abort.triggered:
            raise Aborted

    def wait_until_ready(self, wait: float) -> tuple[str, ...]:
        """Wait at most `wait` seconds until all sites take an empty order, and return the sites that do."""
        return tuple(sorted(i for i, _ in self.ask(dict.fromkeys(self.list_connected(), b""), wait)))

    def ask(self, orders: Mapping[str, bytes], deadline: float) -> Iterator[tuple[str, bytes]]:
        """Send each site its order as a task, and yield (site, answer) in the order of arrival. deadline: in seconds.

        Raises Aborted as `check`.
        """
        arrived: queue.Queue[tuple[str, bytes | None]] = queue.Queue()
        tasks = {i: self._send_task(i, order, deadline, arrived) for i, order in orders.items()}
        waiting, until, answers = set(tasks), time.monotonic() + deadline, 0
        try:
            while waiting - self._late or (waiting and answers < self._quorum):
                self.check()
                if time.monotonic() > until:
                    self._late |= waiting
                    return
                try:
                    site, body = arrived.get(timeout=_TICK)
                except queue.Empty:
                    waiting &= set(self.list_connected())
                    continue
                waiting.discard(site)
                if body is not None:
                    answers += 1
                    yield site, body
        finally:
            for task in tasks.values():
                if task.completion_status is None:
                    self._controller.cancel_task(task, fl_ctx=self._context)

    def _send_task(self, site: str, order: bytes, deadline: float, arrived: queue.Queue[tuple[str, bytes | None]]) -> Task:
        data = Shareable()
        data[BODY] = order

        def mark_taken(client_task: ClientTask, fl_ctx: FLContext) -> None:
            data[CLOCK] = time.time()  # FLARE copies the data after this function
            self._late.discard(site)

        def put_answer(client_task: ClientTask, fl_ctx: FLContext) -> None:
            result, client_task.result = client_task.result, None
            is_ok = isinstance(result, Shareable) and result.get_return_code() == ReturnCode.OK
            body: Any = result.get(BODY) if is_ok else None
            arrived.put((site, body if isinstance(body, bytes) else None))

        task = Task("do", data, timeout=math.ceil(deadline), before_task_sent_cb=mark_taken, result_received_cb=put_answer)
        self._controller.broadcast(task, self._context, targets=[site], min_responses=1)
        return task
