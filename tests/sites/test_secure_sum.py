"""Real sites, over a transport in this process, whose server has the sum of their updates and no update."""

import json
from contextlib import closing

import pytest
import torch

import fedmutual
from authority import write_startup
from fedmutual import boundary
from fedmutual.config import parse_config
from fedmutual.engines import base
from fedmutual.errors import ConfigError, RunError
from fedmutual.privacy.secret import derive_simulation_secret
from fedmutual.rundir.text import describe_event
from fedmutual.sites import contract as contracts
from fedmutual.sites.consent import find_difference
from fedmutual.sites.coordinator import Coordinator
from fedmutual.sites.engine import TooFew
from fedmutual.sites.journal import FILE, Journal
from fedmutual.sites.ledger import read_ledger
from fedmutual.sites.protocol import Order, pack_message, read_answer, read_order
from fedmutual.sites.secure_sum.messages import PRESENT, WORDS, Stage, pack_content, read_content
from fedmutual.sites.site_runtime import SiteRuntime
from fedmutual.sites.site_settings import read_site_file
from wards import COMMON, TELLING, InMemoryTransport, contract, read_update, same, site, together

pytestmark = pytest.mark.sites

FIVE = {
    name: {"model": {"personal": "mlp"}, "data": {"name": "digits"}, "optimizer": {"lr": lr}}
    for name, lr in (("ash", 0.05), ("birch", 0.04), ("cedar", 0.03), ("elm", 0.02), ("fir", 0.01))
}
FML = COMMON | {"rounds": 2}
FEDAVG = FML | {"algorithm": {"name": "fedavg"}}
MASKED, FIXED = {"server": {"sum": "masked"}}, {"server": {"sum": "fixed"}}


class Federation:
    """Its sites, its server, and what came of them."""

    def __init__(self, folder, common=FML, sites=FIVE, site_tables=None, **contract_tables):
        """own: more tables of every site.toml."""
        folder.mkdir(exist_ok=True)
        self.folder, self.notes = folder, []
        self.sites = {i: about | (site_tables or {}) for i, about in sites.items()}
        self.agreed = contracts.read_contract(contract(folder, common | MASKED, sites, **contract_tables))
        self.transport = Watched({i: self.start(i) for i in sites})

    def start(self, name):
        """A site's process, from its files."""
        startup = write_startup(self.folder / name / "startup", name)
        return SiteRuntime(self.agreed, read_site_file(site(self.folder, name, self.sites[name])), startup=startup)

    def run(self):
        def note(event):
            if type(event).__name__ == "Noted":
                self.notes += describe_event(event)

        startup = write_startup(self.folder / "server-kit", "server")
        Coordinator(self.agreed, self.folder / "server", startup).run(self.transport, [note])
        return fedmutual.Run(self.folder / "server")

    def about(self, name):
        return [note for note in self.notes if repr(name) in note]


class Watched(InMemoryTransport):
    """A transport that calls `before(round, phase)` before orders of work, and sends orders as `change` makes them."""

    def __init__(self, halves):
        super().__init__(halves)
        self.before = lambda round, place: None
        self.change = lambda order, inbox, name: (order, inbox)
        self.lost = None  # the site whose answers do not arrive

    def list_connected(self):
        return tuple(self.halves)  # who is away does not answer

    def ask(self, orders, deadline):
        order, _ = read_order(next(iter(orders.values()))) if orders else (None, None)
        if order is not None and order.kind == "work":
            self.before(order.round, order.phase)
        changed = {}
        for i, content in orders.items():
            if i not in self.away:
                changed[i] = pack_message(*self.change(*read_order(content), i))
        yield from ((i, answer) for i, answer in super().ask(changed, deadline) if i != self.lost)


def in_one_process(folder, common, sites):
    return fedmutual.run(parse_config(together(common | FIXED, sites)), folder / "one")


@pytest.mark.parametrize("common", [FML, FEDAVG])
def test_masked_sites_are_a_fixed_sum_in_one_process_to_the_bit(tmp_path, common):
    common = common | TELLING
    federation = Federation(tmp_path / "masked", common)
    masked, plain = federation.run(), in_one_process(tmp_path, common, FIVE)
    assert same(masked.global_model().state_dict(), plain.global_model().state_dict())
    for i in FIVE:
        mine = fedmutual.Run(tmp_path / "masked" / i / "state" / "wards")
        if common["algorithm"]["name"] == "fml":
            assert same(mine.personal_model(i).state_dict(), plain.personal_model(i).state_dict())
    if common["algorithm"]["name"] == "fml":
        assert masked.summary["personal"] == plain.summary["personal"]
    assert federation.notes == []


PRIVATE = FML | {"privacy": {"nets": "both", "sigma": 2.0}, "share": {"metrics": "none"}}


def test_noised_and_masked_sites_are_a_noised_fixed_sum_in_one_process_to_the_bit(tmp_path):
    """Noise is added before masks. A round costs once, although all sites start anew between training and upload."""
    ledgers = {i: tmp_path / "masked" / i / "state" / "privacy" for i in FIVE}
    for i, folder in ledgers.items():
        folder.mkdir(parents=True)
        (folder / "secret").touch(mode=0o600)
        (folder / "secret").write_bytes(derive_simulation_secret(0, i))
    federation = Federation(tmp_path / "masked", PRIVATE, site_tables={"privacy": {"epsilon": 100.0}})
    started = set()

    def start_anew(round, place):
        if place == Stage.UPLOAD and round not in started:
            started.add(round)
            federation.transport.halves.update({i: federation.start(i) for i in FIVE})

    federation.transport.before = start_anew
    masked, plain = federation.run(), in_one_process(tmp_path, PRIVATE, FIVE)
    assert started == {0, 1}
    assert same(masked.global_model().state_dict(), plain.global_model().state_dict())
    for i, folder in ledgers.items():
        (ledger,) = folder.glob("*.jsonl")
        lines = [json.loads(line) for line in ledger.read_text().splitlines()]
        assert [line["round"] for line in lines] == [1, 2]
        mine = fedmutual.Run(tmp_path / "masked" / i / "state" / "wards")
        assert same(mine.personal_model(i).state_dict(), plain.personal_model(i).state_dict())
        assert mine.summary["privacy"]["spent"] == plain.summary["privacy"]["clients"][i]["epsilon"]
        ledger.unlink()
        with pytest.raises(RunError, match="has 0 lines"):
            federation.start(i)


def test_a_masked_site_without_a_budget_declines_and_is_left_out_of_the_sum(tmp_path):
    federation = Federation(tmp_path / "masked", PRIVATE, site_tables={"privacy": {"epsilon": 100.0}})
    federation.sites["elm"] = federation.sites["elm"] | {"privacy": {"epsilon": 0.01}}
    federation.transport.halves["elm"] = federation.start("elm")
    assert federation.run().finished
    assert any("its privacy budget is spent" in note for note in federation.about("elm"))
    assert not list((tmp_path / "masked" / "elm" / "state" / "privacy").glob("*.jsonl"))


def test_no_update_and_no_n_k_leaves_a_site(tmp_path):
    federation = Federation(tmp_path / "masked", FEDAVG)
    run = federation.run()
    lines = read_ledger(tmp_path / "masked" / "elm" / "state" / "wards")
    names = {(t["name"], t["dtype"]) for line in lines for t in line["tensors"]}
    assert names == {("content", "uint8"), ("words", "int64")}
    uploads = [line for line in lines if any(t["name"] == WORDS for t in line["tensors"])]
    assert len(uploads) == 2
    for line in uploads:
        assert line["unmasked_sha256"] != line["tensors"][0]["sha256"]
        assert len(line["unmasked_sha256"]) == 64
    count = sum(t.numel() for t in run.global_model().state_dict().values()) + 1
    assert run.summary["leaves"] == {"fedavg": {"words": ["int64", [count]]}}
    words = [read_answer(a)[1][WORDS] for i, o, a in federation.transport.answers if read_order(o)[0].phase == Stage.UPLOAD]
    assert all(w.shape == (count,) for w in words)
    assert not any(torch.equal(a, b) for k, a in enumerate(words) for b in words[:k])


DROPOUTS = {  # the point at which sites drop out in the first round: stage (0: training) -> sites that are away from it on
    "nobody": {},
    "before training": {0: {"cedar"}},
    "after training, before KEYS": {Stage.KEYS: {"ash"}},
    "after KEYS, before SHARES": {Stage.SHARES: {"elm"}},
    "after SHARES, before UPLOAD": {Stage.UPLOAD: {"fir"}},
    "after UPLOAD, before CONFIRM": {Stage.CONFIRM: {"birch"}},
    "after CONFIRM, before UNMASK": {Stage.UNMASK: {"cedar"}},
}
LOST = {  # the stage whose answer of one site is lost: the site did its part, and the server does not know
    "the answer to KEYS is lost": (Stage.KEYS, "ash"),
    "the answer to UPLOAD is lost": (Stage.UPLOAD, "birch"),
    "the answer to UNMASK is lost": (Stage.UNMASK, "fir"),
}


@pytest.mark.parametrize("point", [*DROPOUTS, *LOST])
def test_masked_equals_plain_to_the_bit_whichever_site_drops_out(tmp_path, point):
    """Ten federations. A dropout costs one round at most: in the second round all sites take part again."""
    federation = Federation(tmp_path / "masked", FML | {"split": {"preset": "v1", "test": 0.8}})
    away, lost = DROPOUTS.get(point, {}), LOST.get(point)
    words = {}  # round -> site -> the words of its update before they are masked

    def before(round, phase):
        absent_sites = set().union(*(sites for stage, sites in away.items() if phase >= stage))
        federation.transport.away = absent_sites if round == 0 else set()
        federation.transport.lost = lost[1] if lost is not None and (round, phase) == (0, lost[0]) else None
        if phase == Stage.CONFIRM:
            words[round] = {i: read_update(half.folder, round) for i, half in federation.transport.halves.items()}

    federation.transport.before = before
    run = federation.run()
    stage, absent_sites = (lost[0], {lost[1]}) if lost is not None else next(iter(away.items()), (Stage.UNMASK, set()))
    counted = set(FIVE) - (absent_sites if stage <= Stage.UPLOAD else set())
    assert present(federation, 0) == counted
    assert present(federation, 1) == set(FIVE)
    for i in FIVE:
        assert any("round 1" in note for note in federation.about(i)) == (i in absent_sites)
        assert not any("round 2" in note for note in federation.about(i))
    sent = [order_to_train(federation, round) for round in (0, 1)]
    for round, received in enumerate([sent[1], run.global_model().state_dict()]):
        updates = [words[round][i] for i in present(federation, round)]
        assert same(apply_plain_mean(sent[round], updates), received)


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
            return set(read_content(PRESENT, inbox, "server"))
    return set()


def test_sites_and_server_restarted_at_every_stage_continue(tmp_path):
    common = FML | {"rounds": 1}
    federation, killed = Federation(tmp_path / "masked", common), set()

    def before(round, phase):
        federation.transport.halves.update({i: federation.start(i) for i in ("ash", "elm")})
        if phase in (Stage.UPLOAD, Stage.UNMASK) and phase not in killed:
            killed.add(phase)
            raise RuntimeError("killed")

    federation.transport.before = before
    for _ in range(2):
        with pytest.raises(RuntimeError, match="killed"):
            federation.run()
    plain = in_one_process(tmp_path, common, FIVE)
    assert same(federation.run().global_model().state_dict(), plain.global_model().state_dict())


def test_too_few_sites_open_nothing_and_go_on_when_they_are_back(tmp_path):
    common = FML | {"rounds": 1}
    federation = Federation(tmp_path / "masked", common)
    absent_sites = {"ash", "elm"}

    def before(round, phase):
        federation.transport.away = absent_sites if phase >= Stage.UPLOAD else set()

    federation.transport.before = before
    with pytest.raises(TooFew, match=r"3 of 5 .* UPLOAD .* 4 are needed"):
        federation.run()
    absent_sites.clear()
    plain = in_one_process(tmp_path, common, FIVE)
    assert same(federation.run().global_model().state_dict(), plain.global_model().state_dict())


def test_the_privacy_boundary_judges_an_update_before_it_is_masked(tmp_path, monkeypatch):
    """The boundary sees floats. In place of a refused update the site masks a zero update; no other party learns of it."""
    federation, dtypes, release = Federation(tmp_path / "masked", FML | {"rounds": 1}), [], boundary.release

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
    words = {i: read_update(federation.transport.halves[i].folder) for i in ("ash", "cedar")}
    assert {i: bool(tensor.any()) for i, tensor in words.items()} == {"ash": True, "cedar": False}


def test_a_second_attempt_of_an_opened_round_is_declined_by_every_site(tmp_path):
    federation = Federation(tmp_path / "masked", FML | {"rounds": 1})
    federation.run()
    order = pack_message(Order("work", 0, int(Stage.KEYS), attempt=1), pack_content(1))
    for half in federation.transport.halves.values():
        answer, message = read_answer(half.carry_out(order))
        assert "opened before" in (answer.problem or "")
        assert message == {}


def test_a_site_that_was_sent_another_model_is_left_out_and_named(tmp_path):
    federation = Federation(tmp_path / "masked", FML | {"rounds": 1})

    def change(order, inbox, name):
        if name == "cedar" and order.kind == "work" and order.phase == 0:
            return order, {k: v + 1 if v.is_floating_point() else v for k, v in inbox.items()}
        return order, inbox

    federation.transport.change = change
    federation.run()
    assert "another model" in federation.about("cedar")[0]
    assert present(federation) == set(FIVE) - {"cedar"}


def test_a_false_dropout_is_named_by_the_site_and_opens_nothing(tmp_path):
    federation = Federation(tmp_path / "masked", FML | {"rounds": 1})

    def change(order, inbox, name):
        return order, pack_content([i for i in FIVE if i != "ash"]) if order.phase == Stage.CONFIRM else inbox

    federation.transport.change = change
    with pytest.raises(TooFew, match="CONFIRM"):
        federation.run()
    assert any("this site dropped out" in note for note in federation.about("ash"))
    assert not any(read_order(o)[0].phase == Stage.UNMASK for _, o, _ in federation.transport.answers)


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


def test_the_sites_consent_to_masks_and_one_process_has_none(tmp_path):
    masked, fixed = (contracts.read_contract(contract(tmp_path, FML | server, FIVE)) for server in (MASKED, FIXED))
    assert "'server.sum'" in (find_difference(masked.record(), fixed.record()) or "")
    assert contracts.accept_contract(json.dumps(masked.record()), [masked.record()]).is_masked
    assert (masked.quorum, fixed.quorum) == (4, 3)
    with pytest.raises(ConfigError, match=r"server\.sum"):
        parse_config(together(FML | MASKED, FIVE))


def test_what_keys_are_bound_to_stays_when_more_rounds_are_submitted(tmp_path):
    """A sum that is under way then goes on; with anything that needs consent it does not."""
    one, more, other = (
        contracts.read_contract(contract(tmp_path, FML | MASKED | change, FIVE))
        for change in ({}, {"rounds": 9}, {"training": {"local_epochs": 2}})
    )
    assert one.binding == more.binding != other.binding


def test_without_a_kit_no_sum_is_begun(tmp_path):
    federation = Federation(tmp_path / "masked")
    with pytest.raises(RunError, match="kit"):
        SiteRuntime(federation.agreed, read_site_file(site(federation.folder, "ash", FIVE["ash"])))
    with pytest.raises(RunError, match="kit"):
        Coordinator(federation.agreed, tmp_path / "server").run(federation.transport)


def test_no_file_holds_a_secret_of_a_sum_after_its_end(tmp_path):
    """Neither the pages of deleted rows nor the log of changes."""
    federation = Federation(tmp_path / "masked", FML | {"rounds": 1})
    seen = {}

    def before(round, phase):
        for i, half in federation.transport.halves.items():
            with closing(Journal(half.folder, read_only=True)) as journal:
                record = journal.get_fact("sum") or "{}"
            secrets = [word for word in record.split('"') if len(word) == 64]
            seen.setdefault(i, set()).update(secrets[1:4] if phase == 2 else ())  # mask key, seal key and seed

    federation.transport.before = before
    federation.run()
    for i, half in federation.transport.halves.items():
        assert len(seen[i]) == 3
        content = b"".join(path.read_bytes() for path in half.folder.glob(f"{FILE}*"))
        assert not [secret for secret in seen[i] if secret.encode() in content]
