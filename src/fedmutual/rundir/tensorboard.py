"""Write the scores of a run for TensorBoard, which needs the extra `fedmutual[tensorboard]`."""

from importlib.util import find_spec
from pathlib import Path

from fedmutual.errors import ConfigError, RunError
from fedmutual.events import Evaluated, Event, Failed, Finished


def check_installed() -> None:
    """Raise ConfigError if TensorBoard is not installed."""
    if find_spec("tensorboard") is None:
        raise ConfigError(
            "key 'records.tensorboard' needs TensorBoard, fedmutual's extra 'tensorboard': pip install tensorboard"
        )


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
            for score in event.scores:
                tag = "/".join((score.model, score.data, *([score.client] if score.client is not None else [])))
                for name, value in score.values.items():
                    if isinstance(value, float):
                        self._writer.add_scalar(f"{name}/{tag}", value, event.round)
            for client, terms in event.train.items():
                for name, value in terms.items():
                    self._writer.add_scalar(f"train/{name}/{client}", value, event.round)
        elif isinstance(event, Finished | Failed):
            self._writer.close()
