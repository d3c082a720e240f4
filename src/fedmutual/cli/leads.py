"""The commands of leads of real sites: submit a federation, look at it, and stop it."""

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fedmutual.cli.sites import File, Kit
from fedmutual.cli.terminal import Code, exit_with_error, print_text

if TYPE_CHECKING:
    from fedmutual.sites.contract import Contract
    from fedmutual.sites.flare import kits
    from fedmutual.sites.flare.session import Session

_PATIENCE = 600.0  # seconds that a server may be unreachable


def submit(
    file: File,
    kit: Kit,
    out_folder: Annotated[
        Path | None, typer.Option("--out", help="The folder of the results; the default is runs/NAME.")
    ] = None,
) -> None:
    """Start a federation, or resume a stopped one; show its progress, and fetch its results.

    The command first waits for the sites. When rounds are shown, Ctrl-C ends only the display; give the command again to
    see the progress.
    """
    from fedmutual.sites.contract import read_submitted_contract
    from fedmutual.sites.flare.kits import open_kit

    contract = read_submitted_contract(file)
    folder = out_folder or Path("runs") / contract.name
    lead_kit, runs = open_kit(kit, "lead"), contract.list_runs()
    for number in range(len(runs)):
        place = folder if len(runs) == 1 else folder / str(number)
        count = _submit_run(lead_kit, runs, number, place)
        print_text(f"{place}: {count} files; `fedmutual report {folder} -o report.html` makes a page of it", soft_wrap=True)


def _submit_run(lead_kit: "kits.Kit", runs: list["Contract"], number: int, folder: Path) -> int:
    """Start or resume one federation, show its progress, and return the number of result files. Exit if it is unfinished.

    runs: all federations of the contract. number: the index of this one. The first one ends the earlier stops of all; a
    later stop ends this command, also between two federations.
    """
    from fedmutual.sites.flare.session import Session
    from fedmutual.sites.server_journal import LEFT

    contract = runs[number]
    with Session(lead_kit) as session:
        job = session.find_job(contract)
        for run in runs if number == 0 else ():
            if session.find_job(run) is None:
                session.allow_start(run.name)
        if job is None:
            until, previous = time.monotonic() + contract.sites.wait, list[str]()
            gone_by_run = [session.status(run.name)["gone"] or {} for run in runs]
            left = {i for gone in gone_by_run for i, why in gone.items() if why == LEFT}  # a site leaves all runs at once
            while True:
                state = session.status(contract.name)
                if state["stops"]:
                    exit_with_error("stopped by hand; saved rounds are kept; `fedmutual submit` resumes", Code.DIVERGED)
                round = state["progress"]["round"] if state["progress"] else 0
                awaited = {i for i in contract.sites.names if contract.sites.takes_part(i, round)}
                missing = sorted(awaited - {*state["connected"], *(state["gone"] or ()), *left})
                if not missing:
                    break
                if missing != previous:
                    print_text(f"waiting for {', '.join(missing)}")
                if time.monotonic() > until:
                    print_text("the federation starts without these sites, which may join later")
                    break
                previous = missing
                time.sleep(0.5)
            job = session.submit(contract)
        else:
            print_text(f"federation {contract.name!r} is running already; showing its progress")
    last = _show_progress(lead_kit, contract.name, job)
    with Session(lead_kit) as session:
        fetched = session.fetch(contract.name, folder)
    if last["outcome"] != "done":
        why = f"{last['outcome']}: {last['said']}"
        exit_with_error(f"{why}; saved rounds are kept; `fedmutual submit` resumes", Code.DIVERGED)
    return len(fetched)


def status(file: File, kit: Kit) -> None:
    """Show the progress of a federation, and how each site stands."""
    from fedmutual.rundir.logs import format_duration
    from fedmutual.sites.flare.progress import format_notes
    from fedmutual.sites.monitor import describe_sites

    with _open_session(file, kit) as (contract, session):
        states = {run.name: session.status(run.name) for run in contract.list_runs()}
    connected = next(iter(states.values()))["connected"]
    print_text(f"connected: {', '.join(connected) or 'nobody'}; of {', '.join(contract.sites.names)}")
    for name, state in states.items():
        if state["progress"] is None:
            print_text(f"federation {name!r} was never started on this server")
            continue
        print_text((f"{name}  " if len(states) > 1 else "") + _format_progress(state["progress"]))
        for one in describe_sites(state):
            since = f", for {format_duration(one['seen'])}" if one["seen"] else ""
            print_text(f"  {one['site']}: {one['state']}{since}")
        for note in state["progress"]["notes"]:
            print_text(f"  {format_notes(note)}")


def stop_federation(file: File, kit: Kit) -> None:
    """Stop a federation after the current round. `fedmutual submit` resumes it."""
    from fedmutual.sites.flare.progress import OVER

    with _open_session(file, kit) as (contract, session):
        states = {run.name: session.status(run.name)["progress"] for run in contract.list_runs()}
        if not any(states.values()):
            exit_with_error(f"federation {contract.name!r} was never started on this server", Code.BAD_INPUT)
        unfinished = [name for name, state in states.items() if state is None or state["outcome"] not in OVER]
        for name in unfinished:  # also those that have not begun: `submit` begins them one after the other
            session.stop(name)
    for name in unfinished[:1]:
        state = states[name]
        saved = "has not begun, and does not begin" if state is None else "ends after the current round"
        print_text(f"federation {name!r} {saved}" + (f"; round {state['round']} is saved" if state else ""))
    if not unfinished:
        print_text(f"federation {contract.name!r} is over already; there is nothing to stop")


@contextmanager
def _open_session(file: Path, kit: Path) -> Iterator[tuple["Contract", "Session"]]:
    """Yield the contract of FEDERATION.toml, and a session with the server."""
    from fedmutual.sites.contract import read_contract
    from fedmutual.sites.flare.kits import open_kit
    from fedmutual.sites.flare.session import Session

    contract = read_contract(file)
    with Session(open_kit(kit)) as session:
        yield contract, session


def _show_progress(kit: "kits.Kit", name: str, job: str) -> Mapping[str, Any]:
    """Print each change of a federation as a line until its end, and return its last progress.

    A new session is opened whenever the connection is lost. Raises ServerLost if the server is lost for 10 minutes.
    """
    from fedmutual.sites.flare.progress import OVER, format_notes
    from fedmutual.sites.flare.session import ServerLost, Session

    until, last_key, printed_notes = time.monotonic() + _PATIENCE, "", set[str]()
    while True:
        try:
            with Session(kit) as session:
                for state in session.watch(name, job):
                    until = time.monotonic() + _PATIENCE
                    for note in (n for n in state["notes"] if n["text"] not in printed_notes):
                        print_text(f"  {format_notes(note)}", soft_wrap=True)
                        printed_notes.add(note["text"])
                    if (key := f"{state['round']} {state['in']} {state['outcome']}") != last_key:
                        print_text(_format_progress(state), soft_wrap=True)
                        last_key = key
                    if state["outcome"] in OVER:
                        return state
        except ServerLost as problem:
            if time.monotonic() > until:
                raise
            print_text(f"{problem}; trying again", soft_wrap=True)
            time.sleep(2.0)


def _format_progress(state: Mapping[str, Any]) -> str:
    """Return the progress of a federation as one line of text: round, sites, scores, bytes and time left or outcome."""
    from fedmutual.sites.flare.progress import Outcome

    missing = sorted(set(state["sites"]) - {*state["in"], *state["evaluators"]})
    sites = f"sites {', '.join(state['in'])}" + (f" (without {', '.join(missing)})" if missing else "")
    traffic = f"{state['bytes']['up']:,} B up, {state['bytes']['down']:,} B down"
    end = state["left"] if state["outcome"] == "running" else f"{Outcome(state['outcome']).label}: {state['said']}"
    parts = (f"round {state['round']}/{state['rounds']}", sites, state["scores"], traffic, end)
    return "  ".join(part for part in parts if part)


def export_job(
    file: File,
    out_folder: Annotated[Path, typer.Option("--out", help="The folder of the jobs, one folder for each.")] = Path("jobs"),
) -> None:
    """Write the federation as a job for an existing network of NVIDIA FLARE, which fedmutual did not set up.

    The job has no code. What such a network cannot guarantee is in the documentation, page Security.
    """
    from fedmutual.sites.flare.archive import write_job
    from fedmutual.sites.flare.workspace import STOCK
    from fedmutual.sites.foreign import read_foreign_contracts

    for contract in read_foreign_contracts(file):
        job = write_job(contract, out_folder, STOCK)
        print_text(f"{job}: submit this job with FLARE's own commands", soft_wrap=True)
    print_text(f"FLARE's clients have the names of the sites: {', '.join(contract.sites.names)}", soft_wrap=True)
    print_text("each operator adds a class to 'class_allow_list' in local/resources.json of FLARE:", soft_wrap=True)
    for party, name in STOCK.items():
        print_text(f"  {party}: {name}", soft_wrap=True)
    _print_preparation("sites")


def flower_app(
    file: File,
    out_folder: Annotated[Path, typer.Option("--out", help="The folder of the apps, one folder for each.")] = Path("apps"),
) -> None:
    """Write the federation as an app for an existing network of Flower, which `flwr run` starts.

    The app has no code. What such a network cannot guarantee is in the documentation, page Security.
    """
    from fedmutual.sites.foreign import read_foreign_contracts, write_flower_app

    for contract in read_foreign_contracts(file):
        print_text(f"{write_flower_app(contract, out_folder)}: start this app with `flwr run`", soft_wrap=True)
    names = contract.sites.names
    print_text(f"each SuperNode names its site: --node-config 'site=\"{names[0]}\"'", soft_wrap=True)
    print_text(f"a simulation has {len(names)} SuperNodes, the sites in the sequence {', '.join(names)}", soft_wrap=True)
    _print_preparation("flower")


def _print_preparation(extra: str) -> None:
    """Print what the operators of all hosts prepare in either network."""
    from fedmutual.sites.flare.kits import FEDERATION
    from fedmutual.sites.foreign import FOLDER

    print_text(
        f"each host has fedmutual[{extra}], and the variable {FOLDER}: the folder with {FEDERATION}, the contract that its "
        "operator agrees to, and at a site SITE.toml; the server writes its results there, into server/NAME",
        soft_wrap=True,
    )
