"""In a site's process: removes the folder of a job when it is over."""

from pathlib import Path

from nvflare.apis.event_type import EventType
from nvflare.apis.fl_component import FLComponent
from nvflare.apis.fl_constant import FLContextKey
from nvflare.apis.fl_context import FLContext

from fedmutual.sites.flare import leftovers


class Sweeper(FLComponent):  # type: ignore[misc]
    """Looks whenever a job's process has ended."""

    def __init__(self, work: str) -> None:
        """work: FLARE's workspace of this process."""
        super().__init__()
        self._work = Path(work)

    def handle_event(self, event_type: str, fl_ctx: FLContext) -> None:
        """Remove the folder of the job that has ended: another may be deployed, and about to begin."""
        if event_type == EventType.JOB_COMPLETED:
            leftovers.remove_folder(self._work, str(fl_ctx.get_prop(FLContextKey.CURRENT_JOB_ID)))
