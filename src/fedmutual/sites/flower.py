"""The ServerApp and the ClientApp of a federation on a network of Flower."""

import json
import time
from collections.abc import Iterator, Mapping
from typing import Any

from flwr.app import ConfigRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp

from fedmutual.errors import UserError
from fedmutual.sites.flare.progress import print_line
from fedmutual.sites.foreign import open_site, run_server
from fedmutual.sites.protocol import MalformedMessage
from fedmutual.sites.site_runtime import hold_runtime

_TICK = 0.05  # seconds between two looks for answers
_ORDER, _NAME = "train", "query"  # Flower's kinds of messages: an order; the question for the site's name

server = ServerApp()  # Flower looks for assignments of one name
client = ClientApp()


class GridTransport:
    """Sends orders as messages of Flower to the nodes that say that they are a site of the federation."""

    def __init__(self, grid: Grid, sites: tuple[str, ...], deadline: float) -> None:
        """deadline: seconds in which a new node must say which site it is."""
        self._grid, self._sites, self._deadline = grid, sites, deadline
        self._names: dict[int, str] = {}  # node -> site; "" until the node has answered
        self._asked: dict[str, int] = {}  # id of the question -> node

    def list_connected(self) -> tuple[str, ...]:
        """Return the connected sites."""
        return tuple(sorted(self._find_nodes()))

    def list_late(self) -> tuple[str, ...]:
        """Return no site: Flower does not tell whether a node has taken a message."""
        return ()

    def ask(self, orders: Mapping[str, bytes], deadline: float) -> Iterator[tuple[str, bytes]]:
        """Send each site its order, and yield (site, answer) in the order of arrival. deadline: in seconds."""
        nodes = self._find_nodes()
        waiting = self._push({nodes[i]: content for i, content in orders.items() if i in nodes}, _ORDER, deadline)
        until = time.monotonic() + deadline
        while waiting and time.monotonic() < until:
            for node, answer in self._pull(waiting):
                yield self._names[node], answer
            time.sleep(_TICK)

    def _find_nodes(self) -> dict[str, int]:
        """Return site -> node. Of two nodes that say the same name, the first one counts."""
        present = [*self._grid.get_node_ids()]
        new = [node for node in present if node not in self._names]
        self._names |= dict.fromkeys(new, "")
        self._asked |= self._push(dict.fromkeys(new, b""), _NAME, self._deadline)
        self._names |= {node: name.decode(errors="replace") for node, name in self._pull(self._asked)}
        return {self._names[node]: node for node in reversed(present) if self._names[node] in self._sites}

    def _push(self, contents: Mapping[int, bytes], kind: str, deadline: float) -> dict[str, int]:
        """Send messages to nodes, and return id of the message -> node."""
        messages = [
            Message(RecordDict({"body": ConfigRecord({"body": content})}), dst_node_id=node, message_type=kind, ttl=deadline)
            for node, content in contents.items()
        ]
        return dict(zip(self._grid.push_messages(messages), contents, strict=True)) if messages else {}

    def _pull(self, waiting: dict[str, int]) -> Iterator[tuple[int, bytes]]:
        """Yield (node, answer) of the messages that were answered, and remove them; an answer with an error is left out."""
        for reply in self._grid.pull_messages([*waiting]) if waiting else ():
            node = waiting.pop(reply.metadata.reply_to_message_id, None)
            body = None if reply.has_error() else _read_body(reply)
            if node is not None and body is not None:
                yield node, body


def _read_body(message: Message) -> bytes | None:
    body: Any = message.content.config_records.get("body", {}).get("body")
    return body if isinstance(body, bytes) else None


@server.main()  # type: ignore[untyped-decorator]
def run_rounds(grid: Grid, context: Context) -> None:
    """Run the remaining rounds of the federation in the run's configuration."""
    text = context.run_config["contract"]
    sites = json.loads(text)["tables"]["sites"]
    try:
        print_line(f"done: {run_server(text, GridTransport(grid, tuple(sites['names']), sites['deadline']), print_line)}")
    except UserError as problem:
        raise SystemExit(str(problem)) from None


@client.query()  # type: ignore[untyped-decorator]
def tell_name(message: Message, context: Context) -> Message:
    """Answer which site this node is."""
    return _reply(message, _find_name(context).encode())


@client.train()  # type: ignore[untyped-decorator]
def carry_out(message: Message, context: Context) -> Message:
    """Carry out an order. Each order opens the site's state, because Flower may begin a process for each message."""
    try:
        settings, contract = open_site(_find_name(context), context.run_config["contract"])
        with hold_runtime(contract, settings, print_line) as runtime:
            return _reply(message, runtime.carry_out(_read_body(message) or b""))
    except (MalformedMessage, UserError, OSError) as problem:
        print_line(str(problem), "error")
        return _reply(message, None)


def _find_name(context: Context) -> str:
    """Return the site of this node: its key `site`; in Flower's simulation, the site with the number of its partition."""
    about = context.node_config
    if "site" in about:
        return str(about["site"])
    names = json.loads(context.run_config["contract"])["tables"]["sites"]["names"]
    number = int(about.get("partition-id", len(names)))
    return str(names[number]) if number < len(names) else ""


def _reply(message: Message, body: bytes | None) -> Message:
    content = {} if body is None else {"body": ConfigRecord({"body": body})}
    return Message(RecordDict(content), reply_to=message)
