"""An HTTP proxy between a participant and the server, as gRPC and `doctor` see it: all on this machine."""

import contextlib
import select
import socket
import threading

import pytest

pytest.importorskip("nvflare", reason="NVIDIA FLARE is not installed (the extra fedmutual[sites])")

import grpc

from fedmutual.sites.flare import doctor
from fedmutual.sites.flare.doctor import check_connection
from loopback import JOBS, LEAD, free_port, loopback
from tls_server import list_server_files, make_kits, move_server, read_last, run_tls_server
from wards import COMMON, SITES, site

pytestmark = pytest.mark.sites

ALL = (*doctor.PROXY_VARIABLES, *doctor.PROXY_EXCEPTIONS, *doctor.UNREAD_VARIABLES)
SILENT, TUNNEL = None, b"HTTP/1.1 200 Connection established\r\n\r\n"


@pytest.fixture(autouse=True)
def environment(monkeypatch):
    """The environment without variables of proxies; `make_grpc_variables` may change it."""
    for name in ALL:
        monkeypatch.setenv(name, "")  # so that the former value is restored
        monkeypatch.delenv(name)
    return monkeypatch


@pytest.fixture(scope="module")
def kits(tmp_path_factory):
    return make_kits(tmp_path_factory.mktemp("federation"), port=1)


@contextlib.contextmanager
def run_proxy(answer):
    """Run a proxy with this answer to each request, which connects first for TUNNEL; yield its port and the requests."""
    requests = []
    with socket.create_server(("127.0.0.1", 0)) as listening, contextlib.ExitStack() as open_sockets:

        def serve(client):
            with contextlib.suppress(OSError, ValueError):  # another thread has closed a socket
                request = b""
                while b"\r\n\r\n" not in request:
                    request += client.recv(1000)
                requests.append(request.decode())
                if answer == TUNNEL:
                    host, port = requests[-1].split()[1].split(":")
                    try:
                        server = open_sockets.enter_context(socket.create_connection((host, int(port))))
                    except OSError:
                        client.sendall(b"HTTP/1.1 502 Bad Gateway\r\n\r\n")
                        raise
                    client.sendall(answer)
                    while True:
                        for ready in select.select([client, server], [], [])[0]:
                            content = ready.recv(2**16)
                            if not content:
                                raise OSError
                            (server if ready is client else client).sendall(content)
                elif answer is not SILENT:
                    client.sendall(answer)
            if answer is not SILENT:
                client.close()

        def accept():
            with contextlib.suppress(OSError):
                while True:
                    client = open_sockets.enter_context(listening.accept()[0])
                    threading.Thread(target=serve, args=(client,), daemon=True).start()

        thread = threading.Thread(target=accept, daemon=True)
        thread.start()
        yield listening.getsockname()[1], requests
        listening.shutdown(socket.SHUT_RDWR)
    thread.join(10)


@pytest.mark.parametrize(
    ("answer", "problem", "is_temporary"),
    [
        (SILENT, "does not answer in 0.5 s", False),
        (b"HTTP/1.1 403 Forbidden\r\n\r\n", "refuses with status 403", False),
        (b"HTTP/1.1 407 Proxy Authentication Required\r\n\r\n", "refuses with status 407", False),
        (b"HTTP/1.1 503 Service Unavailable\r\n\r\n", "refuses with status 503", True),
        (b"SSH-2.0-OpenSSH_9.6\r\n\r\n", "does not answer as an HTTP proxy", False),
        (b"", "does not answer as an HTTP proxy", False),
    ],
)
def test_a_proxy_that_does_not_connect_is_named_with_its_variable(kits, environment, answer, problem, is_temporary):
    with run_tls_server(*list_server_files(kits)) as server, run_proxy(answer) as (port, _):
        environment.setenv("https_proxy", f"http://127.0.0.1:{port}")
        *_, check = check_connection(move_server(kits, server), patience=0.5)
    assert (check.grade, check.is_temporary) == ("wrong", is_temporary)
    assert f"the proxy 127.0.0.1:{port} of https_proxy {problem}" in check.text
    assert "add localhost to no_proxy" in check.text


def test_a_proxy_without_a_listener_or_an_address_is_named(kits, environment):
    for address in (f"127.0.0.1:{free_port()}", "no-such-host.invalid:80"):
        environment.setenv("grpc_proxy", f"http://{address}")
        assert f"the proxy {address} of grpc_proxy" in read_last(check_connection(move_server(kits, 1)))[1]


@pytest.mark.parametrize("kit", ["north", LEAD])
def test_a_server_is_reached_through_a_proxy_that_connects(kits, environment, kit):
    """The proxy alone finds the address of the server, and the proxy's password is not printed."""
    with run_tls_server(*list_server_files(kits)) as server, run_proxy(TUNNEL) as (port, requests):
        environment.setenv("https_proxy", f"http://user:secret%21@127.0.0.1:{port}")
        checks = list(check_connection(move_server(kits, server, kit)))
    assert [check.grade for check in checks] == ["ok", "ok"]
    assert f"the proxy 127.0.0.1:{port} of https_proxy connects to localhost:{server}" in checks[0].text
    assert not any("secret" in check.text for check in checks)
    assert "Proxy-Authorization: Basic dXNlcjpzZWNyZXQh" in requests[0]


def test_a_proxy_that_replaces_the_certificate_is_named(kits, environment, tmp_path):
    with run_tls_server(*list_server_files(make_kits(tmp_path))) as other, run_proxy(TUNNEL) as (port, _):
        environment.setenv("http_proxy", f"http://127.0.0.1:{port}")
        grades, text = read_last(check_connection(move_server(kits, other)))
    assert grades == ["ok", "wrong"]
    assert text.startswith(f"through the proxy 127.0.0.1:{port} of http_proxy: ")


def test_the_server_of_the_kit_itself_is_asked_without_a_proxy(kits, environment):
    with run_tls_server(*list_server_files(kits)) as server:
        environment.setenv("https_proxy", f"http://127.0.0.1:{free_port()}")
        assert read_last(check_connection(move_server(kits, server, "server")))[0][-1] == "ok"


def test_a_variable_that_grpc_does_not_read_is_named_where_the_server_is_silent(kits, environment):
    environment.setenv("HTTPS_PROXY", "http://127.0.0.1:1")
    for kit in (move_server(kits, 1, host="no-such-host.invalid"), move_server(kits, free_port())):
        assert "HTTPS_PROXY is not read" in read_last(check_connection(kit))[1]


@pytest.mark.parametrize(
    ("host", "variables", "expected"),
    [
        ("localhost", {}, None),
        ("localhost", {"https_proxy": "http://{proxy}"}, "https_proxy"),
        ("localhost", {"http_proxy": "http://{proxy}"}, "http_proxy"),
        ("localhost", {"grpc_proxy": "http://{proxy}", "https_proxy": "http://127.0.0.1:1"}, "grpc_proxy"),
        ("localhost", {"grpc_proxy": "", "https_proxy": "http://{proxy}"}, None),
        ("localhost", {"https_proxy": "http://user:a%40b@{proxy}/"}, "https_proxy"),
        ("localhost", {"https_proxy": "https://{proxy}"}, None),
        ("localhost", {"https_proxy": "socks5://{proxy}"}, None),
        ("localhost", {"https_proxy": "{proxy}"}, None),
        ("localhost", {"HTTPS_PROXY": "http://{proxy}", "all_proxy": "http://{proxy}"}, None),
        ("localhost", {"https_proxy": "http://{proxy}", "no_proxy": "example.org, localhost"}, None),
        ("localhost", {"https_proxy": "http://{proxy}", "no_proxy": "host"}, "https_proxy"),
        ("localhost", {"https_proxy": "http://{proxy}", "no_proxy": "*"}, None),
        ("localhost", {"https_proxy": "http://{proxy}", "no_proxy": "localhost:1"}, "https_proxy"),
        ("localhost", {"https_proxy": "http://{proxy}", "no_proxy": ""}, "https_proxy"),
        ("localhost", {"https_proxy": "http://{proxy}", "NO_PROXY": "localhost"}, "https_proxy"),
        ("localhost", {"https_proxy": "http://{proxy}", "no_proxy": "localhost", "no_grpc_proxy": "b"}, "https_proxy"),
        ("localhost", {"https_proxy": "http://{proxy}", "no_grpc_proxy": "LOCALHOST"}, None),
        ("127.0.0.1", {"https_proxy": "http://{proxy}", "no_proxy": "127.0.0.0/8"}, None),
        ("127.0.0.1", {"https_proxy": "http://{proxy}", "no_proxy": "10.0.0.0/8"}, "https_proxy"),
        ("ward.localhost", {"https_proxy": "http://{proxy}", "no_proxy": "localhost"}, None),
        ("ward.localhost", {"https_proxy": "http://{proxy}", "no_proxy": ".localhost"}, None),
    ],
)
def test_grpc_connects_through_the_proxy_that_is_found(environment, host, variables, expected):
    with socket.create_server(("127.0.0.1", 0)) as direct, socket.create_server(("127.0.0.1", 0)) as listening:
        port = direct.getsockname()[1]
        for name, value in variables.items():
            environment.setenv(name, value.format(proxy=f"127.0.0.1:{listening.getsockname()[1]}"))
        found = doctor.find_proxy(host, port)
        assert (found and found[0]) == expected
        for name, value in doctor.make_grpc_variables(host, port).items():
            environment.setenv(name, value)
        assert doctor.find_proxy(host, port) == found
        if host == "ward.localhost":  # a name that needs no address here
            return
        channel = grpc.insecure_channel(f"{host}:{port}", options=[("grpc.use_local_subchannel_pool", 1)])
        call = channel.unary_unary("/service/method").future(b"")
        ready = select.select([direct, listening], [], [], 10)[0]
        call.cancel()
        channel.close()
        assert ready == [direct if expected is None else listening]


def test_commands_end_and_name_the_variable(environment, tmp_path, cli):
    with run_proxy(b"HTTP/1.1 403 Forbidden\r\n\r\n") as (port, _):
        kits = make_kits(tmp_path, port=free_port())
        environment.setenv("https_proxy", f"http://127.0.0.1:{port}")
        for words in (
            ("doctor", "--kit", kits / "north"),
            ("site", "--kit", kits / "north", "--config", site(tmp_path, "north")),
            ("status", tmp_path / "federation.toml", "--kit", kits / LEAD),
            ("submit", tmp_path / "federation.toml", "--kit", kits / LEAD),
        ):
            code, out, error = cli(*words)
            assert code == 2, out + error
            assert "of https_proxy refuses with status 403" in out + error


def test_a_federation_trains_through_a_proxy(environment, tmp_path):
    with run_proxy(TUNNEL) as (port, requests):
        environment.setenv("https_proxy", f"http://127.0.0.1:{port}")
        with loopback(tmp_path / "fed", {**COMMON, "rounds": 1}, {"north": SITES["north"]}) as fed:
            fed.start("server", "north", jobs=JOBS)
            fed.submit()
            fed.done(120)
            fed.wait(lambda: fed.processes["submit"].poll() is not None, 60, "the results are fetched")
            assert fed.processes["submit"].returncode == 0
        assert len(requests) > 1
        assert all(request.startswith(f"CONNECT localhost:{fed.port} ") for request in requests)
