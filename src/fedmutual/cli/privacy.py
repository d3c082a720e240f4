"""The command `fedmutual privacy`: what a guarantee will cost, as a table."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich import box
from rich.markup import escape
from rich.table import Table

from fedmutual.cli.arguments import Set
from fedmutual.cli.terminal import Code, exit_with_error, out, print_text

if TYPE_CHECKING:
    from fedmutual.config import Config
    from fedmutual.studies.privacy_plan import Cost


def privacy(
    file: Annotated[
        Path, typer.Argument(metavar="FILE.toml", help="The experiment, or the federation's file.", show_default=False)
    ],
    epsilon: Annotated[
        float | None, typer.Option(min=1e-6, help="Tell the sigma for this epsilon; else the epsilon for privacy.sigma.")
    ] = None,
    delta: Annotated[float | None, typer.Option(min=1e-30, max=0.5, help="Else privacy.delta.")] = None,
    site: Annotated[
        Path | None,
        typer.Option(metavar="SITE.toml", help="Of a federation of real sites: the part of this site, and its budget."),
    ] = None,
    set: Set = None,
) -> None:
    """Plan differential privacy before anything is trained: epsilon for these rounds, batches and noise, of each client.

    Example: `fedmutual privacy mnist.toml --epsilon 4 --set privacy.nets=both`
    """
    from fedmutual.config import parse_override
    from fedmutual.federation import build
    from fedmutual.studies import privacy_plan

    given: dict[str, Any] = dict(parse_override(text) for text in set or ())
    given |= {} if delta is None else {"privacy.delta": delta}
    if site is not None:
        _of_site(file, site, epsilon, given)
        return
    config = privacy_plan.read_config(file, given, epsilon is not None)
    costs = privacy_plan.plan(build.build(config, device="cpu"))
    _show(config, costs, epsilon)
    _check(config, {client: cost.epsilon(config) for client, cost in costs.items()} if epsilon is None else {})


def _of_site(file: Path, site: Path, epsilon: float | None, given: dict[str, Any]) -> None:
    """The part of one real site, and its budget."""
    from fedmutual.sites import guarantee

    plan = guarantee.plan_site(file, site, given)
    _show(plan.config, plan.costs, epsilon)
    if epsilon is None and plan.budget is not None:
        print_text(
            f"spent on these data so far: epsilon {plan.spent:.4g}; with all these rounds besides {plan.total:.4g}; the "
            f"site's budget is {plan.budget:g}"
        )
        _check(plan.config, dict.fromkeys(plan.costs, plan.total))


def _show(config: "Config", costs: "dict[str, Cost]", wished: float | None) -> None:
    """A line a client; with `wished`, the noise for that epsilon."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    units = "examples" if config.privacy.unit == "example" else "groups"
    for title in ("client", units, "sampling rate", "steps", "sigma", "epsilon"):
        table.add_column(title, justify="left" if title == "client" else "right")
    needed = {i: cost.sigma if wished is None else cost.sigma_for(wished, config) for i, cost in costs.items()}
    for client, cost in costs.items():
        spent = cost._replace(sigma=needed[client]).epsilon(config)
        numbers = (f"{cost.units}", f"{cost.rate:.4g}", f"{cost.steps}", f"{needed[client]:g}", f"{spent:.4g}")
        table.add_row(escape(client), *numbers)
    out.print(table)
    nets = "the meme" if config.privacy.nets == "meme" else "all networks of a client"
    print_text(
        f"noised: {nets}; unit: {config.privacy.unit}; delta {config.privacy.delta:g}; by {config.privacy.accountant!r}"
    )
    if wished is not None:
        print_text(f"set privacy.sigma = {max(needed.values()):g}, and no client's epsilon is above {wished:g}")


def _check(config: "Config", spent: dict[str, float]) -> None:
    """End with the exit code of bad input where a client's part costs more than the budget."""
    budget = config.privacy.epsilon
    over = [client for client, value in spent.items() if budget is not None and value > budget]
    if over:
        exit_with_error(
            f"client {over[0]!r} would spend epsilon {spent[over[0]]:.4g}, and privacy.epsilon is {budget:g}; raise "
            "privacy.sigma (`--epsilon` tells how far), or lower rounds",
            Code.BAD_INPUT,
        )
