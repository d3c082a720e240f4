"""Start and end the process of a server or a site from the command line, and show its operator which tensors may leave."""

import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.table import Table

from fedmutual.cli.terminal import Code, Terminated, err, exit_with_error, out, print_text, stop_on_sigterm

if TYPE_CHECKING:
    from fedmutual.core import Spec
    from fedmutual.sites.flare.kits import Kit


def parse_module_names(names: list[str] | None) -> list[str]:
    """Return the modules of --trust-module. Exit if a name is not the name of a module."""
    from fedmutual.sites.schema import check_modules

    try:
        return [*check_modules(tuple(names or ()))]
    except ValueError as problem:
        exit_with_error(f"--trust-module: {problem}", Code.BAD_INPUT)


def format_reminder(kit: "Kit") -> str:
    """Return a reminder if the certificate expires soon, else an empty text."""
    return f", in {kit.days} days; {kit.reminder}" if kit.reminder else ""


def check_connection(kit: "Kit") -> None:
    """Exit if server and kit do not trust each other; print any other obstacle of the connection."""
    from fedmutual.sites.flare.connectivity import find_obstacle

    text, is_temporary = find_obstacle(kit) or ("", True)
    if not is_temporary:
        exit_with_error(text, Code.BAD_INPUT)
    if text:
        print_text(f"{text}. The site tries again until the server answers", soft_wrap=True)


def run_until_stopped(kit: Any, state: Path, pointer: Mapping[str, Any]) -> None:
    """Run FLARE's process of a participant until it is stopped; exit with the code of the reason.

    Raises:
        ConfigError: as `run_process`.
        RunError: as `run_process`.
    """
    from fedmutual.sites.flare import run

    def print_end(interrupt: KeyboardInterrupt) -> int:
        ending, code = (
            ("stopped by SIGTERM", Code.TERMINATED)
            if isinstance(interrupt, Terminated)
            else ("stopped by Ctrl-C", Code.STOPPED)
        )
        err.print(f"{ending}; saved rounds are kept", highlight=False, markup=False)
        return code

    try:
        with stop_on_sigterm():
            code = run.run_process(kit, state, pointer, print_end)
    except KeyboardInterrupt as interrupt:  # before FLARE runs, or a second one: do not wait for FLARE's threads
        os._exit(print_end(interrupt))
    if code in (Code.STOPPED, Code.TERMINATED):
        sys.exit(code)
    if code:
        exit_with_error(f"ended with code {code}; see {state / 'flare' / 'log.txt'}", Code.DIVERGED)


def print_leaves(leaves: Mapping[str, "Spec"], is_peer_to_peer: bool, is_masked: bool) -> None:
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
    if is_masked:
        print_text(
            "These tensors are masked and sent to the server with keys, encrypted shares and signatures. The server learns "
            "only the sum over all sites."
        )
    else:
        to = "to the other sites, through the server, encrypted" if is_peer_to_peer else "to the server, which can read them"
        print_text(f"These go {to}.")
