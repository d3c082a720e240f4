"""The commands of real sites. Each reads its arguments, calls the library, and says what came out."""

import json
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from fedmutual.cli.terminal import Code, Terminated, err, exit_with_error, out, print_text, stop_on_sigterm

_PATIENCE = 600.0  # seconds that a server may be away

if TYPE_CHECKING:
    from fedmutual.core import Spec
    from fedmutual.sites.contract import Contract
    from fedmutual.sites.flare.kits import Kit as Kit_

File = Annotated[Path, typer.Argument(metavar="FEDERATION.toml", help="The federation's file.", show_default=False)]
Kit = Annotated[
    Path, typer.Option("--kit", metavar="DIR", help="The kit that `provision` made for you.", show_default=False)
]


TrustModule = Annotated[
    list[str] | None,
    typer.Option(
        metavar="NAME",
        help="A module that the contract may name as module:name; installed, or beside the contract. May be repeated.",
    ),
]


def provision(
    file: File,
    out_folder: Annotated[Path, typer.Option("--out", help="The folder of the kits, one folder for each kit.")] = Path(
        "kits"
    ),
    renew: Annotated[list[str] | None, typer.Option(metavar="NAME", help="Renew the kit of this participant.")] = None,
) -> None:
    """Make the kits of a federation: certificates for the server, each site and each lead.

    Give each kit to its owner over a channel that nobody else can read. Keep OUT/authority yourself, off line: it can make
    any participant's kit. Run the command again after adding sites: existing kits stay unchanged.
    """
    from fedmutual.sites.flare import kits

    made = kits.provision(file, out_folder, tuple(renew or ()))
    table = Table("kit", "for", "valid until")
    for kit in made:
        table.add_row(str(kit.folder), kits.KINDS[kit.kind], f"{kit.expires:%Y-%m-%d}")
    out.print(table)
    print_text(f"the server is reached at {', '.join(made[0].hosts)}, port {made[0].port}")
    print_text(f"{out_folder / kits.AUTHORITY}: the root key, for you alone; take it off line", soft_wrap=True)


def server(
    kit: Kit,
    state: Annotated[Path, typer.Option(metavar="DIR", help="The folder of the server's state.")] = Path("server"),
    contract: Annotated[
        list[Path] | None,
        typer.Option(
            metavar="FEDERATION.toml",
            help="The contract that the server agrees to; the default is the one in the kit. May be repeated.",
        ),
    ] = None,
    trust_module: TrustModule = None,
) -> None:
    """Run the server until it is stopped: it forwards messages, averages shared models, and restarts failed jobs.

    The server has no data. After a restart it resumes its federations by itself. It refuses a job with any other contract
    than those that it agreed to.
    """
    from fedmutual import plugins
    from fedmutual.rundir.folder import held
    from fedmutual.sites import contract as contracts
    from fedmutual.sites.coordinator import find_longest_message
    from fedmutual.sites.flare import kits, run, workspace
    from fedmutual.sites.modules import leave_working_folders, modules_of_server

    leave_working_folders(state)
    found = run.check_kind(kits.open_kit(kit), "server")
    files = [path.resolve() for path in contract or [found.folder / kits.FEDERATION]]
    code = modules_of_server(_modules(trust_module), files)
    with plugins.under(code):
        agreed = [contracts.read_contract(path) for path in files]
        longest = max(find_longest_message(one) for one in agreed)
    names = [one.name for one in agreed]
    twice = [name for name in names if names.count(name) > 1]
    if twice:
        exit_with_error(f"--contract: two files are of federation {twice[0]!r}; name each federation once", Code.BAD_INPUT)
    about = {"contracts": [one.record() for one in agreed], "files": [*map(str, files)], "modules": _modules(trust_module)}
    with held(state.resolve(), "runs a server with this state folder", "choose another one by --state"):
        until = f"{found.expires:%Y-%m-%d}{_soon(found)}"
        print_text(f"server {found.hosts[0]}:{found.port}, certificate valid until {until}; Ctrl-C ends it", soft_wrap=True)
        print_text(f"it carries out {', '.join(names)}", soft_wrap=True)
        _serve(found, state.resolve(), {"state": str(state.resolve()), **about, workspace.LONGEST: longest})


def site(
    kit: Kit,
    config: Annotated[
        Path, typer.Option(metavar="SITE.toml", help="The site's file: your data, your model, your state folder.")
    ],
    contract: Annotated[
        Path | None,
        typer.Option(metavar="FEDERATION.toml", help="The contract that you agree to; the default is the one in the kit."),
    ] = None,
) -> None:
    """Take part with your own data and your own model, until stopped. A site opens connections and accepts none.

    The command first lists all tensors that may leave. It refuses a job with any other contract than the one you agreed to.
    """
    from fedmutual import plugins
    from fedmutual.rundir.folder import held
    from fedmutual.sites import contract as contracts
    from fedmutual.sites.coordinator import find_longest_message
    from fedmutual.sites.disclosure import describe_disclosure
    from fedmutual.sites.flare import kits, run, workspace
    from fedmutual.sites.modules import leave_working_folders
    from fedmutual.sites.site_runtime import SiteRuntime, read_site_file

    found, mine = run.check_kind(kits.open_kit(kit), "site"), read_site_file(config)
    leave_working_folders(mine.state)
    if mine.file.site != found.name:
        exit_with_error(f"{config}: is of site {mine.file.site!r}, and {kit} is the kit of {found.name!r}", Code.BAD_INPUT)
    kits.check_valid(found)
    with plugins.under(mine.code):
        agreed = contracts.read_contract((contract or found.folder / kits.FEDERATION).resolve())
        half = SiteRuntime(agreed, mine, looks=True)  # at all that can be wrong before anything is opened
        longest = find_longest_message(agreed)
    with held(mine.state, "runs a site with this state folder", "choose another one by 'state.folder' in its file"):
        _say_leaves(half.leaves(), half.peers is not None, half.is_masked)
        print_text(describe_disclosure(half.experiment, half.site), soft_wrap=True)
        print_text(f"federation {half.folder.name!r}, state and ledger in {half.folder}; Ctrl-C ends it", soft_wrap=True)
        print_text(f"certificate valid until {found.expires:%Y-%m-%d}{_soon(found)}", soft_wrap=True)
        _dial(found)
        about = {"config": str(mine.source), "contracts": [agreed.record()], "rounds": agreed.config.rounds}
        _serve(found, mine.state, {**about, workspace.LONGEST: longest})


def submit(
    file: File,
    kit: Kit,
    out_folder: Annotated[
        Path | None, typer.Option("--out", help="The folder of the results; the default is runs/NAME.")
    ] = None,
) -> None:
    """Start a federation, or resume a stopped one; show its progress, and fetch its results.

    The command first waits for the sites. Once rounds are shown, Ctrl-C ends only the display; run it again to watch.
    """
    from fedmutual.sites import contract as contracts
    from fedmutual.sites.flare.kits import open_kit
    from fedmutual.sites.flare.run import check_kind
    from fedmutual.sites.flare.session import Session

    contract = contracts.read_submitted_contract(file)
    folder = out_folder or Path("runs") / contract.name
    found = check_kind(open_kit(kit), "lead")
    with Session(found) as session:
        job = session.under_way(contract)
        if job is None:
            _wait_for_all(contract, lambda: session.status(contract.name)["there"])
            job = session.submit(contract)
        else:
            print_text(f"federation {contract.name!r} is under way, as it was submitted before; looking on")
    last = _follow(_looked_on(found, contract.name, job))
    with Session(found) as session:
        fetched = session.fetch(contract.name, folder)
    if last["outcome"] != "done":
        exit_with_error(
            f"{last['outcome']}: {last['said']}; what was saved is kept, `fedmutual submit` goes on", Code.DIVERGED
        )
    print_text(
        f"{folder}: {len(fetched)} files; `fedmutual report {folder} -o report.html` makes a page of it", soft_wrap=True
    )


def status(file: File, kit: Kit) -> None:
    """Show the progress of a federation, and which sites are connected."""
    from fedmutual.sites import contract as contracts
    from fedmutual.sites.flare import progress
    from fedmutual.sites.flare.kits import open_kit
    from fedmutual.sites.flare.session import Session

    contract = contracts.read_contract(file)
    with Session(open_kit(kit)) as session:
        found = session.status(contract.name)
    print_text(f"connected: {', '.join(found['there']) or 'nobody'}; of {', '.join(contract.sites.names)}")
    print_text(
        _line(found["progress"]) if found["progress"] else f"federation {contract.name!r} was not begun on this server"
    )
    for note in (found["progress"] or {"notes": []})["notes"]:
        print_text(f"  {progress.format_notes(note)}")


def stop_federation(file: File, kit: Kit) -> None:
    """Stop a federation after the current round. `fedmutual submit` resumes it."""
    from fedmutual.sites import contract as contracts
    from fedmutual.sites.flare.kits import open_kit
    from fedmutual.sites.flare.session import Session

    name = contracts.read_contract(file).name
    with Session(open_kit(kit)) as session:
        found = session.stop(name)
    if found is None:
        exit_with_error(f"federation {name!r} was not begun on this server", Code.BAD_INPUT)
    print_text(f"federation {name!r} ends after the round that is under way; round {found['round']} is saved")


def ledger(
    path: Annotated[
        Path, typer.Argument(metavar="SITE.toml|FOLDER", help="A site's file, or its state folder.", show_default=False)
    ],
    full: Annotated[bool, typer.Option("--full", help="Show every tensor of every message, with shape and digest.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print all lines of the ledger as JSON, for scripts.")] = False,
) -> None:
    """Show which tensors left this site: bytes, receiver and round. The site wrote each line before the message left.

    Successive rounds with equal messages are shown in one line.
    """
    from fedmutual.cli import ledger as tables
    from fedmutual.sites import ledger

    folder = ledger.find_ledger(path)
    lines = ledger.read_ledger(folder)
    if as_json:
        typer.echo(json.dumps({"folder": str(folder), "totals": ledger.count_totals(lines), "left": lines}))
        return
    out.print(tables.make_tensor_table(lines) if full else tables.make_ledger_table(ledger.summarise_ledger(lines)))
    for line in tables.describe_total(lines):
        print_text(line)


def doctor(
    kit: Kit,
    config: Annotated[Path | None, typer.Option(metavar="SITE.toml", help="Your site's file, which is checked too.")] = None,
    contract: Annotated[
        Path | None,
        typer.Option(metavar="FEDERATION.toml", help="The contract that you agree to; the default is the one in the kit."),
    ] = None,
    trust_module: TrustModule = None,
) -> None:
    """Check the connection to the server: kit, clock, name, port, TLS, versions; with --config also your data and model.

    Changes nothing. Exit code 0: no problem; 2: a problem, printed with its fix.
    """
    from fedmutual.sites.flare.doctor import run_checks
    from fedmutual.sites.modules import leave_working_folders

    leave_working_folders()
    grades = []
    for finding in run_checks(kit, config, contract, _modules(trust_module)):
        print_text(f"{finding.grade:5} {finding.said}", soft_wrap=True)
        grades.append(finding.grade)
    if wrong := grades.count("wrong"):
        exit_with_error(f"{wrong} of {len(grades)} checks failed", Code.BAD_INPUT)


def _modules(names: list[str] | None) -> list[str]:
    """Return the modules of --trust-module. Exits where a name is no name of a module."""
    from fedmutual.sites.schema import check_modules

    try:
        return [*check_modules(tuple(names or ()))]
    except ValueError as problem:
        exit_with_error(f"--trust-module: {problem}", Code.BAD_INPUT)


def _soon(kit: "Kit_") -> str:
    """Return a reminder where a certificate expires soon, else an empty text."""
    return f", in {kit.days} days; {kit.reminder}" if kit.reminder else ""


def _dial(kit: "Kit_") -> None:
    """Exit where server and kit do not trust each other; else print what prevents the connection."""
    from fedmutual.sites.flare.connectivity import find_obstacle

    said, may_pass = find_obstacle(kit) or ("", True)
    if not may_pass:
        exit_with_error(said, Code.BAD_INPUT)
    if said:
        print_text(f"{said}. Tried again until it answers", soft_wrap=True)


def _serve(kit: Any, state: Path, told: Mapping[str, Any]) -> None:
    from fedmutual.sites.flare import run

    def ended(interrupt: KeyboardInterrupt) -> int:
        how, code = (
            ("told to end", Code.TERMINATED) if isinstance(interrupt, Terminated) else ("ended by hand", Code.STOPPED)
        )
        with suppress(OSError, SystemExit):  # as where `| tee` was ended by the same Ctrl-C
            err.print(f"{how}; what was saved is kept", highlight=False, markup=False)
        return code

    try:
        with stop_on_sigterm():
            code = run.run_process(kit, state, told, ended)
    except KeyboardInterrupt as interrupt:  # before FLARE listens, or again while it ends: its threads keep no process
        os._exit(ended(interrupt))
    if code in (Code.STOPPED, Code.TERMINATED):
        sys.exit(code)
    if code:
        exit_with_error(f"ended with code {code}; {state / 'flare' / 'log.txt'} says why", Code.DIVERGED)


def _say_leaves(leaves: Mapping[str, "Spec"], by_hand: bool, is_masked: bool) -> None:
    """Print which tensors may leave a site, for its operator."""
    table = Table("phase", "tensor", "type", "shape", "bytes", title="All that may leave this site")
    for phase, spec in leaves.items():
        for name, (dtype, shape) in spec.items():
            count = 1
            for side in shape:
                count *= side
            size = count * dtype.itemsize
            table.add_row(phase, name, str(dtype).removeprefix("torch."), "x".join(map(str, shape)) or "one", f"{size:,}")
    out.print(table)
    to = "to the other sites, through the server, sealed" if by_hand else "to the server, which can read them"
    if is_masked:
        to = "to the server under masks, which has the sum of all sites; and letters with keys, sealed shares and signatures"
    print_text(f"These go {to}.")


def _wait_for_all(contract: "Contract", there: Callable[[], Iterable[str]]) -> None:
    """Wait for the sites, so long."""
    until, said = time.monotonic() + contract.sites.wait, ""
    while missing := sorted(set(contract.sites.names) - set(there())):
        line = f"waiting for {', '.join(missing)}"
        if line != said:
            print_text(line)
            said = line
        if time.monotonic() > until:
            print_text("they are waited for no longer, and may join later")
            return
        time.sleep(0.5)


def _looked_on(kit: "Kit_", name: str, job: str) -> Iterator[Mapping[str, Any]]:
    """How far it is, over as many sessions as that takes: the server may be started anew meanwhile."""
    from fedmutual.sites.flare.session import OVER, Lost, Session

    until = time.monotonic() + _PATIENCE
    while True:
        try:
            with Session(kit) as session:
                for state in session.watch(name, job):
                    until = time.monotonic() + _PATIENCE
                    yield state
                    if state["progress"]["outcome"] in OVER:
                        return
        except Lost as problem:
            if time.monotonic() > until:
                raise
            print_text(f"{problem}; trying again", soft_wrap=True)
            time.sleep(2.0)


def _follow(found: Iterable[Mapping[str, Any]]) -> Mapping[str, Any]:
    """Say what is new, line by line -> how it ended."""
    from fedmutual.sites.flare import progress

    said, noted, last = "", set[str](), dict[str, Any]()
    for state in found:
        last = dict(state["progress"])
        for note in (n for n in last["notes"] if n["text"] not in noted):
            print_text(f"  {progress.format_notes(note)}", soft_wrap=True)
            noted.add(note["text"])
        line, now = _line(last), f"{last['round']} {last['in']} {last['outcome']}"
        if now != said:
            print_text(line, soft_wrap=True)
            said = now
    return last


def _line(now: Mapping[str, Any]) -> str:
    """How far a federation is."""
    away = sorted(set(now["sites"]) - set(now["in"]))
    sites = f"sites {', '.join(now['in'])}" + (f" (without {', '.join(away)})" if away else "")
    ways = now["bytes"]
    crossed = f"{ways['up']:,} B up, {ways['down']:,} B down"
    end = now["left"] if now["outcome"] == "running" else f"{now['outcome']}: {now['said']}"
    return "  ".join(part for part in (f"round {now['round']}/{now['rounds']}", sites, now["scores"], crossed, end) if part)
