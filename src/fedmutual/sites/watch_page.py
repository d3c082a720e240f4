"""The page of `fedmutual watch` and its numbers for Prometheus, and the server of both on the participant's own host.

It answers GET and HEAD only, and no address is a path of a file. Each answer but that of /health needs the token: another
user of the host, and a page of another origin in the operator's browser, have no token. A name in the header Host other than
localhost is refused, because a name can be made to point at this host (DNS rebinding).
"""

import hmac
import http
import http.client
import io
import ipaddress
import json
import re
import secrets
import socket
import socketserver
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from functools import lru_cache
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from statistics import fmean
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pandas as pd

from fedmutual.errors import ConfigError, UserError, format_error, join_words
from fedmutual.metric import ACCURACY, describe_score
from fedmutual.report.cells import Column, PageTable, make_table
from fedmutual.report.curves import SLOTS, Curve, Picture, make_data_table
from fedmutual.report.measures import Pick
from fedmutual.report.plots import Styles, draw_curves
from fedmutual.report.rendering import load_page_template
from fedmutual.results.scale import MetricScale, format_size
from fedmutual.rundir.logs import format_duration
from fedmutual.rundir.schema import SHORT
from fedmutual.sites.flare.kits import SOON
from fedmutual.sites.monitor import EXCLUDED, LATE, PRESENT, RESTARTING, SITE_WORDS, Facts, Monitor
from fedmutual.sites.schema import MOST_AHEAD

PERIOD = 10  # seconds between two looks of an open page
_MOST_ROWS = 30  # of the messages that left a site, the newest; `fedmutual ledger` shows all
_FRESH = 2.0  # seconds for which facts are shown again, however many requests come
_LONGEST_HEAD, _MOST_THREADS = 16_384, 16  # bytes of a request, which has no body; requests at a time
_PATIENCE = 5.0  # seconds until a request must be complete, and an answer taken
_MARKS = dict.fromkeys(SITE_WORDS, "○") | {PRESENT: "●", RESTARTING: "◐", LATE: "◐", EXCLUDED: "✕"}
_HEADERS = {
    "Content-Type": "text/plain; charset=utf-8",
    "Content-Security-Policy": "default-src 'none'",
    "Cache-Control": "no-store",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Connection": "close",
}
_POLICY = (
    "default-src 'none'; style-src 'nonce-{0}'; script-src 'nonce-{0}'; connect-src 'self'; img-src data:; base-uri 'none'; "
    "form-action 'none'; frame-ancestors 'none'"
)
_NO_CLIENT = "/metrics needs the package prometheus-client: pip install 'fedmutual[sites]'"
_METRICS = {  # key of the facts -> what the number is
    "alive": "1 while the process of the site or server runs, or while the server answers a lead",
    "round": "The last round that is done; at a site, that has begun",
    "rounds": "The rounds of the federation",
    "certificate_days": "Days until the certificate of the kit ends",
    "disk_free_bytes": "Free bytes on the disk of the state folder",
    "clock_ahead_seconds": "Seconds by which the clock of the server is ahead of this host's",
    "epsilon_spent": "The epsilon that this site has spent",
    "epsilon_limit": "The epsilon that this site allows",
}


class Watch:
    """Answers requests about one participant. Its methods may be called by several threads."""

    def __init__(self, monitor: Monitor, token: str, say: Callable[[str], object] = print) -> None:
        """token: without it a request gets no content. say: gets an error that has no sentence of its own."""
        self._monitor, self._token, self._say = monitor, token, say
        self._lock, self._facts, self._until = threading.Lock(), Facts(), 0.0

    def answer(self, head: bytes, is_local: bool) -> bytes:
        """Return the answer to a request. head: its lines. is_local: whether it comes from this host."""
        try:
            line, _, headers = head.partition(b"\r\n")
            method, target, _ = line.decode("ascii").split(" ")
            hosts = http.client.parse_headers(io.BytesIO(headers)).get_all("Host", [])
            address = urlsplit(target)
            token = parse_qs(address.query, max_num_fields=8).get("token", [""])[0]
        except (ValueError, http.client.HTTPException):
            return make_answer(400, "this is not an HTTP request")
        if len(hosts) != 1 or not is_trusted_host(hosts[0]):
            return make_answer(403, "name this host as localhost or by its address")
        if method not in ("GET", "HEAD"):
            return make_answer(405, "this page answers GET and HEAD only", ("Allow", "GET, HEAD"))
        if not (hmac.compare_digest(token.encode(), self._token.encode()) or (is_local and address.path == "/health")):
            return make_answer(403, "the address needs the token that `fedmutual watch` printed at its start")
        reply = self._answer_path(address.path)
        return reply if method == "GET" else reply[: reply.index(b"\r\n\r\n") + 4]

    def _answer_path(self, path: str) -> bytes:
        if path not in ("/", "/health", "/metrics"):
            return make_answer(404, "there is no such page")
        if path == "/metrics" and find_spec("prometheus_client") is None:
            return make_answer(501, _NO_CLIENT)
        with self._lock:
            try:
                if path == "/health":
                    alive = self._monitor.is_alive()
                    body = json.dumps({"status": "alive" if alive else "not alive"})
                    return make_answer(200 if alive else 503, body, ("Content-Type", "application/json"))
                if time.monotonic() > self._until:
                    self._facts, self._until = self._monitor.read(), time.monotonic() + _FRESH
                if path == "/":
                    nonce = secrets.token_urlsafe(16)
                    headers = (
                        ("Content-Type", "text/html; charset=utf-8"),
                        ("Content-Security-Policy", _POLICY.format(nonce)),
                    )
                    return make_answer(200, make_page(self._facts, nonce), *headers)
                text = make_metrics(self._facts)
                return make_answer(200, text, ("Content-Type", "text/plain; version=0.0.4; charset=utf-8"))
            except UserError as problem:
                return make_answer(503, str(problem))
            except Exception as problem:
                self._say(f"watch: {format_error(problem)}")
                return make_answer(500, "the page cannot be made; `fedmutual watch` printed why")


def is_trusted_host(host: str) -> bool:
    """Return whether a header Host names this host in a way that no name service decides: by an address, or localhost."""
    name = re.sub(r":\d{1,5}$", "", host)
    try:
        ipaddress.ip_address(name.strip("[]"))
    except ValueError:
        return name == "localhost"
    return True


def make_answer(status: int, body: str, *headers: tuple[str, str]) -> bytes:
    """Return an answer of HTTP. headers: beside `_HEADERS`, or in place of those with the same name."""
    content = body.encode()
    all_headers = _HEADERS | dict(headers) | {"Content-Length": str(len(content))}
    lines = [f"HTTP/1.1 {status} {http.HTTPStatus(status).phrase}", *(f"{k}: {v}" for k, v in all_headers.items())]
    return "\r\n".join([*lines, "", ""]).encode() + content


def make_page(facts: Facts, nonce: str) -> str:
    """Return the page as HTML. nonce: of the page's own style and script, the only ones that may run."""
    own, shared = (tuple(_list_pictures(facts.get(key, {}), facts["name"])) for key in ("own_scores", "scores"))
    drawn, styles = _draw((*own, *shared))
    return load_page_template("watch.html.j2").render(
        facts=facts,
        nonce=nonce,
        period=PERIOD,
        at=f"{datetime.now():%Y-%m-%d %H:%M:%S}",
        about=list(_list_facts(facts)),
        own=drawn[: len(own)],
        shared=drawn[len(own) :],
        sites=_make_site_table(facts["sites"]) if "sites" in facts else None,
        left=_make_left_table("left", "What has left this site", facts["left"]) if "left" in facts else None,
        next=_make_left_table("next", "What is asked for next, as in the round before", facts.get("next", ())),
        styles=styles,
        version=version("fedmutual"),
    )


def _list_facts(facts: Facts) -> Iterator[tuple[str, str]]:
    """Yield the term and the text of each fact that a line can hold."""
    if facts.get("rounds"):
        yield "Round" if facts["role"] == "site" else "Rounds done", f"{facts['round']} of {facts['rounds']}"
    if facts.get("phase"):
        yield "Now", facts["phase"]
    if facts.get("seen"):
        yield "Last order of the server", _format_past(facts["at"] - facts["seen"])
    if "missed" in facts:
        yield "Rounds missed", _format_rounds(facts["missed"])
    if "epsilon_spent" in facts:
        left = facts["epsilon_limit"] - facts["epsilon_spent"]
        yield "Privacy budget", f"epsilon {facts['epsilon_spent']:.3g} spent, {left:.3g} of {facts['epsilon_limit']:g} left"
    for to, total in facts.get("totals", {}).items():
        yield f"Sent to {to}", f"{format_size(total['bytes'])} in {total['messages']:,} messages"
    if "bytes" in facts:
        yield "Bytes of all sites", f"{format_size(facts['bytes']['up'])} up, {format_size(facts['bytes']['down'])} down"
    if "disk_free_bytes" in facts:
        yield "Free disk", format_size(facts["disk_free_bytes"])
    if facts.get("clock_ahead_seconds") is not None:
        ahead = facts["clock_ahead_seconds"]
        fix = "; set both by NTP" if abs(ahead) > MOST_AHEAD else ""
        yield "Clock", f"the server's is {abs(ahead):.1f} s {'ahead' if ahead > 0 else 'behind'}{fix}"
    days = facts["certificate_days"]
    yield "Certificate", f"{days} days left{'; have the kit renewed' if days < SOON else ''}"
    if facts["others"]:
        yield "Other federations here", join_words(facts["others"])


def _format_past(seconds: float) -> str:
    return "now" if seconds < 1 else f"{format_duration(seconds)} ago"


def _format_rounds(ranges: Sequence[tuple[int, int]]) -> str:
    """Return [(4, 5), (9, 9)] as "3: 4 to 5, 9"; long lists without their beginning."""
    spans = ", ".join(_format_span(first, last) for first, last in ranges[-5:])
    return f"{_count_rounds(ranges):,}: {'..., ' if len(ranges) > 5 else ''}{spans}" if ranges else "none"


def _format_span(first: int, last: int) -> str:
    return f"{first} to {last}" if last > first else str(first)


def _count_rounds(ranges: Sequence[tuple[int, int]]) -> int:
    return sum(last - first + 1 for first, last in ranges)


def _make_site_table(sites: Sequence[Facts]) -> PageTable:
    """Return the table of the sites, as the server sees them."""
    columns = (
        Column("Site", numeric=False, read=lambda s: s["site"]),
        Column("State", numeric=False, read=lambda s: f"{_MARKS[s['state']]} {s['state']}"),
        Column("Last seen", numeric=False, read=lambda s: "not known" if s["seen"] is None else _format_past(s["seen"])),
        Column("Rounds missed", numeric=False, read=lambda s: _format_rounds(s["missed"])),
        Column("Last note", numeric=False, read=lambda s: s["why"]),
        Column("Sent", read=lambda s: format_size(s["up"])),
        Column("Received", read=lambda s: format_size(s["down"])),
    )
    return make_table("sites", "Sites", columns, sites, cards=True)


def _make_left_table(id: str, caption: str, rows: Sequence[Mapping[str, Any]]) -> PageTable:
    """Return a table of kinds of messages, the last ones. rows: as `summarise_ledger` returns them."""
    columns = (
        Column("Message", numeric=False, read=lambda r: r["what"]),
        *(
            [Column("Rounds", numeric=False, read=lambda r: _format_span(r["first"], r["last"]) if r["last"] else "start")]
            if id == "left"
            else []
        ),
        Column("To", numeric=False, read=lambda r: r["to"]),
        Column("Tensors", read=lambda r: f"{r['tensors']:,}"),
        Column("Size of each", read=lambda r: format_size(r["size"])),
        Column("Other values", numeric=False, read=lambda r: ", ".join(r["beside"]) or "nothing"),
        *([Column("Total size", read=lambda r: format_size(r["bytes"]))] if id == "left" else []),
    )
    return make_table(id, caption, columns, rows[-_MOST_ROWS:], cards=True)


ScoreLines = tuple[str, str, tuple[tuple[str, tuple[tuple[int, float], ...]], ...]]
"""A picture before it is drawn: its title, the name of the score, and its lines as (label, ((round, value), ...))."""


def _list_pictures(scores: Mapping[tuple[str, str, str], Any], name_of_page: str) -> Iterator[ScoreLines]:
    """Yield a picture of each score. scores: as `group_scores` returns them. name_of_page: of the site, server or lead.

    A line is a model of the only site; or a site; or of many sites the mean, the lowest and the highest.
    """
    pictures: dict[tuple[str, str], dict[str, dict[int, float]]] = {}
    for (model, data, name), lines in scores.items():
        model_name = SHORT.get(model, model)
        if len(lines) == 1:
            ((site, points),) = lines.items()
            label = model_name if site == name_of_page else f"{site}, {model_name}"
            pictures.setdefault((f"{data} rows", name), {})[label] = points
            continue
        if len(lines) > SLOTS:
            by_round = {r: [points[r] for points in lines.values() if r in points] for r in set().union(*lines.values())}
            picks: dict[str, Pick] = {"mean": fmean, "lowest": min, "highest": max}
            lines = {label: {r: pick(values) for r, values in by_round.items()} for label, pick in picks.items()}
        pictures[f"{model_name} model, {data} rows", name] = lines
    for (title, name), lines in pictures.items():
        drawn = tuple((label, tuple(sorted(values.items()))) for label, values in lines.items())
        yield f"{title[:1].upper()}{title[1:]}", name, drawn


@lru_cache(maxsize=8)
def _draw(pictures: tuple[ScoreLines, ...]) -> tuple[list[dict[str, Any]], Styles]:
    """Return the pictures with the tables of their numbers, and their styles. They are drawn again where a number is new."""
    styles: Styles = {}
    drawn = []
    for k, (title, name, lines) in enumerate(pictures):
        scale = MetricScale(metric=describe_score(name, ACCURACY))
        curves = tuple(Curve(label, n + 1, 0, pd.DataFrame({"": dict(points)})) for n, (label, points) in enumerate(lines))
        picture = Picture(f"score-{k}", f"{title}: {scale.metric.title}{scale.head}", scale.metric.is_fraction, curves)
        table = replace(make_data_table(picture, scale), caption=picture.title, csv="")
        drawn.append({"title": picture.title, "svg": draw_curves(picture, picture.id, styles), "table": table})
    return drawn, styles


def make_metrics(facts: Facts) -> str:
    """Return the numbers as text for Prometheus, of scores only those that were disclosed."""
    from prometheus_client import CollectorRegistry, Gauge, generate_latest

    registry, common = CollectorRegistry(), {"federation": facts["federation"], "participant": facts["name"]}

    def add(name: str, about: str, labels: Sequence[str], rows: Sequence[tuple[Sequence[str], float]]) -> None:
        if rows:
            gauge = Gauge(f"fedmutual_{name}", about, [*common, *labels], registry=registry)
        for values, number in rows:
            gauge.labels(*common.values(), *values).set(number)

    for key, about in _METRICS.items():
        if facts.get(key) is not None:
            add(key, about, (), [((), float(facts[key]))])
    sites = facts.get("sites", [])
    traffic = [((s["site"], way), s[way]) for s in sites for way in ("up", "down")]
    add("bytes", "Bytes that the site sent and received", ("site", "way"), traffic)
    sent = [((to,), total["bytes"]) for to, total in facts.get("totals", {}).items()]
    add("sent_bytes", "Bytes that this site sent", ("to",), sent)
    missed = {s["site"]: s["missed"] for s in sites} | ({facts["name"]: facts["missed"]} if "missed" in facts else {})
    rounds = [((site,), _count_rounds(ranges)) for site, ranges in missed.items()]
    add("missed_rounds", "Rounds without a message of the site", ("site",), rounds)
    present = [((s["site"],), float(s["state"] == PRESENT)) for s in sites]
    add("site_present", "1 for a site that takes part", ("site",), present)
    last = [
        ((site, *key), points[max(points)])
        for key, lines in facts.get("scores", {}).items()
        for site, points in lines.items()
    ]
    add("score", "The last disclosed score", ("site", "model", "rows", "score"), last)
    return generate_latest(registry).decode()


class WatchServer(socketserver.ThreadingTCPServer):
    """Serves a `Watch` at an address of this host, `_MOST_THREADS` requests at a time."""

    daemon_threads, block_on_close, allow_reuse_address = True, False, True

    def __init__(self, watch: Watch, address: str, port: int) -> None:
        """port: 0 takes a free one. Raises ConfigError where the port or the address cannot be used."""
        self.watch, self._places = watch, threading.BoundedSemaphore(_MOST_THREADS)
        self.address_family = socket.AF_INET6 if ":" in address else socket.AF_INET
        try:
            self.is_local = ipaddress.ip_address(address).is_loopback
            super().__init__((address, port), _Request)
        except (OSError, ValueError) as problem:
            why = getattr(problem, "strerror", None) or problem
            raise ConfigError(
                f"{address}, port {port} cannot be used ({why}); choose others by --address and --port"
            ) from None

        self.host = f"{f'[{address}]' if ':' in address else address}:{self.server_address[1]}"

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """Answer; or close the connection where too many are open."""
        if not self._places.acquire(blocking=False):
            self.shutdown_request(request)
            return
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._places.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Do nothing: the other end is too slow, or has closed the connection."""


class _Request(socketserver.BaseRequestHandler):
    """One connection: one request, and its answer."""

    server: WatchServer

    def handle(self) -> None:
        head, until = b"", time.monotonic() + _PATIENCE
        while b"\r\n\r\n" not in head:
            self.request.settimeout(max(until - time.monotonic(), 0.001))
            part = self.request.recv(4096)
            if not part:
                return
            head += part
            if len(head) > _LONGEST_HEAD:
                self.request.sendall(make_answer(431, "the request is too long"))
                return
        is_local = ipaddress.ip_address(self.client_address[0]).is_loopback
        answer = self.server.watch.answer(head.partition(b"\r\n\r\n")[0] + b"\r\n\r\n", is_local)
        self.request.settimeout(_PATIENCE)
        self.request.sendall(answer)


def read_token(path: Path) -> str:
    """Return the token in a file. Raises ConfigError where it could be guessed, or the file cannot be read."""
    try:
        token = path.read_text(encoding="utf-8").strip()
    except (OSError, ValueError) as problem:
        raise ConfigError(f"--token-file: {path} cannot be read ({problem}); name another file") from None
    if not re.fullmatch(r"[A-Za-z0-9_-]{32,256}", token):
        raise ConfigError(
            "--token-file: write 32 to 256 letters, digits, - and _ into it, such as `openssl rand -hex 32` makes"
        )
    return token
