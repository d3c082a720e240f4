"""A lead's session with the server: submit and stop a federation, show its status, and fetch its results."""

import base64
import contextlib
import io
import json
import logging
import os
import tempfile
import time
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, TypeAdapter, ValidationError

from fedmutual.errors import RunError
from fedmutual.files import write_bytes
from fedmutual.sites.consent import check_release
from fedmutual.sites.contract import Contract
from fedmutual.sites.flare.archive import write_job
from fedmutual.sites.flare.doctor import find_obstacle, make_grpc_variables
from fedmutual.sites.flare.kits import Kit, check_valid, import_nvflare
from fedmutual.sites.flare.progress import COMMAND, ERROR, OVER, Progress, Seconds, Text, is_result
from fedmutual.sites.protocol import clean_text

_Files = Annotated[list[str], Field(max_length=100)]  # a federation has about a dozen result files


class ServerLost(RunError):
    """The server cannot be reached, or the connection was lost."""


class Session(contextlib.AbstractContextManager["Session"]):
    """An open session. Close it after use, or use it in a `with` statement.

    All methods raise ServerLost if the server does not answer, and RunError if the server reports an error or if the answer
    has another form than fedmutual's: the server is not trusted.
    """

    def __init__(self, kit: Kit, timeout: float = 15.0) -> None:
        """Log in with a lead's kit. timeout: in seconds.

        Raises ConfigError where FLARE is not installed; RunError as `check_valid`; ServerLost where the server cannot be
        reached or rejects the kit.
        """
        logging.getLogger().addHandler(logging.NullHandler())  # fedmutual prints the messages for a lead itself
        api = import_nvflare("nvflare.fuel.flare_api.flare_api")
        check_valid(kit)
        until = time.monotonic() + timeout
        while obstacle := find_obstacle(kit):
            if not obstacle.is_temporary or time.monotonic() > until:
                raise ServerLost(obstacle.text)
            time.sleep(0.5)
        os.environ |= {"GRPC_VERBOSITY": "NONE", **make_grpc_variables(kit.hosts[0], kit.port)}
        self._folder = tempfile.TemporaryDirectory()  # FLARE writes into its folder, and the kit must not change
        work = Path(self._folder.name)
        (work / "startup").symlink_to(kit.startup)
        (work / "local").mkdir()
        try:
            with contextlib.chdir(work), contextlib.redirect_stdout(io.StringIO()):
                self.flare = api.new_secure_session(kit.name, str(work), timeout=timeout)
        except Exception as problem:  # FLARE raises many types
            self._folder.cleanup()
            where, why = f"{kit.hosts[0]}:{kit.port}", clean_text(str(problem))
            raise ServerLost(f"the server at {where} rejects the login of {kit.name!r} ({why})") from None

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Log out, and remove the temporary folder."""
        with contextlib.redirect_stdout(io.StringIO()), contextlib.suppress(Exception):
            self.flare.close()
        self._folder.cleanup()

    def allow_start(self, name: str) -> None:
        """Remove the mark of an earlier stop of a federation, which `submit` then resumes."""
        self._send_command("start", name)

    def submit(self, contract: Contract) -> str:
        """Submit a federation, or resume a federation, and return the id of the job."""
        with tempfile.TemporaryDirectory() as folder:
            try:
                return str(self.flare.submit_job(str(write_job(contract, Path(folder)))))
            except Exception as problem:  # FLARE raises many types
                raise RunError(f"the server refuses the job: {clean_text(str(problem))}") from None

    def find_job(self, contract: Contract) -> str | None:
        """Return the id of a federation's unfinished job, or None. Waits until a stopping job has stopped.

        Raises RunError where the federation is running with another contract; ConfigError as `status`.
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
        """Return the status of a federation. Raises ConfigError where the server has another version of fedmutual.

        The keys are those of `read_status`, and "job": the id of a waiting or running job, or None. "seen", "time" and
        "gone" are None with an older server.
        """
        answer = self._send_command("status", name)
        check_release(_read(answer, "version", Text), "the server")
        kinds: dict[str, Any] = {"connected": list[Text], "progress": Progress | None, "stops": bool, "job": Text | None}
        kinds |= {"seen": dict[Text, tuple[Seconds, bool]] | None, "time": Seconds | None, "gone": dict[Text, Text] | None}
        return {key: _read(answer, key, kind) for key, kind in kinds.items()}

    def stop(self, name: str) -> dict[str, Any] | None:
        """Request a stop after the current round. Return the progress file; None where the federation is unknown."""
        progress: dict[str, Any] | None = _read(self._send_command("stop", name), "progress", Progress | None)
        return progress

    def fetch(self, name: str, out: Path, only: Collection[str] = ()) -> list[Path]:
        """Write the results of a federation into a run folder, and return the paths of the written files.

        only: the names of the wanted files; empty: all.

        Raises RunError where a file cannot be written, or where the server names a file that is not a result file and could
        have any path; then nothing is written.
        """
        files = _read(self._send_command("result", name), "files", _Files)
        if strange := [file for file in files if not is_result(file)]:
            shown = clean_text(repr(strange[0]))
            raise RunError(f"the server names a file that is not a result of a federation ({shown}); nothing was fetched")
        wanted = [file for file in files if not only or file in only]
        for file in wanted:
            body = _read(self._send_command("result", name, file), "body", str)
            try:
                write_bytes(out / file, base64.b64decode(body, validate=True))
            except ValueError:
                raise _make_error("body") from None
        return [out / file for file in wanted]

    def watch(self, name: str, job_id: str, every: float = 0.5) -> Iterator[dict[str, Any]]:
        """Yield the progress of a federation after each change, until its end. every: seconds between two requests.

        Raises RunError where the job ended before its start; ConfigError as `status`.
        """
        previous: dict[str, Any] = {}
        while True:
            progress = self.status(name)["progress"]
            if progress is None or progress["submitted"] != job_id:
                self._check_started(job_id)
            elif progress != previous:
                previous = progress
                yield progress
                if progress["outcome"] in OVER:
                    return
            time.sleep(every)

    def _check_started(self, job_id: str) -> None:
        """Raise RunError if a job ended before its start, because a site or the server refused the job."""
        try:
            about = _read({"job": self.flare.get_job_meta(job_id)}, "job", dict[str, Any])
        except RunError:
            raise
        except Exception as problem:  # FLARE raises many types
            raise ServerLost(f"the server did not answer ({clean_text(str(problem))})") from None
        status = _read({"status": ""} | about, "status", Text)
        if status == "FINISHED:ABANDONED":
            raise RunError("the server restarted before the job started; submit the federation again")
        if status.startswith("FINISHED"):
            reasons = "; ".join(_read(about, "job_deploy_detail", list[Text] | None) or ["no reason"])
            raise RunError(
                f"the job did not start; the server gives the status {status}: {reasons}; correct the cause, then submit "
                "the federation again"
            )

    def _send_command(self, *words: str) -> dict[str, Any]:
        return read_server_answer(self.flare.api.server_execute(" ".join((COMMAND, *words))))


def read_server_answer(reply: dict[str, Any]) -> dict[str, Any]:
    """Return the table in a server's reply to a command.

    Raises ServerLost, with the text of the reply's error, where the reply has no table; RunError where the table has the
    text of an error: a file of the server is damaged or cannot be written.
    """
    data = reply.get("data", [])
    items = [item for item in data if isinstance(item, dict)] if isinstance(data, list) else []
    for item in items:
        if item.get("type") == "dict" and isinstance(item.get("data"), dict):
            answer: dict[str, Any] = item["data"]
            if ERROR in answer:
                error = clean_text(str(answer[ERROR]))
                raise RunError(f"the server reports an error, which its operator can correct: {error}")
            return answer
    errors = "; ".join(str(item.get("data")) for item in items if item.get("type") in ("error", "string"))
    raise ServerLost(f"the server did not answer ({clean_text(str(errors or reply.get('details') or reply.get('status')))})")


def _read(answer: dict[str, Any], key: str, kind: Any) -> Any:
    """Return a key of a server's answer, with printable texts. kind: its type. Raises RunError for another form."""
    adapter: TypeAdapter[Any] = TypeAdapter(kind)
    try:
        value = adapter.validate_json(json.dumps(answer.get(key), default=str), strict=True)
    except ValidationError as problem:
        raise _make_error(".".join(map(str, (key, *problem.errors()[0]["loc"])))) from None
    return adapter.dump_python(value, mode="json", by_alias=True)


def _make_error(key: str) -> RunError:
    return RunError(
        f"the server sent an answer that no server of fedmutual sends (key {clean_text(key)}); ask its operator which "
        "program runs there"
    )
