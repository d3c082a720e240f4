"""What `fedmutual list` prints of keys of real sites, and of each method by what its class declares."""

import re
import sys
from collections.abc import Iterable, Iterator

from torch import nn

from fedmutual.algorithms import ALGORITHMS
from fedmutual.algorithms.fork import is_summable
from fedmutual.algorithms.peers import make_agreed_state, make_proxy_state
from fedmutual.algorithms.registry import METHODS
from fedmutual.config.keys import find_table, list_effects
from fedmutual.config.reference import describe_about, list_reference_keys, render_key
from fedmutual.config.schema import Config, ServerConfig
from fedmutual.core import Algorithm, Message
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
    above = {f"server.{name}" for name in ServerConfig.model_fields if name != "sum"}  # which has a value more there
    keys = [line for key, line in list_reference_keys(ServerTable, "server.") if key not in above]
    keys += [line for _, line in list_reference_keys(SitesTable, "sites.")]
    return "\n".join([head, *keys, _SITE, *_list_site_keys()])


def _join_keys(keys: Iterable[str]) -> str:
    return ", ".join(f"`{key}`" for key in keys)


def _list_site_keys() -> Iterator[str]:
    """Yield the line of each key of site.toml."""
    of_clients = "clients.ID.algorithm."
    settings = sorted(key.removeprefix(of_clients) for key, _ in list_reference_keys() if key.startswith(of_clients))
    for name, spec in SiteFile.model_fields.items():
        table = find_table(spec.annotation)
        if table is not None and table.__module__ == schema.__name__:
            yield from (line for _, line in list_reference_keys(table, f"{name}."))
        elif table is not None or name == "algorithm":
            listed = ", ".join(settings if table is None else table.model_fields)
            yield render_key(f"{name}.KEY", f"as `{name}.KEY` above", "the federation's", listed)
        else:
            yield render_key(name, "text", "needed", spec.description or "")


_METHODS = """# All methods

`fedmutual list methods` prints this page from what each class declares, and `fedmutual list NAME` the settings of a method.
[Comparing methods](comparing.md) trains several. Each method runs on every engine. The table has for each value of
`algorithm.name`:

- networks: `one` for all clients; `any` network of a client's own; `one + any`: both; `one head`: any networks whose last
  layers have one shape. With `model.part` clients of methods with `one` share a part and keep the rest.
- leaves: all that a client sends in a round. n_k is its number of examples, and is not sent with
  `algorithm.weighting = "uniform"`. Compressed, control and similar tensors have the shapes of the network's.
- noise: [differential privacy](privacy.md) can cover all that leaves (with n_k: only with uniform weights).
- masks: real sites can [sum it masked](secure-sum.md), so that nobody sees a single client's.
- needs: a public seed set, the labels of all rows, or equal classes at all clients.

| name | title and paper | what it does | networks | leaves | noise | masks | needs | between real sites |
|---|---|---|---|---|---|---|---|---|"""
_PAPER = re.compile(r"([A-Z][\w'-]+(?: et al\.| and \w+)?), [^.]*?, (\d{4}),? (https?://[^\s,;]*[^\s,;.:])")


def render_methods() -> str:
    """Return a table of all methods as Markdown."""
    return "\n".join([_METHODS, *map(_render_method, ALGORITHMS)])


def _render_method(name: str) -> str:
    """Return the row of a method."""
    kind, method = ALGORITHMS[name], METHODS[name]
    algorithm: Algorithm = kind().algorithm()
    cited = _PAPER.search(method.paper or " ".join((sys.modules[kind.__module__].__doc__ or "").split()))
    paper = f"[{method.title}, {cited[1]}, {cited[2]}]({cited[3]})" if cited and not method.pooled else method.title
    public, phases = algorithm.public, algorithm.phases
    needs = {
        "public rows": public is not None,
        "labels": algorithm.needs_labels or (public is not None and public.labelled),
        "equal classes": algorithm.begins is not None or public is not None,
    }
    leaves = ", ".join(_list_leaves(algorithm)) or "nothing"
    if {"part", "batchnorm"} & method.model.keys():
        leaves = leaves.replace("the network", "a part of the network")
    at_sites = not method.pooled and not (public is not None and public.server)
    cells = (
        f"`{name}`",
        paper,
        describe_about(name).replace("|", r"\|"),
        "one" if method.pooled else _describe_networks(algorithm),
        "all data" if method.pooled else leaves,
        "yes" if algorithm.dp_ready and not method.pooled else "",
        "yes" if len(phases) == 1 and not algorithm.start and is_summable(phases[0]) else "",
        ", ".join(need for need, is_needed in needs.items() if is_needed),
        "yes" if at_sites else "",
    )
    return f"| {' | '.join(cells)} |"


def _describe_networks(algorithm: Algorithm) -> str:
    shares = bool({"global", "proxy"} & set(algorithm.scores))
    if "personal" not in algorithm.scores or algorithm.alike:
        return "one"
    return "one + any" if shares else "one head" if algorithm.same_heads else "any"


def _list_leaves(algorithm: Algorithm) -> list[str]:
    """Return what the replies of a round hold, with the names of the network's tensors as one."""
    shared = nn.Sequential(nn.Linear(64, 32), nn.Linear(32, 10))
    model = dict(shared.state_dict())
    state: Message = model
    if "proxy" in algorithm.scores:
        state = make_proxy_state("ab", 10, model)
    elif algorithm.begins is not None:
        state = algorithm.begins(shared, 10) | (model if "global" in algorithm.scores else {})
    elif algorithm.public is not None and not algorithm.public.server:
        state = make_agreed_state({i: range(64) for i in "ab"}, 10)
    elif "global" not in algorithm.scores:
        state = {}
    names = dict.fromkeys(name for phase in algorithm.phases for name in phase.leaves(state))
    ends = re.compile(f"(.*?)[ .]?(?:{'|'.join(map(re.escape, model))})")
    parts = ((name, ends.fullmatch(name)) for name in names)
    return list(
        dict.fromkeys(name if end is None else f"{end[1]} tensors" if end[1] else "the network" for name, end in parts)
    )
