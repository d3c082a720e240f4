"""The closed stages of a secure sum on the server's disk.

A server that restarts in the middle of a sum must send the same orders as before, because the sites refuse different orders.
"""

from pathlib import Path
from shutil import rmtree
from typing import Annotated

from pydantic import Field

from fedmutual.sites.secure_sum.identity import Authority
from fedmutual.sites.secure_sum.messages import Stage, SumContext
from fedmutual.sites.secure_sum.server import SumServer
from fedmutual.sites.state_files import StateRecord, read_state_record, write_state_record
from fedmutual.tensor_files import read_tensors, write_tensors

FOLDER, RECORD = "secure-sum", "stages.json"


class _SumRecord(StateRecord):
    """The record file: the binding of the sum, and the sites that answered each closed stage."""

    binding: str
    stages: dict[Annotated[str, Field(pattern="^[1-5]$")], list[str]]


class SumStages:
    """The closed stages of the current sum."""

    def __init__(self, folder: Path, authority: Authority) -> None:
        """folder: the folder of the federation at the server."""
        self._folder, self._authority = folder / FOLDER, authority

    def begin(self, context: SumContext, count: int) -> SumServer:
        """Return the server's side of a sum, with the stages that are closed already. count: words of an update.

        Raises:
            RunError: a file is damaged.
        """
        server = SumServer(context, self._authority, count)
        record = read_state_record(self._folder / RECORD, _SumRecord)
        if record is None or record.binding != context.binding.hex():
            rmtree(self._folder, ignore_errors=True)
            return server
        for number, sites in record.stages.items():
            stage = Stage(int(number))
            server.answers[stage] = {site: read_tensors(self._make_stage_path(stage, site))[0] for site in sites}
        return server

    def save(self, server: SumServer, stage: Stage) -> None:
        """Write a closed stage.

        Raises:
            RunError: a file cannot be written.
        """
        for site, answer in server.answers[stage].items():
            write_tensors(self._make_stage_path(stage, site), answer, {"format": "1"})
        stages = {str(int(closed)): sorted(answers) for closed, answers in server.answers.items()}
        write_state_record(self._folder / RECORD, _SumRecord(binding=server.context.binding.hex(), stages=stages))

    def _make_stage_path(self, stage: Stage, site: str) -> Path:
        return self._folder / f"{int(stage)}-{site}.safetensors"
