"""The commands `fedmutual privacy` (the epsilon or the noise of a plan) and `audit` (attacks on a finished run)."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.markup import escape

from fedmutual.cli.arguments import Set, TrustCode, parse_settings
from fedmutual.cli.terminal import Code, describe_stop, err, exit_with_error, make_table, out, print_text, stop_on_sigterm
from fedmutual.errors import ConfigError

if TYPE_CHECKING:
    from fedmutual.config import Config
    from fedmutual.studies.privacy_plan import PrivacyCost

PAGE = "audit.html"


def privacy(
    file: Annotated[
        Path, typer.Argument(metavar="FILE.toml", help="The experiment, or the federation's file.", show_default=False)
    ],
    epsilon: Annotated[
        float | None, typer.Option(min=1e-6, help="Print the sigma for this epsilon; unset, the epsilon for privacy.sigma.")
    ] = None,
    delta: Annotated[float | None, typer.Option(min=1e-30, max=0.5, help="The delta; the default is privacy.delta.")] = None,
    site: Annotated[
        Path | None,
        typer.Option(metavar="SITE.toml", help="The file of one real site: plan its part of a federation, and its budget."),
    ] = None,
    set: Set = None,
) -> None:
    """Plan differential privacy before training: the epsilon of each client for these rounds, batches and noise.

    Example: `fedmutual privacy mnist.toml --epsilon 4 --set privacy.nets=both`
    """
    from fedmutual.config import load_config, read_tables
    from fedmutual.federation import build
    from fedmutual.studies import privacy_plan

    overrides: dict[str, Any] = parse_settings(set) | ({} if delta is None else {"privacy.delta": delta})
    if site is not None:
        from fedmutual.sites import guarantee

        config, costs, spending = guarantee.plan_site(file, site, overrides)
        _print_plan(config, costs, epsilon)
        if epsilon is None and spending is not None:
            budget, spent, total, covered = spending
            print_text(
                f"spent by this site so far: epsilon {spent:.4g}; with these rounds added {total:.4g}; the site's budget is "
                f"{budget:g}, which covers {covered} of {config.rounds} rounds"
            )
            _check_budget(config, dict.fromkeys(costs, total))
        return
    if "sites" in read_tables(file):
        raise ConfigError(f"{file}: is a federation's file, and its data are at the sites; name one site's file with --site")
    # a plan that computes sigma needs none in the file
    config = load_config(file, **({} if epsilon is None else {"privacy.sigma": 1.0}) | overrides)
    costs = privacy_plan.plan_privacy(build.build(config, device="cpu"))
    _print_plan(config, costs, epsilon)
    if epsilon is None:
        _check_budget(config, {client: cost.compute_epsilon(config) for client, cost in costs.items()})


def _print_plan(config: "Config", costs: "dict[str, PrivacyCost]", target: float | None) -> None:
    """Print a table with one line for each client. target: the epsilon that the noise is chosen for, if any."""
    units = "examples" if config.privacy.unit == "example" else "groups"
    table = make_table("client", units, "sampling rate", "steps", "sigma", "epsilon")
    needed = {i: cost.sigma if target is None else cost.find_sigma(target, config) for i, cost in costs.items()}
    for client, cost in costs.items():
        spent = cost._replace(sigma=needed[client]).compute_epsilon(config)
        numbers = (f"{cost.units}", f"{cost.rate:.4g}", f"{cost.steps}", f"{needed[client]:g}", f"{spent:.4g}")
        table.add_row(escape(client), *numbers)
    out.print(table)
    nets = "the meme" if config.privacy.nets == "meme" else "all networks of a client"
    print_text(
        f"noised: {nets}; unit: {config.privacy.unit}; delta {config.privacy.delta:g}; by {config.privacy.accountant!r}"
    )
    if target is not None:
        print_text(f"set privacy.sigma = {max(needed.values()):g}, and the epsilon of every client is at most {target:g}")


def _check_budget(config: "Config", spent: dict[str, float]) -> None:
    """Exit with an error if a client would spend more than the budget. spent: client -> epsilon."""
    budget = config.privacy.epsilon
    exceeding = [client for client, value in spent.items() if budget is not None and value > budget]
    if exceeding:
        exit_with_error(
            f"client {exceeding[0]!r} would spend epsilon {spent[exceeding[0]]:.4g}, and privacy.epsilon is {budget:g}; "
            "increase privacy.sigma (`--epsilon` prints the value), or reduce rounds",
            Code.BAD_INPUT,
        )


def audit(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="The folder of a finished run; its data must still exist.")],
    shadows: Annotated[
        int,
        typer.Option(min=0, help="The number of shadow runs for the stronger membership attack; each takes as long as RUN."),
    ] = 0,
    out_folder: Annotated[
        Path | None, typer.Option("--out", help="The folder of audit.json and audit.html; the default is RUN.")
    ] = None,
    trust_code: TrustCode = False,
) -> None:
    """Attack the models of a finished run with its own data: which rows were trained on, and which can a server read?

    Two attacks: membership inference with intervals, and the imprint attack of a dishonest server. The result is no upper
    bound. Example: `fedmutual audit runs/ward --shadows 8`
    """
    from fedmutual.report.audit import make_membership_table, make_sentences, write_audit
    from fedmutual.report.rendering import check_page
    from fedmutual.report.terminal import make_sheet
    from fedmutual.studies.audit import AUDIT
    from fedmutual.studies.audit import audit as audit_run

    folder = run if out_folder is None else out_folder
    check_page(folder / PAGE)
    try:
        with stop_on_sigterm():
            result = audit_run(run, shadows, folder, trust_code, lambda step: err.print(step, highlight=False, markup=False))
    except KeyboardInterrupt as stop:
        how, code = describe_stop(stop)
        exit_with_error(f"{how}; nothing was written", code)
    out.print(make_sheet(make_membership_table(result)))
    for sentence in make_sentences(result):
        print_text(sentence)
    write_audit(result, folder / PAGE)
    print_text(f"{folder / AUDIT}; page: {folder / PAGE}", soft_wrap=True)
