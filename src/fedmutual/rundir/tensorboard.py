"""Write the scores of a run for TensorBoard, which needs the extra `fedmutual[tensorboard]`."""

from pathlib import Path

from fedmutual.errors import RunError
from fedmutual.events import Evaluated, Event, Failed, Finished
from fedmutual.rundir.scalars import list_scalars


class Writer:
    """Observer: writes scores and training losses as scalars to `tensorboard/` in the run's folder.

    Raises:
        RunError: the folder cannot be written.
    """

    def __init__(self, folder: Path) -> None:
        from torch.utils.tensorboard import SummaryWriter

        try:
            self._writer = SummaryWriter(str(folder / "tensorboard"))
        except OSError as problem:
            raise RunError(f"{folder / 'tensorboard'}: cannot be written ({problem.strerror or problem})") from None

    def __call__(self, event: Event) -> None:
        """Write the numbers of an evaluation; close the writer at the end of the run."""
        if isinstance(event, Evaluated):
            for name, value in list_scalars(event):
                self._writer.add_scalar(name, value, event.round)
        elif isinstance(event, Finished | Failed):
            self._writer.close()
