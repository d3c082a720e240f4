"""Does it pay on these data? Several methods over several seeds, each a run of its own, cached by its folder."""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from fedmutual.config import Config, with_algorithm
from fedmutual.records.events import Observer
from fedmutual.runs import Run, run

METHODS = ("fml", "fedavg", "fedprox", "independent")


def variants(config: Config, methods: Sequence[str], seeds: int) -> Iterator[tuple[str, int, Config]]:
    """(method, seed, configuration): the same experiment under each method, from the configured seed upwards."""
    for method in methods:
        changed, _ = with_algorithm(config, method)
        for seed in range(config.seed, config.seed + seeds):
            yield method, seed, changed.model_copy(update={"seed": seed})


def compare(
    config: Config,
    methods: Sequence[str],
    seeds: int,
    out: Path,
    resume: bool = False,
    observers: Sequence[Observer] = (),
    label: Callable[[str], None] = lambda text: None,
) -> list[Run]:
    """Run every method with every seed into OUT/<method>/<seed>; a finished one is not trained again on resume.

    label: told the name of each run before it starts.
    """
    runs = []
    for method, seed, variant in list(variants(config, methods, seeds)):  # all are checked before the first is trained
        folder = out / method / str(seed)
        label(f"{method}, seed {seed}")
        runs.append(run(variant, folder, resume=resume, observers=observers))
    return runs
