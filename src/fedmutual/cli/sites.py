"""The commands of a server, of a site and of kits. Each command reads its arguments, calls the library and prints."""

import json
import math
import os
import sys
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.markup import escape
from rich.table import Table

from fedmutual.cli.terminal import (
    Code,
    describe_stop,
    err,
    exit_with_error,
    is_json,
    log_json,
    make_table,
    out,
    print_text,
    print_warning,
    stop_on_sigterm,
)
from fedmutual.errors import RunError, format_count

if TYPE_CHECKING:
    from fedmutual.sites.flare import kits
    from fedmutual.sites.ledger import Line
    from fedmutual.sites.site_runtime import SiteRuntime

_LOOK = 1.0  # seconds to wait for the lock of a state folder, which `watch` holds for an instant when it looks

File = Annotated[Path, typer.Argument(metavar="FEDERATION.toml", help="The federation's file.", show_default=False)]
Kit = Annotated[
    Path, typer.Option("--kit", metavar="DIR", help="The kit that `provision` made for you.", show_default=False)
]
AgreedContract = Annotated[
    Path | None,
    typer.Option(metavar="FEDERATION.toml", help="The contract that you agree to; the default is the one in the kit."),
]
TrustModule = Annotated[
    list[str] | None,
    typer.Option(
        metavar="NAME",
        help="A module that the contract may name as module:name; installed, or beside the contract. May be repeated.",
    ),
]
JsonLogs = Annotated[
    bool, typer.Option("--json-logs", help="Print each line as a JSON object, for programs that read logs.")
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
        table.add_row(str(kit.folder), kits.KINDS[kit.kind].words, f"{kit.expires:%Y-%m-%d}")
    out.print(table)
    print_text(f"the server is reached at {', '.join(kits_made[0].hosts)}, port {kits_made[0].port}")
    authority = out_folder / kits.AUTHORITY
    print_text(f"{authority}: the root key, for you alone; keep it on a computer without a network", soft_wrap=True)


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
    json_logs: JsonLogs = False,
) -> None:
    """Run the server until it is stopped: it forwards messages, averages shared models, and restarts failed jobs.

    The server has no data. After a restart it resumes its federations by itself. The server refuses a job with a contract
    to which it did not agree.
    """
    from fedmutual.rundir.folder import lock_folder
    from fedmutual.rundir.trackers import check_installed
    from fedmutual.sites.contract import read_contract
    from fedmutual.sites.coordinator import find_longest_message
    from fedmutual.sites.flare.kits import FEDERATION, open_kit
    from fedmutual.sites.flare.workspace import LONGEST_MESSAGE
    from fedmutual.sites.leaving import end_in_time
    from fedmutual.sites.modules import leave_working_folders, make_server_rule
    from fedmutual.user_code import plugins

    log_json(json_logs)
    leave_working_folders(state)
    server_kit, modules = open_kit(kit, "server"), _parse_module_names(trust_module)
    files = [path.resolve() for path in contract or [server_kit.folder / FEDERATION]]
    with plugins.use_rule(make_server_rule(modules, files)):
        agreed = [read_contract(path) for path in files]
        longest = max(find_longest_message(agreement) for agreement in agreed)
    for agreement in agreed:
        check_installed(agreement.config.records)
    names = [run.name for agreement in agreed for run in agreement.list_runs()]
    log_json(json_logs, names[0] if len(names) == 1 else "")
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        exit_with_error(f"--contract: two files describe federation {twice!r}; name one of them", Code.BAD_INPUT)
    pointer = {
        "state": str(state.resolve()),
        "contracts": [agreement.record() for agreement in agreed],
        "files": [*map(str, files)],
        "modules": modules,
        LONGEST_MESSAGE: longest,
    }
    with lock_folder(state.resolve(), "runs a server with this state folder", "choose another one by --state", _LOOK):
        until, address = f"{server_kit.expires:%Y-%m-%d}{server_kit.reminder}", f"{server_kit.hosts[0]}:{server_kit.port}"
        print_text(f"server {address}, certificate valid until {until}; Ctrl-C ends it", soft_wrap=True)
        print_text(f"it carries out {', '.join(names)}", soft_wrap=True)
        end_in_time(server_kit.expires)
        _run_until_stopped(server_kit, state.resolve(), pointer)


def site(
    kit: Kit,
    config: Annotated[
        Path, typer.Option(metavar="SITE.toml", help="The site's file: your data, your model, your state folder.")
    ],
    contract: AgreedContract = None,
    json_logs: JsonLogs = False,
) -> None:
    """Take part with your own data and your own model, until the command is stopped.

    The site connects to the server, and accepts no connections. The command first lists all tensors that may leave. The
    site refuses a job with another contract than the one you agreed to.
    """
    from fedmutual.rundir.folder import lock_folder
    from fedmutual.sites import leaving
    from fedmutual.sites.contract import read_contract
    from fedmutual.sites.coordinator import find_longest_message
    from fedmutual.sites.flare.doctor import check_owner, find_obstacle
    from fedmutual.sites.flare.kits import FEDERATION, check_valid, open_kit
    from fedmutual.sites.flare.workspace import LONGEST_MESSAGE
    from fedmutual.sites.modules import leave_working_folders
    from fedmutual.sites.site_runtime import SiteRuntime
    from fedmutual.sites.site_settings import read_site_file
    from fedmutual.user_code import plugins

    log_json(json_logs)
    site_kit, site_config = open_kit(kit, "site"), read_site_file(config)
    leave_working_folders(site_config.state)
    check_owner(site_kit, site_config)
    check_valid(site_kit)
    with plugins.use_rule(site_config.code):
        agreed = read_contract((contract or site_kit.folder / FEDERATION).resolve())
        log_json(json_logs, agreed.name)
        names = [run.name for run in agreed.list_runs()]
        if leaving.has_left(site_config.state, names):
            leaving.close_state(site_config.state)
            exit_with_error(f"this site left federation {agreed.name!r}; take part in one of another name", Code.BAD_INPUT)
        for run in agreed.list_runs():  # checks everything before a connection is opened
            runtime = SiteRuntime(run, site_config, check_only=True)
        longest = find_longest_message(agreed)
    advice = "choose another one by 'state.folder' in its file"
    with lock_folder(site_config.state, "runs a site with this state folder", advice, _LOOK):
        for sentence in agreed.sites.describe_roles():
            print_text(sentence, soft_wrap=True)
        _print_leaves(runtime)
        for run in agreed.list_runs():
            folder = site_config.state / run.name
            print_text(f"federation {run.name!r}, state and ledger in {folder}; Ctrl-C ends it", soft_wrap=True)
        print_text(f"certificate valid until {site_kit.expires:%Y-%m-%d}{site_kit.reminder}", soft_wrap=True)
        if obstacle := find_obstacle(site_kit):
            if not obstacle.is_temporary:
                exit_with_error(obstacle.text, Code.BAD_INPUT)
            print_text(f"{obstacle.text}. The site tries again until the server answers", soft_wrap=True)
        leaving.end_in_time(site_kit.expires, lambda: leaving.has_left(site_config.state, names))
        pointer = {"config": str(site_config.source), "contracts": [agreed.record()], "rounds": agreed.config.rounds}
        _run_until_stopped(site_kit, site_config.state, {**pointer, LONGEST_MESSAGE: longest}, names)


def leave(
    kit: Kit,
    config: Annotated[Path, typer.Option(metavar="SITE.toml", help="The site's file, which names its state folder.")],
    state: Annotated[
        str,
        typer.Option(metavar="keep|wipe", help="keep: the state stays; wipe: only the ledgers stay.", show_default=False),
    ],
    contract: AgreedContract = None,
) -> None:
    """Leave a federation permanently; the other sites continue.

    The site answers the server's next order with its last message, closes its ledger, and ends. The shared model keeps what
    it has learned from the site. With --state wipe only two ledgers stay: of what left the site, and of its privacy budget.
    """
    from fedmutual.rundir.folder import is_locked
    from fedmutual.sites import leaving
    from fedmutual.sites.contract import read_contract
    from fedmutual.sites.flare.doctor import check_owner
    from fedmutual.sites.flare.kits import FEDERATION, open_kit
    from fedmutual.sites.site_settings import read_site_file
    from fedmutual.user_code import plugins

    if state not in ("keep", "wipe"):
        exit_with_error(f"--state: keep or wipe, not {state!r}", Code.BAD_INPUT)
    site_kit, site_config = open_kit(kit, "site"), read_site_file(config)
    check_owner(site_kit, site_config)
    with plugins.use_rule(site_config.code):
        agreed = read_contract(contract or site_kit.folder / FEDERATION)
    folder, names = site_config.state, tuple(run.name for run in agreed.list_runs())
    if not any((folder / name).exists() for name in names):
        exit_with_error(f"{folder}: has no state of federation {agreed.name!r}; nothing to leave", Code.BAD_INPUT)
    is_told = leaving.begin_leave(folder, names, wipe=state == "wipe")
    if not is_told and not is_locked(folder):
        exit_with_error("the site's process does not run; start it, and the site leaves at the next order", Code.BAD_INPUT)
    if not is_told:
        print_text("the site leaves at the server's next order; Ctrl-C ends only this display")
    if agreed.is_masked:
        print_warning("the server can compare the last sum with this site and the next, as when a site is absent")
    while is_locked(folder):
        time.sleep(0.5)
    if not leaving.has_left(folder, names):
        exit_with_error("the site's process ended before the server knew; give `fedmutual leave` again", Code.BAD_INPUT)
    leaving.close_state(folder)
    what_stays = "ledgers are" if state == "wipe" else "state is"
    print_text(f"this site has left federation {agreed.name!r}; its {what_stays} kept in {folder}", soft_wrap=True)


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
    from fedmutual.sites import ledger

    folder = ledger.find_ledger(path)
    lines = ledger.read_ledger(folder)
    if as_json:
        typer.echo(json.dumps({"folder": str(folder), "totals": ledger.count_totals(lines), "left": lines}))
        return
    out.print(_make_tensor_table(lines) if full else _make_ledger_table(ledger.summarise_ledger(lines)))
    for to, counts in ledger.count_totals(lines).items():
        messages = format_count(counts["messages"], "message")
        print_text(f"to {to}: {messages} of {counts['bytes']:,} bytes, of which tensors {counts['tensors']:,}")


def _make_ledger_table(rows: Iterable[Mapping[str, Any]]) -> Table:
    """Return a table with one line for each kind of message, with the rounds in which messages of this kind left."""
    table = make_table("round", "what", "to", "messages", "tensors", "bytes each", texts=3, padding=(0, 1, 0, 0))
    table.add_column("beside them", overflow="fold")
    table.add_column("bytes in all", justify="right", no_wrap=True)
    for row in rows:
        first, last = row["first"], row["last"]
        rounds = f"{first}-{last}" if last > first else str(first) if first else "start"
        size, count = f"{row['size']:,}" if row["tensors"] else "-", str(row["tensors"] or "-")
        beside = escape(", ".join(row["beside"])) or "-"
        texts = map(escape, (rounds, row["what"], row["to"]))
        table.add_row(*texts, f"{row['messages']:,}", count, size, beside, f"{row['bytes']:,}")
    return table


def _make_tensor_table(lines: Sequence["Line"]) -> Table:
    """Return a table with one line for each tensor of each message."""
    table = make_table("round", "phase", "to", "tensor", "type", "shape", "bytes", "sha256", texts=6, padding=(0, 1, 0, 0))
    for line in lines:
        for tensor in line["tensors"]:
            shape = "x".join(map(str, tensor["shape"])) or "one"
            texts = map(escape, (str(line["round"]), str(line["phase"]), line["to"], tensor["name"], tensor["dtype"], shape))
            table.add_row(*texts, f"{tensor['bytes']:,}", tensor["sha256"])
    return table


def doctor(
    kit: Kit,
    config: Annotated[Path | None, typer.Option(metavar="SITE.toml", help="Your site's file, which is checked too.")] = None,
    contract: AgreedContract = None,
    trust_module: TrustModule = None,
) -> None:
    """Check the connection to the server: kit, clock, name, port, TLS, versions; with --config also your data and model.

    Changes nothing. Exit code 0: no problem; 2: a problem, printed with its fix.
    """
    from fedmutual.sites.flare.doctor import run_checks
    from fedmutual.sites.modules import leave_working_folders

    leave_working_folders()
    grades = []
    for finding in run_checks(kit, config, contract, _parse_module_names(trust_module)):
        print_text(f"{finding.grade:5} {finding.text}", soft_wrap=True)
        grades.append(finding.grade)
    if wrong := grades.count("wrong"):
        exit_with_error(f"{wrong} of {len(grades)} checks failed", Code.BAD_INPUT)


def watch(
    kit: Kit,
    config: Annotated[
        Path | None, typer.Option(metavar="SITE.toml", help="Your site's file, which names its state folder.")
    ] = None,
    state: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="The state folder of the site or server; the server's default is server."),
    ] = None,
    port: Annotated[int, typer.Option(min=0, max=65535, help="The port of the page; 0 takes a free one.")] = 8080,
    address: Annotated[
        str, typer.Option(help="The address of this host at which the page is served; the default is this host alone.")
    ] = "127.0.0.1",
    name: Annotated[
        str | None, typer.Option(metavar="FEDERATION", help="The federation; the default is the one that was active last.")
    ] = None,
    token_file: Annotated[
        Path | None, typer.Option(metavar="FILE", help="A file with the token of the page; the default is a new token.")
    ] = None,
) -> None:
    """Serve a page on this host that shows the federation as this participant may see it, until the command is stopped.

    The page only reads: a site sees its own scores and what has left it, the server and leads see what sites disclose. The
    address that is printed holds a token: who knows it can see the page. /metrics has the numbers for Prometheus, /health
    tells whether the site or the server runs.
    """
    import secrets

    from fedmutual.sites.flare.kits import open_kit
    from fedmutual.sites.monitor import Monitor
    from fedmutual.sites.site_settings import read_site_file
    from fedmutual.sites.watch_page import Watch, WatchServer, read_token

    own_kit = open_kit(kit)
    if config is not None and own_kit.kind != "site":
        exit_with_error(
            f"--config names the file of a site, and this is the kit of a {own_kit.kind}; remove it", Code.BAD_INPUT
        )
    if state is not None and own_kit.kind == "lead":
        exit_with_error("--state: a lead has no state folder; remove it", Code.BAD_INPUT)
    if state is None and config is not None:
        state = read_site_file(config).state
    if own_kit.kind == "site" and state is None:
        exit_with_error("name the site's file by --config, or its state folder by --state", Code.BAD_INPUT)
    folder = None if own_kit.kind == "lead" else (state or Path("server")).resolve()
    token = secrets.token_urlsafe(32) if token_file is None else read_token(token_file)
    with Monitor(own_kit, folder, name) as monitor, WatchServer(Watch(monitor, token, print_warning), address, port) as page:
        shown = token if token_file is None else "TOKEN"  # the operator knows it, and a log need not
        print_text(f"http://{page.host}/?token={shown}  Ctrl-C ends it", soft_wrap=True)
        if not page.is_local:
            print_warning(
                f"other hosts can connect to {page.host}, and nothing is encrypted: allow only a proxy with TLS to connect"
            )
        try:
            with stop_on_sigterm():
                page.serve_forever()
        except KeyboardInterrupt as interrupt:
            sys.exit(describe_stop(interrupt)[1])


def _parse_module_names(names: list[str] | None) -> list[str]:
    """Return the modules of --trust-module. Exit if a name is not the name of a module."""
    from fedmutual.sites.schema import check_modules

    try:
        return [*check_modules(tuple(names or ()))]
    except ValueError as problem:
        exit_with_error(f"--trust-module: {problem}", Code.BAD_INPUT)


def _print_leaves(runtime: "SiteRuntime") -> None:
    """Print which tensors may leave a site, and what else, for its operator."""
    import torch

    from fedmutual.sites.private_values import describe_disclosure

    table = Table("phase", "tensor", "type", "shape", "bytes", title="All that may leave this site")
    for phase, spec in runtime.list_leaves().items():
        for name, (dtype, shape) in spec.items():
            size, sides = math.prod(shape) * getattr(torch, dtype).itemsize, "x".join(map(str, shape)) or "one"
            row = phase, name, dtype, sides, f"{size:,}"
            if is_json():
                print_text(f"may leave: {', '.join(row)} bytes")
            table.add_row(*row)
    if runtime.is_evaluator:
        sent = "no score" if runtime.experiment.config.disclosure(runtime.site) == "none" else "its scores on all its rows"
        print_text(f"This site trains nothing, and no tensor leaves it; of the shared model {sent} once a round.")
        return
    if not is_json():
        out.print(table)
    if runtime.is_masked:
        what = "These tensors are masked and sent to the server with keys, encrypted shares and signatures. "
        print_text(f"{what}The server learns only the sum over all sites.")
    elif runtime.peers is not None:
        print_text("These go to the other sites, through the server, encrypted.")
    else:
        print_text("These go to the server, which can read them.")
    print_text(describe_disclosure(runtime.experiment, runtime.site, runtime.trains_alone), soft_wrap=True)


def _run_until_stopped(kit: "kits.Kit", state: Path, pointer: Mapping[str, Any], runs: Collection[str] = ()) -> None:
    """Run FLARE's process of a participant until it is stopped, its certificate ends, or the site has left.

    The exit code states the reason.

    runs: the names of the federation's runs, which a site may leave.
    """
    from fedmutual.sites.flare.kits import check_valid
    from fedmutual.sites.flare.workspace import run_process
    from fedmutual.sites.leaving import has_left

    def print_end(interrupt: KeyboardInterrupt) -> int:
        if has_left(state, runs):
            print_text("this site has left the federation; its ledger is closed")
            return 0
        try:
            check_valid(kit)
        except RunError as problem:
            print_text(f"{problem}. Saved rounds are kept", soft_wrap=True)
            return Code.BAD_INPUT
        how, stop_code = describe_stop(interrupt)
        text = f"{how}; saved rounds are kept"
        if is_json():
            print_text(text)
        else:
            err.print(text, highlight=False, markup=False)
        return stop_code

    try:
        with stop_on_sigterm():
            code = run_process(kit, state, pointer, print_end)
    except KeyboardInterrupt as interrupt:  # before FLARE runs, or a second one: do not wait for FLARE's threads
        os._exit(print_end(interrupt))
    if code in (Code.STOPPED, Code.TERMINATED, Code.BAD_INPUT):
        sys.exit(code)
    if code:
        exit_with_error(f"ended with code {code}; see {state / 'flare' / 'log.txt'}", Code.DIVERGED)
