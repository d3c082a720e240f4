"""`fedmutual demo`: its experiments, and what it prints before torch is imported, which can take 20 s on a new machine."""

import shlex
from itertools import count
from pathlib import Path

from fedmutual.cli.terminal import print_text

EXPERIMENTS = {
    "different-networks": ("fml", "fedavg", "independent"),
    "different-digits": ("fml", "fedavg", "fedprox", "independent"),
}
"""The name of an experiment, without ".toml" in `fedmutual.demo` -> the methods that are compared.

Mutual learning should pay in the first experiment, where each client has few images, and should not pay in the second
experiment, where each client has images of few digits.
"""

EXPECTATIONS = {
    "different-networks": "40 images of all ten digits a client. Alone that is too few, so mutual learning should pay.",
    "different-digits": "60 images of four digits a client. Alone that is enough for these four, and a client is scored on "
    "these four only, so mutual learning should gain little.",
}
"""The name of an experiment -> what its clients hold, and the expected result."""

PAGE = "report.html"
_SECONDS_PER_RUN = 1.4  # measured: 35 runs in 49 s on two cores


def count_runs(seeds: int) -> int:
    """Return the number of runs that the demo trains with this number of seeds."""
    return seeds * sum(map(len, EXPERIMENTS.values()))


def print_plan(folder: Path, seeds: int) -> None:
    """Print what will be trained, about how long the training takes, and where the page will be."""
    runs = count_runs(seeds)
    minutes = max(1, round(runs * _SECONDS_PER_RUN / 60))
    print_text(
        f"The demo trains {runs} runs on handwritten digits: {len(EXPERIMENTS)} experiments, several methods each, "
        f"{seeds} {'seed' if seeds == 1 else 'seeds'}. It takes about {minutes} min on two cores and ends with a page, "
        f"{folder / PAGE}. PyTorch is imported first.",
        soft_wrap=True,
    )
    for name, expectation in EXPECTATIONS.items():
        print_text(f"{name}: {expectation}", soft_wrap=True)


def is_finished(folder: Path) -> bool:
    """Return whether a demo in this folder is finished. The page is written last."""
    return (folder / PAGE).is_file()


def print_finished(folder: Path, seeds: int) -> None:
    """Print where the page of an earlier demo is, and the command that runs the demo again."""
    other = next(path for n in count(2) if not (path := folder.parent / f"{folder.name or 'demo'}-{n}").exists())
    command = shlex.join(("fedmutual", "demo", "--seeds", str(seeds), "--out", str(other)))
    print_text(f"An earlier demo ended; its page is {folder / PAGE}. To run the demo again: `{command}`", soft_wrap=True)
