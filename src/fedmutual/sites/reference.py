"""The keys of the two files of real sites in words: part of what `fedmutual list keys` prints."""

from collections.abc import Iterable, Iterator

from fedmutual.config.keys import find_table, list_effects
from fedmutual.config.reference import list_reference_keys, render_key
from fedmutual.config.schema import Config, ServerConfig
from fedmutual.sites import schema
from fedmutual.sites.schema import SITE_KEYS, ServerTable, SiteFile, SitesTable

_HEAD = """## FEDERATION.toml

The file that all participants of a [federation of real sites](sites.md) have. It takes the keys above, except for
`partition`, `engine`, `clients`, and the keys of a site's own data and budget, which are in site.toml: {site_keys}. A value
other than the default is an error for keys without effect between real sites: {unused}. For classification `data.classes` is
required. `share.metrics` is "accuracy" unless the file sets it. The file also has the table `sites`, two more keys of
`server`, and one more value of `server.sum`:
"""
_SITE = """
## site.toml

The settings of one site, which are never sent. A table with a name from above takes those keys of the table that each
participant may set; unset keys have the federation's values. `data.name` is required. Paths are relative to the folder of
the file.
"""


def render_sites_page() -> str:
    """Return all keys of both files as Markdown."""
    unused = [key for key, effect in list_effects(Config).items() if effect.unused_on_sites]
    head = _HEAD.format(site_keys=_join_keys(SITE_KEYS), unused=_join_keys(unused))
    lines = [line for _, line in list_federation_keys()]
    return "\n".join([head, *lines, _SITE, *(line for _, line in list_site_keys())])


def _join_keys(keys: Iterable[str]) -> str:
    return ", ".join(f"`{key}`" for key in keys)


def list_federation_keys() -> Iterator[tuple[str, str]]:
    """Yield (dotted key, its line) for the keys of FEDERATION.toml that a configuration lacks."""
    above = {f"server.{name}" for name in ServerConfig.model_fields if name != "sum"}  # which has a value more there
    yield from ((key, line) for key, line in list_reference_keys(ServerTable, "server.") if key not in above)
    yield from list_reference_keys(SitesTable, "sites.")


def list_site_keys() -> Iterator[tuple[str, str]]:
    """Yield (dotted key, its line) for the keys of site.toml."""
    of_clients = "clients.ID.algorithm."
    settings = sorted(key.removeprefix(of_clients) for key, _ in list_reference_keys() if key.startswith(of_clients))
    for name, spec in SiteFile.model_fields.items():
        table = find_table(spec.annotation)
        if table is not None and table.__module__ == schema.__name__:
            yield from list_reference_keys(table, f"{name}.")
        elif table is not None or name == "algorithm":
            listed = ", ".join(settings if table is None else table.model_fields)
            yield name, render_key(f"{name}.KEY", f"as `{name}.KEY` above", "the federation's", listed)
        else:
            yield name, render_key(name, "text", "needed", spec.description or "")
