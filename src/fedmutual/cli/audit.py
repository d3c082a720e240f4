"""The command `fedmutual audit`: what attacks learn about the training rows of a run."""

from pathlib import Path
from typing import Annotated

import typer
from rich import box
from rich.table import Table

from fedmutual.cli.arguments import TrustCode
from fedmutual.cli.terminal import out, print_text


def audit(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="The run's folder; its data must still be in their place.")],
    out_folder: Annotated[
        Path | None, typer.Option("--out", help="The folder of audit.json and audit.md; the default is RUN.")
    ] = None,
    trust_code: TrustCode = False,
) -> None:
    """Attack the models of a run, and show what the attacks learn about its training rows. No upper bound.

    Membership inference on personal models, the shared model and the message of one more round; the imprint attack.
    """
    from fedmutual.studies.audit import audit as audit_run
    from fedmutual.studies.audit import write_audit

    result = audit_run(run, trust_code)
    table = Table("client", "model", "sees", "hit rate", "95 % interval", "caught", box=box.SIMPLE)
    for finding in result.findings:
        auc, low, high, caught = (f"{100 * x:.1f} %" for x in finding.membership[2:])
        table.add_row(finding.client, finding.target, finding.attack, auc, f"{low} to {high}", caught)
    out.print(table)
    disclosed = sum(f.membership.succeeds for f in result.findings)
    print_text(f"membership is disclosed in {disclosed} of {len(result.findings)} attacks (50 % is a coin)")
    if result.imprint is None:
        print_text("the imprint attack does not fit this run: no whole shared model of linear layers is sent")
    else:
        counts = ", ".join(f"{rows} of client {client}" for client, rows in result.imprint.items())
        print_text(f"training rows read out of one message by the imprint attack: {counts}")
    values = [value for value in result.epsilon.values() if value is not None]
    print_text(f"differential privacy: epsilon {max(values):.2f} at most" if values else "differential privacy: none")
    print_text("no upper bound: a better attack may learn more")
    out.print(f"page: {write_audit(out_folder or run, result)}", soft_wrap=True)
