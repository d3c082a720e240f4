"""Does it pay on these data? Several methods over several seeds, each a run of its own, cached by its folder."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from fedmutual.config import Config, with_algorithm
from fedmutual.errors import ConfigError
from fedmutual.records.events import Observer
from fedmutual.records.folder import CONFIG, check_free, reopen
from fedmutual.runs import Run, run

METHODS = ("fml", "fedavg", "fedprox", "independent")


def variants(
    config: Config, methods: Sequence[str], seeds: int, own: Mapping[str, Any] | None = None
) -> Iterator[tuple[str, int, Config]]:
    """(method, seed, configuration): the same experiment under each method, from the configured seed upwards.

    own: settings for those methods that have them, beside those of the configuration.

    Raises:
        ConfigError: there is no method, one comes twice, or one does not fit the configuration.
    """
    if not methods:
        raise ConfigError(f"--methods names no algorithm; name some, separated by commas: {','.join(METHODS)}")
    twice = [method for n, method in enumerate(methods) if method in methods[:n]]
    if twice:
        raise ConfigError(f"--methods names {twice[0]!r} twice; name each algorithm once")
    for method in methods:
        changed, _ = with_algorithm(config, method, own)
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
    own: Mapping[str, Any] | None = None,
) -> list[Run]:
    """Run every method with every seed into OUT/<method>/<seed>; a finished one is not trained again on resume.

    label: told the name of each run before it starts. own: as `variants` takes it.

    Raises:
        UserError: as `run`; what is wrong with a method or a folder, before the first is trained.
    """
    planned = [(m, seed, variant, out / m / str(seed)) for m, seed, variant in variants(config, methods, seeds, own)]
    for _, _, variant, folder in planned:
        if resume and (folder / CONFIG).exists():
            reopen(folder, variant)
        else:
            check_free(folder)
    runs = []
    for method, seed, variant, folder in planned:
        label(f"{method}, seed {seed}")
        runs.append(run(variant, folder, resume=resume, observers=observers))
    return runs
