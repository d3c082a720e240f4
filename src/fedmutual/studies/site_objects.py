"""The caller's objects as a configuration: the data and the network of each participant, by name."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import nn

from fedmutual.config import Config, make_algorithm
from fedmutual.data.objects import make_memory_source
from fedmutual.errors import ConfigError, format_error
from fedmutual.in_memory import PREFIX, hold_objects
from fedmutual.models.copying import copy_networks
from fedmutual.studies.trained_run import Run

Model = nn.Module | str | Callable[..., nn.Module]


@dataclass(frozen=True, kw_only=True)
class Site:
    """One participant: its data and its network.

    train: a torch Dataset of (x, y); a pair (x, y) of arrays, tensors or DataFrames; or a DataFrame with `label`.
    test: test rows in one of these forms; None: a fifth of `train` is held out. label: the column of the targets of a
    DataFrame, or a list of columns of 0 and 1 (several labels of one example).
    model: the personal network of the participant: an nn.Module with its first weights, a name of `fedmutual list models`,
    or a function of (shape, classes) that makes a network; None: the shared architecture.
    settings: keys of this participant alone, for example {"optimizer.lr": 0.01}.
    """

    train: Any
    test: Any = None
    label: str | Sequence[str] | None = None
    model: Model | None = None
    settings: Mapping[str, Any] | None = None


@contextmanager
def hold_sites(
    sites: Mapping[str, Site], shared: Model | None, *methods: Any
) -> Iterator[tuple[dict[str, Any], dict[str, dict[str, Any]]]]:
    """Keep the caller's objects during the block; yield the objects by name, and the table of each client.

    Raises:
        ConfigError: `sites` is no dictionary of `Site` by name, or is empty; or a model is not in a form of `Site.model`.
        DataError: the data of a site cannot be used.
    """
    if not isinstance(sites, Mapping) or not sites or not all(isinstance(site, Site) for site in sites.values()):
        raise ConfigError("argument 'sites' must be a dictionary of fedmutual.Site by name, as {'north': Site(train=...)}")
    objects: dict[str, Any] = {f"method.{type(m).__name__}": type(m) for m in methods if not isinstance(m, str)}
    tables: dict[str, dict[str, Any]] = {}
    for site_name, site in sites.items():
        table = _nest(site.settings or {})
        source = make_memory_source(site.train, site.test, site.label, f"site {site_name!r}")
        objects[f"data.{site_name}"] = lambda source=source: source
        table.setdefault("data", {})["name"] = f"{PREFIX}data.{site_name}"
        if site.model is not None:
            objects[f"model.{site_name}"] = _make_factory(site.model, f"model of site {site_name!r}")
            table.setdefault("model", {})["personal"] = _name_model(site.model, f"model.{site_name}")
        tables[str(site_name)] = table
    if shared is not None:
        objects["shared"] = _make_factory(shared, "argument 'shared'")
    with hold_objects(objects):
        yield objects, tables


def _nest(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return dotted keys as nested tables."""
    tables: dict[str, Any] = {}
    for key, value in settings.items():
        table, _, name = key.partition(".")
        tables.setdefault(table, {})[name] = value
    return tables


def _make_factory(model: Model, place: str) -> Any:
    """Return a function that makes a new network at each call: copies of an nn.Module."""
    if isinstance(model, nn.Module):
        try:
            original = copy_networks(model).cpu()
        except Exception as problem:  # a module may hold objects of any kind
            raise ConfigError(
                f"{place} cannot be copied for each participant ({format_error(problem)}); give a function that makes a new "
                "network at each call, as lambda: Net()"
            ) from problem
        return lambda: copy_networks(original)
    if isinstance(model, str) or callable(model):
        return model
    raise ConfigError(f"{place} is {type(model).__name__}; give an nn.Module, a function that makes one, or a name")


def _name_model(model: Model, name: str) -> str:
    return model if isinstance(model, str) else f"{PREFIX}{name}"


def add_shared_network(settings: Mapping[str, Any] | None, shared: Model | None) -> dict[str, Any]:
    """Return the settings with the name of the shared network."""
    return {**(settings or {}), **({} if shared is None else {"model.shared": _name_model(shared, "shared")})}


def check_shared_network(config: Config, shared: Model | None) -> None:
    """Raise ConfigError if the method needs a shared network and none is given."""
    needed = {"global", "proxy"} & set(make_algorithm(config).scores)
    if needed and shared is None:
        raise ConfigError(
            f"method {config.algorithm['name']!r} shares a network; give it as the argument 'shared', as shared='mlp'"
        )


def check_distinct_networks(sites: Mapping[str, Site], shared: Model | None) -> None:
    """Raise ConfigError if one nn.Module would receive the weights of two participants."""
    owners: dict[int, str] = {}
    for owner, model in (*((f"site {n!r}", s.model) for n, s in sites.items()), ("shared", shared)):
        if isinstance(model, nn.Module) and owners.setdefault(id(model), owner) != owner:
            raise ConfigError(
                f"in_place=True: {owners[id(model)]} and {owner} share one nn.Module, which holds the weights of one; "
                "give each a copy: copy.deepcopy(net)"
            )


def load_in_place(run: Run, sites: Mapping[str, Site], shared: Model | None) -> None:
    """Load the trained weights into the caller's modules."""
    from fedmutual.rundir.record_files import read_model_environment

    personal = read_model_environment(run.folder).models.personal
    for name, site in sites.items():
        if isinstance(site.model, nn.Module) and name in personal:
            site.model.load_state_dict(run.personal_model(name).state_dict())
    if isinstance(shared, nn.Module) and run.complete:
        shared.load_state_dict(run.global_model().state_dict())


def name_methods(methods: Sequence[Any] | Mapping[str, Any]) -> dict[str, Any]:
    """Return the methods by title: by the given titles, or by the names of the algorithms.

    Raises:
        ConfigError: there is no method, or two methods have one name.
    """
    if isinstance(methods, Mapping) and methods:
        return dict(methods)
    names = [method if isinstance(method, str) else type(method).__name__.lower() for method in methods]
    twice = [n for k, n in enumerate(names) if n in names[:k]]
    if twice or not names:
        what = f"has {twice[0]!r} twice" if twice else "is empty"
        raise ConfigError(f"argument 'methods' {what}; give titles: methods={{'a': FML(alpha=0.3), 'b': FML(alpha=0.7)}}")
    return dict(zip(names, methods, strict=True))
