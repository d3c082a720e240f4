"""A lead's session with the server: submit, look, stop, fetch. Signed with the lead's kit."""

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
from fedmutual.sites.flare.admin_protocol import AGAIN, RESULT, STATUS, STOP, is_result
from fedmutual.sites.flare.connectivity import find_obstacle
from fedmutual.sites.flare.kits import Kit, check_valid
from fedmutual.sites.flare.nvflare_import import import_nvflare, silence_nvflare
from fedmutual.sites.flare.progress import Outcome
from fedmutual.sites.protocol import clean_text

_MOST_FILES = 100  # that came of a federation; `asked.results` has about a dozen
OVER = (Outcome.DONE, Outcome.FAILED, Outcome.STOPPED)


class Lost(RunError):
    """The server cannot be reached, or not any more."""


Text = Annotated[str, AfterValidator(clean_text)]  # for a console
_Count = Annotated[int, Field(ge=0, lt=2**63)]


class _Told(BaseModel):
    """What a server says: it is not trusted to write it as ours does."""

    model_config = ConfigDict(extra="ignore", strict=True)


class _Note(_Told):
    text: Text
    first: int
    last: int


class _Progress(_Told):
    """What `progress` writes, as far as a lead reads it."""

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


class _Status(_Told):
    there: list[Text]
    progress: _Progress | None
    stops: bool
    job: Text | None
    version: Text = "0.0"


class _Files(_Told):
    files: list[str] = Field(max_length=_MOST_FILES)


class _Body(_Told):
    body: str


class _Stopped(_Told):
    progress: _Progress | None


T = TypeVar("T", bound=_Told)


class Session:
    """Open; close it, or use it as a context."""

    def __init__(self, kit: Kit, timeout: float = 15.0) -> None:
        """Raises RunError, in one sentence, where the server cannot be reached or does not take the kit."""
        silence_nvflare()
        api = import_nvflare("nvflare.fuel.flare_api.flare_api")
        check_valid(kit)
        _reach(kit, timeout)
        self._folder = tempfile.TemporaryDirectory()  # FLARE wants a folder to write into; the kit is only read
        work = Path(self._folder.name)
        (work / "startup").symlink_to(kit.startup)
        (work / "local").mkdir()
        self._kit = kit
        where, here = f"{kit.hosts[0]}:{kit.port}", Path.cwd()
        try:
            os.chdir(work)
            with contextlib.redirect_stdout(io.StringIO()):
                self._session = api.new_secure_session(kit.name, str(work), timeout=timeout)
        except Exception as problem:  # of many types
            self._folder.cleanup()
            raise Lost(f"the server at {where} does not let {kit.name!r} in ({problem})") from None
        finally:
            os.chdir(here)

    def __enter__(self) -> "Session":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Log out."""
        with contextlib.redirect_stdout(io.StringIO()), contextlib.suppress(Exception):
            self._session.close()
        self._folder.cleanup()

    def submit(self, contract: Contract) -> str:
        """Submit a federation, or let one go on that was stopped -> the job's id.

        Raises:
            RunError: the server refuses it.
        """
        self._ask(AGAIN, contract.name)
        with tempfile.TemporaryDirectory() as folder:
            made = job.write_job(contract, Path(folder))
            try:
                return str(self._session.submit_job(str(made)))
            except Exception as problem:  # of many types
                raise RunError(f"the server refuses the job: {clean_text(str(problem))}") from None

    def under_way(self, contract: Contract) -> str | None:
        """The job by which a federation was submitted that is not over; None where there is none. Waits for one that stops.

        Raises:
            RunError: it is under way with another contract.
        """
        while True:
            status = self.status(contract.name)
            found = status["progress"]
            if found is None or found["outcome"] in OVER:
                return None if status["job"] is None else str(status["job"])  # that has not begun yet
            if not status["stops"]:
                break
            time.sleep(0.5)
        if found["contract"] != contract.imprint:
            raise RunError(
                f"federation {contract.name!r} is under way as another file has it; `fedmutual stop` it first, and submit "
                "this one, which goes on from what is saved"
            )
        return str(found["submitted"])

    def status(self, name: str) -> dict[str, Any]:
        """Who is connected ("there"), how far the federation is ("progress", None where there is none), whether it was told
        to stop ("stops"), and its job in FLARE, if one is to start or runs ("job").

        Raises:
            ConfigError: the server is of another version.
        """
        found = _checked(_Status, self._ask(STATUS, name))
        check_release(found["version"], "the server")
        return found

    def stop(self, name: str) -> dict[str, Any] | None:
        """Let it end after the round that is under way -> how far it is."""
        found: dict[str, Any] | None = _checked(_Stopped, self._ask(STOP, name))["progress"]
        return found

    def fetch(self, name: str, out: Path) -> list[Path]:
        """What came of it, into a folder in the form of a run's -> the files.

        Raises:
            RunError: the server names a file that is none of a federation's, which could lie anywhere. Nothing was written.
        """
        written, files = [], _checked(_Files, self._ask(RESULT, name))["files"]
        for file in files:
            if not is_result(file):
                odd = clean_text(repr(file))
                raise RunError(f"the server names a file that is no result of a federation ({odd}); nothing was fetched")
        for file in files:
            try:
                body = base64.b64decode(_checked(_Body, self._ask(RESULT, name, file))["body"], validate=True)
            except ValueError:
                raise _strange("body") from None
            write_bytes(out / file, body)
            written.append(out / file)
        return written

    def watch(self, name: str, job_id: str, every: float = 0.5) -> Iterator[dict[str, Any]]:
        """How far it is, whenever that changed, to its end. Raises RunError where it never begins."""
        before: Any = None
        while True:
            found = self.status(name)
            now = found["progress"]
            if now is None or now["submitted"] != job_id:
                self._check_started(job_id)
            elif found != before:
                before = found
                yield found
                if now["outcome"] in OVER:
                    return
            time.sleep(every)

    def _check_started(self, job_id: str) -> None:
        """Raise RunError where a job ended before it began: a site or the server refused it."""
        meta = self._session.get_job_meta(job_id) or {}
        if meta.get("status") == "FINISHED:ABANDONED":
            raise RunError("the server was started anew before the job began; submit it once more")
        if str(meta.get("status", "")).startswith("FINISHED"):
            why = clean_text("; ".join(map(str, meta.get("job_deploy_detail") or ())))
            raise RunError(f"the job did not start ({clean_text(str(meta['status']))}){': ' if why else ''}{why}")

    def _ask(self, command: str, *words: str) -> dict[str, Any]:
        reply = self._session.api.server_execute(" ".join((command, *words)))
        return _answer(reply)


def _reach(kit: Kit, timeout: float) -> None:
    """Wait until the server is up, so long. Raises Lost with what is in the way."""
    until = time.monotonic() + timeout
    while found := find_obstacle(kit):
        said, may_pass = found
        if not may_pass or time.monotonic() > until:
            raise Lost(said)
        time.sleep(0.5)


def _answer(reply: dict[str, Any]) -> dict[str, Any]:
    """What the server says to a command of ours. Raises Lost where it says something else, with its words."""
    data = reply.get("data", [])
    items = [item for item in data if isinstance(item, dict)] if isinstance(data, list) else []
    for item in items:
        if item.get("type") == "dict" and isinstance(item.get("data"), dict):
            found: dict[str, Any] = item["data"]
            return found
    words = "; ".join(str(item.get("data")) for item in items if item.get("type") in ("error", "string"))
    raise Lost(f"the server did not answer ({clean_text(str(words or reply.get('details') or reply.get('status')))})")


def _checked(kind: type[T], told: dict[str, Any]) -> dict[str, Any]:
    """What the server told, as far as it is read, in words that move no cursor. Raises RunError where it is another form."""
    try:
        return kind.model_validate(told).model_dump(by_alias=True)
    except ValidationError as problem:
        raise _strange(".".join(map(str, problem.errors()[0]["loc"]))) from None


def _strange(key: str) -> RunError:
    return RunError(
        f"the server says what no server of fedmutual would ({clean_text(key)}); ask its operator what runs there"
    )
