"""The command `fedmutual audit`: attacks on a finished run; their results as a table and a page."""

from pathlib import Path
from typing import Annotated

import typer

from fedmutual.cli.arguments import TrustCode
from fedmutual.cli.terminal import Code, Terminated, err, exit_with_error, out, print_text, stop_on_sigterm

PAGE = "audit.html"


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
        code = Code.TERMINATED if isinstance(stop, Terminated) else Code.STOPPED
        exit_with_error("stopped; nothing was written", code)
    out.print(make_sheet(make_membership_table(result)))
    for sentence in make_sentences(result):
        print_text(sentence)
    write_audit(result, folder / PAGE)
    print_text(f"{folder / AUDIT}; page: {folder / PAGE}", soft_wrap=True)
