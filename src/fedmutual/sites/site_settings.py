"""The settings of one site, and the experiment that they make together with the contract."""

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np

from fedmutual.calling import Shapes, format_shape
from fedmutual.config import Config, merge_overrides, parse_config, read_tables
from fedmutual.config.checks import parse_table
from fedmutual.data import PublicSet, load, prepare
from fedmutual.data.examples import list_names
from fedmutual.data.federation import list_public_parts
from fedmutual.data.space import describe_column_difference
from fedmutual.data.statistics import Moments, make_layout
from fedmutual.data.text import HASH
from fedmutual.errors import ConfigError, format_count
from fedmutual.federation import build
from fedmutual.federation.experiment import Experiment
from fedmutual.models.pretrained import IMAGENET
from fedmutual.sites.contract import Contract, read_contract
from fedmutual.sites.modules import ListedModules
from fedmutual.sites.schema import SiteFile
from fedmutual.sites.seedset import SeedsetFile, collect_seedset, make_seedset_path, write_seedset_file
from fedmutual.user_code import plugins


@dataclass(frozen=True)
class SiteSettings:
    """The contents of a site's own file, and the path of that file."""

    file: SiteFile
    source: Path

    @property
    def state(self) -> Path:
        """The folder with the state of the site, which must not be lost."""
        return _resolve_path(self.source, self.file.state.folder)

    @property
    def code(self) -> ListedModules:
        """The modules that the site may import where its own file or the contract names code."""
        listed = self.file.trust.modules
        return ListedModules(
            listed,
            [self.source.parent],
            lambda name: f"write trust = {{ modules = {json.dumps([*listed, name])} }} into {self.source}",
        )


def read_site_file(path: Path) -> SiteSettings:
    """Read a site's own file and return its settings. Relative paths in the file start at the folder of the file.

    Raises ConfigError where the file cannot be read, or a key is wrong or missing.
    """
    file: SiteFile = parse_table(SiteFile, read_tables(path), str(path))
    if file.data.name is None:
        raise ConfigError(f"{path}: the key 'data.name' is missing, the source of the site's examples")
    data: dict[str, Path | str] = {
        key: _resolve_path(path, value) for key in ("root", "test") if (value := getattr(file.data, key)) is not None
    }
    if file.data.tokenizer not in (None, HASH):
        data["tokenizer"] = str(_resolve_path(path, Path(file.data.tokenizer)))
    pretrained = file.model.pretrained
    model = {} if pretrained in (None, IMAGENET) else {"pretrained": str(_resolve_path(path, Path(pretrained)))}
    tables = {"data": file.data.model_copy(update=data), "model": file.model.model_copy(update=model)}
    return SiteSettings(file.model_copy(update=tables), path.resolve())


def _resolve_path(source: Path, path: Path) -> Path:
    return (source.parent / path).resolve()


def build_site(contract: Contract, settings: SiteSettings, moments: Moments | None = None) -> Experiment:
    """Return the experiment of one site, after all checks that need no other site.

    moments: what standardises inputs, with data.mean = "federated"; None: nothing, until the server has sent it. Raises
    UserError where the file, the data or the network of the site does not fit the contract.
    """
    config = configure_site(contract, settings)
    if contract.layout is not None and moments is None:
        count = len(contract.layout.inputs)
        moments = Moments((0.0,) * count, (1.0,) * count)
    with plugins.use_rule(settings.code):
        experiment = build.build(config, gathered=_find_seedset(contract, settings), moments=moments)
    fault = _find_fault(contract, experiment)
    if fault is not None:
        raise ConfigError(f"{settings.source}: {fault}")
    if contract.layout is None:
        return experiment
    return replace(experiment, algorithm=replace(experiment.algorithm, start=contract.algorithm.start))


def _find_fault(contract: Contract, experiment: Experiment) -> str | None:
    """Return in one clause how the examples of a site differ from those of the contract, or None."""
    space, sites = experiment.data.space, contract.sites
    difference = describe_column_difference(space.columns, sites.columns)
    if difference is not None:
        return (
            f"the examples have {difference}, and the federation agreed on {list_names(sites.columns or ())} "
            "(sites.columns); change the columns of the file to these"
        )
    if space.shape != sites.shape and (experiment.nets.shares or experiment.algorithm.public):
        return (
            f"the examples have the shape {format_shape(space.shape)}, and the federation agreed on "
            f"{format_shape(sites.shape)} (sites.input); resize images with 'data.size', or change the columns to fit"
        )
    for name, scaling in (space.scaling.inputs or {"x": space.scaling}).items():
        dtype, agreed = scaling.dtype or "float32", sites.inputs[name].dtype if name in sites.inputs else None
        if agreed not in (None, dtype) and (experiment.nets.shares or experiment.algorithm.public):
            return (
                f"the input {name!r} is of type {dtype}, and the federation agreed on {agreed} (sites.input); let the lead "
                f'declare {{ {name} = {{ shape = {format_shape(sites.inputs[name].shape)}, dtype = "{dtype}" }} }}'
            )
    if contract.layout is not None:
        layout, agreed_layout = make_layout(space, contract.config.data.columns), contract.layout
        if layout != (agreed_layout if sites.columns is None else replace(agreed_layout, inputs=layout.inputs)):
            return (
                "data.mean = 'federated' sums the rows of all sites, but this site's rows have other classes, another "
                "shape, or columns with names; change the data to fit 'data.classes' and 'sites.input', or let the lead set "
                "'sites.columns'"
            )
    return None


def configure_site(contract: Contract, settings: SiteSettings) -> Config:
    """Return the full configuration of one site: a federation of one client, with the site's own data.

    Raises ConfigError where the contract does not name the site, or a key of the site's file is wrong or does not fit the
    contract.
    """
    if settings.file.site not in contract.sites.names:
        raise ConfigError(
            f"{settings.source}: site {settings.file.site!r} is not of federation {contract.name!r}; the sites of this "
            f"federation are {', '.join(contract.sites.names)}; correct the key 'site'"
        )
    sections = {"data", "model", "algorithm", "training", "optimizer", "share"}
    client_tables = settings.file.model_dump(exclude_unset=True, include=sections)
    client = {"data": {"name": "digits"}, **{key: table for key, table in client_tables.items() if table != {}}}
    overrides = settings.file.model_dump(exclude_none=True, include={"engine", "split", "privacy", "records"})
    for key in ("folds", "fold"):
        if key in overrides["split"]:
            raise ConfigError(
                f"{settings.source}: key 'split.{key}' is one for all sites, in FEDERATION.toml; remove it here"
            )
    tables = merge_overrides(contract.tables, {"clients": {settings.file.site: client}, **overrides})
    with plugins.use_rule(settings.code):
        if "public_file" in overrides["split"] and contract.config.split.public_file is None:
            raise ConfigError(
                f"{settings.source}: key 'split.public_file' is the path of a file that all sites have, and FEDERATION.toml "
                "has no such file; remove it here, or let the lead set it there, too"
            )
        try:
            return parse_config(tables, str(settings.source))
        except ConfigError as problem:
            raise ConfigError(str(problem).replace(f"clients.{settings.file.site}.", "")) from None


def _find_seedset(contract: Contract, settings: SiteSettings) -> Callable[..., PublicSet | None] | None:
    """Return what makes the public seed set of the sites' files, or None where the algorithm uses no public seed set."""
    public_data = contract.algorithm.public
    if public_data is None:
        return None
    if settings.file.public is None:
        raise ConfigError(
            f"{settings.source}: the key 'public.folder' is missing: algorithm {contract.config.algorithm['name']!r} needs "
            "the public seed set; set the key to the folder that holds the file SITE.npz of every site"
        )
    folder = _resolve_path(settings.source, settings.file.public.folder)
    names, all_have = contract.sites.names, contract.config.split.public_file is not None
    return partial(collect_seedset, folder, settings.file.site, names, public_data, contract.public, all_have)


def export_seedset(file: Path, site: Path, folder: Path) -> list[SeedsetFile]:
    """Write the part of a site into a folder, and return the parts. file: FEDERATION.toml. site: the site.toml.

    With `split.public_file` the parts are those of all sites, into which the file is divided. Raises UserError where the
    site has no public rows, or a file cannot be read or written.
    """
    mine = read_site_file(site)
    with plugins.use_rule(mine.code):
        contract, name = read_contract(file), mine.file.site
        config, use = configure_site(contract, mine), contract.algorithm.public
        if use is None:
            raise ConfigError(
                f"{file}: algorithm {config.algorithm['name']!r} has no public seed set to export; `fedmutual data give` is "
                "for contracts with an algorithm that has one, such as fedh2l"
            )
        read, public_file = prepare(config), config.split.public_file
        federation = load(config, read, gathered=lambda *_: None)
        if isinstance(federation.space.shape, Shapes):
            raise ConfigError(
                f"{file}: the examples have several inputs, and the public seed set of real sites has one; choose an "
                "algorithm without public data"
            )
        part = list_public_parts(federation, read)[name]
        rows, examples, has_labels = part.rows, part.examples, use.labelled
        if public_file is not None:
            from fedmutual.data.public_file import read_public_rows  # imports pandas, which takes 0.3 s

            at_site = mine.file.model_dump()["split"]["public_file"]
            path = _resolve_path(mine.source, at_site) if at_site else _resolve_path(file, public_file)
            rows, examples, has_labels = read_public_rows(config, path, federation.spaces)
    if rows is None:
        raise ConfigError(
            f"{file}: the key 'split.public' is not set, the fraction of each site's training data that it gives to all"
        )
    if federation.space.targets != "classes":
        raise ConfigError(
            f"{file}: training.task learns {federation.space.targets}, and the public seed set of real sites is of classes; "
            "choose another algorithm, or the task classification"
        )
    made, sites = list[SeedsetFile](), (name,) if public_file is None else contract.sites.names
    for one, index in zip(sites, np.array_split(rows.index, len(sites)), strict=True):
        labels = rows.with_index(index).labels.astype(np.int64) if has_labels else None
        x = examples.take_one(index.tolist()).numpy()
        made.append(SeedsetFile(one, x, labels, federation.space.classes, read[name].space.scaling))
        write_seedset_file(folder, made[-1])
    return made


def describe_export(exported: Sequence[SeedsetFile], folder: Path) -> Iterator[str]:
    """Yield sentences for the site's operator on the parts that were written."""
    for one in exported:
        path = make_seedset_path(folder, one.site)
        yield f"{path}: {format_count(len(one.x), 'example')} of site {one.site!r}, {one.size:,} bytes"
        if one.labels is not None:
            yield f"of each class: {', '.join(f'{name} {n}' for name, n in zip(one.classes, one.counts, strict=True))}"
    known = "and their labels" if exported[0].labels is not None else "and not their labels"
    if len(exported) > 1:
        yield (
            "These rows are of the file that all sites have. Each site writes these files from its own copy, and the person "
            "who submits the federation needs them, too; where a copy differs, a site does not take part."
        )
        return
    yield (
        "Send this file to all other sites and to the person who submits the federation. They then know these examples "
        f"{known}, and this cannot be undone; the file has no other rows."
    )
