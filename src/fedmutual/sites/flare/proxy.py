"""The HTTP proxy through which gRPC connects to the server, if the environment names one."""

import base64
import http.client
import os
import socket
from collections.abc import Mapping
from ipaddress import ip_address, ip_network
from typing import NamedTuple
from urllib.parse import unquote, urlsplit

_VARIABLES = ("grpc_proxy", "https_proxy", "http_proxy")  # gRPC reads the first one that is set; "": no proxy
_EXCEPTIONS = ("no_grpc_proxy", "no_proxy")  # hosts without a proxy: gRPC reads the first one that is set
_UNREAD = ("HTTPS_PROXY", "HTTP_PROXY", "all_proxy", "ALL_PROXY")  # other programs read these variables, but gRPC does not
_DEFAULT_PORT = 443  # gRPC's


class Proxy(NamedTuple):
    """A proxy, and the environment variable that names the proxy."""

    variable: str
    host: str
    port: int
    headers: Mapping[str, str]  # of a request to the proxy

    def connect(self, host: str, port: int, timeout: float) -> socket.socket:
        """Return a connection to host:port through the proxy. timeout: in seconds, for each step.

        Raises:
            OSError: the proxy cannot be reached, is silent or refuses.
            http.client.HTTPException: the program at the proxy's address does not answer with HTTP.
        """
        connection = http.client.HTTPConnection(self.host, self.port, timeout=timeout)
        connection.set_tunnel(host, port, dict(self.headers))
        try:
            connection.connect()
        except BaseException:
            connection.close()
            raise
        return connection.sock


def find_proxy(host: str, port: int) -> Proxy | None:
    """Return the proxy through which gRPC connects to a server after `make_grpc_variables`; None: gRPC connects directly.

    A variable whose value is not a URL of the form http://HOST:PORT has no effect, as in gRPC.
    """
    variable = _find_first(_VARIABLES)
    if variable is None or bypasses_proxy(host, port):
        return None
    try:
        url = urlsplit(os.environ[variable])
        proxy_host, proxy_port = url.hostname, url.port
    except ValueError:
        return None
    if url.scheme != "http" or not proxy_host:
        return None
    user = unquote(url.netloc.rpartition("@")[0])
    headers = {"Proxy-Authorization": f"Basic {base64.b64encode(user.encode()).decode()}"} if user else {}
    return Proxy(variable, proxy_host, proxy_port or _DEFAULT_PORT, headers)


def bypasses_proxy(host: str, port: int) -> bool:
    """Return whether the operator wants no proxy for this server: `no_proxy` has its name, domain, address or network."""
    entries = os.environ.get(_find_first(_EXCEPTIONS) or "", "").lower().split(",")
    return any(_includes(entry.strip().removesuffix(f":{port}").lstrip("."), host.lower()) for entry in entries)


def make_grpc_variables(host: str, port: int) -> dict[str, str]:
    """Return the environment variables that make every version of gRPC match names as `bypasses_proxy` does."""
    return {"no_grpc_proxy": host if bypasses_proxy(host, port) else ""}


def list_unread_variables() -> list[str]:
    """Return the variables in the environment that name a proxy, but that gRPC does not read."""
    return [name for name in _UNREAD if os.environ.get(name)]


def _find_first(names: tuple[str, ...]) -> str | None:
    return next((name for name in names if name in os.environ), None)


def _includes(entry: str, host: str) -> bool:
    """Return whether an entry of `no_proxy` includes a host. entry: in lower case, without port and first dot."""
    if entry in ("*", host) or (entry and host.endswith(f".{entry}")):
        return True
    try:
        return ip_address(host) in ip_network(entry, strict=False)
    except ValueError:
        return False
