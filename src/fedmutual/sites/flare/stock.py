"""A job for a FLARE network of somebody else's, which starts no process of fedmutual but the two classes of this job.

FLARE's own processes have no access control of ours, so the job is as safe as that network is.
"""

import shutil
from pathlib import Path

from nvflare.apis.fl_constant import FLContextKey
from nvflare.apis.fl_context import FLContext
from nvflare.apis.signal import Signal

from fedmutual.errors import UserError
from fedmutual.rundir.checkpoint import read_checkpoint
from fedmutual.sites.flare.controller import Aborted, Rounds, TaskTransport
from fedmutual.sites.flare.executor import SiteExecutor
from fedmutual.sites.flare.progress import list_result_files, print_line
from fedmutual.sites.foreign import open_site, run_server
from fedmutual.sites.site_runtime import hold_runtime


class StockTransport(TaskTransport):
    """Sends orders as FLARE tasks to the clients of the job that FLARE counts as connected."""

    def __init__(self, controller: Rounds, fl_ctx: FLContext, abort: Signal) -> None:
        self._controller, self._context, self._abort = controller, fl_ctx, abort
        self._quorum, self._late = 0, set[str]()

    def list_connected(self) -> tuple[str, ...]:
        """Return the connected sites."""
        names = (client.name for client in self._controller._engine.get_clients())
        return tuple(sorted(i for i in names if not self._controller.communicator.get_client_disconnect_time(i)))


class StockRounds(Rounds):
    """The workflow of the job: the server of the federation, whose state outlives the job."""

    def control_flow(self, abort_signal: Signal, fl_ctx: FLContext) -> None:
        """Run the remaining rounds, and copy the results into the folder of the job, which FLARE downloads."""
        transport = StockTransport(self, fl_ctx, abort_signal)
        try:
            run = run_server(self._contract, transport, print_line, transport.check)
        except Aborted:
            return
        except UserError as problem:
            print_line(str(problem), "error")
            self.system_panic(str(problem), fl_ctx)
            return
        job = Path(fl_ctx.get_prop(FLContextKey.WORKSPACE_OBJECT).get_run_dir(fl_ctx.get_job_id()))
        saved = read_checkpoint(run)
        for name, path in list_result_files(run, saved.round if saved else None).items():
            (job / run.name / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(path, job / run.name / name)


class StockSite(SiteExecutor):
    """The part of a site in the job."""

    def _start(self, fl_ctx: FLContext, patience: float) -> None:
        settings, contract = open_site(fl_ctx.get_identity_name(), self._contract)
        self._runtime = self._open.enter_context(hold_runtime(contract, settings, print_line, patience))
