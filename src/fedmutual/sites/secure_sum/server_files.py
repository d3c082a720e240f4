"""The server's side of the secure sums of a federation: the stages that are closed lie on its disk.

So a server that is started anew in the middle of a sum goes on with the very orders that it sent before; sites would decline
others.
"""

from pathlib import Path
from shutil import rmtree
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from fedmutual.errors import RunError
from fedmutual.files import read_json, write_json
from fedmutual.sites.secure_sum.identity import Authority
from fedmutual.sites.secure_sum.letters import Stage, SumContext
from fedmutual.sites.secure_sum.server import SumServer
from fedmutual.tensor_files import read_tensors, write_tensors

FOLDER, RECORD = "secure-sum", "stages.json"


class _Record(BaseModel):
    """The file: which sum, and who answered each closed stage."""

    model_config = ConfigDict(strict=True)

    binding: str
    stages: dict[Annotated[str, Field(pattern="^[1-5]$")], list[str]]


class SumStages:
    """The closed stages of the sum under way."""

    def __init__(self, folder: Path, authority: Authority) -> None:
        """folder: the federation's at the server."""
        self._folder, self._authority = folder / FOLDER, authority

    def begin(self, context: SumContext, count: int) -> SumServer:
        """The server's part of a sum, with the stages that were closed before. count: words of an update.

        Raises:
            RunError: a file is damaged, or cannot be removed.
        """
        server = SumServer(context, self._authority, count)
        record = self._read()
        if record is None or record.binding != context.binding.hex():
            rmtree(self._folder, ignore_errors=True)
            return server
        for number, sites in record.stages.items():
            stage = Stage(int(number))
            server.answers[stage] = {site: read_tensors(self._file(stage, site))[0] for site in sites}
        return server

    def save(self, server: SumServer, stage: Stage) -> None:
        """Write a stage down that was closed. Raises RunError where it cannot be written."""
        for site, answer in server.answers[stage].items():
            write_tensors(self._file(stage, site), answer, {"format": "1"})
        stages = {str(int(closed)): sorted(answers) for closed, answers in server.answers.items()}
        write_json(self._folder / RECORD, {"format": 1, "binding": server.context.binding.hex(), "stages": stages})

    def _read(self) -> _Record | None:
        path = self._folder / RECORD
        if not path.exists():
            return None
        try:
            return _Record.model_validate({key: value for key, value in read_json(path).items() if key != "format"})
        except ValidationError as problem:
            place = ".".join(map(str, problem.errors(include_input=False)[0]["loc"]))
            raise RunError(f"{path}: is damaged at {place}; look for a copy of the folder {self._folder}") from None

    def _file(self, stage: Stage, site: str) -> Path:
        return self._folder / f"{int(stage)}-{site}.safetensors"
