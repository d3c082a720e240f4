"""Sites that exchange messages within one process: the work, the saved files and the sent messages of each site."""

import re

import pytest

from fedmutual.errors import ConfigError, RunError
from fedmutual.rundir.file_names import LEDGER, METRICS
from fedmutual.sites import contract as contracts
from fedmutual.sites.consent import find_difference
from fedmutual.sites.coordinator import Coordinator
from fedmutual.sites.site_runtime import SiteRuntime
from fedmutual.sites.site_settings import read_site_file
from fedmutual.tensor_files import read_tensors
from log_lines import read_lines
from wards import (
    COMMON,
    MLPS,
    SITES,
    TELLING,
    Federation,
    InMemoryTransport,
    contract,
    find_event,
    run_together,
    same,
)

pytestmark = pytest.mark.sites

RULES = {
    "mean": {},
    "median": {"aggregate": "median"},
    "trimmed mean": {"aggregate": "trimmed-mean", "trim": 0.4},
    "fixed sum": {"sum": "fixed"},
}


@pytest.mark.parametrize("rule", RULES)
def test_three_sites_are_one_run_in_one_process(rule, tmp_path):
    common = COMMON | TELLING | ({"server": RULES[rule]} if RULES[rule] else {})
    federation, run = Federation(tmp_path, common).run(), run_together(tmp_path / "one", common)
    assert federation.equals(run)
    for key in ("personal", "bytes", "rounds"):
        assert federation.summary[key] == run.summary[key]


@pytest.mark.parametrize(("name", "round"), [("fml", 1), ("fml", 2), ("fedavg-ft", 1), ("fedproto", 1), ("proxyfl", 1)])
def test_an_absent_site_is_left_out_until_it_returns(tmp_path, name, round):
    federation = Federation(tmp_path, *((COMMON, SITES) if name == "fml" else of_method(name)))

    def watch(event):
        if find_event("RoundDone")(event):
            federation.transport.away = {"west"} if event.round == round else set()

    federation.run(watch)
    assert f"note in round {round + 1}: site 'west' is left out: it is not connected" in federation.notes
    ledger = read_lines(federation.server / LEDGER)
    rounds = [line["round"] for line in ledger if line["client"] == "west" and line["up"]]
    assert rounds == [r for r in (1, 2, 3) if r != round + 1]


@pytest.mark.parametrize("server", [{"aggregate": "median"}, {"sum": "fixed"}])
def test_a_rule_where_nothing_is_averaged_is_refused(tmp_path, server):
    path = contract(tmp_path, COMMON | {"algorithm": {"name": "independent"}, "server": server})
    with pytest.raises(ConfigError, match=rf"'server\.{next(iter(server))}' has no effect .* algorithm 'independent'"):
        contracts.read_contract(path)


METHODS = {  # without public data, which tests of their own have
    "fedavg": {},
    "fedprox": {},
    "independent": {},
    "fedavg-ft": {"tune_every": 2},
    "ditto": {},
    "apfl": {"adaptive": True},
    "fedopt": {},
    "scaffold": {},
    "moon": {},
    "fedala": {},
    "pfedme": {},
    "fedper": {},
    "fedrep": {"head_epochs": 1},
    "lg-fedavg": {},
    "fedproto": {"proto_size": 32},
    "fedtgp": {"proto_size": 32, "server_epochs": 5},
    "fd": {},
    "fedgh": {},
    "fedgen": {"gen_alpha": 0.1, "gen_beta": 0.1},
    "fedapen": {},
    "fedkd": {},
    "proxyfl": {},
}
ALIKE = ("fedavg", "fedprox", "fedavg-ft", "ditto", "apfl", "fedala", "pfedme", "fedgh")


def of_method(name):
    """What all have in common, and what each site has its own."""
    common = COMMON | TELLING | {"algorithm": {"name": name, **METHODS[name]}}
    left_out = ("algorithm", "model") if name in ALIKE else ("algorithm",)
    return common, {i: {k: v for k, v in tables.items() if k not in left_out} for i, tables in SITES.items()}


@pytest.mark.parametrize("name", METHODS)
def test_a_method_between_sites_that_start_again_is_that_of_one_process(name, tmp_path):
    """The server and all sites are made anew for the last round, out of what they saved."""
    common, tables = of_method(name)
    for rounds in (2, 3):
        federation = Federation(tmp_path, common | {"rounds": rounds}, tables).run()
    run = run_together(tmp_path / "one", common, tables)
    assert federation.summary["bytes"] == run.summary["bytes"]
    assert federation.summary["personal"] == run.summary["personal"]
    for folder, half in ((federation.server, "server"), *((federation[i].folder, f"clients/{i}") for i in SITES)):
        mine, theirs = (read_tensors(where / half / "round-3.safetensors")[0] for where in (folder, run.folder))
        assert same(mine, theirs), half


MOVING = {"start": 1.0, "end": 0.0}
SCHEDULED = COMMON | {"algorithm": {"name": "fml", "alpha": MOVING}}
SAVED = (".json", ".jsonl", ".safetensors")


@pytest.mark.parametrize(
    ("common", "sites", "rounds", "message"),
    [
        (SCHEDULED, MLPS, 5, "rounds cannot grow from 3 to 5, because the schedule 'algorithm.alpha' depends on"),
        (SCHEDULED, MLPS, 4, "give the federation another name"),
        (COMMON, MLPS | {"west": MLPS["west"] | {"optimizer": {"lr": MOVING}}}, 5, "schedule 'optimizer.lr' depends"),
        (COMMON, MLPS, 2, "round 3 is done, and the contract has 2; set 'rounds' to 3 or more"),
    ],
)
def test_rounds_that_would_not_be_those_of_one_run_are_refused(tmp_path, common, sites, rounds, message):
    """As a run in one process refuses them; by a site itself, for the server does not know what is its own."""
    Federation(tmp_path, common, sites).run()
    before = {p: p.read_bytes() for p in tmp_path.rglob("*") if p.suffix in SAVED}
    other = contracts.read_contract(contract(tmp_path, {**common, "rounds": rounds}, sites))
    # a site may be ahead of the server, by a round that did not count
    for i in ("west",) if "optimizer" in message else () if rounds == 2 else sites:
        with pytest.raises(RunError, match=re.escape(message)):
            SiteRuntime(other, read_site_file(tmp_path / i / "site.toml"))
    if "optimizer" not in message:
        with pytest.raises(RunError, match=re.escape(message)):
            Coordinator(other, tmp_path / "server").run(InMemoryTransport({}))
    assert {p: p.read_bytes() for p in before} == before


@pytest.mark.parametrize("common", [COMMON, SCHEDULED])
def test_a_site_starts_again_with_the_rounds_that_its_kit_has(tmp_path, common):
    """A submission may have others than the kit's file: whoever starts looks only whether the site can take part."""
    federation = Federation(tmp_path, common, MLPS).run()
    kit = contracts.read_contract(contract(tmp_path, common | {"rounds": 1}, MLPS))
    assert find_difference(kit.record(), federation.agreed.record()) is None
    SiteRuntime(kit, read_site_file(tmp_path / "north" / "site.toml"), check_only=True)
    federation.start("north")


def test_rounds_that_grow_end_as_if_they_had_been_so_many_from_the_first(tmp_path):
    """The scores of what was the last round, and is not due, go too, at the server and at home."""
    common = COMMON | {"records": {"evaluate_every": 2}}
    for name, steps in (("grown", (3, 4)), ("whole", (4,))):
        for rounds in steps:
            Federation(tmp_path / name, common | {"rounds": rounds}, MLPS).run()
    for place in ("server", "west/state/wards"):
        grown, from_start = (read_lines(tmp_path / name / place / METRICS) for name in ("grown", "whole"))
        assert grown == from_start
        assert [line["round"] for line in from_start] == [2, 4]
