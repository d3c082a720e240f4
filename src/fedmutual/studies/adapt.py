"""A newcomer adapts a run's shared model by mutual learning, beside training from scratch and fine-tuning.

Each way is an ordinary run, of a federation of one. The run that the shared model comes from is read, and no client of it is
asked for anything.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from fedmutual import data
from fedmutual.config import ALONE, Config
from fedmutual.config.keys import Table
from fedmutual.config.methods import find_adapt_rival
from fedmutual.core import get_metric
from fedmutual.data.examples import list_names
from fedmutual.errors import ConfigError, RunError, warn_user
from fedmutual.events import Observer
from fedmutual.federation import build
from fedmutual.federation.evaluation import score
from fedmutual.files import read_json, write_json
from fedmutual.metric import ACCURACY, Metric
from fedmutual.rundir.file_names import ADAPT, CONFIG
from fedmutual.studies import newcomer
from fedmutual.studies.newcomer import Newcomer, SourceRun
from fedmutual.studies.study import Setting, Study, list_seeds
from fedmutual.user_code.recorded_code import set_trust


def adapt(
    run: str | Path,
    file: str | Path,
    out: str | Path,
    sizes: Sequence[int | None] = (50, 100, None),
    seeds: int = 3,
    fedavg: str | Path | None = None,
    resume: bool = False,
    overrides: Mapping[str, Any] | None = None,
    watch: Callable[[str], Observer] | None = None,
    trust_code: bool = False,
) -> None:
    """Adapt a run's shared model to a newcomer's data, and compare with training from scratch and with fine-tuning.

    Each of these ways is trained with every size and seed.

    file: TOML, the newcomer's part of a configuration. sizes: training examples, None for all. fedavg: a run of FedAvg (of
    the `Phase.adapt_rival` of the newcomer's algorithm), whose shared model is fine-tuned; unset, the shared model of `run`.
    Runs are in OUT/<way>/<size>/<seed>, the scores in OUT/adapt.json; accuracies are fractions in [0, 1].
    trust_code: import any code that the runs' folders name.

    Raises:
        UserError: a file, a folder or a setting does not fit; raised before the first training.
        Diverged: a client's loss or weights are not finite.
    """
    with set_trust(trust_code):
        _adapt_shared_model(run, file, out, sizes, seeds, fedavg, resume, overrides, watch)


def _adapt_shared_model(
    run: str | Path,
    file: str | Path,
    out: str | Path,
    sizes: Sequence[int | None],
    seeds: int,
    fedavg: str | Path | None,
    resume: bool,
    overrides: Mapping[str, Any] | None,
    watch: Callable[[str], Observer] | None,
) -> None:
    shared, folder = newcomer.read_source(Path(run)), Path(out)
    tuned = shared if fedavg is None else newcomer.read_source(Path(fedavg))
    _check_apart(folder, shared, tuned)
    joining = newcomer.read_newcomer(Path(file), overrides or {}, shared, tuned)
    if tuned is not shared:
        _check_tuned(joining)
    first, read = joining.make_config(joining.ways[0], None), joining.prepare()
    _note_divisor(read, shared, tuned)
    counts = _select_sizes(sizes, data.load(first, {"": read}), str(file))
    settings = {
        (way, size): Setting(f"{way}, {size} examples", joining.make_config(way, n), f"{way}/{size}")
        for size, n in counts.items()
        for way in joining.ways
    }
    config_by_way = {way: settings[way, next(iter(counts))].config for way in joining.ways}
    first_way = {size: settings[joining.ways[0], size].config for size in counts}
    for config in config_by_way.values():
        build.build(config, prepared={"": read}).build_client(ALONE)
    study = Study([*settings.values()], list_seeds(first, seeds), folder)
    about = {"format": 1, "name": first.name, "from": shared.describe(), "fine-tuned": tuned.describe()}
    _check_same(folder, about, resume)
    study.check_folders(resume)
    write_json(folder / ADAPT, about)
    study.train(resume, watch)
    metric = get_metric(shared.task)
    assert metric is not None  # `read_source` has looked
    scores = "val_accuracy" if metric == ACCURACY else "val_metric"
    results: Table = {way: {} for way in joining.ways}
    for (way, size), setting in settings.items():
        runs = study.open_runs(setting)
        results[way][size] = {str(seed): run.summary["personal"][scores]["last"]["mean"] for seed, run in runs.items()}
    networks = {way: _get_network(config) for way, config in config_by_way.items()}
    table: Table = {"rounds": first.rounds, "seeds": [*study.seeds], "networks": networks}
    table |= {"accuracy": results} if metric == ACCURACY else {"metric": asdict(metric), "values": results}
    write_json(folder / ADAPT, about | table | _score_unchanged(shared, first_way, study.seeds, read, metric))


def _check_tuned(joining: Newcomer) -> None:
    """Raise RunError if the run of --fedavg has another algorithm than the rival of the newcomer's, or other inputs."""
    shared, source = joining.shared, joining.tuned
    folder, run = source.run.folder, shared.run.folder
    name, rival = source.run.config.algorithm["name"], find_adapt_rival(joining.algorithm["name"])
    if name != rival:
        raise RunError(
            f"{folder}: is a run of {name!r}, and --fedavg must name a run of {rival!r}; leave it out to "
            f"fine-tune the model of {run}"
        )
    if shared.is_complete and source.is_complete:  # else the newcomer's data are compared with the complete model
        ours, theirs = _list_inputs(shared), _list_inputs(source)
        for key in (k for k in ours if ours[k] != theirs[k]):
            raise RunError(
                f"{folder}: its shared model takes {key} {theirs[key]}, and the shared model of {run} takes "
                f"{ours[key]}; name a run with equal inputs and classes"
            )


def _list_inputs(source: SourceRun) -> dict[str, str]:
    """Return the inputs of a shared model by their description in messages; augmentation is not part of the inputs."""
    takes = source.takes
    about: dict[str, str] = {
        "training.task =": source.run.config.training.task,
        "examples of the shape": str(list(takes.shape)),
        "data.classes =": list_names(takes.classes),
        "the columns": list_names(takes.columns) if takes.columns else "none",
    }
    words = {"divisor": "inputs divided by", **{key: f"data.{key} =" for key in ("mean", "std", "size")}}
    for key, description in words.items():
        value = takes.scaling.get(key)
        about[description] = str("none" if value is None else value) if takes.agreed else "each client's own"
    return about


def parse_sizes(text: str) -> tuple[int | None, ...]:
    """Return the numbers of examples of a list, None for "all": "50,100,all" -> (50, 100, None).

    Raises:
        ConfigError: a word is neither a number above 0 nor "all", or is repeated.
    """
    words = [word.strip() for word in text.split(",")]
    for n, word in enumerate(words):
        if word != "all" and not (word.isdecimal() and int(word)):
            raise ConfigError(f"--examples {text}: {word!r} is no number of examples; write for example 50,100,all")
        if word in words[:n]:
            raise ConfigError(f"--examples {text}: {word!r} comes twice; write it once")
    return tuple(None if word == "all" else int(word) for word in words)


def _select_sizes(wanted: Sequence[int | None], federation: data.Federation, file: str) -> dict[str, int | None]:
    """Return name of a size -> number of examples (None: all), for the sizes for which there are enough examples."""
    shares = federation.partition["clients"][ALONE]
    most = sum(len(part["rows"]) for kind, part in shares.items() if kind != "counts" and part["of"] == "train")
    over = [n for n in wanted if n is not None and n > most]
    counts = {"all" if n is None else str(n): n for n in wanted if n not in over}
    if not counts:
        raise ConfigError(f"--examples: {file} has {most} training examples; name fewer, or all")
    if over:
        warn_user(f"there are {most} training examples, so --examples {','.join(map(str, over))} is left out")
    return counts


def _note_divisor(read: data.Prepared, *sources: SourceRun) -> None:
    ours = read.scaled.divisor
    for source in sources:
        theirs = source.takes.scaling["divisor"]
        if ours != theirs:
            warn_user(
                f"the newcomer's inputs are divided by {ours:g}, and the inputs of {source.run.folder} were divided by "
                f"{theirs:g}: check that both then have one range"
            )
            return


def _check_apart(folder: Path, *sources: SourceRun) -> None:
    """Raise RunError where the folder lies in a run that is only read, or is itself a run's."""
    for source in sources:
        read = source.run.folder
        if read.resolve() in (folder.resolve(), *folder.resolve().parents):
            raise RunError(f"{folder}: lies in {read}, which is only read; choose another folder with --out")
    if (folder / CONFIG).exists():
        raise RunError(f"{folder}: contains a run, not an adaptation; choose another folder with --out")


def _check_same(folder: Path, about: Table, resume: bool) -> None:
    """Raise RunError where the folder holds an adaptation that is not to be gone on with, or of another shared model."""
    if not (folder / ADAPT).exists():
        return
    if not resume:
        raise RunError(
            f"{folder}: already contains an adaptation; add --resume to resume it, or choose another folder with --out"
        )
    before = read_json(folder / ADAPT)
    for key in ("from", "fine-tuned"):
        recorded = before.get(key) or {}
        if any(recorded.get(k) != value for k, value in about[key].items() if k != "title"):  # earlier versions have none
            raise RunError(
                f"{folder}: began with another shared model than that of {about[key]['run']} after round "
                f"{about[key]['round']}; choose another folder with --out"
            )


def _get_network(config: Config) -> str:
    return (config.model.personal or (config.model.shared,))[0]


def _score_unchanged(
    shared: SourceRun, configs: Mapping[str, Config], seeds: Sequence[int], read: data.Prepared, metric: Metric
) -> Table:
    """Return the scores of the unchanged shared model on the newcomer's validation data, and the numbers of examples.

    configs: by the name of the size; they determine the rows.

    Raises:
        RunError: an output of the model is not finite.
    """

    def refuse(what: str) -> None:
        raise RunError(f"{shared.run.folder}: the shared model gives {what} validation rows of the newcomer")

    net = shared.run.global_model() if shared.run.complete else None
    counts: Table = {}
    scores: Table = {size: {} for size in configs}
    for size, config in configs.items():
        for seed in seeds:
            shares = data.load(config.model_copy(update={"seed": seed}), {"": read}).clients[ALONE]
            counts[size] = {"training": len(shares.private), "validation": len(shares.validation)}
            if net is not None:
                scores[size][str(seed)] = score(net, shares.validation, shared.task, "the newcomer", refuse)[metric.name]
    return {"examples": counts, "as it is": scores if net is not None else None}
