"""The progress of a federation of real sites, for its lead: wait for sites, follow rounds, print each change as a line."""

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from fedmutual.cli.terminal import print_text

if TYPE_CHECKING:
    from fedmutual.sites.contract import Contract
    from fedmutual.sites.flare.kits import Kit

_PATIENCE = 600.0  # seconds that a server may be unreachable


def wait_for_all(contract: "Contract", list_sites: Callable[[], Iterable[str]]) -> None:
    """Wait until all sites are connected, at most `sites.wait` seconds."""
    until, last_line = time.monotonic() + contract.sites.wait, ""
    while missing := sorted(set(contract.sites.names) - set(list_sites())):
        line = f"waiting for {', '.join(missing)}"
        if line != last_line:
            print_text(line)
            last_line = line
        if time.monotonic() > until:
            print_text("the federation starts without these sites, which may join later")
            return
        time.sleep(0.5)


def watch_progress(kit: "Kit", name: str, job: str) -> Iterator[Mapping[str, Any]]:
    """Yield the status (`Session.status`) after each change, until the federation ends.

    A new session is opened whenever the connection is lost.

    Raises:
        ServerLost: the server cannot be reached for 10 minutes.
        RunError: as `Session.watch`.
        ConfigError: as `Session.watch`.
    """
    from fedmutual.sites.flare.session import OVER, ServerLost, Session

    until = time.monotonic() + _PATIENCE
    while True:
        try:
            with Session(kit) as session:
                for state in session.watch(name, job):
                    until = time.monotonic() + _PATIENCE
                    yield state
                    if state["progress"]["outcome"] in OVER:
                        return
        except ServerLost as problem:
            if time.monotonic() > until:
                raise
            print_text(f"{problem}; trying again", soft_wrap=True)
            time.sleep(2.0)


def print_progress(states: Iterable[Mapping[str, Any]]) -> Mapping[str, Any]:
    """Print each change as a line, and return the last progress of the federation; {} without a state.

    states: as `watch_progress` yields them.
    """
    from fedmutual.sites.flare import progress

    last_key, printed_notes, last = "", set[str](), dict[str, Any]()
    for state in states:
        last = dict(state["progress"])
        for note in (n for n in last["notes"] if n["text"] not in printed_notes):
            print_text(f"  {progress.format_notes(note)}", soft_wrap=True)
            printed_notes.add(note["text"])
        line, key = format_progress(last), f"{last['round']} {last['in']} {last['outcome']}"
        if key != last_key:
            print_text(line, soft_wrap=True)
            last_key = key
    return last


def format_progress(state: Mapping[str, Any]) -> str:
    """Return the progress of a federation as one line of text: round, sites, scores, bytes and time left or outcome."""
    missing = sorted(set(state["sites"]) - set(state["in"]))
    sites = f"sites {', '.join(state['in'])}" + (f" (without {', '.join(missing)})" if missing else "")
    traffic = f"{state['bytes']['up']:,} B up, {state['bytes']['down']:,} B down"
    end = state["left"] if state["outcome"] == "running" else f"{state['outcome']}: {state['said']}"
    return "  ".join(
        part for part in (f"round {state['round']}/{state['rounds']}", sites, state["scores"], traffic, end) if part
    )
