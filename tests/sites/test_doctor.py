"""What `fedmutual doctor` says of what stands between a kit and its server: against real sockets, and one TLS server."""

import importlib.metadata
import json
import re
import shutil
import socket
import tomllib
from contextlib import ExitStack
from datetime import UTC, datetime, timedelta
from pathlib import Path
from unittest.mock import Mock

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization

import fedmutual
from fedmutual.boundary import Refused
from fedmutual.errors import ConfigError, RunError
from fedmutual.files import write_json
from fedmutual.rundir.folder import lock_folder
from fedmutual.sites.flare.doctor import check_connection, run_checks
from fedmutual.sites.flare.kits import FLARE, check_valid, check_version, open_kit
from tls_server import list_server_files, list_startup_files, make_kits, move_server, read_last, run_tls_server
from wards import site

pytestmark = pytest.mark.sites


@pytest.fixture(scope="module")
def kits(tmp_path_factory):
    return make_kits(tmp_path_factory.mktemp("federation"), port=1)  # where nobody listens


def issued(kits, folder, days, hosts=("localhost",), name="localhost"):
    """A certificate of these kits' authority, made here -> certificate, key."""
    known = json.loads((kits / "authority" / "cert.json").read_text())
    signer = serialization.load_pem_private_key(known["root_pri_key"].encode(), None)
    root = x509.load_pem_x509_certificate(known["root_cert"].encode())
    files = (folder / "made.crt", folder / "made.key")
    files[1].write_text(known["localhost"]["pri_key"])
    key = serialization.load_pem_private_key(files[1].read_bytes(), None)
    now, builder = datetime.now(UTC), x509.CertificateBuilder()
    certificate = (
        builder.subject_name(x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, name)]))
        .issuer_name(root.subject)
        .public_key(key.public_key())
        .serial_number(7)
        .not_valid_before(now + timedelta(days=min(days) if isinstance(days, tuple) else days - 300))
        .not_valid_after(now + timedelta(days=max(days) if isinstance(days, tuple) else days, minutes=5))
        .add_extension(x509.SubjectAlternativeName([x509.DNSName(host) for host in hosts]), critical=False)
        .sign(signer, hashes.SHA256())
    )
    files[0].write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
    return files


def test_a_kit_and_its_server_take_each_other_and_each_missing_step_is_named(kits):
    with run_tls_server(*list_server_files(kits)) as port:
        grades, texts = read_last(check_connection(move_server(kits, port)))
    assert (grades, texts) == (
        ["ok"] * 3,
        f"mutual TLS with localhost:{port}: each accepts the other's certificate (TLSv1.3)",
    )
    grades, texts = read_last(check_connection(move_server(kits, 8002, host="no-such-host.invalid")))
    assert (grades, texts.split(":")[0]) == (["wrong"], "the server's name 'no-such-host.invalid' has no address here")
    with socket.create_server(("localhost", 0)) as listening:
        port = listening.getsockname()[1]
    grades, texts = read_last(check_connection(move_server(kits, port)))
    assert (grades, texts.split(":", 2)[1]) == (["ok", "wrong"], f"{port} refuses connections")


def test_a_port_that_swallows_everything(kits):
    """As behind a firewall: a listener whose queue is full drops what comes."""
    with socket.create_server(("127.0.0.1", 0), backlog=0) as listening, ExitStack() as waiting:
        port = listening.getsockname()[1]
        for _ in range(4):
            s = waiting.enter_context(socket.socket())
            s.setblocking(False)
            s.connect_ex(("127.0.0.1", port))
        grades, texts = read_last(check_connection(move_server(kits, port, host="127.0.0.1"), patience=0.3))
    assert grades == ["ok", "wrong"]
    assert "does not answer in 0.3 s: a firewall" in texts


@pytest.mark.parametrize(
    ("days", "hosts", "why", "fix"),
    [
        (100, ("fl.example.org",), "Hostname mismatch", "add 'localhost' to server.hosts, then: fedmutual provision"),
        (-2, ("localhost",), "certificate has expired", "if this host's clock is right: fedmutual provision"),
        ((3, 9), ("localhost",), "certificate is not yet valid", "compare this host's clock with the server's"),
        (None, ("localhost",), "does not use TLS", "another program has that port"),
    ],
)
def test_a_server_that_cannot_be_trusted_is_named_with_the_fix(kits, tmp_path, days, hosts, why, fix):
    files = issued(kits, tmp_path, days or 100, hosts)
    answer = {} if days else {"first_bytes": None}
    with run_tls_server(*files, *list_startup_files(kits, ("server", "rootCA.pem")), **answer) as port:
        *grades, check = check_connection(move_server(kits, port))
    assert [grade.grade for grade in grades] == ["ok", "ok"]
    assert (check.grade, check.is_temporary) == ("wrong", why.endswith("yet valid"))
    assert why in check.text
    assert fix in check.text


def test_a_foreign_kit_is_detected_from_both_sides(kits, tmp_path):
    foreign_folder = make_kits(tmp_path)
    with run_tls_server(*list_server_files(foreign_folder)) as port:
        _, texts = read_last(check_connection(move_server(kits, port)))
    assert "was not issued by this kit's authority" in texts
    *server, _ = list_server_files(kits)
    foreign_root = list_startup_files(foreign_folder, ("server", "rootCA.pem"))
    with run_tls_server(*server, *foreign_root) as port:  # takes our server's name, not our site
        grades, texts = read_last(check_connection(move_server(kits, port)))
    assert grades[-1] == "wrong"
    assert texts.startswith("the server rejects the certificate of 'north' (")


def test_a_whole_site_is_well(kits, tmp_path):
    grades = {f.text.split(":")[0]: f.grade for f in run_checks(kits / "north", site(tmp_path, "north"))}
    mine = (kits / "north", tmp_path / "north" / "site.toml", tmp_path / "north" / "state")
    assert [grades[str(path)] for path in mine] == ["ok"] * 3
    assert not (tmp_path / "north" / "state").exists()


@pytest.mark.parametrize(
    ("site_tables", "expected"),
    [
        ({"data": {"name": "npz", "root": "nowhere.npz"}}, "nowhere.npz"),
        ({"model": {"personal": "no-such-net"}}, "no-such-net"),
        ({"data": {"name": "digits", "size": [12, 12]}}, "the examples have the shape [1, 12, 12]"),
        ({"state": {"folder": "file/state"}}, "cannot be written into"),
        ({"state": {"folder": "KIT/state"}}, "is inside the kit"),
    ],
)
def test_what_is_wrong_with_a_site(kits, tmp_path, site_tables, expected):
    path = site(tmp_path, "north", **site_tables)
    path.write_text(path.read_text().replace("KIT", str(kits / "north")))
    (path.parent / "file").write_text("no folder")
    texts = [f.text for f in run_checks(kits / "north", path) if f.grade == "wrong"]
    assert any(expected in text for text in texts), texts


def test_a_first_reply_with_a_private_row_is_wrong(kits, tmp_path, monkeypatch):
    def find(reply, client, inbox):
        return Refused(client.id, next(iter(reply)), "it holds a row of the client's private data")

    monkeypatch.setattr("fedmutual.boundary._find_private_values", find)
    path = site(tmp_path, "north")
    (text,) = [f.text for f in run_checks(kits / "north", path) if f.grade == "wrong" and str(path) in f.text]
    assert "it holds a row of the client's private data" in text


@pytest.mark.parametrize(("idle", "grade"), [(0.2, "ok"), (5.0, "note")])
def test_a_proxy_that_closes_silent_connections_is_reported(kits, idle, grade):
    with run_tls_server(*list_server_files(kits), patience=1) as port:
        grades, text = read_last(check_connection(move_server(kits, port), idle=idle))
    assert grades == ["ok", "ok", grade]
    assert ("after 1 s without a byte, which delays rounds; set its limit to 18 s or more" in text) == (grade == "note")


def test_a_full_disk_another_version_and_another_clock_are_reported(kits, tmp_path, monkeypatch):
    path = site(tmp_path, "north")
    mine, state = shutil.copytree(kits / "north", tmp_path / "kit"), path.parent / "state"
    about = json.loads((mine / "kit.json").read_text())
    (mine / "kit.json").write_text(json.dumps(about | {"version": "99.1.0"}))
    write_json(state / "wards" / "environment.json", {"format": 1, "fedmutual": "98.1.0"})
    write_json(state / "flare" / "clock.json", {"format": 1, "ahead": -240.0})
    monkeypatch.setattr("shutil.disk_usage", lambda path: Mock(free=100_000))
    texts = {grade: [f.text for f in run_checks(mine, path) if f.grade == grade] for grade in ("note", "wrong")}
    fix = f"has fedmutual {{}}, and this host has {fedmutual.__version__}; install the same version everywhere"
    assert texts["note"] == [
        f"the host where {mine} was made {fix.format('99.1.0')}",
        f"{state / 'wards'}: the last round {fix.format('98.1.0')}",
        "in the last job the server's clock was -240 s from this host's; set both by NTP",
    ]
    assert texts["wrong"][-1].startswith(f"{state}: 0.1 MB are free, and the saved rounds need up to ")
    assert texts["wrong"][-1].endswith(" MB; make room, or name another state.folder")


def test_what_the_command_says_and_its_exit_codes(kits, tmp_path, cli):
    code, out, err = cli("doctor", "--kit", kits / "nobody")
    assert (code, "is not a kit" in out, "1 of 2 checks failed" in err) == (2, True, True)
    code, out, _ = cli("doctor", "--kit", kits / "north", "--config", site(tmp_path, "south"))
    assert (code, "belongs to site 'south'" in out) == (2, True)


def test_a_server_kit_asks_for_its_port(tmp_path, cli):
    with socket.create_server(("", 0)) as listening:
        port = listening.getsockname()[1]
        kits = make_kits(tmp_path, port=port)
        code, out, _ = cli("doctor", "--kit", kits / "server")
        assert (code, f"port {port} cannot be used (Address already in use)" in out) == (2, True)
    code, out, _ = cli("doctor", "--kit", kits / "server")
    assert (code, f"port {port} is free" in out) == (0, True)


def test_a_kit_that_is_old_open_or_mixed(kits, tmp_path):
    mine = tmp_path / "north"
    shutil.copytree(kits / "north", mine)
    certificate, key = issued(kits, tmp_path, 12, name="north")
    shutil.copy(certificate, mine / "startup" / "client.crt")
    wrong = [f.text for f in run_checks(mine) if f.grade == "wrong"]
    assert any("is not the key of the certificate beside it" in text for text in wrong)
    shutil.copy(key, mine / "startup" / "client.key")
    (mine / "startup" / "client.key").chmod(0o644)
    known = [f.text for f in run_checks(mine) if f.grade == "note"]
    assert known[0].startswith("its certificate is valid until ")
    assert known[1].endswith(f"chmod 600 {mine / 'startup' / 'client.key'}")
    shutil.copy(issued(kits, tmp_path, -1, name="north")[0], mine / "startup" / "client.crt")
    assert any("and this host's clock says" in f.text for f in run_checks(mine) if f.grade == "wrong")


@pytest.mark.parametrize("name", ["north", "server"])
@pytest.mark.parametrize("damage", ["another key", "a damaged key", "a damaged authority", "a damaged second authority"])
def test_an_unusable_key_or_authority_of_a_kit_gives_one_sentence(kits, tmp_path, name, damage):
    mine = shutil.copytree(kits / name, tmp_path / name)
    key = open_kit(mine).certificate.with_suffix(".key")
    file = mine / "startup" / "rootCA.pem" if damage.endswith("authority") else key
    if damage == "a damaged second authority":
        file.write_bytes(file.read_bytes() + b"-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n")
    else:
        file.write_bytes((kits / "south" / "startup" / "client.key").read_bytes() if damage == "another key" else b"damaged")
    with pytest.raises(RunError, match=re.escape(str(file))):
        check_valid(open_kit(mine))
    with run_tls_server(*list_server_files(kits)) as port, pytest.raises(RunError, match=re.escape(str(file))):
        list(check_connection(move_server(tmp_path, port, name)))
    assert [finding.text for finding in run_checks(mine) if finding.grade == "wrong" and str(file) in finding.text]


@pytest.mark.parametrize(("version", "fine"), [("2.8.3", False), ("2.9.0", True), ("2.9.1rc2", True), ("2.10.0", False)])
def test_an_older_flare_is_refused(monkeypatch, version, fine):
    """Sites of 2.8.3 took jobs that nobody signed. The versions are those of the package."""
    text = (Path(__file__).parents[2] / "pyproject.toml").read_text()
    first, end = (".".join(map(str, limit)) for limit in FLARE)
    assert f"nvflare>={first},<{end}" in tomllib.loads(text)["project"]["optional-dependencies"]["sites"]
    monkeypatch.setattr(importlib.metadata, "version", lambda name: version)
    if fine:
        assert check_version() == version
        return
    with pytest.raises(ConfigError, match=rf"nvflare {version} .*: pip install 'nvflare>=2.9,<2.10'"):
        check_version()


def test_a_state_folder_is_of_one_process(kits, tmp_path, cli):
    """A second server, or site, by mistake would take away what the first one works with."""
    mine = site(tmp_path, "north")
    for words, folder, fix in (
        (("server", "--kit", kits / "server", "--state", tmp_path / "state"), tmp_path / "state", "another one by --state"),
        (("site", "--kit", kits / "north", "--config", mine), mine.parent / "state", "by 'state.folder' in its file"),
    ):
        with lock_folder(folder):
            code, _, output = cli(*words)
        assert code == 2
        assert f"{folder}: another process runs a {words[0]} with this state folder; wait for it, or choose" in output
        assert fix in output
