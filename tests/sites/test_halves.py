"""Sites over a post in this process: what each does, keeps and lets go of, without any network."""

import json

import pytest

import fedmutual
from fedmutual.config import parse_config
from fedmutual.engines.sites import contract as contracts
from fedmutual.engines.sites.consent import difference
from fedmutual.engines.sites.coordinator import Coordinator
from fedmutual.errors import ConfigError
from fedmutual.records.logs import LEDGER, read_lines
from fedmutual.records.text import told
from wards import COMMON, SITES, TELLING, Desk, contract, halves, same, together

RULES = {
    "mean": COMMON,
    "median": COMMON | {"server": {"aggregate": "median"}},
    "trimmed mean": COMMON | {"server": {"aggregate": "trimmed-mean", "trim": 0.4}},
}


@pytest.mark.parametrize("rule", RULES)
def test_three_sites_are_one_run_in_one_process(rule, tmp_path):
    common = RULES[rule] | TELLING
    agreed, sites = halves(tmp_path, contract(tmp_path, common))
    Coordinator(agreed, tmp_path / "server").run(Desk(sites))
    run = fedmutual.run(parse_config(together(common)), tmp_path / "one")
    found = fedmutual.Run(tmp_path / "server")
    assert same(found.global_model().state_dict(), run.global_model().state_dict())
    for i in SITES:
        mine = fedmutual.Run(sites[i].folder)
        assert same(mine.personal_model(i).state_dict(), run.personal_model(i).state_dict())
    assert found.summary["personal"] == run.summary["personal"]
    assert found.summary["bytes"] == run.summary["bytes"]
    assert COMMON["rounds"] == found.summary["rounds"]


@pytest.mark.parametrize("round", [1, 2])
def test_who_is_away_is_left_out_and_back_in(tmp_path, round):
    agreed, sites = halves(tmp_path, contract(tmp_path))
    desk, notes = Desk(sites), []

    def watch(event):
        if type(event).__name__ == "RoundDone":
            desk.away = {"west"} if event.round == round else set()
        if type(event).__name__ == "Noted":
            notes.extend(told(event))

    Coordinator(agreed, tmp_path / "server").run(desk, [watch])
    assert any(note == f"note in round {round + 1}: site 'west' is left out: it is not there" for note in notes)
    ledger = read_lines(tmp_path / "server" / LEDGER)
    rounds = [line["round"] for line in ledger if line["client"] == "west" and line["up"]]
    assert rounds == [r for r in (1, 2, 3) if r != round + 1]


def test_the_rule_of_a_federation_is_what_sites_agreed_to(tmp_path):
    """Where the server is may change without them; how it makes one model of theirs may not."""
    robust = contracts.read(contract(tmp_path, RULES["trimmed mean"]))
    assert contracts.accept(json.dumps(robust.record()), [robust.record()]).config.server == robust.config.server
    assert robust.config.server.model_dump() == {"aggregate": "trimmed-mean", "trim": 0.4}
    for server, differs in (({"port": 9000}, None), ({"trim": 0.1}, "'server.trim'"), ({"aggregate": "mean"}, "'server.")):
        tables = {**robust.config.server.model_dump(), **server}
        tables = {k: v for k, v in tables.items() if k != "trim" or tables["aggregate"] == "trimmed-mean"}
        other = contracts.read(contract(tmp_path, COMMON | {"server": tables}))
        found = difference(robust.record(), other.record())
        assert (found is None) == (differs is None)
        assert (differs or "") in (found or "")


def test_a_rule_where_nothing_is_averaged_is_refused(tmp_path):
    path = contract(tmp_path, COMMON | {"algorithm": {"name": "independent"}, "server": {"aggregate": "median"}})
    with pytest.raises(ConfigError, match=r"'server\.aggregate' has no effect .* algorithm 'independent'"):
        contracts.read(path)
