"""`fedmutual demo`: its experiments, and what it prints before torch is imported, which can take 20 s on a new machine."""

import shlex
from importlib.resources import as_file, files
from itertools import count
from pathlib import Path
from typing import Annotated

import typer

import fedmutual
from fedmutual.cli import conclude
from fedmutual.cli.arguments import Jobs, Resume, Seeds
from fedmutual.cli.terminal import format_resume_command, print_text, show_progress
from fedmutual.engines.child_process import start_fork_server_early

EXPERIMENTS = {
    "different-networks": (
        ("fml", "fedavg", "independent"),
        "40 images of all ten digits a client. Alone that is too few, so mutual learning should pay.",
    ),
    "different-digits": (
        ("fml", "fedavg", "fedprox", "independent"),
        "60 images of four digits a client. Alone that is enough for these four, and a client is scored on these four only, "
        "so mutual learning should gain little.",
    ),
}
"""The name of an experiment, without ".toml" in `fedmutual.demo` -> the methods, and the expected result."""

_SECONDS_PER_RUN = 1.4  # measured: 35 runs in 49 s on two cores


def demo(
    out_folder: Annotated[Path | None, typer.Option("--out", help="The folder; the default is runs/demo.")] = None,
    seeds: Seeds = 5,
    jobs: Jobs = None,
    resume: Resume = False,
) -> None:
    """Does federated mutual learning improve models of handwritten digits, for which clients, and with how many bytes?

    Two experiments: clients with few images and different networks, where mutual learning pays; clients with different
    digits, where mutual learning gains little.
    """
    folder = out_folder or Path("runs") / "demo"
    page, runs = folder / "report.html", seeds * sum(len(methods) for methods, _ in EXPERIMENTS.values())
    if page.is_file() and not resume:  # it is written last
        other = next(path for n in count(2) if not (path := folder.parent / f"{folder.name or 'demo'}-{n}").exists())
        command = shlex.join(("fedmutual", "demo", "--seeds", str(seeds), "--out", str(other)))
        print_text(f"An earlier demo ended; its page is {page}. To run the demo again: `{command}`", soft_wrap=True)
        return
    print_text(
        f"The demo trains {runs} runs on handwritten digits: {len(EXPERIMENTS)} experiments, several methods each, "
        f"{seeds} {'seed' if seeds == 1 else 'seeds'}. It takes about {max(1, round(runs * _SECONDS_PER_RUN / 60))} min on "
        f"two cores and ends with a page, {page}. PyTorch is imported first.",
        soft_wrap=True,
    )
    for name, (_, expectation) in EXPERIMENTS.items():
        print_text(f"{name}: {expectation}", soft_wrap=True)
    start_fork_server_early()  # its imports, which take seconds, run beside those below
    from fedmutual.studies.compare import compare

    groups = []
    command = format_resume_command("demo", None, folder, "--seeds", str(seeds))
    with show_progress(command, runs=runs) as watch:
        for name, (methods, _) in EXPERIMENTS.items():
            with as_file(files("fedmutual") / "demo" / f"{name}.toml") as file:
                config = fedmutual.load_config(file)
            trained = compare(config, methods, seeds, folder / name, resume, watch.observe, jobs=jobs)
            groups.append((name, [run.folder for run in trained]))
    conclude.print_comparison(groups, page)
