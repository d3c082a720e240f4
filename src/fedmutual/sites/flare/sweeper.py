"""A component of a site's process that removes the folder of a finished job."""

from pathlib import Path

from nvflare.apis.event_type import EventType
from nvflare.apis.fl_component import FLComponent
from nvflare.apis.fl_constant import FLContextKey
from nvflare.apis.fl_context import FLContext

from fedmutual.sites.flare import leftovers


class Sweeper(FLComponent):  # type: ignore[misc]
    """Removes the folder of a job after its process has ended."""

    def __init__(self, work: str) -> None:
        """work: FLARE's workspace of this process."""
        super().__init__()
        self._work = Path(work)

    def handle_event(self, event_type: str, fl_ctx: FLContext) -> None:
        """Remove the folder of the finished job only, because the next job may be deployed already."""
        if event_type == EventType.JOB_COMPLETED:
            leftovers.remove_folder(self._work, str(fl_ctx.get_prop(FLContextKey.CURRENT_JOB_ID)))
