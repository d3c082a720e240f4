"""Real sites, over a transport in this process, whose server has the sum of their updates and no update."""

import json
from contextlib import closing

import pytest
import torch

import fedmutual
from fedmutual import boundary
from fedmutual.config import parse_config
from fedmutual.engines import base
from fedmutual.errors import ConfigError, RunError
from fedmutual.privacy.secret import derive_simulation_secret
from fedmutual.sites import contract as contracts
from fedmutual.sites.coordinator import Coordinator
from fedmutual.sites.journal import FILE, Journal
from fedmutual.sites.protocol import Order, pack_message, read_answer, read_order
from fedmutual.sites.secure_sum.messages import ORDERS, WORDS, Stage, pack_content, read_content
from fedmutual.sites.site_runtime import SiteRuntime
from fedmutual.sites.site_settings import read_site_file
from log_lines import read_lines
from wards import COMMON, TELLING, Federation, contract, read_update, run_together, same, site, together

pytestmark = pytest.mark.sites

FIVE = {
    name: {"model": {"personal": "mlp"}, "data": {"name": "digits"}, "optimizer": {"lr": lr}}
    for name, lr in (("ash", 0.05), ("birch", 0.04), ("cedar", 0.03), ("elm", 0.02), ("fir", 0.01))
}
FML = COMMON | {"rounds": 2}
ONE_ROUND = FML | {"rounds": 1}
MASKED = {"server": {"sum": "masked"}}


def federate(folder, common=FML, **given):
    return Federation(folder / "masked", common | MASKED, FIVE, **given)


def in_one_process(folder, common):
    return run_together(folder / "one", common, FIVE, sum="fixed")


@pytest.mark.parametrize("algorithm", ["fml", "fedavg"])
def test_masked_sites_are_a_fixed_sum_in_one_process_to_the_bit(tmp_path, algorithm):
    """No update and no n_k leaves a site."""
    common = FML | TELLING | {"algorithm": {"name": algorithm}}
    federation, plain = federate(tmp_path, common).run(), in_one_process(tmp_path, common)
    assert same(federation.model, plain.global_model().state_dict())
    if algorithm == "fml":
        assert federation.equals(plain)
        assert federation.summary["personal"] == plain.summary["personal"]
    assert federation.notes == []
    lines = federation.ledger("elm")
    assert {(t["name"], t["dtype"]) for line in lines for t in line["tensors"]} == {("content", "uint8"), ("words", "int64")}
    uploads = [line for line in lines if any(t["name"] == WORDS for t in line["tensors"])]
    assert [len(line["unmasked_sha256"]) for line in uploads] == [64, 64]
    assert all(line["unmasked_sha256"] != line["tensors"][0]["sha256"] for line in uploads)
    count = sum(t.numel() for t in federation.model.values()) + (algorithm == "fedavg")
    assert federation.summary["leaves"] == {algorithm: {"words": ["int64", [count]]}}
    words = [read_answer(a)[1][WORDS] for _, o, a in federation.transport.answers if read_order(o)[0].phase == Stage.UPLOAD]
    assert all(w.shape == (count,) for w in words)
    assert not any(torch.equal(a, b) for k, a in enumerate(words) for b in words[:k])


PRIVATE = FML | {"privacy": {"nets": "both", "sigma": 2.0}, "share": {"metrics": "none"}}


def test_noised_and_masked_sites_are_a_noised_fixed_sum_in_one_process_to_the_bit(tmp_path):
    """Noise is added before masks. A round costs once, although all sites start anew between training and upload."""
    ledgers = {i: tmp_path / "masked" / i / "state" / "privacy" for i in FIVE}
    for i, folder in ledgers.items():
        folder.mkdir(parents=True)
        (folder / "secret").touch(mode=0o600)
        (folder / "secret").write_bytes(derive_simulation_secret(0, i))
    federation, started = federate(tmp_path, PRIVATE, site_tables={"privacy": {"epsilon": 100.0}}), set()

    def start_anew(round, phase):
        if phase == Stage.UPLOAD and round not in started:
            started.add(round)
            federation.restart()

    federation.transport.before = start_anew
    plain = in_one_process(tmp_path, PRIVATE)
    assert federation.run().equals(plain)
    assert started == {0, 1}
    for i, folder in ledgers.items():
        (ledger,) = folder.glob("*.jsonl")
        assert [json.loads(line)["round"] for line in ledger.read_text().splitlines()] == [1, 2]
        mine = fedmutual.Run(federation[i].folder).summary["privacy"]["spent"]
        assert mine == plain.summary["privacy"]["clients"][i]["epsilon"]
        ledger.unlink()
        with pytest.raises(RunError, match="has 0 lines"):
            federation.start(i)


def test_a_masked_site_without_a_budget_declines_and_is_left_out_of_the_sum(tmp_path):
    federation = federate(tmp_path, PRIVATE, site_tables={"privacy": {"epsilon": 100.0}})
    federation.sites["elm"] |= {"privacy": {"epsilon": 0.01}}
    federation.restart("elm")
    federation.run()
    assert any("its privacy budget is spent" in note for note in federation.about("elm"))
    assert not list((tmp_path / "masked" / "elm" / "state" / "privacy").glob("*.jsonl"))


DROPOUTS = {  # the point at which a site drops out in the first round: the stage (0: training) from which it is silent
    "nobody": (6, "ash"),
    "before training": (0, "cedar"),
    "after training, before KEYS": (Stage.KEYS, "ash"),
    "after KEYS, before SHARES": (Stage.SHARES, "elm"),
    "after SHARES, before UPLOAD": (Stage.UPLOAD, "fir"),
    "after UPLOAD, before CONFIRM": (Stage.CONFIRM, "birch"),
    "after CONFIRM, before UNMASK": (Stage.UNMASK, "cedar"),
}
LOST = {  # the stage whose answer of one site is lost: the site did its part, and the server does not know
    "the answer to KEYS is lost": (Stage.KEYS, "ash"),
    "the answer to UPLOAD is lost": (Stage.UPLOAD, "birch"),
    "the answer to UNMASK is lost": (Stage.UNMASK, "fir"),
}


@pytest.mark.parametrize("point", [*DROPOUTS, *LOST])
def test_masked_equals_plain_to_the_bit_whichever_site_drops_out(tmp_path, point):
    """Ten federations. A dropout costs one round at most: in the second round all sites take part again."""
    federation = federate(tmp_path, FML | {"split": {"preset": "v1", "test": 0.8}})
    stage, absent = (DROPOUTS | LOST)[point]
    words = {}  # round -> site -> the words of its update before they are masked

    def before(round, phase):
        federation.transport.silent = {absent} if point in DROPOUTS and round == 0 and phase >= stage else set()
        if phase == Stage.CONFIRM:
            words[round] = {i: read_update(federation[i].folder, round) for i in FIVE}

    def lose(name, order, content):
        return [] if point in LOST and (order.round, order.phase, name) == (0, stage, absent) else [content]

    federation.transport.before, federation.transport.change = before, lose
    federation.run()
    assert present(federation, 0) == set(FIVE) - ({absent} if stage <= Stage.UPLOAD else set())
    assert present(federation, 1) == set(FIVE)
    for i in FIVE:
        assert any("round 1" in note for note in federation.about(i)) == (i == absent and stage <= Stage.UNMASK)
        assert not any("round 2" in note for note in federation.about(i))
    sent = [order_to_train(federation, round) for round in (0, 1)]
    for round, received in enumerate([sent[1], federation.model]):
        assert same(apply_plain_mean(sent[round], [words[round][i] for i in present(federation, round)]), received)


def apply_plain_mean(base, updates):
    """Return the shared model after the mean of updates without masks, of 40 fractional bits, in Python's integers."""
    names = sorted(name for name, tensor in base.items() if tensor.is_floating_point())
    columns = torch.split(torch.stack(updates), [base[name].numel() for name in names], 1)
    moved = dict(base)
    for name, column in zip(names, columns, strict=True):
        total = torch.tensor([sum(row) for row in column.T.tolist()], dtype=torch.float64)
        moved[name] = (base[name].double() + (total / 2**40 / len(updates)).reshape(base[name].shape)).to(base[name].dtype)
    return moved


def order_to_train(federation, round):
    """Return the shared model that the server sent in a round."""
    orders = (read_order(o) for _, o, _ in federation.transport.answers)
    return next(inbox for order, inbox in orders if order.kind == "work" and (order.round, order.phase) == (round, 0))


def present(federation, round=0):
    """Return the sites whose words were in the sum of a round, as the orders of CONFIRM list them."""
    for _, o, _ in federation.transport.answers:
        order, inbox = read_order(o)
        if order.round == round and order.phase == Stage.CONFIRM:
            return set(read_content(ORDERS[Stage.CONFIRM], inbox, "server"))
    return set()


def test_sites_and_server_restarted_at_every_stage_continue(tmp_path):
    federation, killed = federate(tmp_path, ONE_ROUND), set()

    def before(round, phase):
        federation.restart("ash", "elm")
        if phase in (Stage.UPLOAD, Stage.UNMASK) and phase not in killed:
            killed.add(phase)
            raise RuntimeError("killed")

    federation.transport.before = before
    for _ in range(2):
        with pytest.raises(RuntimeError, match="killed"):
            federation.run()
    assert federation.run().equals(in_one_process(tmp_path, ONE_ROUND))


def test_bytes_count_at_a_site_that_is_in_the_sum_and_absent_after_a_restart(tmp_path):
    federation, killed = federate(tmp_path, ONE_ROUND), []

    def before(round, phase):
        if phase == Stage.UNMASK and not killed:
            killed.append(phase)
            raise RuntimeError("killed")

    federation.transport.before = before
    with pytest.raises(RuntimeError, match="killed"):
        federation.run()
    federation.transport.away = {"ash"}
    federation.run()
    assert "ash" in present(federation)
    size = sum(tensor.nbytes for tensor in federation.model.values())
    sent = {line["client"]: line["down"] for line in read_lines(federation.server / "ledger.jsonl")}
    assert sent["ash"] == size


def test_the_privacy_boundary_judges_an_update_before_it_is_masked(tmp_path, monkeypatch):
    """The boundary sees floats. In place of a refused update the site masks a zero update; no other party learns of it."""
    federation, dtypes, release = federate(tmp_path, ONE_ROUND), [], boundary.release

    def judge(reply, declared, client, inbox, warn):
        dtypes.append({str(tensor.dtype) for tensor in reply.values()})
        if client.id == "cedar":
            raise boundary.Refused("cedar", "classifier.bias", "it holds a private row")
        return release(reply, declared, client, inbox, warn)

    monkeypatch.setattr(base, "release", judge)
    federation.run()
    assert dtypes == [{"torch.float32"}] * 5
    assert federation.about("cedar") == []
    assert present(federation) == set(FIVE)
    assert [bool(read_update(federation[i].folder).any()) for i in ("ash", "cedar")] == [True, False]


def test_a_second_attempt_of_an_opened_round_is_declined_and_no_secret_is_left(tmp_path):
    """In no file of a site: neither the pages of deleted rows nor the log of changes."""
    federation, seen = federate(tmp_path, ONE_ROUND), {}

    def before(round, phase):
        for i in FIVE if phase == Stage.SHARES else ():
            with closing(Journal(federation[i].folder, read_only=True)) as journal:
                seen[i] = journal.get_fact("sum")["keys"]

    federation.transport.before = before
    federation.run()
    order = pack_message(Order("work", 0, int(Stage.KEYS), attempt=1), pack_content(1))
    for i, secrets in seen.items():
        content = b"".join(path.read_bytes() for path in federation[i].folder.glob(f"{FILE}*"))
        assert len(secrets) == 3
        assert not [secret for secret in secrets if secret.encode() in content]
        answer, message = read_answer(federation[i].carry_out(order))
        assert ("opened before" in answer.problem, message) == (True, {})


@pytest.mark.parametrize(
    ("common", "names", "contract_tables", "reason"),
    [
        ({}, ("ash", "elm"), {}, r"3 to 20 sites, and key 'sites\.names' has 2"),
        ({}, [f"s{k}" for k in range(21)], {}, "has 21"),
        ({}, FIVE, {"quorum": 3}, r"set 'sites\.quorum' to 4 or more"),
        ({}, FIVE, {"update_limit": 5.0}, r"'sites\.update_limit' has no effect"),
        ({}, FIVE, {"examples_limit": 500}, r"'sites\.examples_limit' has no effect"),
        ({"algorithm": {"name": "fedkd"}}, FIVE, {}, r"remove 'server\.sum'"),
        ({"algorithm": {"name": "fedavg-ft"}}, FIVE, {}, r"remove 'server\.sum'"),
        ({"algorithm": {"name": "independent"}}, FIVE, {}, r"server\.sum"),
        ({"server": {"sum": "masked", "aggregate": "median"}}, FIVE, {}, "has no effect with server.aggregate = 'median'"),
    ],
)
def test_what_a_secure_sum_does_not_go_together_with_is_refused(tmp_path, common, names, contract_tables, reason):
    path = contract(tmp_path, FML | MASKED | common, {name: {} for name in names}, **contract_tables)
    with pytest.raises(ConfigError, match=reason):
        contracts.read_contract(path)


def test_what_keys_are_bound_to_stays_when_more_rounds_are_submitted(tmp_path):
    """A sum that is under way then goes on; with anything that needs consent it does not. One process has no masks."""
    one, more, other = (
        contracts.read_contract(contract(tmp_path, FML | MASKED | change, FIVE))
        for change in ({}, {"rounds": 9}, {"training": {"local_epochs": 2}})
    )
    assert one.binding == more.binding != other.binding
    assert contracts.accept_contract(json.dumps(one.record()), [one.record()]).is_masked
    assert (one.quorum, contracts.read_contract(contract(tmp_path, FML, FIVE)).quorum) == (4, 3)
    with pytest.raises(ConfigError, match=r"server\.sum"):
        parse_config(together(FML | MASKED, FIVE))


def test_without_a_kit_no_sum_is_begun(tmp_path):
    federation = federate(tmp_path)
    with pytest.raises(RunError, match="kit"):
        SiteRuntime(federation.agreed, read_site_file(site(federation.folder, "ash", FIVE["ash"])))
    with pytest.raises(RunError, match="kit"):
        Coordinator(federation.agreed, tmp_path / "server").run(federation.transport)
