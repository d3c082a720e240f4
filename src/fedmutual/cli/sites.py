"""The commands of real sites. Each command reads its arguments, calls the library and prints the result."""

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from fedmutual.cli.federation_progress import format_progress, print_progress, wait_for_all, watch_progress
from fedmutual.cli.site_process import (
    check_connection,
    format_reminder,
    parse_module_names,
    print_leaves,
    run_until_stopped,
)
from fedmutual.cli.terminal import Code, exit_with_error, out, print_text

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

    Give each kit to its owner over a channel that nobody else can read. Keep OUT/authority yourself, off line: its key can
    make the kit of any participant. Run the command again after adding sites: existing kits stay unchanged.
    """
    from fedmutual.sites.flare import kits

    kits_made = kits.provision(file, out_folder, tuple(renew or ()))
    table = Table("kit", "for", "valid until")
    for kit in kits_made:
        table.add_row(str(kit.folder), kits.KIT_KINDS[kit.kind], f"{kit.expires:%Y-%m-%d}")
    out.print(table)
    print_text(f"the server is reached at {', '.join(kits_made[0].hosts)}, port {kits_made[0].port}")
    print_text(
        f"{out_folder / kits.AUTHORITY}: the root key, for you alone; keep it on a computer without a network",
        soft_wrap=True,
    )


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

    The server has no data. After a restart it resumes its federations by itself. The server refuses a job with a contract
    to which it did not agree.
    """
    from fedmutual.rundir.folder import lock_folder
    from fedmutual.sites import contract as contracts
    from fedmutual.sites.flare import kits, run, workspace
    from fedmutual.sites.modules import leave_working_folders, make_server_rule
    from fedmutual.sites.server_experiment import find_longest_message
    from fedmutual.user_code import plugins

    leave_working_folders(state)
    server_kit = run.check_kind(kits.open_kit(kit), "server")
    files = [path.resolve() for path in contract or [server_kit.folder / kits.FEDERATION]]
    code = make_server_rule(parse_module_names(trust_module), files)
    with plugins.use_rule(code):
        agreed = [contracts.read_contract(path) for path in files]
        longest = max(find_longest_message(agreement) for agreement in agreed)
    names = [agreement.name for agreement in agreed]
    repeated = [name for name in names if names.count(name) > 1]
    if repeated:
        exit_with_error(
            f"--contract: two files describe federation {repeated[0]!r}; name each federation once", Code.BAD_INPUT
        )
    pointer = {
        "contracts": [agreement.record() for agreement in agreed],
        "files": [*map(str, files)],
        "modules": parse_module_names(trust_module),
    }
    with lock_folder(state.resolve(), "runs a server with this state folder", "choose another one by --state"):
        until = f"{server_kit.expires:%Y-%m-%d}{format_reminder(server_kit)}"
        print_text(
            f"server {server_kit.hosts[0]}:{server_kit.port}, certificate valid until {until}; Ctrl-C ends it",
            soft_wrap=True,
        )
        print_text(f"it carries out {', '.join(names)}", soft_wrap=True)
        run_until_stopped(
            server_kit, state.resolve(), {"state": str(state.resolve()), **pointer, workspace.LONGEST_MESSAGE: longest}
        )


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
    """Take part with your own data and your own model, until the command is stopped.

    The site connects to the server, and accepts no connections. The command first lists all tensors that may leave. The
    site refuses a job with another contract than the one you agreed to.
    """
    from fedmutual.rundir.folder import lock_folder
    from fedmutual.sites import contract as contracts
    from fedmutual.sites.disclosure import describe_disclosure
    from fedmutual.sites.flare import kits, run, workspace
    from fedmutual.sites.modules import leave_working_folders
    from fedmutual.sites.server_experiment import find_longest_message
    from fedmutual.sites.site_runtime import SiteRuntime
    from fedmutual.sites.site_settings import read_site_file
    from fedmutual.user_code import plugins

    site_kit, site_config = run.check_kind(kits.open_kit(kit), "site"), read_site_file(config)
    leave_working_folders(site_config.state)
    if site_config.file.site != site_kit.name:
        exit_with_error(
            f"{config}: belongs to site {site_config.file.site!r}, and {kit} is the kit of {site_kit.name!r}", Code.BAD_INPUT
        )
    kits.check_valid(site_kit)
    with plugins.use_rule(site_config.code):
        agreed = contracts.read_contract((contract or site_kit.folder / kits.FEDERATION).resolve())
        runtime = SiteRuntime(agreed, site_config, check_only=True)  # checks everything before a connection is opened
        longest = find_longest_message(agreed)
    with lock_folder(
        site_config.state, "runs a site with this state folder", "choose another one by 'state.folder' in its file"
    ):
        print_leaves(runtime.list_leaves(), runtime.peers is not None, runtime.is_masked)
        print_text(describe_disclosure(runtime.experiment, runtime.site), soft_wrap=True)
        print_text(
            f"federation {runtime.folder.name!r}, state and ledger in {runtime.folder}; Ctrl-C ends it", soft_wrap=True
        )
        print_text(f"certificate valid until {site_kit.expires:%Y-%m-%d}{format_reminder(site_kit)}", soft_wrap=True)
        check_connection(site_kit)
        pointer = {"config": str(site_config.source), "contracts": [agreed.record()], "rounds": agreed.config.rounds}
        run_until_stopped(site_kit, site_config.state, {**pointer, workspace.LONGEST_MESSAGE: longest})


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
    from fedmutual.sites import contract as contracts
    from fedmutual.sites.flare.kits import open_kit
    from fedmutual.sites.flare.run import check_kind
    from fedmutual.sites.flare.session import Session

    contract = contracts.read_submitted_contract(file)
    folder = out_folder or Path("runs") / contract.name
    lead_kit = check_kind(open_kit(kit), "lead")
    with Session(lead_kit) as session:
        job = session.find_job(contract)
        if job is None:
            wait_for_all(contract, lambda: session.status(contract.name)["there"])
            job = session.submit(contract)
        else:
            print_text(f"federation {contract.name!r} is running already; showing its progress")
    last = print_progress(watch_progress(lead_kit, contract.name, job))
    with Session(lead_kit) as session:
        fetched = session.fetch(contract.name, folder)
    if last["outcome"] != "done":
        exit_with_error(
            f"{last['outcome']}: {last['said']}; saved rounds are kept; `fedmutual submit` resumes", Code.DIVERGED
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
        state = session.status(contract.name)
    print_text(f"connected: {', '.join(state['there']) or 'nobody'}; of {', '.join(contract.sites.names)}")
    print_text(
        format_progress(state["progress"])
        if state["progress"]
        else f"federation {contract.name!r} was never started on this server"
    )
    for note in (state["progress"] or {"notes": []})["notes"]:
        print_text(f"  {progress.format_notes(note)}")


def stop_federation(file: File, kit: Kit) -> None:
    """Stop a federation after the current round. `fedmutual submit` resumes it."""
    from fedmutual.sites import contract as contracts
    from fedmutual.sites.flare.kits import open_kit
    from fedmutual.sites.flare.session import Session

    name = contracts.read_contract(file).name
    with Session(open_kit(kit)) as session:
        state = session.stop(name)
    if state is None:
        exit_with_error(f"federation {name!r} was never started on this server", Code.BAD_INPUT)
    print_text(f"federation {name!r} ends after the current round; round {state['round']} is saved")


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
    for finding in run_checks(kit, config, contract, parse_module_names(trust_module)):
        print_text(f"{finding.grade:5} {finding.text}", soft_wrap=True)
        grades.append(finding.grade)
    if wrong := grades.count("wrong"):
        exit_with_error(f"{wrong} of {len(grades)} checks failed", Code.BAD_INPUT)
