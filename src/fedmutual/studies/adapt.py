"""A newcomer adapts a run's shared model by mutual learning, beside training from scratch and fine-tuning.

Each way is an ordinary run, of a federation of one. The run that the shared model comes from is read, and no client of it is
asked for anything: it gives the shared model, its inputs and its classes, and the newcomer's file gives the rest.
"""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, NoReturn

from fedmutual import data
from fedmutual.calling import format_shape
from fedmutual.config import ALONE, Config, check_scored, merge_overrides, parse_config, read_tables
from fedmutual.config.grid import make_folder_name
from fedmutual.config.keys import FEDERATED, Table
from fedmutual.config.methods import find_adapt_rival, make_algorithm
from fedmutual.core import get_metric, get_target_kind
from fedmutual.data.examples import list_names
from fedmutual.data.labels import UnknownClass
from fedmutual.errors import ConfigError, DataError, RunError, warn_user
from fedmutual.federation import build
from fedmutual.federation.evaluation import score
from fedmutual.files import read_json, write_json
from fedmutual.metric import ACCURACY, KINDS, Metric, describe_undefined
from fedmutual.results.frame import read_method
from fedmutual.role import LOCAL_ONLY
from fedmutual.rundir.checkpoint import make_file_name, read_shared_state
from fedmutual.rundir.file_names import ADAPT, CONFIG, FINE_TUNE, SCRATCH, server_folder
from fedmutual.studies.observers import Watch
from fedmutual.studies.study import Setting, Study, check_folders, list_seeds, train_runs
from fedmutual.studies.trained_run import Run, has_one_scaling, read_space
from fedmutual.tasks import make_task
from fedmutual.user_code.recorded_code import check_tables, set_trust

NAME = "newcomer"  # where the file names none
_SHARED_KEYS = ("shared", "part", "batchnorm")  # the keys of [model] that all participants of a run have in common
_NOT_ALLOWED = {
    "partition": "a newcomer is one participant, and --examples sets its number of examples",
    "clients": "a newcomer is one participant; its settings are in the other tables",
    "share": "a newcomer discloses nothing to others",
    **dict.fromkeys(("model.start", "model.weights", "model.pretrained"), "it is set by each way to adapt"),
}


def adapt(
    run: str | Path,
    file: str | Path,
    out: str | Path,
    sizes: Sequence[int | None] = (50, 100, None),
    seeds: int = 3,
    fedavg: str | Path | None = None,
    resume: bool = False,
    overrides: Mapping[str, Any] | None = None,
    watch: Watch | None = None,
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
        folder, shared = Path(out), _SourceRun(Path(run))
        tuned = shared if fedavg is None else _SourceRun(Path(fedavg))
        _check_apart(folder, shared, tuned)
        newcomer = _Newcomer(Path(file), overrides or {}, shared, tuned)
        read = newcomer.prepare()
        first = newcomer.make_config(newcomer.ways[0], None)
        counts = _select_sizes(sizes, data.load(first, {"": read}), str(file))
        settings = {
            (way, size): Setting(f"{way}, {size} examples", newcomer.make_config(way, n), f"{way}/{size}")
            for size, n in counts.items()
            for way in newcomer.ways
        }
        config_by_way = {way: setting.config for (way, _), setting in settings.items()}
        for config in config_by_way.values():
            build.build(config, prepared={"": read}).build_client(ALONE)
        study = Study([*settings.values()], list_seeds(first, seeds), folder)
        about = {"format": 1, "name": first.name, "from": shared.describe(), "fine-tuned": tuned.describe()}
        _check_same(folder, about, resume)
        check_folders(study.runs, resume)
        metric = get_metric(make_task(shared.config.training.task))
        assert metric is not None  # `_SourceRun` has looked
        first_way = {size: setting.config for (way, size), setting in settings.items() if way == newcomer.ways[0]}
        unchanged = _score_unchanged(shared, first_way, study.seeds, read, metric.name)
        if any(None in of_seeds.values() for of_seeds in (unchanged["as it is"] or {}).values()):
            raise DataError(f"{file}: {_describe_undefined_metric(metric)}")
        write_json(folder / ADAPT, about)
        train_runs(study.runs, resume, watch)
        scores = "val_accuracy" if metric == ACCURACY else "val_metric"
        results: Table = {way: {} for way in newcomer.ways}
        for (way, size), setting in settings.items():
            runs = study.open_runs(setting)
            results[way][size] = {str(seed): _get_last_mean(run, scores, metric) for seed, run in runs.items()}
        networks = {way: (config.model.personal or (config.model.shared,))[0] for way, config in config_by_way.items()}
        about |= {"rounds": first.rounds, "seeds": [*study.seeds], "networks": networks}
        about |= {"accuracy": results} if metric == ACCURACY else {"metric": asdict(metric), "values": results}
        write_json(folder / ADAPT, about | unchanged)


def _get_last_mean(run: Run, scores: str, metric: Metric) -> float:
    """Return the newcomer's main metric after the last round. Raises DataError if the metric is undefined on its rows."""
    if (found := run.summary["personal"][scores]) is None:
        raise DataError(f"{run.folder}: {_describe_undefined_metric(metric)}")
    mean: float = found["last"]["mean"]
    return mean


def _describe_undefined_metric(metric: Metric) -> str:
    undefined = describe_undefined(metric, "the newcomer's validation rows")
    return f"{undefined}; take more rows with split.validation = 0.3"


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


def name_newcomer(file: Path, overrides: Mapping[str, Any]) -> str:
    """Return the name of a newcomer: the key `name` of its file, else `NAME`.

    Raises:
        ConfigError: the file cannot be read.
    """
    return str(merge_overrides(read_tables(file), overrides).get("name", NAME))


class _SourceRun(Run):
    """A run whose shared model is adapted, as after the last saved round."""

    def __init__(self, folder: Path) -> None:
        """Open a run."""
        if not (folder / CONFIG).is_file():
            raise RunError(f"{folder}: is not a run's folder, because it has no {CONFIG}; name a run's folder")
        super().__init__(folder)
        read_shared_state(folder)
        model = self.config.model.model_dump(exclude_defaults=True)
        self.model = {"shared": self.config.model.shared} | {k: model[k] for k in (*_SHARED_KEYS, "adaptor") if k in model}
        """The keys of [model] that describe the shared part."""
        # the newcomer's own runs build these networks, and learn this task
        check_tables({"model": self.model, "training": {"task": self.config.training.task}}, folder)
        self.is_complete = "part" not in self.model
        """Whether the layer of the classes is shared too, so that all must have the same ones."""
        if get_metric(make_task(self.config.training.task)) is None:
            raise RunError(f"{folder}: its task has no main metric to compare by; give the task the member 'metric'")
        self.takes = read_space(folder)
        """The inputs and outputs of its shared model."""
        self.has_one_scaling = has_one_scaling(folder)
        """Whether all of its clients scale their inputs equally."""

    def describe(self) -> Table:
        """Return the identity of this model: it differs for other models, and for this model after further rounds."""
        return {
            "run": str(self.folder),
            "algorithm": self.config.algorithm["name"],
            "title": read_method(self.folder).title,
            "model": self.config.model.shared,
            "round": self.round,
            "sha256": hashlib.sha256((server_folder(self.folder) / make_file_name(self.round)).read_bytes()).hexdigest(),
        }


class _Newcomer:
    """A newcomer's part of a configuration, completed by the run."""

    def __init__(self, file: Path, overrides: Mapping[str, Any], shared: _SourceRun, tuned: _SourceRun) -> None:
        """Read the TOML file, with overrides by dotted key. tuned: has the shared model that is fine-tuned."""
        self.file, self.shared, self.tuned = file, shared, tuned
        tables, task = merge_overrides(read_tables(file), overrides), shared.config.training.task
        if task != "classification" and isinstance(training := tables.get("training", {}), dict):
            tables = {**tables, "training": {"task": task, **training}}
        model = table if isinstance(table := tables.get("model"), dict) else {}
        for key, why in _NOT_ALLOWED.items():
            if key in tables or key.removeprefix("model.") in model:
                raise ConfigError(f"{file}: key {key!r} has no place here: {why}; remove it")
        joined = merge_overrides({"model": shared.model}, {"model": tables.get("model", {})})
        parsed = parse_config({**tables, **joined}, str(file))  # says what is wrong with a key or its type
        check_scored(parsed, str(file))
        if parsed.split.folds is not None and parsed.split.fold is None:
            raise ConfigError(f"{file}: key 'split.folds': adapting trains one model of each size; set split.fold, too")
        if "name" not in tables.get("data", {}):
            raise ConfigError(f"{file}: the key 'data.name' is missing, the source of the newcomer's examples")
        self.algorithm: Table = {"name": parsed.algorithm["name"], **tables.get("algorithm", {})}
        self._check_algorithm(parsed)
        if parsed.training.task != task:
            self._refuse("training.task", repr(parsed.training.task), repr(task))
        for key in (k for k in _SHARED_KEYS if k in model):
            settled = getattr(shared.config.model, key)
            if getattr(parsed.model, key) != settled:
                self._refuse(
                    f"model.{key}", repr(model[key]), ", ".join(settled or ("unset",)) if key == "part" else settled
                )
        self.tables = {**tables, "data": self._complete_data(tables["data"])}

    @property
    def ways(self) -> tuple[str, str, str]:
        """Return the ways to adapt, by the names of their folders: the newcomer's algorithm, training alone, fine-tuning."""
        return make_folder_name(self.algorithm["name"]), SCRATCH, FINE_TUNE

    def _refuse(self, key: str, value: object, settled: object) -> NoReturn:
        """Raise ConfigError for a key with another value than the one that the run determines."""
        raise ConfigError(f"{self.file}: key {key!r} is {value}, and {self.shared.folder} has {settled}; remove the key")

    def _check_algorithm(self, parsed: Config) -> None:
        """Raise an error unless a newcomer can adapt by the algorithm, beside the run whose model is fine-tuned."""
        name = self.algorithm["name"]
        rival = find_adapt_rival(name)
        cannot = f"{self.file}: key 'algorithm.name': a newcomer cannot adapt by {name!r}, because its"
        if rival is None:
            raise ConfigError(f"{cannot} class does not declare `adapt_rival`; remove the key to adapt by FML")
        if missing := {"global", "personal"} - {*make_algorithm(parsed).scores}:
            raise ConfigError(f"{cannot} `scores` lack {min(missing)!r}; add it, or remove `adapt_rival` from the class")
        shared, tuned = self.shared, self.tuned
        if tuned is shared:
            return
        if (found := tuned.config.algorithm["name"]) != rival:
            raise RunError(f"{tuned.folder}: is a run of {found!r}, and --fedavg must name a run of {rival!r}; leave it out")
        if (learned := tuned.config.training.task) != (task := shared.config.training.task):
            raise RunError(f"{tuned.folder}: learns {learned!r}, and {shared.folder} {task!r}; name a run of equal task")

    def _complete_data(self, table: Table) -> Table:
        """Return [data], completed by the classes, size and scaling of a complete shared model; a part fits any data."""
        shared, takes = self.shared, self.shared.takes
        if not shared.is_complete:
            return table
        if tuple(table.get("classes", takes.classes)) != takes.classes:
            self._refuse("data.classes", table["classes"], list_names(takes.classes))
        if shared.has_one_scaling and FEDERATED in (table.get("mean"), table.get("std")):
            raise ConfigError(
                f"{self.file}: 'data.mean' and 'data.std' cannot be {FEDERATED!r} of a newcomer; remove both keys"
            )
        task = make_task(shared.config.training.task, outputs=takes.classes)
        times = list(getattr(task, "times", ()))
        settled: Table = {"times": times} if times else {}
        if KINDS[get_target_kind(task)].is_named:
            settled["classes"] = list(takes.classes)
        if takes.scaling.columns:
            numeric = ("kind", "fill", "mean", "std") if shared.has_one_scaling else ("kind",)
            steps = {"category": ("kind", "values"), "number": numeric, "date": numeric}
            settled["columns"] = {c.name: c.model_dump(include={*steps[c.kind]}) for c in takes.scaling.columns}
        elif shared.has_one_scaling and "mean" not in table and "std" not in table:
            settled |= {"mean": takes.scaling.mean, "std": takes.scaling.std}
        if takes.scaling.size:
            settled["size"] = takes.scaling.size
        return {**settled, **table}

    def make_config(self, way: str, size: int | None) -> Config:
        """Return the ordinary configuration of one of `ways`.

        size: the number of training examples; None: all.
        """
        model_keys = {k: v for k, v in self.tables.get("model", {}).items() if k not in _SHARED_KEYS}
        personal, adaptor = ({k: v for k, v in model_keys.items() if k == key} for key in ("personal", "adaptor"))
        start = {"start": "server"}  # needs a whole model
        algorithm: Table = {"name": LOCAL_ONLY}
        if way == SCRATCH:
            model = {"shared": self.shared.model["shared"], **personal}
        elif way == FINE_TUNE:
            model = {**self.tuned.model, **(start if self.tuned.is_complete else adaptor)}
            model["weights"] = str(self.tuned.folder.resolve())
            if not self.tuned.is_complete:  # a part with an adaptor, in a federation of one
                algorithm = {"name": find_adapt_rival(self.algorithm["name"])}
        else:
            algorithm = self.algorithm
            model = {**self.shared.model, **model_keys, **({} if personal or not self.shared.is_complete else start)}
            model["weights"] = str(self.shared.folder.resolve())
        partition = {"kind": "iid", "clients": 1, **({} if size is None else {"examples": size})}
        tables = {"name": NAME, **self.tables, "partition": partition, "algorithm": algorithm, "model": model}
        return parse_config(tables, str(self.file))

    def prepare(self) -> data.Prepared:
        """Read the newcomer's data, and check that they fit each complete shared model."""
        try:
            read = data.prepare(self.make_config(self.ways[0], None))[""]
        except UnknownClass as problem:
            if not self.shared.is_complete:
                raise  # these are the newcomer's own classes
            raise DataError(
                f"{problem.reason} of the shared model in {self.shared.folder}; rename it with data.labels, or start "
                "from a run that shares only a part (model.part), where a newcomer has outputs of its own"
            ) from None
        sources = (self.shared, self.tuned)
        for source in (s for s in sources if s.is_complete):
            self._check_inputs(read, source)
        divisor = read.space.scaling.divisor
        for source in [s for s in sources if s.takes.scaling.divisor != divisor][:1]:
            warn_user(
                f"the newcomer's inputs are divided by {divisor:g}, and the inputs of {source.folder} were divided by "
                f"{source.takes.scaling.divisor:g}: check that both then have one range"
            )
        return read

    def _check_inputs(self, read: data.Prepared, source: _SourceRun) -> None:
        """Raise ConfigError if the newcomer's inputs or classes do not fit a complete shared model."""
        takes, space = source.takes, read.space
        are_images = all(isinstance(one, tuple) and len(one) == 3 for one in (space.shape, takes.shape))
        resize = f"set data.size = {[*takes.shape][1:]}" if are_images else "give it such examples"
        settled = "remove data.mean and data.std, and the run's are used"
        rescale = settled if self.shared.is_complete else "set both to that run's"
        compared: list[tuple[str, Any, Any, str]] = [("the shape of the examples", space.shape, takes.shape, resize)]
        if takes.columns is not None:
            compared.append(("the columns", space.columns or (), takes.columns, "give the file these, in this order"))
        if not space.numbers:
            compared.append(("the classes", space.classes, takes.classes, "name these in data.classes, in this order"))
        if space.targets == "times":
            compared.append(("key 'data.times'", space.classes, takes.classes, "remove the key"))
        if source.has_one_scaling:
            pairs = {key: (getattr(space.scaling, key), getattr(takes.scaling, key)) for key in ("mean", "std")}
            compared += [(f"key 'data.{key}'", *pair, rescale) for key, pair in pairs.items()]
        for what, ours, theirs, fix in compared:
            if ours != theirs:
                are_names = isinstance(next(iter(theirs), None), str) and isinstance(theirs, tuple)
                ours, theirs = ((list_names if are_names and one else format_shape)(one) for one in (ours, theirs))
                raise ConfigError(
                    f"{self.file}: {what} is {ours}, and the shared model of {source.folder} has {theirs}; {fix}"
                )


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


def _check_apart(folder: Path, *sources: _SourceRun) -> None:
    """Raise RunError where the folder lies in a run that is only read, or is itself a run's."""
    for source in sources:
        if source.folder.resolve() in (folder.resolve(), *folder.resolve().parents):
            raise RunError(f"{folder}: lies in {source.folder}, which is only read; choose another folder with --out")
    if (folder / CONFIG).exists():
        raise RunError(f"{folder}: contains a run, not an adaptation; choose another folder with --out")


def _check_same(folder: Path, about: Table, resume: bool) -> None:
    """Raise RunError where the folder holds an adaptation that is not to be gone on with, or of another shared model."""
    if not (folder / ADAPT).exists():
        return
    if not resume:
        raise RunError(f"{folder}: already contains an adaptation; add --resume, or choose another folder with --out")
    before = read_json(folder / ADAPT)
    for key in ("from", "fine-tuned"):
        recorded = before.get(key) or {}
        if any(recorded.get(k) != value for k, value in about[key].items() if k != "title"):  # earlier versions have none
            raise RunError(
                f"{folder}: began with another shared model than that of {about[key]['run']} after round "
                f"{about[key]['round']}; choose another folder with --out"
            )


def _score_unchanged(
    shared: _SourceRun, configs: Mapping[str, Config], seeds: Sequence[int], read: data.Prepared, metric: str
) -> Table:
    """Return the scores of the unchanged shared model on the newcomer's validation data, and the numbers of examples.

    configs: by the name of the size; they determine the rows.
    """

    def refuse(what: str) -> None:
        raise RunError(f"{shared.folder}: the shared model gives {what} validation rows of the newcomer")

    net, task = shared.global_model() if shared.complete else None, make_task(shared.config.training.task)
    counts: Table = {}
    scores: Table = {size: {} for size in configs}
    for size, config in configs.items():
        for seed in seeds:
            shares = data.load(config.model_copy(update={"seed": seed}), {"": read}).clients[ALONE]
            counts[size] = {"training": len(shares.private), "validation": len(shares.validation)}
            if net is not None:
                scores[size][str(seed)] = score(net, shares.validation, task, "the newcomer", refuse)[metric]
    return {"examples": counts, "as it is": scores if net is not None else None}
