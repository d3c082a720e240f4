"""What an operator reads while a process runs: lines with the time, from FLARE's processes too."""

import time
from collections import Counter

from nvflare.apis.event_type import EventType
from nvflare.apis.fl_component import FLComponent
from nvflare.apis.fl_context import FLContext


def print_line(line: object) -> None:
    """A line on this host's console, and nowhere else."""
    print(f"{time.strftime('%H:%M:%S')}  {line}", flush=True)


_said: Counter[str] = Counter()  # lines of each kind so far


def print_line_seldom(kind: str, line: object) -> None:
    """Say the first, second, fourth, eighth ... line of a kind: what others can cause without end fills no console.

    kind: one of a few; not of others' making.
    """
    _said[kind] += 1
    if _said[kind] & (_said[kind] - 1) == 0:
        print_line(line if _said[kind] == 1 else f"{line} ({_said[kind]} of this kind so far)")


class Lookout(FLComponent):  # type: ignore[misc]
    """At a site: says when it is connected."""

    def handle_event(self, event_type: str, fl_ctx: FLContext) -> None:
        """Say what an operator waits for."""
        if event_type == EventType.AFTER_CLIENT_REGISTER:
            print_line("connected to the server; waiting for a lead to submit")
