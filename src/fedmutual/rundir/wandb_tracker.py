"""Log a run to Weights & Biases, which needs the extra `fedmutual[wandb]`.

The environment variables of Weights & Biases say where: WANDB_MODE (for example "offline"), WANDB_PROJECT (else "fedmutual")
and others.
"""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path


class WandbRun:
    """A run of Weights & Biases; a resumed run continues the run that has the key."""

    def __init__(self, key: str, title: str, settings: Mapping[str, str]) -> None:
        """key: of the run folder. title: the name that people read. settings: configuration keys with their values."""
        import wandb

        self._artifact = wandb.Artifact(f"run-{key}", type="run")
        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", "fedmutual"),
            id=key,
            name=title,
            config=dict(settings),
            resume="allow",
            reinit="create_new",  # several runs can be trained at once in one process
            settings=wandb.Settings(console="off", silent=True),
        )

    def log(self, round: int, scalars: Mapping[str, float]) -> None:
        """Log the numbers of a round."""
        self._run.log(dict(scalars), step=round)

    def end(self, folder: Path, files: Sequence[Path], is_finished: bool) -> None:
        """End the run; files of the run's folder become an artifact."""
        for file in files:
            self._artifact.add_file(str(file), name=file.relative_to(folder).as_posix())
        if files:
            self._run.log_artifact(self._artifact)
        self._run.finish(exit_code=0 if is_finished else 1)
