"""The files of a federation on a network of another framework, and what its results must equal."""

import tomli_w

import fedmutual
from fedmutual.config import parse_config
from fedmutual.sites.ledger import read_ledger
from wards import COMMON, SITES, TELLING, contract, same, together

TWO = {i: SITES[i] for i in ("north", "south")}
TABLES = {**COMMON, **TELLING, "rounds": 2}


def prepare(folder, sites=TWO):
    """Write the files of all hosts into one folder, and return the path of FEDERATION.toml."""
    for i, tables in sites.items():
        about = {"site": i, "state": {"folder": f"state-{i}"}, "engine": {"device": "cpu"}, **tables}
        (folder / f"{i}.toml").write_text(tomli_w.dumps(about))
    return contract(folder, TABLES, sites, wait=120.0)


def check_equal(folder, one):
    """Check that all models and bytes are those of a run in one process, and that each site has its ledger."""
    run, server = fedmutual.run(parse_config(together(TABLES, TWO)), one), fedmutual.Run(folder / "server" / "wards")
    assert same(server.global_model().state_dict(), run.global_model().state_dict())
    assert server.summary["bytes"] == run.summary["bytes"]
    for i in TWO:
        mine = fedmutual.Run(folder / f"state-{i}" / "wards").personal_model(i)
        assert same(mine.state_dict(), run.personal_model(i).state_dict())
        assert {line["round"] for line in read_ledger(folder / f"state-{i}" / "wards")} == {1, 2}
