"""Sites that exchange messages within one process: the work, the saved files and the sent messages of each site."""

import json

import pytest

import fedmutual
from fedmutual.config import parse_config
from fedmutual.errors import ConfigError
from fedmutual.rundir.file_names import LEDGER
from fedmutual.rundir.text import describe_event
from fedmutual.sites import contract as contracts
from fedmutual.sites.consent import find_difference
from fedmutual.sites.coordinator import Coordinator
from fedmutual.tensor_files import read_tensors
from log_lines import read_lines
from wards import COMMON, SITES, TELLING, InMemoryTransport, contract, halves, same, together

pytestmark = pytest.mark.sites

RULES = {
    "mean": COMMON,
    "median": COMMON | {"server": {"aggregate": "median"}},
    "trimmed mean": COMMON | {"server": {"aggregate": "trimmed-mean", "trim": 0.4}},
    "fixed sum": COMMON | {"server": {"sum": "fixed"}},
}


@pytest.mark.parametrize("rule", RULES)
def test_three_sites_are_one_run_in_one_process(rule, tmp_path):
    common = RULES[rule] | TELLING
    agreed, sites = halves(tmp_path, contract(tmp_path, common))
    Coordinator(agreed, tmp_path / "server").run(InMemoryTransport(sites))
    run = fedmutual.run(parse_config(together(common)), tmp_path / "one")
    server_run = fedmutual.Run(tmp_path / "server")
    assert same(server_run.global_model().state_dict(), run.global_model().state_dict())
    for i in SITES:
        mine = fedmutual.Run(sites[i].folder)
        assert same(mine.personal_model(i).state_dict(), run.personal_model(i).state_dict())
    assert server_run.summary["personal"] == run.summary["personal"]
    assert server_run.summary["bytes"] == run.summary["bytes"]
    assert COMMON["rounds"] == server_run.summary["rounds"]


@pytest.mark.parametrize(("name", "round"), [("fml", 1), ("fml", 2), ("fedavg-ft", 1), ("fedproto", 1), ("proxyfl", 1)])
def test_an_absent_site_is_left_out_until_it_returns(tmp_path, name, round):
    common, tables = (COMMON, SITES) if name == "fml" else of_method(name)
    agreed, sites = halves(tmp_path, contract(tmp_path, common, tables), tables)
    transport, notes = InMemoryTransport(sites), []

    def watch(event):
        if type(event).__name__ == "RoundDone":
            transport.away = {"west"} if event.round == round else set()
        if type(event).__name__ == "Noted":
            notes.extend(describe_event(event))

    Coordinator(agreed, tmp_path / "server").run(transport, [watch])
    assert any(note == f"note in round {round + 1}: site 'west' is left out: it is not connected" for note in notes)
    ledger = read_lines(tmp_path / "server" / LEDGER)
    rounds = [line["round"] for line in ledger if line["client"] == "west" and line["up"]]
    assert rounds == [r for r in (1, 2, 3) if r != round + 1]


def test_the_rule_of_a_federation_is_what_sites_agreed_to(tmp_path):
    """Where the server is may change without them; how it makes one model of theirs may not."""
    robust = contracts.read_contract(contract(tmp_path, RULES["trimmed mean"]))
    assert contracts.accept_contract(json.dumps(robust.record()), [robust.record()]).config.server == robust.config.server
    assert robust.config.server.model_dump() == {"aggregate": "trimmed-mean", "trim": 0.4, "sum": "float"}
    for server, differs in (({"port": 9000}, None), ({"trim": 0.1}, "'server.trim'"), ({"aggregate": "mean"}, "'server.")):
        tables = {**robust.config.server.model_dump(), **server}
        tables = {k: v for k, v in tables.items() if k != "trim" or tables["aggregate"] == "trimmed-mean"}
        other = contracts.read_contract(contract(tmp_path, COMMON | {"server": tables}))
        difference = find_difference(robust.record(), other.record())
        assert (difference is None) == (differs is None)
        assert (differs or "") in (difference or "")


def test_a_rule_where_nothing_is_averaged_is_refused(tmp_path):
    for key, value in (("aggregate", "median"), ("sum", "fixed")):
        path = contract(tmp_path, COMMON | {"algorithm": {"name": "independent"}, "server": {key: value}})
        with pytest.raises(ConfigError, match=rf"'server\.{key}' has no effect .* algorithm 'independent'"):
            contracts.read_contract(path)


def test_how_the_server_sums_is_what_sites_agreed_to(tmp_path):
    plain, fixed = (
        contracts.read_contract(contract(tmp_path, COMMON | {"server": {"sum": how}})) for how in ("float", "fixed")
    )
    assert "'server.sum'" in (find_difference(plain.record(), fixed.record()) or "")


METHODS = {  # without public data, which tests of their own have
    "fedavg-ft": {"tune_every": 2},
    "ditto": {},
    "apfl": {"adaptive": True},
    "fedper": {},
    "fedrep": {"head_epochs": 1},
    "lg-fedavg": {},
    "fedproto": {"proto_size": 32},
    "fedtgp": {"proto_size": 32, "server_epochs": 5},
    "fedkd": {},
    "proxyfl": {},
}
ALIKE = ("fedavg-ft", "ditto", "apfl")


def of_method(name):
    """What all have in common, and what each site has its own."""
    common = COMMON | TELLING | {"algorithm": {"name": name, **METHODS[name]}}
    nets = {i: {} if name in ALIKE else {"model": tables["model"]} for i, tables in SITES.items()}
    return common, {
        i: {k: v for k, v in tables.items() if k not in ("model", "algorithm")} | nets[i] for i, tables in SITES.items()
    }


@pytest.mark.parametrize("name", METHODS)
def test_a_method_between_sites_that_start_again_is_that_of_one_process(name, tmp_path):
    """The server and all sites are made anew for the last round, out of what they saved."""
    common, tables = of_method(name)
    for rounds in (2, 3):
        agreed, sites = halves(tmp_path, contract(tmp_path, common | {"rounds": rounds}, tables), tables)
        Coordinator(agreed, tmp_path / "server").run(InMemoryTransport(sites))
    run = fedmutual.run(parse_config(together(common, tables)), tmp_path / "one")
    server_run = fedmutual.Run(tmp_path / "server")
    assert server_run.summary["bytes"] == run.summary["bytes"]
    assert server_run.summary["personal"] == run.summary["personal"]
    assert same(read_tensors(tmp_path / "server" / "server" / "round-3.safetensors")[0], state(run, "server"))
    for i in SITES:
        mine = read_tensors(sites[i].folder / "clients" / i / "round-3.safetensors")[0]
        assert same(mine, state(run, f"clients/{i}"))


def state(run, half):
    return read_tensors(run.folder / half / "round-3.safetensors")[0]
