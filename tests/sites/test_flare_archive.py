"""A job's archive: only what fedmutual writes and a lead signed is taken, at the server and at a site."""

import json
import os
import re
import stat
import struct
import sys
import tracemalloc
import warnings
import zipfile
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given as given_examples
from hypothesis import settings
from hypothesis import strategies as st
from nvflare.apis.event_type import EventType
from nvflare.apis.fl_constant import FLContextKey
from nvflare.apis.fl_context import FLContext
from nvflare.fuel.f3.cellnet.utils import new_cell_message
from nvflare.fuel.hci.server.constants import ConnProps
from nvflare.private.admin_defs import Message
from nvflare.private.defs import RequestHeader

from fedmutual.errors import ConfigError, RunError, UserError
from fedmutual.sites import contract as contracts
from fedmutual.sites.flare import archive, workspace
from fedmutual.sites.flare.access_control import JobChecks, change_job_command
from fedmutual.sites.flare.archive import APP, META, SERVER, SITE
from fedmutual.sites.flare.executor import SiteEvents
from fedmutual.sites.flare.kits import open_kit, provision
from loopback import LEAD
from signing import deployment, repacked, submission
from wards import contract

pytestmark = pytest.mark.sites

JOB = "0a1b2c3d-0000-4000-8000-0123456789ab"
CLIENT = f"{APP}/config/{SITE}"


@pytest.fixture(scope="module")
def federation(tmp_path_factory):
    """Kits of a federation and of another one; its contract."""
    folder = tmp_path_factory.mktemp("federation")
    agreed = contracts.read_contract(contract(folder))
    for name in ("kits", "others"):
        provision(folder / "federation.toml", folder / name)
    return SimpleNamespace(folder=folder, agreed=agreed, kits=folder / "kits", lead=folder / "kits" / LEAD)


@pytest.fixture
def submit(federation, tmp_path):
    """Hold an archive against what the server takes."""

    def check(content: bytes, name: str = "wards") -> None:
        (tmp_path / "arrived").write_bytes(content)
        root = federation.kits / "server" / "startup" / "rootCA.pem"
        archive.check_submission(tmp_path / "arrived", name, root, [federation.agreed.record()])

    return check


@pytest.fixture
def deploy(federation):
    """Hold an archive against what a site takes."""
    return lambda content: archive.check_deployment(content, federation.kits / "north" / "startup" / "rootCA.pem")


def edit(name, change):
    """Change what a JSON file of the job's folder holds."""

    def edited(made):
        content = json.loads((made / name).read_text())
        (made / name).write_text(json.dumps(change(content) or content, indent=1))

    return edited


def set_contract(text):
    """Return a function that gives the job another well-formed contract."""

    def changed(made):
        for name, content in archive.make_configs(text).items():
            (made / APP / name).write_bytes(content)

    return changed


def test_what_a_lead_submits_is_taken(federation, submit, deploy, tmp_path):
    submit(submission(federation.agreed, federation.lead, tmp_path / "job"))
    deploy(deployment(federation.agreed, federation.lead, tmp_path / "app"))


@pytest.fixture
def refuse(federation, submit, deploy, tmp_path):
    """Check that the server, and a site, refuse a job that somebody changed; the changed file may not reach the site."""

    def check(message, change=lambda made: None, late=lambda made: None, kit=federation.lead, at_site=True):
        for take, pack in ((submit, submission), (deploy, deployment))[: 1 + at_site]:
            with pytest.raises(RunError, match=message):
                take(pack(federation.agreed, kit, tmp_path / pack.__name__, change, late))

    return check


EXTRA = [f"{APP}/{name}" for name in ("config/evil.py", "custom/evil.py", "config/config_fed_client.conf", "evil.py")]


@pytest.mark.parametrize("name", [*EXTRA, "meta.conf", "evil.py"])
def test_no_other_file_is_taken(refuse, name):
    """Though a lead signed it."""

    def add(made):
        (made / name).parent.mkdir(exist_ok=True)
        (made / name).write_text("raise SystemExit\n")

    refuse("it has unexpected files", add, at_site=name.startswith(APP))


@pytest.mark.parametrize("name", [".__nvfl_sig.json", ".__nvfl_submitter.crt", SITE])
def test_no_file_may_lack(refuse, name):
    refuse("it has unexpected files", late=lambda made: (made / APP / "config" / name).unlink())


CHANGES = {
    "another class": (CLIENT, lambda c: c["executors"][0]["executor"].update(path="subprocess.Popen")),
    "another argument": (CLIENT, lambda c: c["executors"][0]["executor"]["args"].update(more=1)),
    "a component": (CLIENT, lambda c: c.update(components=[{"id": "x", "path": "subprocess.Popen", "args": {}}])),
    "a filter": (CLIENT, lambda c: c.update(task_data_filters=[{"tasks": ["*"], "filters": []}])),
    "another key": (CLIENT, lambda c: c.update(more=1)),
    "another number": (CLIENT, lambda c: c.update(format_version=2.0)),
    "another contract than the server's": (CLIENT, lambda c: c["executors"][0]["executor"]["args"].update(contract="{}")),
    "no workflow": (f"{APP}/config/{SERVER}", lambda c: c["workflows"].clear()),
    "another workflow": (f"{APP}/config/{SERVER}", lambda c: c["workflows"][0].update(id="x")),
    "a job's id": (META, lambda m: m.update(job_id=JOB)),
    "another quorum": (META, lambda m: m.update(min_clients=True)),
    "other sites": (META, lambda m: m.update(deploy_map={"app": ["server", "north"]})),
    "a launcher": (META, lambda m: m.update(launcher_spec={"north": {"docker": {"image": "evil"}}})),
}


@pytest.mark.parametrize(("file", "change"), CHANGES.values(), ids=CHANGES)
def test_a_job_s_files_are_as_fedmutual_writes_them(refuse, file, change):
    refuse(rf"\({Path(file).name} has another content\)", edit(file, change), at_site=file != META)


def test_the_server_takes_the_contract_that_its_operator_agreed_to(federation, submit, deploy, tmp_path):
    """A site compares it in the job's process; neither imports what it names."""
    record = federation.agreed.record()
    record["tables"]["algorithm"]["name"] = f"{JOB}.app_north.config.evil:X"
    spoil = set_contract(json.dumps(record))
    with pytest.raises(ConfigError, match=r"its 'algorithm.name' is .* and this server agreed to"):
        submit(submission(federation.agreed, federation.lead, tmp_path / "job", spoil))
    deploy(deployment(federation.agreed, federation.lead, tmp_path / "app", spoil))
    with pytest.raises(ConfigError, match="not written by fedmutual"):
        deploy(deployment(federation.agreed, federation.lead, tmp_path / "none", set_contract("{}")))


@pytest.mark.parametrize("kit", [None, "kits/north", "kits/server", f"others/{LEAD}", f"kits/{LEAD}"])
def test_only_a_lead_of_this_federation_signs(federation, refuse, kit):
    """What was signed may not change: nor a key that a lead may change alone."""
    record = federation.agreed.record()
    record["tables"]["rounds"] = 9
    late = set_contract(json.dumps(record)) if kit == f"kits/{LEAD}" else lambda made: None
    reason = "is not signed by a lead" if kit else "it has unexpected files"
    refuse(reason, kit=kit and federation.folder / kit, late=late)


def test_a_folder_of_another_name(federation, submit, tmp_path):
    content = submission(federation.agreed, federation.lead, tmp_path / "job")
    with pytest.raises(RunError, match="it has unexpected files"):
        submit(content, "others")
    renamed = repacked(content, lambda name, body: [(name.replace("wards/", "../others/", 1), body)])
    with pytest.raises(RunError, match="its folder does not have the name of its federation"):
        submit(renamed, "../others")


def link(name, body):
    if not name.endswith(SITE):
        return [(name, body)]
    info = zipfile.ZipInfo(name)
    info.external_attr = (stat.S_IFLNK | 0o777) << 16
    return [(info, b"/etc/passwd")]


ODD = {
    "a link": (link, "is a link or is too large"),
    "a file twice": (lambda name, body: [(name, body)] * 2, "it has unexpected files"),
    "a path upwards": (lambda name, body: [(f"../{name}", body)], "it has unexpected files"),
    "a path from the root": (lambda name, body: [(f"/{name}", body)], "it has unexpected files"),
    "an empty folder": (lambda name, body: [(name, body), (f"{name}/", b"")], "it has unexpected files"),
    "a bomb": (lambda name, body: [(name, bytes(archive.LARGEST + 1))], "is a link or is too large"),
    "no JSON": (lambda name, body: [(name, b"[" * 10**6)], f"{SERVER} has another content"),
}


@pytest.mark.parametrize(("change", "message"), ODD.values(), ids=ODD)
@pytest.mark.filterwarnings("ignore:Duplicate name")
def test_odd_archives(federation, deploy, tmp_path, change, message):
    content = deployment(federation.agreed, federation.lead, tmp_path / "app")
    with pytest.raises(RunError, match=re.escape(message)):
        deploy(repacked(content, change, zipfile.ZIP_DEFLATED))


def test_a_size_that_lies_is_not_believed(federation, deploy, tmp_path):
    """The size in the archive's list says little, and the file goes on."""
    bomb = lambda name, body: [(name, bytes(archive.LARGEST + 1) if name.endswith(SITE) else body)]  # noqa: E731
    content = repacked(deployment(federation.agreed, federation.lead, tmp_path / "app"), bomb, zipfile.ZIP_DEFLATED)
    lies = content.replace((archive.LARGEST + 1).to_bytes(4, "little"), (100).to_bytes(4, "little"))
    assert lies != content
    with pytest.raises(RunError):
        deploy(lies)


def listing(entries: int, large: bool = False) -> bytes:
    """An archive of a list of files alone, each without a name; `zipfile` makes an object of each."""
    entry = struct.pack("<4s4B4HL2L5H2L", b"PK\1\2", *[0] * 18)
    listed = entry * entries
    end = struct.pack("<4s4H2LH", b"PK\5\6", 0, 0, 1, 1, 0 if large else len(listed), 0, 0)
    if not large:
        return listed + end
    record = struct.pack("<4sQ2H2L4Q", b"PK\6\6", 44, 45, 45, 0, 0, entries, entries, len(listed), 0)
    return listed + record + struct.pack("<4sLQL", b"PK\6\7", 0, len(listed), 1) + end


@pytest.mark.parametrize("large", [False, True])
def test_a_list_of_a_hundred_thousand_files_is_not_read(federation, deploy, large):
    """550,000 of them, in an archive of 25 MB, took 700 MB of memory."""
    content = listing(100_000, large)
    tracemalloc.start()
    try:
        with pytest.raises(RunError, match="is not what fedmutual writes"):
            deploy(content)
        assert tracemalloc.get_traced_memory()[1] < 2 * len(content)
    finally:
        tracemalloc.stop()


def test_no_archive_at_all(deploy):
    for content in (b"", b"PK", None, "text", bytes(3 * archive.LARGEST + 1)):
        with pytest.raises(RunError, match="the job's archive is not what fedmutual writes"):
            deploy(content)


@settings(max_examples=150, deadline=None)
@given_examples(data=st.data())
def test_a_spoiled_archive_ends_nothing(federation, packed, data):
    """A spoiled archive is refused, or its content equals the signed content."""
    content = bytearray(packed)
    for _ in range(data.draw(st.integers(1, 8))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    root = federation.kits / "north" / "startup" / "rootCA.pem"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with suppress(UserError):
            archive.check_deployment(bytes(content[: data.draw(st.integers(0, 2 * len(content)))]), root)


@pytest.fixture(scope="module")
def packed(federation, tmp_path_factory):
    """What a server deploys."""
    return deployment(federation.agreed, federation.lead, tmp_path_factory.mktemp("packed") / "app")


@pytest.fixture
def work(federation, tmp_path):
    """The workspace of a server."""
    facts = {"contracts": [federation.agreed.record()]}
    return workspace.make_workspace(open_kit(federation.kits / "server"), tmp_path / "server", facts)


class Asked:
    """A command that a lead sends, and what it is answered."""

    def __init__(self, command: str, file: Path | None, role: str = "lead") -> None:
        self.errors: list[str] = []
        self._props = {ConnProps.CMD_ENTRY: SimpleNamespace(name=command), ConnProps.FILE_LOCATION: file and str(file)}
        self._props |= {ConnProps.USER_ROLE: role, ConnProps.USER_NAME: LEAD}

    def get_prop(self, name, default=None):
        return self._props.get(name, default)

    def append_error(self, text, meta=None):
        self.errors.append(text)


def test_a_submission_goes_by_the_door(federation, work, tmp_path):
    """By both names that FLARE has for the command; what is refused is removed."""
    content = submission(federation.agreed, federation.lead, tmp_path / "job")
    for words in (["submit_job", "wards"], ["job_mgmt.submit_job", "wards"]):
        for body, refusal in ((content, None), (content[:-1], False)):
            (tmp_path / "arrived").write_bytes(body)
            assert JobChecks(work).refuse_command(None, asked := Asked("submit_job", tmp_path / "arrived"), words) is refusal
        assert "is damaged" in asked.errors[0]
        assert not (tmp_path / "arrived").exists()


@pytest.mark.parametrize(
    ("command", "role", "words", "sent", "message"),
    [
        ("submit_job", "", ["x.submit_job", "wards"], True, "only a lead may"),
        ("submit_job", "lead", ["submit_job", "wards", "--submit-token", "x"], True, "without options"),
        ("submit_job", "lead", ["submit_job", "wards"], False, "submitted as an archive"),
        ("get_job_meta", "lead", ["get_job_meta", JOB], True, "only a job may be sent"),
        ("_logout", "lead", ["_logout"], True, "only a job may be sent"),
        ("get_job_meta", "", ["_x.get_job_meta", JOB], False, "only a lead may"),
    ],
)
def test_commands_at_the_door(federation, work, tmp_path, command, role, words, sent, message):
    file = tmp_path / "arrived" if sent else None
    if file is not None:
        file.write_bytes(b"x" * 100)
    assert JobChecks(work).refuse_command(None, asked := Asked(command, file, role), words) is False
    assert message in asked.errors[0]
    assert not (tmp_path / "arrived").exists()


def test_a_deployment_goes_by_the_door(federation, packed, tmp_path, capsys):
    """A job that is taken makes room: folders of jobs that do not run go. Why one is refused is for the site alone."""
    work = workspace.make_workspace(open_kit(federation.kits / "north"), tmp_path / "north", {})
    running, over = JOB, JOB.replace("0a", "1a")
    for folder in (running, over):
        (work / folder).mkdir()
    agent = SimpleNamespace(app_ctx=SimpleNamespace(get_all_job_ids=lambda: [running]))

    def answer(body, number=JOB, app=APP):
        order = Message(topic="train.deploy", body=body)
        order.set_header(RequestHeader.APP_NAME, app)
        if number is not None:
            order.set_header(RequestHeader.JOB_ID, number)
        refusal = JobChecks(work).refuse_order(agent, new_cell_message({}, order))
        return refusal and refusal.payload.body

    refused = "refused, or could not; its operator reads why"
    assert answer(packed[:-1]) == answer(packed, number=None) == answer(packed, app="other") == refused
    assert "is damaged" in capsys.readouterr().out
    assert (work / over).exists()
    assert answer(packed) is None
    assert [(work / folder).exists() for folder in (running, over)] == [True, False]


def test_folders_of_jobs_are_removed_at_their_end_and_after_a_crash_at_the_next_start(federation, tmp_path):
    """At the server and at a site, but for the job's log. Another job may be deployed, and about to begin."""
    other_job = JOB.replace("0a", "1a")
    for name in ("server", "north"):
        kit, state = open_kit(federation.kits / name), tmp_path / name
        work = workspace.make_workspace(kit, state, {})
        for job in (JOB, other_job):
            (work / job / "app_north" / "config").mkdir(parents=True)
            (work / job / "log.txt").write_text(f"what happened in {job}\n")
        (work / "jobs").mkdir()
        events, context = SiteEvents(str(work)), FLContext()
        for ended in (JOB, "startup", "../north"):
            context.set_prop(FLContextKey.CURRENT_JOB_ID, ended, private=True, sticky=False)
            events.handle_event(EventType.JOB_COMPLETED, context)
        assert [(work / folder).exists() for folder in (JOB, other_job, "startup", "jobs")] == [False, True, True, True]
        assert workspace.make_workspace(kit, state, {}) == work
        assert [(work / folder).exists() for folder in (other_job, "jobs")] == [False, True]
        assert (work / workspace.LAST_LOG).read_text() == f"what happened in {other_job}\n"


def test_a_job_is_started_by_a_python_that_searches_no_working_folder():
    command = f"{sys.executable} -m nvflare.private.fed.app.client.worker_process -m /state/flare -n {JOB} --set x -m y"
    ours = f" -P -E -m fedmutual.parent_process {os.getpid()} nvflare"
    assert change_job_command(command) == command.replace(" -m nvflare", ours, 1)
    for other in ("docker run x -m y", f"{sys.executable} /state/flare/worker.py"):
        with pytest.raises(RuntimeError, match="starts jobs with an unknown command"):
            change_job_command(other)
