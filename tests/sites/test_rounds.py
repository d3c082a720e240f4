"""A federation of real sites that is to go on to another number of rounds than it was begun with."""

import re

import pytest

from fedmutual.errors import RunError
from fedmutual.rundir.file_names import METRICS
from fedmutual.sites import contract as contracts
from fedmutual.sites.consent import find_difference
from fedmutual.sites.coordinator import Coordinator
from fedmutual.sites.site_runtime import SiteRuntime
from fedmutual.sites.site_settings import read_site_file
from log_lines import read_lines
from wards import COMMON, SITES, InMemoryTransport, contract, halves

pytestmark = pytest.mark.sites

MLPS = {i: {**tables, "model": {"personal": "mlp"}} for i, tables in SITES.items()}
MOVING = {"start": 1.0, "end": 0.0}
SCHEDULED = COMMON | {"algorithm": {"name": "fml", "alpha": MOVING}}
SAVED = (".json", ".jsonl", ".safetensors")


@pytest.mark.parametrize(
    ("common", "sites", "rounds", "message"),
    [
        (
            SCHEDULED,
            MLPS,
            5,
            "rounds cannot grow from 3 to 5, because the schedule 'algorithm.alpha' depends on their number",
        ),
        (SCHEDULED, MLPS, 4, "give the federation another name"),
        (COMMON, MLPS | {"west": MLPS["west"] | {"optimizer": {"lr": MOVING}}}, 5, "schedule 'optimizer.lr' depends"),
    ],
)
def test_rounds_that_would_not_be_those_of_one_run_are_refused(tmp_path, common, sites, rounds, message):
    """As a run in one process refuses them; by a site itself, for the server does not know what is its own."""
    agreed, them = halves(tmp_path, contract(tmp_path, common, sites), sites)
    Coordinator(agreed, tmp_path / "server").run(InMemoryTransport(them))
    own_key = "optimizer" in message
    before = {p: p.read_bytes() for p in tmp_path.rglob("*") if p.suffix in SAVED}
    longer = contracts.read_contract(contract(tmp_path, {**common, "rounds": rounds}, sites))
    for i in ("west",) if own_key else sites:
        with pytest.raises(RunError, match=re.escape(message)):
            SiteRuntime(longer, read_site_file(tmp_path / i / "site.toml"))
    if not own_key:
        with pytest.raises(RunError, match=re.escape(message)):
            Coordinator(longer, tmp_path / "server").run(InMemoryTransport({}))
    assert {p: p.read_bytes() for p in before} == before


def test_fewer_rounds_than_are_done_are_refused_by_the_server(tmp_path):
    """A site may be ahead of it, by a round that did not count."""
    agreed, them = halves(tmp_path, contract(tmp_path, COMMON, MLPS), MLPS)
    Coordinator(agreed, tmp_path / "server").run(InMemoryTransport(them))
    other, sites = halves(tmp_path, contract(tmp_path, COMMON | {"rounds": 2}, MLPS), MLPS)
    with pytest.raises(RunError, match="round 3 is done, and the contract has 2; set 'rounds' to 3 or more"):
        Coordinator(other, tmp_path / "server").run(InMemoryTransport(sites))


@pytest.mark.parametrize("common", [COMMON, SCHEDULED])
def test_a_site_starts_again_with_the_rounds_that_its_kit_has(tmp_path, common):
    """A submission may have others than the kit's file: whoever starts looks only whether the site can take part."""
    agreed, them = halves(tmp_path, contract(tmp_path, common, MLPS), MLPS)
    Coordinator(agreed, tmp_path / "server").run(InMemoryTransport(them))
    kit = contracts.read_contract(contract(tmp_path, common | {"rounds": 1}, MLPS))
    assert find_difference(kit.record(), agreed.record()) is None
    SiteRuntime(kit, read_site_file(tmp_path / "north" / "site.toml"), check_only=True)
    SiteRuntime(agreed, read_site_file(tmp_path / "north" / "site.toml"))


def test_rounds_that_grow_end_as_if_they_had_been_so_many_from_the_first(tmp_path):
    """The scores of what was the last round, and is not due, go too, at the server and at home."""
    common = COMMON | {"records": {"evaluate_every": 2}}
    for name, steps in (("grown", (3, 4)), ("whole", (4,))):
        (tmp_path / name).mkdir()
        for rounds in steps:
            path = contract(tmp_path / name, common | {"rounds": rounds}, MLPS)
            agreed, sites = halves(tmp_path / name, path, MLPS)
            Coordinator(agreed, tmp_path / name / "server").run(InMemoryTransport(sites))
    for place in ("server", "west/state/wards"):
        grown, from_start = (read_lines(tmp_path / name / place / METRICS) for name in ("grown", "whole"))
        assert grown == from_start
        assert [line["round"] for line in from_start] == [2, 4]
