"""Sites that only evaluate, that join later, and that do not vote for the best round."""

import json

import pytest
import torch

from fedmutual.core import Message
from fedmutual.errors import ConfigError, RunError
from fedmutual.metric import ACCURACY
from fedmutual.rundir.schema import Evaluation
from fedmutual.rundir.summary import summarise_scores
from fedmutual.sites.contract import read_contract
from fedmutual.sites.protocol import EVALUATE, WORK, Order, pack_message, read_answer, read_order
from log_lines import read_lines
from wards import COMMON, MLPS, TELLING, Federation, changed, contract, same

pytestmark = pytest.mark.sites

FOUR = {**MLPS, "east": MLPS["north"]}


@pytest.fixture(scope="module", params=["float", "masked"])
def tested(request, tmp_path_factory):
    """Three sites train, with plain and with masked sums; east has a test set."""
    common = COMMON | TELLING | {"server": {"sum": request.param}}
    return Federation(tmp_path_factory.mktemp("roles") / "fed", common, FOUR, evaluators=["east"]).run(), common


def test_an_evaluator_gets_memes_and_sends_scores_only(tested, tmp_path):
    federation, common = tested
    assert same(federation.model, Federation(tmp_path / "alone", common, MLPS).run().model)  # trained as without east
    assert federation.about("east") == []
    assert [(line["what"], line["tensors"]) for line in federation.ledger("east")] == [(EVALUATE, [])] * 3
    assert federation["east"].list_leaves() == {}
    assert {order.kind for order in map_orders(federation, "east")} == {EVALUATE}


def map_orders(federation, name):
    return [read_order(order)[0] for site, order, _ in federation.transport.answers if site == name]


def test_the_shared_model_is_scored_on_all_rows_of_the_evaluator(tested):
    federation, _ = tested
    rows = federation["east"]._collect_rows()
    (score,) = (s for s in read_lines(federation.server / "metrics.jsonl")[-1]["scores"] if s["client"] == "east")
    assert (score["model"], score["data"], score["examples"]) == ("global", "test", len(rows))
    client = federation["east"].experiment.build_client("east")
    meme = client.nets["meme"].eval()
    meme.load_state_dict(federation.model)
    with torch.no_grad():
        ((x, y, *_),) = rows.rows([torch.arange(len(rows))])
        assert score["accuracy"] == pytest.approx((meme(x).argmax(1) == y).double().mean().item(), abs=1e-6)
    test = json.loads((federation.server / "summary.json").read_text())["global"]["test_accuracy"]
    assert test["last"] == pytest.approx(score["accuracy"])


ORDERS: list[tuple[str, Order, str]] = [
    ("east", Order(WORK, 0, 0), "it trains nothing"),
    ("west", Order(WORK, 1, 0), "it takes part from a later round on"),
    ("west", Order(EVALUATE, 0, 0), "it takes part from a later round on"),
]


def test_a_site_declines_what_its_role_does_not_have(tmp_path):
    federation = Federation(tmp_path / "fed", {**COMMON, "rounds": 5}, FOUR, evaluators=["east"], joins={"west": 3})
    model: Message = federation["north"]._public
    for name, order, why in ORDERS:
        answer, message = read_answer(federation[name].carry_out(pack_message(order, model)))
        assert (answer.problem or "").startswith(why)
        assert not message


@pytest.mark.parametrize(
    ("tables", "why"),
    [
        ({"records": {"keep_best": True}}, "a site that only evaluates keeps no model; remove 'records.keep_best'"),
        ({"split": {"public_file": "public.npz"}}, "key 'split.public_file' is the path of a file that all sites have"),
    ],
)
def test_a_key_without_effect_in_the_file_of_an_evaluator_is_refused(tmp_path, tables, why):
    with pytest.raises(ConfigError, match=rf"site\.toml: {why}"):
        Federation(tmp_path / "fed", COMMON, FOUR, site_tables=tables, evaluators=["east"])


def test_a_site_joins_from_its_round_on_with_its_own_start(tmp_path):
    """Before, all is as without west, which need not be there; then west trains from the shared model."""
    common, three = {**COMMON, "rounds": 2}, {i: MLPS[i] for i in ("north", "south")}
    before = Federation(tmp_path / "before", common, three).run().model
    federation = Federation(tmp_path / "fed", {**COMMON, "rounds": 4}, MLPS, quorum=2, joins={"west": 3})
    models = {}
    federation.run(lambda event: models.update({event.round: event.server}) if type(event).__name__ == "RoundDone" else None)
    assert same({k: models[2][k] for k in before}, before)
    assert {(o.kind, o.round) for o in map_orders(federation, "west")} == {(k, r) for k in (WORK, EVALUATE) for r in (2, 3)}
    assert federation.about("west") == []


def test_no_round_of_a_site_that_joins_late_is_lost(tmp_path):
    """Its personal network knows nothing yet, so its first updates are opposed to those of the others."""
    common = {**COMMON, "rounds": 34, "optimizer": {"lr": 0.1}}
    federation = Federation(tmp_path / "fed", common, FOUR, quorum=2, joins={"west": 30}).run()
    assert {
        line["round"] for line in read_lines(federation.server / "ledger.jsonl") if line["client"] == "west" and line["up"]
    } == {*range(30, 35)}
    assert any("site 'west' joined lately, and its update is shortened" in note for note in federation.notes)
    assert not any("left out" in note for note in federation.about("west"))


REFUSED = [
    ({"evaluators": ["x"]}, {}, "'sites.evaluators' names 'x'"),
    ({"evaluators": ["west"], "joins": {"west": 2}}, {}, "'west' is one of 'sites.evaluators'"),
    ({"no_vote": ["north", "south", "west"]}, {}, "leaves no site that votes"),
    ({"joins": {"south": 2, "west": 2}}, {}, "1 sites train in round 1"),  # the others would get north's model
    ({"evaluators": ["west"], "quorum": 1}, {}, "the quorum is 2 or more"),
    ({"joins": {"west": 2}}, {"server": {"sum": "masked"}}, "the difference of two sums"),
    ({"joins": {"west": 2}}, {"algorithm": {"name": "independent"}}, "need a shared model"),
    ({"evaluators": ["west"]}, {"privacy": {"nets": "meme", "noise": 1.0, "clip": 1.0}}, "epsilon"),
]


@pytest.mark.parametrize(("roles", "tables", "why"), REFUSED)
def test_a_role_that_is_impossible_or_would_show_a_model_is_refused(tmp_path, roles, tables, why):
    tables = {"algorithm": {**COMMON["algorithm"], "beta": 1.0}} | tables if "privacy" in tables else tables
    with pytest.raises(ConfigError, match=why) as caught:
        read_contract(contract(tmp_path, COMMON | tables, ["north", "south", "west"], **roles))
    assert "\n" not in str(caught.value)


def test_masked_sums_do_not_go_on_with_another_site(tmp_path):
    """Everybody agreed to a contract with east: the sum with it minus the sum without it is nearly its update."""
    common = COMMON | {"rounds": 1, "server": {"sum": "masked"}}
    federation = Federation(tmp_path / "fed", common, MLPS).run()
    changed(federation.folder / "federation.toml", rounds=2)
    federation.agreed = read_contract(federation.folder / "federation.toml")
    federation["north"].close()
    federation.start("north").close()  # more rounds of the same sites
    contract(federation.folder, common | {"rounds": 2}, FOUR)
    federation.agreed = read_contract(federation.folder / "federation.toml")
    with pytest.raises(RunError, match="begin a federation of another name"):
        federation.start("north")


def test_the_roles_are_told_before_a_site_starts(tmp_path):
    agreed = read_contract(contract(tmp_path, COMMON, FOUR, evaluators=["east"], joins={"west": 3}, no_vote=["south"]))
    told = list(agreed.sites.describe_roles())
    assert [next(i for i in FOUR if repr(i) in sentence) for sentence in told] == ["south", "west", "east"]
    assert agreed.quorum == 2  # of the three that train


def test_a_site_without_a_vote_does_not_choose_the_best_round():
    """Of two rounds north is best in the first, south in the second, by more."""
    scores = [{"north": 0.9, "south": 0.1}, {"north": 0.8, "south": 0.7}]
    row = {"model": "personal", "data": "validation"}
    of_rounds = [tuple(row | {"client": i, "accuracy": a} for i, a in by_site.items()) for by_site in scores]
    lines = [Evaluation.model_validate({"round": r, "scores": rows}) for r, rows in enumerate(of_rounds, 1)]
    best = [summarise_scores(None, lines, ACCURACY, out)["personal"]["val_accuracy"]["best"] for out in ((), ("south",))]
    assert [b["best_round"] for b in best] == [2, 1]
    assert best[1]["mean"] == pytest.approx(0.5)  # of both sites, in the round that north chose
