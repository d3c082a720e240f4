"""A federation's kits, and a TLS server with the certificate of such a kit, which sends the first bytes of HTTP/2."""

import socket
import ssl
import threading
import tomllib
from contextlib import contextmanager

import tomli_w

from fedmutual.sites.flare.kits import open_kit, provision
from wards import contract

SETTINGS = b"\x00\x00\x00\x04\x00\x00\x00\x00\x00"  # what an HTTP/2 server says first


def federation(folder, **server):
    """Kits of a federation, in a folder."""
    path = contract(folder)
    path.write_text(tomli_w.dumps({**tomllib.loads(path.read_text()), "server": {"hosts": ["localhost"], **server}}))
    provision(path, folder / "kits")
    return folder / "kits"


@contextmanager
def serving(certificate, key, authority, says=SETTINGS):
    """A TLS server that wants a certificate of an authority -> its port. says: to whom it takes; None: no TLS at all."""
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
                    plain.settimeout(5)
                    if says is None:
                        plain.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")
                        plain.close()
                        continue
                    with context.wrap_socket(plain, server_side=True) as tls:
                        tls.sendall(says)
                        tls.recv(1)
                except OSError:
                    plain.close()

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield listening.getsockname()[1]
        listening.shutdown(socket.SHUT_RDWR)
    thread.join(10)


def at(kits, port, name="north", host="localhost"):
    """A kit, with the server elsewhere."""
    kit = open_kit(kits / name)
    return kit.__class__(kit.folder, kit.name, kit.kind, kit.expires, (host,), port)


def startup(kits, *files):
    return [kits / name / "startup" / file for name, file in files]


def of_server(kits):
    return startup(kits, ("server", "server.crt"), ("server", "server.key"), ("server", "rootCA.pem"))


def last(findings):
    """The grades, and what was said last."""
    findings = list(findings)
    return [f.grade for f in findings], findings[-1].text
