"""data.mean = "federated" between real sites: statistics before the first round, by masked and by plain sums."""

import json

import numpy as np
import pytest
import torch

from fedmutual.errors import ConfigError, RunError, UserError
from fedmutual.sites import contract as contracts
from fedmutual.sites.engine import TooFew
from fedmutual.sites.journal import FILE
from fedmutual.sites.protocol import EVALUATE, pack_message, read_answer, read_order
from fedmutual.sites.secure_sum.messages import CONTENT, WORDS, Stage
from fedmutual.sites.server_journal import ServerJournal
from fedmutual.sites.site_settings import build_site, read_site_file
from fedmutual.sites.statistics import SCALING, SUMS
from wards import COMMON, TELLING, Federation, contract, run_together, same, site, with_data

pytestmark = pytest.mark.sites

BY_SUMS = {"mean": "federated", "std": "federated"}
FML = COMMON | TELLING | {"rounds": 2, "data": {"classes": COMMON["data"]["classes"], **BY_SUMS}}
ONE_ROUND = FML | {"rounds": 1}


def federate(folder, kind="masked", common=FML, sites=None, **given):
    """Sites with a third of the digits each, and their server. kind: of the sum."""
    folder.mkdir(exist_ok=True)
    return Federation(folder, common | {"server": {"sum": kind}}, sites or with_data(folder), **given)


def asked(federation, round):
    """Return the phases of the orders of work of a round, in order."""
    orders = [read_order(order)[0] for _, order, _ in federation.transport.answers]
    return [order.phase for order in orders if order.round == round and order.kind != EVALUATE]


def count_rows(federation, *names):
    return sum(len(federation[i].experiment.data.clients[i].private) for i in names)


def answer_with(message, when):
    """Return a change of west's messages in a round and phase."""

    def change(name, order, content):
        answer, sent = read_answer(content)
        return [pack_message(answer, message(sent)) if (name, order.round, order.phase) == ("west", *when) else content]

    return change


@pytest.mark.parametrize(("kind", "algorithm"), [("masked", "fml"), ("masked", "fedavg"), ("fixed", "fml")])
def test_real_sites_are_one_process_to_the_bit(tmp_path, kind, algorithm):
    """fedavg weights updates, so that its words are one more than a model has numbers."""
    common = FML | {"algorithm": {"name": algorithm}}
    federation = federate(tmp_path / kind, kind, common).run()
    run = run_together(tmp_path / "one", common, federation.sites, sum="fixed")
    about, expected = federation.environment(), json.loads((tmp_path / "one" / "environment.json").read_text())
    assert about["statistics"] == expected["statistics"]
    assert about["statistics"]["rows"] == sum(about["statistics"]["classes"].values())
    scaling = about["clients"]["north"]["scaling"]
    assert (scaling["mean"], scaling["std"]) == (about["statistics"]["mean"], about["statistics"]["std"])
    for i in federation.sites:
        environment = json.loads((federation[i].folder / "environment.json").read_text())
        assert environment["scaling"]["mean"] == scaling["mean"]
    if algorithm == "fml":
        assert federation.equals(run)
        assert federation.summary["personal"] == run.summary["personal"]
    assert same(federation.model, run.global_model().state_dict())
    assert federation.notes == []
    lines = [json.loads(line) for line in (federation.server / "ledger.jsonl").open()]
    first, count = [line for line in lines if line["round"] == 0], federation.agreed.layout.count
    assert [(line["client"], line["phase"]) for line in first] == [(i, SUMS) for i in federation.sites]
    assert all(line["up"] == 8 * count if kind == "fixed" else line["up"] > 8 * count for line in first)


def test_under_masks_no_sums_of_a_single_site_leave(tmp_path):
    """Uploads are uniform words, and what the site would have sent unmasked is in its log as a digest only."""
    federation = federate(tmp_path / "masked").run()
    for i in federation.sites:
        assert {t["name"] for line in federation.ledger(i) for t in line["tensors"]} == {CONTENT, WORDS}
    orders = [(read_order(o)[0], read_answer(a)[1]) for _, o, a in federation.transport.answers]
    uploads = [m[WORDS] for o, m in orders if (o.round, o.phase) == (-1, Stage.UPLOAD)]
    assert [len(words) for words in uploads] == [federation.agreed.layout.count] * 3
    assert all((words.abs() > 2**40).float().mean() > 0.95 for words in uploads)
    # the masks of seeds are taken off by shares alone
    assert torch.stack(uploads).sum(0)[0] != federation.environment()["statistics"]["rows"]


def test_a_site_that_misses_the_start_is_not_in_the_sums_and_has_the_scaling(tmp_path):
    federation = federate(tmp_path / "fixed", "fixed")
    federation.transport.before = lambda round, phase: setattr(
        federation.transport, "silent", {"west"} if round < 0 else set()
    )
    statistics = federation.run().environment()["statistics"]
    assert statistics["rows"] == count_rows(federation, "north", "south")
    for i in federation.sites:
        assert federation[i].experiment.data.spaces[i].scaling.mean == tuple(statistics["mean"])
    assert len(federation.about("west")) == len(federation.notes) == 1


@pytest.mark.parametrize("kind", ["masked", "fixed"])
def test_restarting_at_every_order_asks_once_and_changes_no_bit(tmp_path, kind):
    untouched = federate(tmp_path / "untouched", kind).run()
    federation = federate(tmp_path / "restarted", kind, sites=untouched.sites)
    federation.transport.before = lambda round, phase: federation.restart()
    assert same(federation.run().model, untouched.model)
    assert federation.environment()["statistics"] == untouched.environment()["statistics"]


def stop(federation):
    """Run a federation until it has its statistics."""

    def before(round, phase):
        if round == 0:
            raise InterruptedError

    federation.transport.before = before
    with pytest.raises(InterruptedError):
        federation.run()


def test_a_restarted_server_does_not_ask_for_statistics_again(tmp_path):
    federation = federate(tmp_path / "masked")
    stop(federation)
    before = asked(federation, -1)
    federation.transport.before = lambda round, phase: None
    federation.run()
    assert asked(federation, -1) == before
    assert sorted(set(before)) == list(range(6))
    lines = [json.loads(line) for line in (federation.server / "ledger.jsonl").open()]
    assert sum(line["phase"] == SUMS for line in lines) == 3


def test_a_server_that_asks_twice_gets_no_second_sum(tmp_path):
    """Not in the same attempt with fewer sites, and not in a new attempt."""
    federation = federate(tmp_path / "masked")
    stop(federation)
    (federation.server / FILE).unlink()
    ServerJournal(federation.server).set_fact("attempt", 1)
    with pytest.raises(TooFew):
        federation.run()
    assert sum("was opened before" in note for note in federation.notes) == 3


def scaled(value, inputs=1):
    return {SCALING: torch.full((2, inputs), value, dtype=torch.float64)}


def test_a_site_declines_another_scaling_and_does_the_order_with_the_first(tmp_path):
    federation = federate(tmp_path / "fixed", "fixed", ONE_ROUND).run()
    orders = [(read_order(o), a) for i, o, a in federation.transport.answers if i == "north"]
    (order, inbox), answer = next(one for one in orders if one[0][0].kind == EVALUATE)
    rest = {name: tensor for name, tensor in inbox.items() if name != SCALING}
    out_of_range = (float("nan"), float("inf"), 0.0, 1e-60, 3e-38, 1e16)
    for changed, word in (
        ({}, "no mean and divisor"),
        (scaled(0.25), "another mean"),
        *((scaled(value), "a mean that is not between") for value in out_of_range),
        (scaled(0.5, 2), "no mean and divisor"),
        ({SCALING: torch.ones(2, 1)}, "no mean and divisor"),
    ):
        declined, message = read_answer(federation["north"].carry_out(pack_message(order, rest | changed)))
        assert (word in declined.problem, message) == (True, {})
    assert federation["north"].carry_out(pack_message(order, inbox)) == answer


HOSTILE = {
    "impossible": (lambda words: words.index_fill(0, torch.tensor([0]), 5), "impossible"),
    "negative": (lambda words: -words, "impossible"),
    "rows without end": (lambda words: words * 1000, "n_k"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_impossible_sums_of_a_site_are_refused_and_named(tmp_path, name):
    spoil, word = HOSTILE[name]
    federation = federate(tmp_path / "fixed", "fixed", ONE_ROUND)
    federation.transport.change = answer_with(lambda message: {SUMS: spoil(message[SUMS])}, (-1, 0))
    federation.run()
    assert any(word in note for note in federation.about("west"))
    assert federation.environment()["statistics"]["rows"] == count_rows(federation, "north", "south")


def test_impossible_sums_under_masks_end_the_federation_before_training(tmp_path):
    federation = federate(tmp_path / "masked")
    federation.transport.change = answer_with(lambda message: {WORDS: message[WORDS] - 10**6}, (-1, Stage.UPLOAD))
    with pytest.raises(RunError, match="impossible"):
        federation.run()
    assert asked(federation, 0) == []
    assert ServerJournal(federation.server).get_fact(SUMS) is None


@pytest.mark.parametrize("kind", ["masked", "fixed"])
def test_a_site_with_values_beyond_the_range_is_left_out_and_its_operator_learns_why(tmp_path, kind):
    sites = with_data(tmp_path)
    with np.load(tmp_path / "west-digits.npz") as arrays:
        x, y = arrays["x"].astype(np.float32), arrays["y"]
    x[:, 0, 0] = 1e30
    np.savez(tmp_path / "west-digits.npz", x=x, y=y)
    sites |= {"fourth": sites["north"]} if kind == "masked" else {}
    federation, messages = federate(tmp_path / kind, kind, ONE_ROUND, sites), []
    federation["west"].say = messages.append
    federation.run()
    assert federation.about("west")
    assert any("input '0'" in line and "too large" in line for line in messages)
    assert not any("1e+30" in note for note in federation.notes)


@pytest.mark.parametrize(
    ("common", "sites", "word"),
    [
        (FML | {"algorithm": {"name": "proxyfl"}}, "abc", "'proxyfl'"),
        (FML | {"data": FML["data"] | {"std": [0.4]}}, "abc", "both"),
        (FML | {"privacy": {"nets": "both", "sigma": 1.0}, "training": {"local_steps": 2}}, "abc", "epsilon"),
        (FML | {"server": {"sum": "masked"}}, "ab", "3 to 20 sites"),
    ],
)
def test_a_contract_that_cannot_have_statistics_is_refused(tmp_path, common, sites, word):
    with pytest.raises(ConfigError, match=word):
        contracts.read_contract(contract(tmp_path, common, sites))


@pytest.mark.parametrize(
    ("data", "words"),
    [
        ({"mean": [0.1], "std": [0.2]}, ("data.mean", "all clients")),
        ({"classes": ["0", "1"], "name": "npz"}, ("data.classes",)),
    ],
)
def test_a_site_with_its_own_scaling_or_classes_is_refused(tmp_path, data, words):
    sites = with_data(tmp_path)
    path = tmp_path / "few.npz"
    np.savez(path, x=np.zeros((40, 8, 8), np.uint8), y=np.arange(40) % 2)
    north = {**sites["north"], "data": {**sites["north"]["data"], "root": str(path), **data}}
    agreed = contracts.read_contract(contract(tmp_path, FML, sites))
    with pytest.raises(UserError) as caught:
        build_site(agreed, read_site_file(site(tmp_path, "north", north)))
    assert all(word in str(caught.value) for word in words), str(caught.value)


def test_a_site_that_is_sent_another_scaling_under_masks_is_named_and_opens_nothing(tmp_path):
    federation = federate(tmp_path / "masked")
    federation.transport.alter = lambda name, order, inbox: (
        (order, inbox | scaled(0.5)) if (name, order.round, order.phase) == ("west", 0, 0) else (order, inbox)
    )
    with pytest.raises(TooFew):
        federation.run()
    assert any("another model" in note for note in federation.about("west"))
    assert not (federation.server / "metrics.jsonl").exists()


def write_tables(folder, names=("age", "sex", "pulse")):
    """Return sites with a table each: empty cells, a category, and the columns in another order at each site."""
    rng, sites = np.random.default_rng(0), {}
    for k, name in enumerate(("north", "south", "west")):
        columns = {"age": rng.integers(20, 90, 60), "sex": rng.choice(["f", "m", ""], 60), "pulse": rng.integers(50, 99, 60)}
        columns = {column: columns[column].astype(str) for column in (*names[k:], *names[:k])}
        columns["age"] = np.where(rng.random(60) < 0.2, "", columns["age"])
        rows = zip(*columns.values(), np.where(np.arange(60) % 2, "ill", "well"), strict=True)
        lines = [",".join((*columns, "label")), *map(",".join, rows)]
        (folder / f"{name}.csv").write_text("\n".join(lines) + "\n")
        sites[name] = {"data": {"name": "csv", "root": str(folder / f"{name}.csv")}}
    return sites


TABLES = ONE_ROUND | {"optimizer": {"lr": 0.02}}


def test_columns_of_real_sites_are_those_of_one_process(tmp_path):
    columns = {"age": "number", "sex": ["f", "m"], "pulse": {"kind": "number", "fill": 60.0}}
    common = TABLES | {"data": {"classes": ["well", "ill"], "columns": columns, **BY_SUMS}}
    shape = {"input": [4], "columns": ["age", "sex=f", "sex=m", "pulse"]}
    federation = federate(tmp_path / "masked", "masked", common, write_tables(tmp_path), **shape).run()
    run = run_together(tmp_path / "one", common, federation.sites, sum="fixed")
    statistics = federation.environment()["statistics"]
    assert statistics == json.loads((tmp_path / "one" / "environment.json").read_text())["statistics"]
    assert statistics["inputs"] == ["age", "sex", "pulse"]
    assert [count > 0 for count in statistics["missing"]] == [True, True, False]
    assert statistics["mean"][1] is None
    steps = federation["west"].experiment.data.space.scaling.columns or ()
    assert [step.fill for step in steps if step.kind != "category"] == [statistics["mean"][0], 60]
    assert same(federation.model, run.global_model().state_dict())


def test_named_columns_need_the_names_in_the_contract(tmp_path):
    """Without them nobody could compare the order of the columns."""
    common = TABLES | {"data": {"classes": ["well", "ill"], **BY_SUMS}}
    (tmp_path / "a.csv").write_text("age,pulse,label\n" + "31,60,ill\n45,71,well\n" * 20)
    tables = {"data": {"name": "csv", "root": str(tmp_path / "a.csv")}}
    path = site(tmp_path, "north", tables)
    with pytest.raises(UserError, match=r"sites\.columns"):
        build_site(contracts.read_contract(contract(tmp_path, common, {"north": tables}, input=[2])), read_site_file(path))
    agreed = contracts.read_contract(contract(tmp_path, common, {"north": tables}, input=[2], columns=["age", "pulse"]))
    assert build_site(agreed, read_site_file(path)).data.space.columns == ("age", "pulse")
