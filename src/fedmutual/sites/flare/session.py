"""A lead's session with the server: submit and stop a federation, show its status, and fetch its results."""

import base64
import contextlib
import io
import os
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

from fedmutual.errors import RunError
from fedmutual.files import write_bytes
from fedmutual.sites.consent import check_release
from fedmutual.sites.contract import Contract
from fedmutual.sites.flare import job
from fedmutual.sites.flare.admin_protocol import AGAIN, ERROR, RESULT, STATUS, STOP, is_result
from fedmutual.sites.flare.connectivity import find_obstacle
from fedmutual.sites.flare.kits import Kit, check_valid
from fedmutual.sites.flare.nvflare_import import import_nvflare, silence_nvflare
from fedmutual.sites.flare.progress import Outcome
from fedmutual.sites.flare.proxy import make_grpc_variables
from fedmutual.sites.protocol import clean_text

_MOST_FILES = 100  # result files of a federation; `admin_protocol.list_result_files` has about a dozen
OVER = (Outcome.DONE, Outcome.FAILED, Outcome.STOPPED)


class ServerLost(RunError):
    """The server cannot be reached, or the connection was lost."""


Text = Annotated[str, AfterValidator(clean_text)]  # safe to print on a console
_Count = Annotated[int, Field(ge=0, lt=2**63)]


class _ServerAnswer(BaseModel):
    """The base class of a server's answers, which are checked because the server is not trusted."""

    model_config = ConfigDict(extra="ignore", strict=True)


class _Note(_ServerAnswer):
    text: Text
    first: int
    last: int


class _Progress(_ServerAnswer):
    """The keys of the progress file that a lead reads."""

    outcome: Text
    submitted: Text
    contract: Text
    said: Text = ""
    round: _Count = 0
    rounds: _Count = 0
    sites: list[Text] = []
    within: list[Text] = Field([], alias="in")
    scores: Text = ""
    left: Text = ""
    bytes: dict[Literal["up", "down"], _Count] = {"up": 0, "down": 0}
    notes: list[_Note] = []


class _Status(_ServerAnswer):
    there: list[Text]
    progress: _Progress | None
    stops: bool
    job: Text | None
    version: Text = "0.0"


class _Files(_ServerAnswer):
    files: list[str] = Field(max_length=_MOST_FILES)


class _Body(_ServerAnswer):
    body: str


class _Stopped(_ServerAnswer):
    progress: _Progress | None


class _JobMeta(_ServerAnswer):
    """The keys of FLARE's record of a job that a lead reads."""

    status: Text = ""
    job_deploy_detail: list[Text] | None = None


class _Job(_ServerAnswer):
    job_meta: _JobMeta


T = TypeVar("T", bound=_ServerAnswer)


class Session:
    """An open session. Close it after use, or use it in a `with` statement."""

    def __init__(self, kit: Kit, timeout: float = 15.0) -> None:
        """Log in with a lead's kit. timeout: in seconds.

        Raises:
            ConfigError: FLARE is not installed.
            RunError: as `check_valid`.
            ServerLost: the server cannot be reached or rejects the kit.
        """
        silence_nvflare()
        api = import_nvflare("nvflare.fuel.flare_api.flare_api")
        check_valid(kit)
        _wait_for_server(kit, timeout)
        settings = make_grpc_variables(kit.hosts[0], kit.port)
        self._earlier = {name: os.environ.get(name) for name in settings}  # for the next session, to another server
        os.environ |= settings
        self._folder = tempfile.TemporaryDirectory()  # FLARE writes into its folder, and the kit must not change
        work = Path(self._folder.name)
        (work / "startup").symlink_to(kit.startup)
        (work / "local").mkdir()
        self._kit = kit
        address, previous_folder = f"{kit.hosts[0]}:{kit.port}", Path.cwd()
        try:
            os.chdir(work)
            with contextlib.redirect_stdout(io.StringIO()):
                self.flare = api.new_secure_session(kit.name, str(work), timeout=timeout)
        except Exception as problem:  # FLARE raises many types
            self._leave()
            raise ServerLost(f"the server at {address} rejects the login of {kit.name!r} ({problem})") from None
        finally:
            os.chdir(previous_folder)

    def __enter__(self) -> "Session":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Log out, remove the temporary folder, and restore the variables of the environment."""
        with contextlib.redirect_stdout(io.StringIO()), contextlib.suppress(Exception):
            self.flare.close()
        self._leave()

    def _leave(self) -> None:
        self._folder.cleanup()
        for name, value in self._earlier.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value

    def submit(self, contract: Contract) -> str:
        """Submit a federation, or resume a stopped federation, and return the id of the job.

        Raises:
            ServerLost: the server does not answer.
            RunError: the server refuses the job, or reports an error.
        """
        self._send_command(AGAIN, contract.name)
        with tempfile.TemporaryDirectory() as folder:
            job_folder = job.write_job(contract, Path(folder))
            try:
                return str(self.flare.submit_job(str(job_folder)))
            except Exception as problem:  # FLARE raises many types
                raise RunError(f"the server refuses the job: {clean_text(str(problem))}") from None

    def find_job(self, contract: Contract) -> str | None:
        """Return the id of a federation's unfinished job, or None. Waits until a stopping job has stopped.

        Raises:
            RunError: the federation is running with another contract; or as `status`.
            ConfigError: as `status`.
        """
        while True:
            status = self.status(contract.name)
            progress = status["progress"]
            if progress is None or progress["outcome"] in OVER:
                return None if status["job"] is None else str(status["job"])  # a job that has not started yet
            if not status["stops"]:
                break
            time.sleep(0.5)
        if progress["contract"] != contract.imprint:
            raise RunError(
                f"federation {contract.name!r} is running with another contract; give `fedmutual stop` first, then submit "
                "this file, which resumes from the last saved round"
            )
        return str(progress["submitted"])

    def status(self, name: str) -> dict[str, Any]:
        """Return the status of a federation.

        "there": the connected sites. "progress": the progress file, or None. "stops": whether a stop is requested. "job":
        the id of a waiting or running job, or None. "version": of fedmutual at the server.

        Raises:
            ServerLost: the server does not answer.
            RunError: the server reports an error, or the answer has another form than fedmutual's.
            ConfigError: the server has another version of fedmutual.
        """
        status = _check_answer(_Status, self._send_command(STATUS, name))
        check_release(status["version"], "the server")
        return status

    def stop(self, name: str) -> dict[str, Any] | None:
        """Request a stop after the current round. Return the progress file; None where the federation is unknown.

        Raises:
            ServerLost: the server does not answer.
            RunError: the server reports an error, or the answer has another form than fedmutual's.
        """
        progress: dict[str, Any] | None = _check_answer(_Stopped, self._send_command(STOP, name))["progress"]
        return progress

    def fetch(self, name: str, out: Path) -> list[Path]:
        """Write the results of a federation into a run folder, and return the paths of the written files.

        Raises:
            RunError: the server names a file that is not a result file and could have any path, in which case nothing is
                written; or the server reports an error; or the answer has another form than fedmutual's; or a file cannot
                be written.
            ServerLost: the server does not answer.
        """
        written, files = [], _check_answer(_Files, self._send_command(RESULT, name))["files"]
        for file in files:
            if not is_result(file):
                name = clean_text(repr(file))
                raise RunError(f"the server names a file that is not a result of a federation ({name}); nothing was fetched")
        for file in files:
            try:
                body = base64.b64decode(_check_answer(_Body, self._send_command(RESULT, name, file))["body"], validate=True)
            except ValueError:
                raise _make_error("body") from None
            write_bytes(out / file, body)
            written.append(out / file)
        return written

    def watch(self, name: str, job_id: str, every: float = 0.5) -> Iterator[dict[str, Any]]:
        """Yield the status of a federation after each change, until its end. every: seconds between two requests.

        Raises:
            ServerLost: the server does not answer.
            RunError: the job ended before its start; or as `status`.
            ConfigError: as `status`.
        """
        previous: Any = None
        while True:
            status = self.status(name)
            progress = status["progress"]
            if progress is None or progress["submitted"] != job_id:
                self._check_started(job_id)
            elif status != previous:
                previous = status
                yield status
                if progress["outcome"] in OVER:
                    return
            time.sleep(every)

    def _check_started(self, job_id: str) -> None:
        """Check that a job did not end before its start, because a site or the server refused the job.

        Raises:
            ServerLost: the server does not answer.
            RunError: the job ended before its start, or the answer has another form than FLARE's.
        """
        try:
            job_meta = self.flare.get_job_meta(job_id)
        except Exception as problem:  # FLARE raises many types
            raise ServerLost(f"the server did not answer ({clean_text(str(problem))})") from None
        meta = _check_answer(_Job, {"job_meta": job_meta})["job_meta"]
        status, reason = meta["status"], clean_text("; ".join(meta["job_deploy_detail"] or ()))
        if status == "FINISHED:ABANDONED":
            raise RunError("the server restarted before the job started; submit the federation again")
        if status.startswith("FINISHED"):
            raise RunError(
                f"the job did not start; the server gives the status {status}{': ' if reason else ''}{reason}; correct the "
                "cause, then submit the federation again"
            )

    def _send_command(self, command: str, *words: str) -> dict[str, Any]:
        reply = self.flare.api.server_execute(" ".join((command, *words)))
        return read_server_answer(reply)


def _wait_for_server(kit: Kit, timeout: float) -> None:
    """Wait at most `timeout` seconds for the server. Raises ServerLost with the cause."""
    until = time.monotonic() + timeout
    while obstacle := find_obstacle(kit):
        text, is_temporary = obstacle
        if not is_temporary or time.monotonic() > until:
            raise ServerLost(text)
        time.sleep(0.5)


def read_server_answer(reply: dict[str, Any]) -> dict[str, Any]:
    """Return the table in a server's reply to a command.

    Raises:
        ServerLost: the reply has no table; with the text of the reply's error.
        RunError: the table has the text of an error: a file of the server is damaged or cannot be written.
    """
    data = reply.get("data", [])
    items = [item for item in data if isinstance(item, dict)] if isinstance(data, list) else []
    for item in items:
        if item.get("type") == "dict" and isinstance(item.get("data"), dict):
            answer: dict[str, Any] = item["data"]
            if ERROR in answer:
                raise RunError(
                    f"the server reports an error, which its operator can correct: {clean_text(str(answer[ERROR]))}"
                )
            return answer
    errors = "; ".join(str(item.get("data")) for item in items if item.get("type") in ("error", "string"))
    raise ServerLost(f"the server did not answer ({clean_text(str(errors or reply.get('details') or reply.get('status')))})")


def _check_answer(kind: type[T], answer: dict[str, Any]) -> dict[str, Any]:
    """Return the keys of a server's answer that are read, with printable texts. Raises RunError for another form."""
    try:
        return kind.model_validate(answer).model_dump(by_alias=True)
    except ValidationError as problem:
        raise _make_error(".".join(map(str, problem.errors()[0]["loc"]))) from None


def _make_error(key: str) -> RunError:
    return RunError(
        f"the server sent an answer that no server of fedmutual sends (key {clean_text(key)}); ask its operator which "
        "program runs there"
    )
