"""A federation's kits, and a TLS server with the certificate of such a kit, which sends the first bytes of HTTP/2."""

import socket
import ssl
import threading
import tomllib
from contextlib import contextmanager

import tomli_w

from fedmutual.sites.flare.kits import open_kit, provision
from wards import contract

SETTINGS = b"\x00\x00\x00\x04\x00\x00\x00\x00\x00"  # the first frame of an HTTP/2 server


def make_kits(folder, **server):
    """Make the kits of a federation, and return their folder."""
    path = contract(folder)
    path.write_text(tomli_w.dumps({**tomllib.loads(path.read_text()), "server": {"hosts": ["localhost"], **server}}))
    provision(path, folder / "kits")
    return folder / "kits"


@contextmanager
def run_tls_server(certificate, key, authority, first_bytes=SETTINGS, patience=5):
    """Run a TLS server that requires a certificate of an authority, and yield its port.

    first_bytes: sent to each client that the server accepts; None: the server uses no TLS. patience: seconds until a silent
    connection is closed.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    context.load_verify_locations(authority)
    context.verify_mode = ssl.CERT_REQUIRED
    context.set_alpn_protocols(["h2"])
    with socket.create_server(("localhost", 0)) as listening:

        def serve():
            while True:
                try:
                    plain, _ = listening.accept()
                except OSError:
                    return  # closed
                try:
                    plain.settimeout(patience)
                    if first_bytes is None:
                        plain.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")
                        plain.close()
                        continue
                    with context.wrap_socket(plain, server_side=True) as tls:
                        tls.sendall(first_bytes)
                        tls.recv(1)
                except OSError:
                    plain.close()

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield listening.getsockname()[1]
        listening.shutdown(socket.SHUT_RDWR)
    thread.join(10)


def move_server(kits, port, name="north", host="localhost"):
    """Return the kit of a participant, with the server at another address."""
    return open_kit(kits / name).model_copy(update={"hosts": (host,), "port": port})


def list_startup_files(kits, *files):
    return [kits / name / "startup" / file for name, file in files]


def list_server_files(kits):
    return list_startup_files(kits, ("server", "server.crt"), ("server", "server.key"), ("server", "rootCA.pem"))


def read_last(findings):
    """Return all grades, and the last text."""
    findings = list(findings)
    return [f.grade for f in findings], findings[-1].text
